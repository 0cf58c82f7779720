"""Two threads of OpenMP on one processor, while other programs keep every processor busy.

At a barrier the threads of a team sleep and wake by turns, some hundred times a token. On
processors that others keep busy too, each that wakes waits there until it is its turn; on the same
one they hand it to each other (docs/cpu.md has figures). Teams of more threads were not measured,
and are left alone.
"""

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch

from sglang_ext.servers.cpu_watch import idle_seconds

_TASKS = Path("/proc/self/task")
_TEAM = 2
_PERIOD_S = 1.0
# Part of a period that no processor may have been idle for the threads to be on one: beside less
# work than that they are better off apart.
_ROOM = 0.25


class OneCore:
    """Has the model's threads on one processor, or on all.

    Where several servers do so on the same one, another is idle: all let go, and draw anew.

    Attributes:
        at: the processor; None: all.

    Args:
        idle: seconds that each processor was idle since some moment; None where the kernel does not
            say.
        place: puts the model's threads on these processors.
    """

    def __init__(
        self,
        idle: Callable[[], Mapping[int, float] | None] | None = None,
        place: Callable[[Collection[int]], None] | None = None,
    ) -> None:
        self.at: int | None = None
        self._idle = idle or idle_seconds
        self._place = place or place_threads
        self._processors = os.sched_getaffinity(0)
        self._since: float | None = None
        self._before: Mapping[int, float] | None = None

    def look(self, crowded: bool) -> None:
        """Change it where that is better, at most once a second.

        Args:
            crowded: whether other programs want the processors.
        """
        if not crowded:
            self._since = None
            self._set(None)
            return
        now = time.monotonic()
        if self._since is not None and now - self._since < _PERIOD_S:
            return
        before, self._before = self._before, self._idle()
        since, self._since = self._since, now
        if since is None or before is None or self._before is None:
            return
        most = max(self._before[one] - before[one] for one in self._processors)
        if most > _ROOM * (now - since):
            self._set(None)
        elif self.at is None:
            self._set(random.choice(sorted(self._processors)))

    def _set(self, at: int | None) -> None:
        if at != self.at:
            self.at = at
            self._place(self._processors if at is None else {at})


def one_core() -> OneCore | None:
    """What is to be asked while the model runs; None where it is not known to be of use."""
    several = len(os.sched_getaffinity(0)) > 1 and idle_seconds() is not None
    return OneCore() if several and torch.get_num_threads() == _TEAM else None


def place_threads(processors: Collection[int]) -> None:
    """Have the main thread and OpenMP's run on these processors.

    Python's other threads stay where they are: what they start would be bound too, and this may be
    one of them.
    """
    main = threading.main_thread()
    others = {thread.native_id for thread in threading.enumerate() if thread is not main}
    for task in os.listdir(_TASKS):
        if int(task) not in others:
            # One that has just ended; and a processor that was taken from us meanwhile.
            with contextlib.suppress(OSError):
                os.sched_setaffinity(int(task), processors)
