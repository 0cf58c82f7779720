"""A server's process: started, waited for, watched, and stopped with all that it starts."""

import contextlib
import functools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

import httpx

from sglang_ext.servers import processes

# Models load, graphs are captured, and code is compiled the first time.
START_TIMEOUT_S = 900.0
POLL_S = 0.3
_HEALTH_TIMEOUT_S = 5.0
SHOWN_LINES = 30


class ServerError(RuntimeError):
    """A server did not start; the message ends with its last lines."""


class ServerProcess:
    """One server, in a session of its own that ends with this process (`processes.start`).

    Attributes:
        name: what to call it in messages.
        command: its command line.
        url: its address.
        log: the file that what it prints is added to.
        env: what its environment has besides this process's.
        without: what its environment lacks of it.

    Args:
        ready: whether it is up, asked until it is; default: `/health` answers.
        grace_s: between SIGTERM and SIGKILL, in seconds.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        url: str,
        log: Path,
        *,
        env: Mapping[str, str] | None = None,
        without: Sequence[str] = (),
        ready: Callable[[], bool] | None = None,
        grace_s: float = processes.GRACE_S,
    ):
        self.name = name
        self.command = command
        self.url = url
        self.log = log
        self.env = dict(env or {})
        self.without = without
        self._ready = ready or (lambda: is_ready(url))
        self._grace_s = grace_s
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        """Start without waiting; see `wait`."""
        env = {name: value for name, value in os.environ.items() if name not in self.without}
        with self.log.open("ab") as log:
            self._process = processes.start(
                self.command,
                stdout=log,
                stderr=log,
                env=env | {"PYTHONUNBUFFERED": "1"} | self.env,
            )
        return self

    def wait(self, timeout_s: float = START_TIMEOUT_S) -> Self:
        """Returns when it is ready.

        Raises:
            ServerError: it ended, or took too long; what is left of it is stopped.
        """
        try:
            self.wait_for(self.name, self.is_ready, timeout_s)
        except BaseException:
            self.stop()
            raise
        return self

    def wait_for(
        self, what: str, is_there: Callable[[], bool], timeout_s: float = START_TIMEOUT_S
    ) -> None:
        """Returns when something of it is there.

        Raises:
            ServerError: the process ended before, or that took too long.
        """
        deadline = time.monotonic() + timeout_s
        while self.is_running() and time.monotonic() < deadline:
            if is_there():
                return
            time.sleep(POLL_S)
        code = self.exit_code()
        late = f"was not ready after {timeout_s:.0f} s"
        words = late if code is None else f"did not start (exit code {code})"
        raise ServerError(f"{what} {words}:\n{self.tail()}")

    @property
    def pid(self) -> int:
        """The supervisor's process id: the server, and SGLang's processes, are below it."""
        assert self._process is not None, f"{self.name} is not running"
        return self._process.pid

    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def is_ready(self) -> bool:
        """Whether it is up now."""
        return self._ready()

    def exit_code(self) -> int | None:
        """The exit code; None while it runs, and where it does not run."""
        return None if self._process is None else self._process.poll()

    def tail(self, lines: int = SHOWN_LINES) -> str:
        """The last lines that it printed."""
        return "\n".join(self.output().rstrip().splitlines()[-lines:])

    def output(self) -> str:
        """All that it printed."""
        with contextlib.suppress(FileNotFoundError):
            return self.log.read_text(errors="replace")
        return ""

    def cpu_seconds(self) -> float:
        """CPU time that its processes have used so far.

        Raises:
            psutil.Error: one of them has just ended.
        """
        return processes.cpu_seconds(self.pid)

    def memory_bytes(self) -> int:
        """Memory that its processes hold, what they share counted once (PSS).

        Raises:
            psutil.Error: one of them has just ended.
        """
        return processes.memory_bytes(self.pid)

    def terminate(self) -> None:
        """Tell it and all that it started to end, without waiting; `stop` waits."""
        self._signal(signal.SIGTERM)

    def stop(self) -> None:
        """End it and all that it started."""
        if self._process is not None:
            processes.stop_group(self._process, self._grace_s)
            self._process = None

    def kill(self) -> None:
        """End it and all that it started with kill -9, at once."""
        if self._process is not None:
            processes.kill_group(self._process)
            self._process = None

    def pause(self) -> None:
        """Stop all its processes where they are; what is sent to it waits."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let its processes go on after `pause`."""
        self._signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        if self._process is None:
            self.start()
        return self.wait()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _signal(self, number: int) -> None:
        if self._process is not None:
            processes.signal_group(self._process, number)


def is_ready(url: str) -> bool:
    """Whether the server at an address answers that it is up."""
    with contextlib.suppress(httpx.HTTPError):
        return _client().get(url + "/health").is_success
    return False


@functools.cache
def _client() -> httpx.Client:
    # No connection is kept: servers close idle ones, perhaps just as they are used again.
    limits = httpx.Limits(max_keepalive_connections=0)
    return httpx.Client(limits=limits, follow_redirects=True, timeout=_HEALTH_TIMEOUT_S)
