"""Who else used the processors while something was measured.

A figure that is taken while other programs run says as much about them. The kernel counts how long
the processors worked (/proc/stat) and how long the host of a virtual machine kept them (steal);
what this process and those below it did not use was another program's, or the kernel's own.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil  # type: ignore[import-untyped]

DISTURBED = 0.05
"""A measurement in which others took more than this part of the processors is called disturbed."""
_STAT = "/proc/stat"
# Columns of a cpuN line that are work, proc(5): user, nice, system, irq, softirq; and steal.
_WORK, _STEAL = (1, 2, 3, 6, 7), 8
_IDLE = (4, 5)  # idle, iowait


@dataclass(frozen=True)
class CpuUse:
    """Seconds since some moment, of the processors that this process may run on.

    Attributes:
        clock: of the clock, times the number of processors.
        busy: that they worked, for whomever.
        stolen: that the host of this virtual machine kept them, though there was work.
        own: CPU time of this process and those below it, ended ones included.
    """

    clock: float
    busy: float
    stolen: float
    own: float

    @property
    def foreign(self) -> float:
        """Seconds that other programs used."""
        return self.busy - self.own

    @classmethod
    def now(cls, family: psutil.Process | None = None) -> "CpuUse | None":
        """None where the kernel does not say.

        Args:
            family: the process that is ours, with those below it; None: this one.
        """
        processors = os.sched_getaffinity(0)
        try:
            with open(_STAT, encoding="ascii") as file:
                busy, stolen = processor_seconds(file.read(), processors)
        except (OSError, ValueError, IndexError):
            return None
        return cls(time.monotonic() * len(processors), busy, stolen, family_seconds(family))


@dataclass(frozen=True)
class Shares:
    """What others took of the processors, as parts of all of their time.

    Attributes:
        foreign: other programs; None: not told apart from ours.
        stolen: the host of the virtual machine.
    """

    foreign: float | None
    stolen: float

    @property
    def disturbed(self) -> bool:
        """Whether that is more than a measurement bears."""
        return (self.foreign or 0.0) + self.stolen > DISTURBED

    def __str__(self) -> str:
        stolen = f"the host kept {self.stolen:.1%} (steal)"
        if self.foreign is None:
            return stolen
        return f"other programs took {self.foreign:.1%} of the processors, {stolen}"


class CpuWatch:
    """Adds up what others took over several spans.

    Args:
        whole: whether all that is measured runs below this process; else what is foreign cannot be
            told from what is measured.
        read: the processors' seconds now; tests give others.
    """

    def __init__(self, whole: bool = True, read: Callable[[], CpuUse | None] = CpuUse.now) -> None:
        self._whole = whole
        self._read = read
        self._clock = self._foreign = self._stolen = 0.0

    @contextlib.contextmanager
    def span(self) -> Iterator[None]:
        """Watch while the block runs; one that ends with an exception counts for nothing."""
        before = self._read()
        yield
        self.add(before)

    def add(self, before: CpuUse | None) -> None:
        """Count from `before`, a reading, until now."""
        after = self._read()
        if before is None or after is None:
            return
        self._clock += after.clock - before.clock
        self._stolen += after.stolen - before.stolen
        self._foreign += after.foreign - before.foreign

    @property
    def shares(self) -> Shares | None:
        """Of all spans together; None where nothing was seen."""
        if self._clock <= 0.0:
            return None
        # Ticks of 10 ms are counted to whoever is there when one ends: short spans can come out
        # below 0.
        foreign, stolen = (max(0.0, s / self._clock) for s in (self._foreign, self._stolen))
        return Shares(foreign if self._whole else None, stolen)


def processor_seconds(stat: str, processors: set[int]) -> tuple[float, float]:
    """Seconds (worked, stolen) of these processors since the start, from the text of /proc/stat.

    Raises:
        ValueError, IndexError: it has another form.
    """
    rows = _rows(stat, processors).values()
    ticks = os.sysconf("SC_CLK_TCK")
    busy = sum(int(row[column]) for row in rows for column in _WORK)
    return busy / ticks, sum(int(row[_STEAL]) for row in rows) / ticks


def idle_seconds() -> dict[int, float] | None:
    """Seconds that each of the processors we may run on had nothing to do, since the start.

    None where the kernel does not say.
    """
    try:
        with open(_STAT, encoding="ascii") as file:
            rows = _rows(file.read(), os.sched_getaffinity(0))
        ticks = os.sysconf("SC_CLK_TCK")
        return {one: sum(int(row[column]) for column in _IDLE) / ticks for one, row in rows.items()}
    except (OSError, ValueError, IndexError):
        return None


def _rows(stat: str, processors: set[int]) -> dict[int, list[str]]:
    """The line of each of these processors, in columns, from the text of /proc/stat.

    Raises:
        ValueError: one has no line.
    """
    names = {f"cpu{number}": number for number in processors}
    lines = (line.split() for line in stat.splitlines() if line.split(" ", 1)[0] in names)
    rows = {names[columns[0]]: columns for columns in lines}
    if len(rows) != len(names):
        raise ValueError(f"{_STAT} has no line for each of {sorted(names)}")
    return rows


def others_seconds() -> float | None:
    """Seconds that other programs have used, since some moment, of the processors we may run on.

    Ours are the processes that were started together with this one: its process group's first, and
    all below it. None where the kernel does not say.
    """
    try:
        own = psutil.Process()
        while (above := own.parent()) is not None and os.getpgid(above.pid) == os.getpgid(0):
            own = above
    except (OSError, psutil.Error):
        return None
    use = CpuUse.now(own)
    return None if use is None else use.foreign


def family_seconds(own: psutil.Process | None = None) -> float:
    """CPU time of a process and all below it, ended ones that were waited for included.

    Args:
        own: None: this one.
    """
    own = own or psutil.Process()
    seconds = 0.0
    for process in [own, *own.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):  # one that has just ended is in its parent's time
            t = process.cpu_times()
            seconds += t.user + t.system + t.children_user + t.children_system
    return float(seconds)
