"""Good manners on shared cores: OpenMP's threads spin at barriers only while nobody else waits.

A layer's products end at barriers, some hundred a token. Spinning there bridges the Python code
between two products and is quickest on cores of one's own; where other programs want the cores, a
thread that spins keeps from them, and from its own siblings, what they need to get to the barrier.
libgomp decides anew at each barrier: with more of its threads than processors it spins 100 times
instead of GOMP_SPINCOUNT (GCC's manual of libgomp, GOMP_SPINCOUNT). So while this process's threads
have to wait for processors, which the kernel counts, and other programs use them, threads that hold
a team of their own and do nothing are kept beside them: a team of torch's and one of numba's, which
have a libgomp each (PyPI's numba asks for it by another name). How many threads a product runs on
stays, and with it its bits. Where all processors are busy a team of two goes to one (one_core.py).
"""

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numba
import numpy as np
import torch

from sglang_ext.cpu.one_core import one_core
from sglang_ext.servers.cpu_watch import others_seconds

logger = logging.getLogger(__name__)

WAITS_VARIABLE = "SGLANG_EXT_CPU_SHORT_WAITS"
_MODES = ("auto", "always", "never")
_TASKS = Path("/proc/self/task")
_LOOK_S = 0.2
# Of the time, what all threads together wait for processors: above this, for so many looks in a
# row, others want them. On two cores a server that streams waits 0.1 to 0.4 for its own other
# processes, more for a moment where requests begin, beside one busy neighbour 0.9.
_CROWDED, _CROWDED_LOOKS = 0.6, 4
# With short waits threads sleep at barriers and wake where there is room: what they wait tells no
# more. So it is asked so often whether other programs use more than this part of a processor.
_FREE_S, _FREE = 1.0, 0.15
# What it takes to wake a thread that sleeps, at the most, on a processor that nobody else wants. Of
# threads with short waits that is some thousand times in a look.
_WAKE_S = 15e-6
# Below this part of a processor the process is idle, and nobody looks.
_IDLE = 0.1
# Elements above which torch's element-wise kernels start a team (at::internal::GRAIN_SIZE: 32,768).
_ENOUGH_FOR_A_TEAM = 1 << 18
_MOST_HOLDERS = 16
_crowded = threading.Event()


def is_crowded() -> bool:
    """Whether this process's waits are short: at barriers its threads sleep, and wake late."""
    return _crowded.is_set()


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
            _crowded.set()
            self._end = threading.Event()
            self._holders = [self._held_team() for _ in range(_holders_needed())]
            return
        _crowded.clear()
        self._end.set()
        for holder in self._holders:
            holder.join()
        self._holders = []

    def _held_team(self) -> threading.Thread:
        """A thread that has started a team, which sleeps until `_end`."""
        started, end = threading.Event(), self._end

        def hold() -> None:
            torch.ones(_ENOUGH_FOR_A_TEAM).add_(1.0)
            _start_numbas_team()
            started.set()
            end.wait()

        thread = threading.Thread(target=hold, name="openmp-team", daemon=True)
        thread.start()
        started.wait()
        return thread


@numba.njit(parallel=True, nogil=True, cache=True)
def _start_numbas_team() -> None:
    """Run something on all of numba's threads, a place for each."""
    places = np.zeros(numba.get_num_threads())
    for i in numba.prange(len(places)):
        places[i] = 1.0


class Crowd:
    """Tells whether others want this process's processors: from its threads' waits that they do,
    and from what others use that they do no more.

    Args:
        others: seconds of the processors that others have used since some moment; None: not known.
    """

    def __init__(self, others: Callable[[], float | None] = others_seconds) -> None:
        self.here = False
        self._crowded_looks = 0
        self._others = others
        # Others that use little whenever, or while this process runs, want its processors no more;
        # what they use in its pauses takes nothing from it.
        self._use, self._use_while_running = _Use(), _Use()

    def note(self, waited: float) -> bool:
        """Whether others want them.

        Args:
            waited: by this process's threads, by the time since the last look.
        """
        if self.here:
            self.here = not self._are_gone()
            return self.here
        self._crowded_looks = self._crowded_looks + 1 if waited > _CROWDED else 0
        self.here = self._crowded_looks >= _CROWDED_LOOKS
        if self.here:
            self._crowded_looks = 0
            self._use, self._use_while_running = _Use(), _Use()
            self._are_gone()  # the first reading
        return self.here

    def pause(self) -> None:
        """Say that this process was idle since the last look."""
        self._use_while_running.pause()

    def _are_gone(self) -> bool:
        used, now = self._others(), time.monotonic()
        gone = False
        for use in (self._use, self._use_while_running):
            use.look(now, math.nan if used is None else used)
            if use.seconds >= _FREE_S:
                # Where it is not known (nan) waits tell again.
                gone |= not use.used > _FREE * use.seconds
                use.forget()
        return gone


class _Use:
    """What others used, added up over looks.

    Attributes:
        seconds: of those looks together.
        used: seconds of the processors, meanwhile.
    """

    def __init__(self) -> None:
        self.seconds = self.used = 0.0
        self._readings: list[tuple[float, float]] = []

    def look(self, now: float, used: float) -> None:
        """Add the look before the last: this process runs now, so it ran until that one's end."""
        readings = [*self._readings, (now, used)]
        if len(readings) == 3:
            (start, before), (end, after), _ = readings
            self.seconds += end - start
            self.used += after - before
        self._readings = readings[-2:]

    def pause(self) -> None:
        """Leave out what is used until the next look, and the last: it may have been idle in it."""
        self._readings = []

    def forget(self) -> None:
        """Add up anew."""
        self.seconds = self.used = 0.0


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
    _start_numbas_team()  # compiled before it is needed
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
    core = one_core()
    while not rest(_LOOK_S):
        last, used = used, time.process_time()
        if used - last < _IDLE * _LOOK_S:
            before = None  # nothing runs that could wait: what is, stays
            crowd.pause()
            continue
        now = waited_seconds()
        if before is not None and now is not None:
            # A thread that has ended takes its waits along.
            here = crowd.note((now - before) / _LOOK_S)
            if here != waits.on:
                waits.set(here)
                logger.debug("OpenMP waits are %s", "short" if here else "as they are set")
            if core is not None:
                core.look(here)
        before = now
    waits.set(False)
    if core is not None:
        core.look(False)


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
