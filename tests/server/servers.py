"""Servers of tests: real ones, which end with their block at once."""

import contextlib
import os
from typing import Self

import psutil  # type: ignore[import-untyped]

from scripts.lib import server
from tests.eventually import eventually

# What one takes at its start, and its requests on top. Other workers' servers end within minutes.
_ROOM_BYTES = 6 << 30
_PATIENCE_S = 300.0


class Server(server.Server):
    """`scripts.lib.server.Server`, killed at the end of its block.

    SGLang takes 5 s to end by SIGTERM; tests of that call `stop`.
    """

    def __enter__(self) -> Self:
        if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
            _wait_for_room()
        super().__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def _wait_for_room() -> None:
    """Wait while the other workers' servers leave too little memory, but not for ever.

    A machine that has none left stops for minutes: connections end, and the kernel kills servers.
    """
    with contextlib.suppress(AssertionError):
        eventually(lambda: psutil.virtual_memory().available >= _ROOM_BYTES, _PATIENCE_S)
