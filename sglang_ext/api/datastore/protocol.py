"""What the HTTP process and the scheduler's control socket agree on.

One JSON object a line each way, over a Unix socket per data-parallel rank in a private folder.
Request: {"op": name, ...}. Reply: {"ok": true, "result": ...} or {"ok": false, "error": message,
"status": HTTP status}.
"""

import os
import shutil
import tempfile
from pathlib import Path

import psutil  # type: ignore[import-untyped]

# The folder's path; the first process sets it and its children inherit it.
FOLDER_VARIABLE = "SGLANG_EXT_CONTROL_SOCKET"
_PREFIX = "sglang-ext-"
# A corpus travels as a file beside the sockets, so no message is long.
MAX_LINE = 1 << 20


def make_folder() -> None:
    """Make the sockets' folder, readable by this user only, unless a parent process has."""
    if FOLDER_VARIABLE in os.environ:
        return
    base = Path(tempfile.gettempdir())
    for old in base.glob(f"{_PREFIX}*"):
        if _is_left_behind(old):
            shutil.rmtree(old, ignore_errors=True)
    # Short: a Unix socket's path has room for some 100 bytes.
    os.environ[FOLDER_VARIABLE] = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=base)


def _is_left_behind(old: Path) -> bool:
    """Whether it is the folder of a server of this user that was killed."""
    pid = old.name.removeprefix(_PREFIX).partition("-")[0]
    if not pid.isdigit() or psutil.pid_exists(int(pid)):
        return False
    try:
        return old.stat().st_uid == os.getuid()
    except FileNotFoundError:  # another server that starts was quicker
        return False


def folder() -> Path:
    """The sockets' folder."""
    return Path(os.environ[FOLDER_VARIABLE])


def socket_path(rank: int) -> Path:
    """The control socket of a data-parallel rank."""
    return folder() / f"scheduler-{rank}.sock"
