"""Memory that processes have made themselves, for checks of what grows."""

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path

import psutil  # type: ignore[import-untyped]

_FIELD = re.compile(r"^(?:Pss_Anon|Pss_Shmem): +(\d+) kB$", re.MULTILINE)
_MIB = 1 << 20


def own_mib(pid: int) -> dict[int, float]:
    """MiB of anonymous and shared memory of a process and those below it, by process id.

    What they share is counted once. Files that are mapped, libraries above all, are left out: of
    them a process counts a share (proc(5): Pss) that grows whenever another program that uses them
    ends. A process that ends meanwhile is left out.

    Raises:
        psutil.NoSuchProcess: `pid` has ended.
        ValueError: the kernel does not tell (Linux before 5.9).
    """
    root, found = psutil.Process(pid), {}
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(OSError):
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            fields = _FIELD.findall(rollup)
            if rollup and len(fields) != 2:
                raise ValueError(f"/proc/{process.pid}/smaps_rollup has no Pss_Anon: Linux 5.9 has")
            found[process.pid] = 1024 * sum(map(int, fields)) / _MIB
    return found


def growth_mib(before: Mapping[int, float], after: Mapping[int, float]) -> float:
    """Of the processes that are in both, two answers of `own_mib`."""
    return sum(after[pid] - before[pid] for pid in before.keys() & after.keys())
