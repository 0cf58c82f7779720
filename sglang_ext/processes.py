"""Server processes that are started and stopped together with all that they start."""

import contextlib
import os
import signal
import socket
import subprocess

_GRACE_S = 10.0


def stop_group(process: "subprocess.Popen[bytes]") -> None:
    """End a process that leads a session of its own, and the ones it started."""
    signal_group(process, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=_GRACE_S)
    kill_group(process)


def kill_group(process: "subprocess.Popen[bytes]") -> None:
    """The same with kill -9, at once."""
    signal_group(process, signal.SIGKILL)
    process.wait()


def signal_group(process: "subprocess.Popen[bytes]", number: int) -> None:
    """Send a signal to the whole session; nothing happens where it has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def free_port() -> int:
    """A loopback port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
