"""Servers of tests: real ones, which end with their block at once."""

from scripts.lib import server


class Server(server.Server):
    """`scripts.lib.server.Server`, killed at the end of its block.

    SGLang takes 5 s to end by SIGTERM; tests of that call `stop`.
    """

    def __exit__(self, *_: object) -> None:
        self.kill()
