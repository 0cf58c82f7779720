"""A CPU server's processes as forks of one that has imported SGLang, so that it is imported once.

SGLang 0.5.23 starts its scheduler and its detokenizer by multiprocessing's "spawn"
(entrypoints/engine.py, _set_envs_and_config): each imports all of SGLang again, with 12 s of a core
and 600 MB of memory. Python's own fork server (multiprocessing.forkserver) imports it once, while
the launcher does, and both are forked from it: they start at once and share that memory. It has no
thread and has computed nothing when it forks; CUDA is not initialized where this is used.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from types import FrameType
from typing import Any

from sglang_ext import sglang_points
from sglang_ext.sglang_points.hooking import assign

FORK_SERVER_VARIABLE = "SGLANG_EXT_CPU_FORK_SERVER"
_IMPORTS = "sglang_ext.cpu.fork_server_imports"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def begin() -> bool:
    """Have a fork server import SGLang, from now on and beside this process.

    Returns:
        False where SGLANG_EXT_CPU_FORK_SERVER=0 says that processes are spawned, and where the
        kernel is not Linux.
    """
    if os.environ.get(FORK_SERVER_VARIABLE) == "0" or sys.platform != "linux":
        return False
    multiprocessing.set_forkserver_preload([_IMPORTS])
    forkserver.ensure_running()
    return True


def use() -> None:
    """Have SGLang start its processes from the fork server that `begin` started."""
    context = _Context()
    assign(sglang_points.PROCESSES, lambda _: context)


def stand_between() -> None:
    """Be the parent that SGLang's processes expect, in the fork server.

    They end with their parent, and tell it by SIGQUIT when they fail: the fork server ends with the
    launcher, and hands the signal on to it.
    """
    fork_server, launcher = os.getpid(), os.getppid()

    def hand_on(number: int, frame: FrameType | None) -> None:
        if os.getpid() == fork_server:
            os.kill(launcher, number)
        else:  # a fork, which has inherited this
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != launcher:
        sys.exit("the launcher has ended")
    signal.signal(signal.SIGQUIT, hand_on)


class _Process(ForkServerProcess):
    """A process with the environment of whoever starts it, not of the fork server."""

    def start(self) -> None:
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        # What is the same stays in its place: setproctitle finds argv's end by it.
        for name in os.environ.keys() - self._environment.keys():
            del os.environ[name]
        for name, value in self._environment.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        super().run()


class _Context(ForkServerContext):
    """What SGLang takes for the module multiprocessing."""

    Process = _Process  # type: ignore[assignment]

    def set_start_method(self, method: Any, force: bool = False) -> None:
        """That of what others start, which is not ours."""
        multiprocessing.set_start_method(method, force)
