"""Real SGLang servers for checks, benchmarks, tests and the demo: start, wait, stop."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import requests

from sglang_ext.servers import processes
from sglang_ext.servers.processes import free_port, kill_group, signal_group, stop_group

START_TIMEOUT_S = 300
# Several servers share the machine's memory; a later flag overrides it.
KV_POOL = ["--max-total-tokens", "16384"]


class ServerError(RuntimeError):
    """The server did not come up; the message ends with its log's last lines."""


class Server:
    """One `sglang-ext serve` process on the loopback interface.

    Args:
        model: path, hub id or a name of `sglang-ext models list`.
        args: further flags.
        name: what to call it in messages.
        log: where its output goes; default: a temporary file.
    """

    def __init__(
        self,
        model: str,
        args: Sequence[str] = (),
        *,
        name: str = "server",
        log: Path | None = None,
        port: int | None = None,
    ):
        self.name = name
        self.port = port or free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.log = log or Path(tempfile.mkstemp(prefix=f"sglang-{name}-", suffix=".log")[1])
        self._command = [
            sys.executable, "-m", "sglang_ext.cli", "serve", "--model", model,
            "--host", "127.0.0.1", "--port", str(self.port), *KV_POOL, *args,
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> "Server":
        """Start without waiting; see `wait`."""
        with self.log.open("wb") as log:
            self._process = processes.start(
                self._command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )
        return self

    def wait(self, timeout_s: float = START_TIMEOUT_S) -> "Server":
        """Wait until it answers.

        Raises:
            ServerError: it ended, or did not answer in time.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.exit_code() is not None:
                raise ServerError(f"{self.name} ended with {self.exit_code()}:\n{self.log_tail()}")
            try:
                if requests.get(self.base_url + "/health", timeout=5).ok:
                    return self
            except requests.RequestException:
                pass
            time.sleep(0.3)
        self.stop()
        raise ServerError(f"{self.name} not ready after {timeout_s:.0f} s:\n{self.log_tail()}")

    def exit_code(self) -> int | None:
        """The process's exit code, None while it runs."""
        return None if self._process is None else self._process.poll()

    @property
    def pid(self) -> int:
        """Of its first process."""
        assert self._process is not None, f"{self.name} is not running"
        return self._process.pid

    def cpu_seconds(self) -> float:
        """CPU time that its processes have used so far."""
        assert self._process is not None, f"{self.name} is not running"
        return processes.cpu_seconds(self._process.pid)

    def memory_bytes(self) -> int:
        """Memory that its processes hold, what they share counted once (PSS)."""
        assert self._process is not None, f"{self.name} is not running"
        return processes.memory_bytes(self._process.pid)

    def log_tail(self, lines: int = 30) -> str:
        """The last lines it printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self) -> None:
        """End the process and the ones it started."""
        if self._process is None:
            return
        stop_group(self._process)
        self._process = None

    def pause(self) -> None:
        """Stop all its processes where they are; what is sent to it waits."""
        if self._process is not None:
            signal_group(self._process, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        if self._process is not None:
            signal_group(self._process, signal.SIGCONT)

    def kill(self) -> None:
        """kill -9 of the process and the ones it started, at once."""
        if self._process is not None:
            kill_group(self._process)
            self._process = None

    def __enter__(self) -> "Server":
        if self._process is None:
            self.start()
        try:
            return self.wait()
        except BaseException:
            self.stop()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
