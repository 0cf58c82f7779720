"""The built wheel, installed alone and used: what a checkout has beside it is not there.

    python -m scripts.check_wheel [--quick] [--json FILE]

Builds the wheel, lists it, and installs it into an empty virtual environment outside of any
checkout. There it serves a text model, transcribes the recording that it carries, sweeps and builds
a datastore; then again with the packages of all extras hidden, where the text server must start and
the other commands must name their extra in one line, with exit code 2. --quick leaves the
transcript and the sweep out.

Dependencies (11 GB) are not downloaded again: a .pth file of the new environment adds the folder of
those that the check runs with. Python does not read the .pth files in a folder added so, thus the
editable install of this checkout is not found there; that is checked. Extras are hidden by an
import finder that leaves their modules out.

wheel_kib: its size. wheel_files_missing: files that it should hold and does not.
wheel_commands_failed: commands that did not do their work.
wheel_without_extras_failed: the same where no extra is installed. All three must be 0.
"""

import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.lib.figures import parser, report
from scripts.lib.http_client import HTTP
from sglang_ext.commands import ops
from sglang_ext.extras import MODULES
from sglang_ext.servers import processes
from sglang_ext.servers.server_process import ServerError, ServerProcess

ROOT = Path(__file__).parents[1]
MODEL = "smollm2-135m-instruct"
DATA = "sglang_ext/sweep/data"
# What the wheel must hold, besides modules; in dist-info: the endings of their paths.
FILES = (
    "sglang_ext/api/realtime/captions.html",
    *(f"sglang_ext/commands/ops/pack/{name}" for name in ops.FILES),
    *(f"{package}/py.typed" for package in ("sglang_ext", "speech", "datastores")),
    *(f"{DATA}/{name}" for name in ("README.md", "spec_bench.jsonl.gz", "LJ001-0001.flac")),
)
LICENSES = (".dist-info/licenses/LICENSE", ".dist-info/licenses/NOTICE")
# Names the hidden modules, comma-separated, in the new environment.
_HIDDEN = "CHECK_WHEEL_HIDDEN"
_FINDER = f'''"""Leaves out the modules that {_HIDDEN} names."""
import os, sys
from importlib.machinery import PathFinder

_hidden = set(os.environ.get("{_HIDDEN}", "").split(",")) - {{""}}

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in _hidden else super().find_spec(name, path, target)

if _hidden:
    sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
'''
# They would bring in what the wheel does not carry.
_NOT_INHERITED = ("PYTHONPATH", "SGLANG_EXT_DATA")
_COMMAND_S = 1200.0
_SHOWN_LINES = 15


def main() -> int:
    options = parser(__doc__, model=False).parse_args()
    with tempfile.TemporaryDirectory(prefix="check-wheel-") as folder:
        work = Path(folder)
        wheel = build(work / "dist")
        missing = missing_files(zipfile.ZipFile(wheel).namelist())
        for name in missing:
            print(f"{wheel.name} lacks {name}")
        python = install(wheel, work / "venv")
        check = Check(python, work)
        figures: dict[str, float] = {
            "wheel_kib": wheel.stat().st_size / 1024,
            "wheel_files_missing": len(missing),
            "wheel_commands_failed": check.commands(quick=options.quick),
            "wheel_without_extras_failed": check.without_extras(),
        }
    report(figures, options.json)
    return 1 if any(value for name, value in figures.items() if name != "wheel_kib") else 0


def build(folder: Path) -> Path:
    """Build the wheel of this checkout from a copy of its tracked and new files.

    Raises:
        subprocess.CalledProcessError: it cannot be built.
    """
    copy = folder / "source"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check"]
    flags = ["--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(copy)]
    subprocess.run([*command, *flags], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def missing_files(names: Sequence[str]) -> list[str]:
    """What a wheel with files of these names lacks of FILES and LICENSES."""
    lacking = [name for name in FILES if name not in names]
    return lacking + [end for end in LICENSES if not any(name.endswith(end) for name in names)]


def install(wheel: Path, folder: Path) -> Path:
    """Make a virtual environment with the wheel alone, and this one's dependencies in reach.

    Returns:
        its python.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q"]
    flags = ["--disable-pip-version-check", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([*command, *flags], check=True)
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (site / "check_wheel_finder.py").write_text(_FINDER)
    (site / "check_wheel_finder.pth").write_text("import check_wheel_finder\n")
    return python


class Check:
    """Commands of an installed wheel, each printed with how it ended.

    Args:
        python: of the environment.
        work: a folder outside of any checkout, in which they run.
    """

    def __init__(self, python: Path, work: Path):
        self._python = python
        self._work = work
        self._tool = str(python.with_name("sglang-ext"))
        carried = "import sglang_ext.sweep.data_files as d; print(d.CARRIED)"
        self._data = Path(self._run([str(python), "-c", carried]).stdout.strip())
        assert self._data.is_relative_to(work), f"{self._data}: not the installed wheel"

    def commands(self, *, quick: bool) -> int:
        """How many of the commands fail that extras are installed for."""
        text = self._work / "corpus.txt"
        text.write_text("The quick brown fox jumps over the lazy dog.\n" * 200)
        store = str(self._work / "store")
        done = [
            self._serves({}),
            self._does("datastore", "build", store, str(text), "--tokenizer", MODEL),
            self._does("ops", "write", str(self._work / "ops"), says="dashboard.json"),
        ]
        if not quick:
            clip = str(self._data / "LJ001-0001.flac")
            done.append(self._does("transcribe", clip, says="Printing"))
            flags = ["--quick", "--methods", "ar,sssd-live", "--minutes", "1"]
            done.append(self._does("sweep", *flags, "--out", str(self._work / "swept")))
        return done.count(False)

    def without_extras(self) -> int:
        """How many commands do not end as they should where no extra is installed."""
        hidden = {_HIDDEN: ",".join(name for names in MODULES.values() for name in names)}
        clip = str(self._data / "LJ001-0001.flac")
        done = [
            self._serves(hidden),
            self._refuses(hidden, "speech", "transcribe", clip),
            self._refuses(hidden, "speech", "captions", clip),
            self._refuses(hidden, "speech", "serve", "--model", "whisper-base"),
            self._refuses(hidden, "sweep", "sweep", "--out", str(self._work / "none")),
            self._refuses(hidden, "pd", "pd", "--model", MODEL),
        ]
        return done.count(False)

    def _serves(self, env: Mapping[str, str]) -> bool:
        """Whether a text server starts and answers."""
        url = f"http://127.0.0.1:{(port := processes.free_port())}"
        flags = ["--speculative-algorithm", "SSSD", "--max-total-tokens", "8192"]
        command = [self._tool, "serve", "--model", MODEL, "--port", str(port), *flags]
        log = self._work / f"server-{port}.log"
        server = ServerProcess("server", command, url, log, env=env, without=_NOT_INHERITED)
        body = {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 8}}
        try:
            with server:
                answer = HTTP.post(f"{url}/generate", json=body)
            told = "" if answer.is_success and answer.json().get("text") else answer.text
        except ServerError as error:
            told = str(error)
        return _told(command, not told, told)

    def _does(self, *arguments: str, says: str = "") -> bool:
        """Whether a command ends well, and prints `says`."""
        done = self._run([self._tool, *arguments])
        return _told(done.args, not done.returncode and says in done.stdout, done.stderr)

    def _refuses(self, env: Mapping[str, str], extra: str, *arguments: str) -> bool:
        """Whether a command ends with 2 and one line, which names the extra."""
        done = self._run([self._tool, *arguments], env)
        lines = done.stderr.strip().splitlines()
        named = len(lines) == 1 and f"pip install 'sglang-ext[{extra}]'" in lines[0]
        return _told(done.args, done.returncode == 2 and named, done.stderr)

    def _run(
        self, command: Sequence[str], env: Mapping[str, str] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        inherited = {name: os.environ[name] for name in os.environ if name not in _NOT_INHERITED}
        return subprocess.run(
            command, cwd=self._work, env=inherited | dict(env or {}), stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=_COMMAND_S, check=False,
        )  # fmt: skip


def _told(command: Sequence[str], well: bool, said: str) -> bool:
    """Print how a command ended, and what it said where that was not well."""
    print(f"{'well' if well else 'FAILED'}: sglang-ext {' '.join(command[1:])}", flush=True)
    if not well:
        print("\n".join(said.rstrip().splitlines()[-_SHOWN_LINES:]), flush=True)
    return well


if __name__ == "__main__":
    sys.exit(main())
