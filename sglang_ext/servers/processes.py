"""Server processes that are started and stopped together with all that they start."""

import contextlib
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil  # type: ignore[import-untyped]

# Between SIGTERM and SIGKILL.
GRACE_S = 10.0
# Below those of outgoing connections (Linux: 32768 up) and those that SGLang chooses (22000 up).
_PORTS = 10_000, 20_000
_SUPERVISOR = Path(__file__).with_name("supervisor.py")


def start(
    command: Sequence[str],
    *,
    stdin: int | IO[bytes] | None = subprocess.DEVNULL,
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
    env: Mapping[str, str] | None = None,
) -> "subprocess.Popen[bytes]":
    """Start a program in a session of its own, to be stopped with `stop_group`.

    It ends, with all that it started, also when this process ends without stopping it, by
    whatever: an exception, a signal, kill -9. The process returned is its supervisor
    (supervisor.py), which ends as the program does; the program is its child.

    Raises:
        OSError: no process can be started. A program that is not there ends with exit code 127.
    """
    supervisor = [sys.executable, "-I", "-S", str(_SUPERVISOR), str(os.getpid()), str(GRACE_S)]
    return subprocess.Popen(
        [*supervisor, *command],
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env=env,
        start_new_session=True,
    )


def run(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, timeout: float | None = None
) -> int:
    """`start`, wait, and return the exit code; what it left is ended.

    Raises:
        subprocess.TimeoutExpired: it took longer than `timeout` seconds.
    """
    process = start(command, env=env)
    try:
        return process.wait(timeout)
    finally:
        stop_group(process)


def end_with_parent() -> None:
    """Have this process, which multiprocessing started, end when the one that started it has.

    multiprocessing ends its children when their parent exits, not when it is killed.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "multiprocessing did not start this process"

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, name="end-with-parent", daemon=True).start()


def stop_group(process: "subprocess.Popen[bytes]", grace_s: float = GRACE_S) -> None:
    """End a process that leads a session of its own, and the ones it started.

    Args:
        grace_s: between SIGTERM and SIGKILL, in seconds.
    """
    signal_group(process, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=grace_s)
    kill_group(process)


def kill_group(process: "subprocess.Popen[bytes]") -> None:
    """End a process that leads a session of its own, and the ones it started, with kill -9."""
    signal_group(process, signal.SIGKILL)
    process.wait()


def signal_group(process: "subprocess.Popen[bytes]", number: int) -> None:
    """Send a signal to the whole session; nothing happens where it has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def cpu_seconds(pid: int) -> float:
    """CPU time that a process and those it started have used so far.

    Raises:
        psutil.Error: one of them has just ended.
    """
    times = [process.cpu_times() for process in _family(pid)]
    return sum(t.user + t.system for t in times)


def memory_bytes(pid: int) -> int:
    """Memory that a process and those it started hold, what they share counted once (PSS).

    Raises:
        psutil.Error: one of them has just ended.
    """
    return sum(process.memory_full_info().pss for process in _family(pid))


def _family(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


@contextlib.contextmanager
def end_as_ctrl_c() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does, so that what it started is stopped."""
    handlers = {s: signal.signal(s, _interrupt) for s in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _interrupt(*_: object) -> None:
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):  # a shell has its background jobs ignore it
        raise KeyboardInterrupt
    handler(signal.SIGINT, None)  # asyncio's cancels what is under way


def free_port() -> int:
    """A loopback port that is free now, and that no outgoing connection is given until it is used.

    Servers listen a minute after they are started; a port of the kernel's choice (bind to 0) may be
    taken by then.
    """
    while True:
        port = random.randrange(*_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
