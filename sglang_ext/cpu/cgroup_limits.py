"""How many processors' worth of time the cgroups of this process allow: containers' limits.

More threads than that are stopped together for the rest of each period once its quota is used up,
most of which they have spent waiting for one another. Imports neither torch nor SGLang.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

_OWN = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")
_NO_LIMIT = "max"


def allowed_processors() -> float | None:
    """The least quota of this process's cgroups and those above, in processors; None: no limit."""
    return min(_quotas(), default=None)


def _quotas() -> Iterator[float]:
    """Of control groups of version 2 (cpu.max) and 1 (cpu.cfs_quota_us), cgroups(7)."""
    for path, unified in _groups():
        for folder in (path, *path.parents):
            if folder == _MOUNT.parent:
                break
            with contextlib.suppress(OSError, ValueError, IndexError):
                quota, period = _limit(folder, unified)
                if quota > 0 and period > 0:
                    yield quota / period


def _groups() -> Iterator[tuple[Path, bool]]:
    """(folder, whether of version 2) of the groups that limit processors."""
    with contextlib.suppress(OSError):
        for line in _OWN.read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if not controllers:
                yield _MOUNT / name.lstrip("/"), True
            elif "cpu" in controllers.split(","):
                for mount in (controllers, "cpu"):
                    yield _MOUNT / mount / name.lstrip("/"), False


def _limit(folder: Path, unified: bool) -> tuple[int, int]:
    """(microseconds of processor time, per so many of the clock); 0 or less: no limit.

    Raises:
        OSError, ValueError, IndexError: the group has no such file, or one of another form.
    """
    if unified:
        quota, period = (folder / "cpu.max").read_text().split()[:2]
        return (0 if quota == _NO_LIMIT else int(quota)), int(period)
    texts = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
    quota_us, period_us = map(int, texts)
    return quota_us, period_us
