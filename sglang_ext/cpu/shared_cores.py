"""Good manners on shared cores: OpenMP's threads spin at barriers only while nobody else waits.

A layer's products end at barriers, some hundred a token. Spinning there bridges the Python code
between two products and is quickest on cores of one's own; where other programs want the cores, a
thread that spins keeps from them, and from its own siblings, what they need to get to the barrier.
libgomp decides anew at each barrier: with more of its threads than processors it spins 100 times
instead of GOMP_SPINCOUNT (GCC's manual of libgomp, GOMP_SPINCOUNT). So while this process's threads
have to wait for processors, which the kernel counts, threads that hold a team of their own and do
nothing are kept beside them. How many threads a product runs on stays, and with it its bits.
"""

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

WAITS_VARIABLE = "SGLANG_EXT_CPU_SHORT_WAITS"
_MODES = ("auto", "always", "never")
_TASKS = Path("/proc/self/task")
_LOOK_S = 0.2
# Of the time, what all threads together wait for processors: above this, for so many looks in a
# row, others want them. On two cores a server that streams waits 0.1 to 0.4 for its own other
# processes, more for a moment where requests begin, beside one busy neighbour 0.9.
_CROWDED, _CROWDED_LOOKS = 0.6, 4
# In the mean of so many looks below this, others do not want them any more. With short waits a
# server that streams waits -0.1 to 0.2, in the mean 0; beside busy neighbours 0.14 to 0.18.
_FREE, _FREE_LOOKS, _LEAST = 0.03, 15, -0.2
# What it takes to wake a thread that sleeps, at the most, on a processor that nobody else wants. Of
# threads with short waits that is some thousand times in a look.
_WAKE_S = 15e-6
# Below this part of a processor the process is idle, and nobody looks.
_IDLE = 0.1
# Elements above which torch's element-wise kernels start a team (at::internal::GRAIN_SIZE: 32,768).
_ENOUGH_FOR_A_TEAM = 1 << 18
_MOST_HOLDERS = 16


class ShortWaits:
    """Has OpenMP's threads of this process spin hardly at all, or as they are set.

    Attributes:
        on: whether they spin hardly at all.
    """

    def __init__(self) -> None:
        self.on = False
        self._end = threading.Event()
        self._holders: list[threading.Thread] = []

    def set(self, on: bool) -> None:
        """Change it; from the next barrier on."""
        if on == self.on:
            return
        self.on = on
        if on:
            self._end = threading.Event()
            self._holders = [self._held_team() for _ in range(_holders_needed())]
            return
        self._end.set()
        for holder in self._holders:
            holder.join()
        self._holders = []

    def _held_team(self) -> threading.Thread:
        """A thread that has started a team, which sleeps until `_end`."""
        started, end = threading.Event(), self._end

        def hold() -> None:
            torch.ones(_ENOUGH_FOR_A_TEAM).add_(1.0)
            started.set()
            end.wait()

        thread = threading.Thread(target=hold, name="openmp-team", daemon=True)
        thread.start()
        started.wait()
        return thread


class Crowd:
    """Tells from the waits of this process's threads whether others want its processors."""

    def __init__(self) -> None:
        self.here = False
        self._crowded_looks = 0
        self._looks: deque[float] = deque(maxlen=_FREE_LOOKS)

    def note(self, waited: float) -> bool:
        """Whether others want them, given what threads waited, by the time since the last look.

        Args:
            waited: below 0 where waking threads took less than is taken off for it.
        """
        self._crowded_looks = self._crowded_looks + 1 if waited > _CROWDED else 0
        self._looks.append(waited)
        if not self.here and self._crowded_looks >= _CROWDED_LOOKS:
            self.here = True
            self._looks.clear()
        elif len(self._looks) == _FREE_LOOKS and sum(self._looks) < _FREE * _FREE_LOOKS:
            self.here = False
        return self.here


def watch_cores() -> threading.Event | None:
    """Watch from a thread of this process and set its waits; once, where the model is.

    Returns:
        Set it to end the watching; None: there is nothing to watch for (SGLANG_EXT_CPU_SHORT_WAITS,
        one thread, or a kernel that does not count waits).
    Raises:
        ValueError: the variable has another value; the message names it.
    """
    mode = _configured_mode()
    if mode == "never" or torch.get_num_threads() < 2 or waited_seconds() is None:
        return None
    waits = ShortWaits()
    if mode == "always":
        waits.set(True)
        return None
    end = threading.Event()
    watch = threading.Thread(target=_watch, args=(waits, end.wait), name="core-watch", daemon=True)
    watch.start()
    return end


def _watch(waits: ShortWaits, rest: Callable[[float], bool]) -> None:
    crowd, before, used = Crowd(), waited_seconds(), time.process_time()
    while not rest(_LOOK_S):
        last, used = used, time.process_time()
        if used - last < _IDLE * _LOOK_S:
            before = None  # nothing runs that could wait: what is, stays
            continue
        now = waited_seconds()
        if before is not None and now is not None:
            # A thread that has ended takes its waits along.
            here = crowd.note(max(_LEAST, (now - before) / _LOOK_S))
            if here != waits.on:
                waits.set(here)
                logger.debug("OpenMP waits are %s", "short" if here else "as they are set")
        before = now
    waits.set(False)


def waited_seconds() -> float | None:
    """Seconds that this process's threads stood ready and had no processor; None: not counted.

    Without what waking up takes: the sum can fall.
    """
    waited, runs, seen = 0, 0, False
    with contextlib.suppress(OSError):
        for task in os.listdir(_TASKS):
            # One that has just ended has no file any more.
            with (
                contextlib.suppress(OSError, ValueError),
                open(f"{_TASKS}/{task}/schedstat", "rb", buffering=0) as file,
            ):
                _, behind, times = file.read().split()  # both in nanoseconds, and how many runs
                waited, runs, seen = waited + int(behind), runs + int(times), True
    return waited / 1e9 - runs * _WAKE_S if seen else None


def _holders_needed() -> int:
    """Teams that make libgomp's threads more than the processors that it knows of."""
    threads = torch.get_num_threads()
    processors = len(os.sched_getaffinity(0))
    missing = processors + 1 - threads
    return min(_MOST_HOLDERS, max(1, -(-missing // (threads - 1))))


def _configured_mode() -> str:
    mode = os.environ.get(WAITS_VARIABLE) or "auto"
    if mode not in _MODES:
        raise ValueError(f"{WAITS_VARIABLE} must be one of {', '.join(_MODES)}, got {mode!r}")
    return mode
