"""Lets a server on the same machine go first.

Priorities alone do not: Linux shares processors out between sessions, containers and systemd's
slices before it looks at them (sched(7), "The autogroup feature"), and a server whose threads wait
for one another at every layer is as slow as the slowest of them. So this process also rests.
"""

import atexit
import contextlib
import gc
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

_SHARE = 0.02
"""Of a processor's time, where none is to spare."""
_BURST_S = 0.001
_LOOK_S = 0.5
# A processor for this process, and half of one for what else it wakes.
_SPARE = 1.5


def copies_beside_a_server(arguments: Sequence[str]) -> bool:
    """Whether these arguments of `sglang-ext` copy a datastore while its server runs."""
    command = list(arguments[:2])
    if command == ["datastore", "push"]:
        return any(argument.partition("=")[0] == "--url" for argument in arguments)
    return command == ["datastore", "snapshot"]


def step_aside() -> None:
    """From here on this process takes 2% of a processor's time, or all of one that is to spare.

    For the main thread, once: it uses SIGALRM up. Work in other threads is not slowed.
    """
    with contextlib.suppress(OSError):
        os.nice(19)
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    rests = Rests()

    def on_alarm(_signal: int, _frame: object) -> None:
        rests.rest()
        signal.setitimer(signal.ITIMER_REAL, _BURST_S)

    # ValueError: not the main thread. Python runs this between two of its instructions, whatever
    # is being done. A timer of processor time counts whole ticks, which are too long here.
    with contextlib.suppress(ValueError, AttributeError):
        signal.signal(signal.SIGALRM, on_alarm)
        signal.setitimer(signal.ITIMER_REAL, _BURST_S)
        # The handler is gone before the process is, whose end is no time to collect garbage.
        atexit.register(signal.setitimer, signal.ITIMER_REAL, 0)
        atexit.register(gc.freeze)


@dataclass(frozen=True)
class Taken:
    """Seconds since some moment: of the clock, of idle processors, of a processor for us."""

    clock: float
    idle: float
    own: float

    @classmethod
    def now(cls) -> "Taken":
        """idle is 0 where the kernel does not say (/proc/stat)."""
        idle = 0.0
        with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/stat") as stat:
            idle = float(stat.readline().split()[4]) / os.sysconf("SC_CLK_TCK")
        return cls(time.monotonic(), idle, time.process_time())


class Rests:
    """Decides how long to rest after some work."""

    def __init__(self) -> None:
        self._seen = Taken.now()
        self._own = self._seen.own
        self._spare = False

    def rest(self) -> None:
        """Sleeps as long as the work since the last time is worth."""
        now = time.process_time()
        seconds = self.worth(now - self._own, Taken.now())
        self._own = now
        if seconds:
            time.sleep(seconds)

    def worth(self, worked: float, taken: Taken) -> float:
        """Seconds to rest after so many of work; `taken` is what was taken until now."""
        passed = taken.clock - self._seen.clock
        if passed >= _LOOK_S:
            free = taken.idle - self._seen.idle + taken.own - self._seen.own
            self._spare = free / passed >= _SPARE
            self._seen = taken
        return 0.0 if self._spare else worked * (1 / _SHARE - 1)
