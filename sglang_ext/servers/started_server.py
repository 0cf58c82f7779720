"""Servers that are started for a command and stopped with it."""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import httpx

from sglang_ext.servers.processes import free_port, start, stop_group

_START_TIMEOUT_S = 900.0
_POLL_S = 0.5
_SHOWN_LINES = 15


class ServerError(Exception):
    """A server did not start; the message ends with its last lines."""


@contextlib.contextmanager
def started(
    model: str, flags: Sequence[str], log_file: Path | None = None
) -> Iterator["StartedServer"]:
    """A server on the loopback interface, which loads its model; see `StartedServer.wait`.

    Args:
        flags: further ones of `sglang-ext serve`.
        log_file: what it prints is added to it, and kept.
    """
    port = free_port()
    command = [
        sys.executable, "-m", "sglang_ext.cli", "serve", "--model", model,
        "--host", "127.0.0.1", "--port", str(port), *flags,
    ]  # fmt: skip
    with (
        open(log_file, "a+b") if log_file else tempfile.TemporaryFile() as log,
        # SGLang leaves its sockets behind.
        tempfile.TemporaryDirectory(prefix="sglang-ext-", ignore_cleanup_errors=True) as folder,
    ):
        # In its session Ctrl-C does not reach it before this process has finished with it.
        process = start(command, stdout=log, stderr=log, env=os.environ | {"TMPDIR": folder})
        try:
            print(f"starting a server with {model} ...", file=sys.stderr)
            yield StartedServer(model, f"http://127.0.0.1:{port}", process, log)
        finally:
            stop_group(process)


def is_ready(url: str) -> bool:
    """Whether the server at an address answers that it is up."""
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(url + "/health", timeout=5).is_success
    return False


class StartedServer:
    """A server's process.

    Attributes:
        url: its address.
        pid: the process's; those of SGLang are its children.
    """

    def __init__(self, model: str, url: str, process: "subprocess.Popen[bytes]", log: IO[bytes]):
        self.url = url
        self.pid = process.pid
        self._model = model
        self._process = process
        self._log = log

    def wait(self) -> str:
        """Returns the address when the server is ready.

        Raises:
            ServerError: it ended, or took too long.
        """
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            if not self.running():
                raise ServerError(f"the server with {self._model} did not start:\n{self.tail()}")
            if is_ready(self.url):
                return self.url
            time.sleep(_POLL_S)
        raise ServerError(
            f"the server with {self._model} was not ready after {_START_TIMEOUT_S:.0f} s"
        )

    def running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def tail(self) -> str:
        """The last lines it printed."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return "\n".join(lines[-_SHOWN_LINES:])
