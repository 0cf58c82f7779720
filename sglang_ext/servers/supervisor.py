"""Ends a program, and all that it started, when the process that asked for it has ended.

It stands between the two as a process of its own (`processes.start`), so that it is there whatever
ends its parent, kill -9 included. It is a subreaper (prctl(2)): what the program starts stays
below it in the tree of processes, whoever in between ends and whatever session it is in. The
kernel's parent-death signal wakes it up; since that comes also when only the thread ends that
started it, the parent's process id decides.

    python -I -S supervisor.py PARENT GRACE COMMAND...

It ends as the program does, by the same exit code or signal. Standard library alone: it starts
within 0.1 s and takes 10 MiB.
"""

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

# How often the parent is looked at where the kernel sends no parent-death signal.
_LOOK_S = 1.0
_POLL_S = 0.05
_CANNOT_START = 127
# From linux/prctl.h.
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_WAITED_FOR = (signal.SIGCHLD, signal.SIGCONT, *_PASSED_ON)


def supervise(parent: int, grace_s: float, command: Sequence[str]) -> int:
    """Run a program to its end or the parent's.

    Args:
        parent: the process that called; it may have ended by now.
        grace_s: between SIGTERM and SIGKILL where the parent has ended, in seconds.

    Returns:
        the program's wait status, as os.waitpid's; 0 where the parent ended first.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED_FOR)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # A parent that stopped the group (SIGSTOP) may be killed then; SIGCONT does nothing else.
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
    child = _start(command, mask)
    while os.getppid() == parent:
        if (status := _reaped(child)) is not None:
            _end_descendants(0.0)
            return status
        seen = signal.sigtimedwait(_WAITED_FOR, _LOOK_S)
        # What the parent sends goes to the whole group, the program included.
        if seen and seen.si_signo in _PASSED_ON and seen.si_pid not in (parent, os.getpid()):
            os.killpg(0, seen.si_signo)
    _end_descendants(grace_s)
    return 0


def _start(command: Sequence[str], mask: Iterable[int]) -> int:
    """Returns the program's process id; it is killed if this process is."""
    me = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        # Python had these ignored; an exec would keep that.
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        if os.getppid() == me:
            os.execvp(command[0], list(command))
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
    os._exit(_CANNOT_START)


def _reaped(child: int) -> int | None:
    """Take what has ended below; the child's wait status, if it is among it."""
    found = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                found = ended[1]
    return found


def _end_descendants(grace_s: float) -> None:
    """SIGTERM, where there is time for it, then SIGKILL; returns when none is left."""
    kill_at = time.monotonic() + grace_s
    told: set[int] = set()
    while left := _descendants():
        kill = time.monotonic() >= kill_at
        for pid in left:
            with suppress(ProcessLookupError):
                if kill:
                    os.kill(pid, signal.SIGKILL)
                elif pid not in told:
                    os.kill(pid, signal.SIGTERM)
                    os.kill(pid, signal.SIGCONT)
        told.update(left)
        signal.sigtimedwait((signal.SIGCHLD,), _POLL_S)
        _reaped(0)


def _descendants() -> list[int]:
    """Processes below this one that have not ended."""
    children: dict[int, list[int]] = {}
    ended = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                # pid (name, which may hold anything) state parent ...
                state, parent = (entry / "stat").read_text("latin-1").rpartition(")")[2].split()[:2]
                children.setdefault(int(parent), []).append(int(entry.name))
                if state in "ZX":
                    ended.add(int(entry.name))
    found, look = [], [os.getpid()]
    while look:
        below = children.get(look.pop(), [])
        found += below
        look += below
    return [pid for pid in found if pid not in ended]


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def _end_like(status: int) -> None:
    """End this process as wait status `status` says."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    _end_like(supervise(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
