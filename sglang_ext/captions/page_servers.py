"""The captions page with its servers: `sglang-ext captions --page`, until Ctrl-C."""

import contextlib
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from sglang_ext.api.realtime.captions_page import PATH
from sglang_ext.servers.processes import free_port
from sglang_ext.servers.server_process import ServerProcess
from sglang_ext.servers.started_server import ServerError, started

_POLL_S = 0.5


@dataclass(frozen=True)
class PageServers:
    """What the page needs.

    Attributes:
        asr_model, asr_flags: the Whisper server's.
        translate_model, translate_flags: the text server's; no model: none is started.
        translate_url: a text server that runs already.
        translate_key: its API key.
        port: where the page is to be; another one if that is taken.
    """

    asr_model: str
    asr_flags: Sequence[str]
    translate_model: str | None
    translate_flags: Sequence[str]
    translate_url: str | None
    translate_key: str
    port: int


def serve(wanted: PageServers) -> NoReturn:
    """Start the servers, print the page's address, and wait until one of them ends.

    Raises:
        ServerError: one did not start, or has ended.
        KeyboardInterrupt: Ctrl-C; all of them have ended.
    """
    with running(wanted) as servers:
        for server in servers:
            server.wait()
        # What stands alone on standard output can be opened by another program.
        print(f"{servers[0].url}{PATH}", flush=True)
        print("Ctrl-C ends both servers." if servers[1:] else "Ctrl-C ends it.", file=sys.stderr)
        while all(server.is_running() for server in servers):
            time.sleep(_POLL_S)
        ended = next(server for server in servers if not server.is_running())
        reason = f"has ended (exit code {ended.exit_code()})"
        raise ServerError(f"{ended.name} {reason}:\n{ended.tail()}")


@contextlib.contextmanager
def running(wanted: PageServers) -> Iterator[list[ServerProcess]]:
    """The servers, the Whisper first, while they load their models."""
    with contextlib.ExitStack() as stack:
        text, address = [], wanted.translate_url
        if wanted.translate_model:
            server = started(wanted.translate_model, wanted.translate_flags)
            text.append(stack.enter_context(server))
            address = text[0].url
        flags, env = list(wanted.asr_flags), {}
        if address:
            flags += ["--translate-with", address]
            env = {"SGLANG_EXT_TRANSLATE_KEY": wanted.translate_key}
        port = wanted.port if _is_free(wanted.port) else free_port()
        yield [stack.enter_context(started(wanted.asr_model, flags, port=port, env=env)), *text]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
