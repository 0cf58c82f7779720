"""Real SGLang servers for checks, benchmarks, tests and the demo: start, wait, stop."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from sglang_ext.servers.processes import free_port
from sglang_ext.servers.server_process import ServerError, ServerProcess
from sglang_ext.servers.started_server import serve_command

__all__ = ["KV_POOL", "Server", "ServerError"]

# Several servers share the machine's memory; a later flag overrides it.
KV_POOL = ["--max-total-tokens", "16384"]


class Server(ServerProcess):
    """One `sglang-ext serve` process on the loopback interface.

    Args:
        model: path, hub id or a name of `sglang-ext models list`.
        args: further flags.
        name: what to call it in messages.
        log: what its output is added to; default: a temporary file.
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
        self.port = port or free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        super().__init__(
            name,
            serve_command(model, self.port, [*KV_POOL, *args]),
            self.base_url,
            log or Path(tempfile.mkstemp(prefix=f"sglang-{name}-", suffix=".log")[1]),
        )
