"""Server processes that belong together: started, watched, started again, and stopped together."""

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sglang_ext.servers.server_process import (
    POLL_S,
    SHOWN_LINES,
    START_TIMEOUT_S,
    ServerProcess,
)

# The last line of a traceback, or of a refusal, anywhere in what a process printed.
_REASON = re.compile(r"^(?:[\w.]*(?:Error|Exception)|sglang-ext serve: error): .+", re.MULTILINE)
# One that ends before it was ready so often in a row will not come up.
_MOST_FAILED_STARTS = 3


class ClusterError(Exception):
    """The servers cannot go on; the message says which one and ends with its last lines."""


class Member(ServerProcess):
    """One process of a cluster, which gives it its log.

    Attributes:
        name: what to call it, as "decode 1".
        last: it is started when all others are ready: a router, which else answers before them.
        ready: whether it has been up since it was last started.
        failed_starts: how often in a row it ended before it was.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        url: str,
        env: Mapping[str, str] | None = None,
        without: Sequence[str] = (),
        last: bool = False,
    ):
        super().__init__(name, command, url, Path(os.devnull), env=env, without=without)
        self.last = last
        self.ready = False
        self.failed_starts = 0

    def tail(self, lines: int = SHOWN_LINES) -> str:
        """The last lines that it printed, then the last error, if it is none of them."""
        shown = super().tail(lines)
        errors = _REASON.findall(self.output())
        if errors and errors[-1] != shown.splitlines()[-1]:
            shown += f"\n{self.name}: {errors[-1]}"
        return shown


class Cluster:
    """Processes that are stopped when the block ends.

    Args:
        members: in the order in which they are started.
        folder: for their logs.
        say: shows a line.
        restart: start again what ended; else the cluster ends with it.
    """

    def __init__(
        self, members: Sequence[Member], folder: Path, say: Callable[[str], None], restart: bool
    ) -> None:
        self.members = members
        self._folder = folder
        self._say = say
        self._restart = restart

    def __enter__(self) -> "Cluster":
        try:
            self._start(self._first)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait(self) -> None:
        """Returns when all are ready.

        Raises:
            ClusterError: one of them ended, or took too long.
        """
        self._wait_for(self._first)
        self._start([member for member in self.members if member.last])
        self._wait_for(self.members)

    @property
    def _first(self) -> list[Member]:
        """Those that wait for no others."""
        return [member for member in self.members if not member.last]

    def _start(self, members: Sequence[Member]) -> None:
        for member in members:
            member.log = self._folder / f"{member.name.replace(' ', '-')}.log"
            member.start()

    def _wait_for(self, members: Sequence[Member]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not all(member.ready for member in members):
            for member in members:
                code = member.exit_code()
                if code is not None:
                    words = f"did not start (exit code {code}):\n{member.tail()}"
                    raise ClusterError(f"{member.name} {words}")
                self._look(member)
            if time.monotonic() > deadline:
                late = ", ".join(m.name for m in members if not m.ready)
                raise ClusterError(f"not ready after {START_TIMEOUT_S:.0f} s: {late}")
            time.sleep(POLL_S)

    def watch(self) -> None:
        """Stays with them, and starts again what ends.

        Raises:
            ClusterError: one of them ended and is not to be started again, or does not come up.
        """
        while True:
            for member in self.members:
                code = member.exit_code()
                if code is None:
                    self._look(member)
                else:
                    self._start_again(member, code)
            time.sleep(POLL_S)

    def stop(self) -> None:
        """End them all."""
        for member in self.members:
            member.terminate()
        for member in self.members:
            member.stop()

    def _look(self, member: Member) -> None:
        if not member.ready and member.is_ready():
            member.ready, member.failed_starts = True, 0
            self._say(f"{member.name} is ready: {member.url} (process {member.pid})")

    def _start_again(self, member: Member, code: int) -> None:
        if not self._restart:
            raise ClusterError(f"{member.name} ended (exit code {code}):\n{member.tail()}")
        member.failed_starts += not member.ready
        if member.failed_starts >= _MOST_FAILED_STARTS:
            raise ClusterError(
                f"{member.name} ended {member.failed_starts} times before it was ready "
                f"(exit code {code}):\n{member.tail()}"
            )
        self._say(f"{member.name} ended (exit code {code}); starting it again")
        member.stop()  # what it had started
        member.ready = False
        member.start()
