"""Servers that are started for a command and stopped with it."""

import contextlib
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from sglang_ext.servers.processes import free_port
from sglang_ext.servers.server_process import ServerError, ServerProcess

__all__ = ["ServerError", "serve_command", "started"]


def serve_command(model: str, port: int, flags: Sequence[str]) -> list[str]:
    """The command line of a server on the loopback interface.

    Args:
        flags: further ones of `sglang-ext serve`.
    """
    return [
        sys.executable, "-m", "sglang_ext.cli", "serve", "--model", model,
        "--host", "127.0.0.1", "--port", str(port), *flags,
    ]  # fmt: skip


@contextlib.contextmanager
def started(
    model: str,
    flags: Sequence[str],
    log_file: Path | None = None,
    port: int | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[ServerProcess]:
    """A server on the loopback interface, which loads its model; see `ServerProcess.wait`.

    Args:
        flags: further ones of `sglang-ext serve`.
        log_file: what it prints is added to it, and kept.
        port: default: a free one.
        env: variables that it gets besides this process's.
    """
    port = port or free_port()
    # SGLang leaves its sockets behind.
    with tempfile.TemporaryDirectory(prefix="sglang-ext-", ignore_cleanup_errors=True) as folder:
        server = ServerProcess(
            f"the server with {model}",
            serve_command(model, port, flags),
            f"http://127.0.0.1:{port}",
            log_file or Path(folder) / "server.log",
            env={**(env or {}), "TMPDIR": folder},
        )
        try:
            # In its session Ctrl-C does not reach it before this process has finished with it.
            server.start()
            print(f"starting a server with {model} ...", file=sys.stderr)
            yield server
        finally:
            server.stop()
