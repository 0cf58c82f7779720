"""Server processes that belong together: started, watched, started again, and stopped together."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sglang_ext.servers.processes import signal_group, start, stop_group
from sglang_ext.servers.started_server import is_ready

START_TIMEOUT_S = 900.0
_POLL_S = 0.5
_SHOWN_LINES = 15
# The last line of a traceback, or of a refusal, anywhere in what a process printed.
_REASON = re.compile(r"^(?:[\w.]*(?:Error|Exception)|sglang-ext serve: error): .+", re.MULTILINE)
# One that ends before it was ready so often in a row will not come up.
_MOST_FAILED_STARTS = 3


class ClusterError(Exception):
    """The servers cannot go on; the message says which one and ends with its last lines."""


@dataclass
class Member:
    """One process of a cluster.

    Attributes:
        name: what to call it, as "decode 1".
        command: its command line.
        url: its address; `/health` there answers when it is ready.
        env: what its environment has besides this process's.
        without: what its environment lacks of it.
    """

    name: str
    command: Sequence[str]
    url: str
    env: Mapping[str, str] = field(default_factory=dict)
    without: Sequence[str] = ()
    log: Path | None = None
    process: "subprocess.Popen[bytes] | None" = None
    ready: bool = False
    failed_starts: int = 0

    def start(self, folder: Path) -> None:
        """Start it, its output behind that of before in FOLDER/NAME.log."""
        self.log = folder / f"{self.name.replace(' ', '-')}.log"
        env = {k: v for k, v in os.environ.items() if k not in self.without}
        with self.log.open("ab") as log:
            # In its session Ctrl-C does not reach it before the others are told.
            self.process = start(
                self.command,
                stdout=log,
                stderr=log,
                env=env | {"PYTHONUNBUFFERED": "1"} | dict(self.env),
            )
        self.ready = False

    def ended(self) -> int | None:
        """Its exit code; None while it runs."""
        assert self.process is not None
        return self.process.poll()

    def tail(self) -> str:
        """The last lines that it printed, then the last error, if it is none of them."""
        if self.log is None or not self.log.exists():
            return ""
        text = self.log.read_text(errors="replace").strip()
        shown = text.splitlines()[-_SHOWN_LINES:]
        errors = _REASON.findall(text)
        if errors and errors[-1] != shown[-1]:
            shown.append(f"{self.name}: {errors[-1]}")
        return "\n".join(shown)


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
            for member in self.members:
                member.start(self._folder)
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
        deadline = time.monotonic() + START_TIMEOUT_S
        while not all(member.ready for member in self.members):
            for member in self.members:
                code = member.ended()
                if code is not None:
                    words = f"did not start (exit code {code}):\n{member.tail()}"
                    raise ClusterError(f"{member.name} {words}")
                self._look(member)
            if time.monotonic() > deadline:
                late = ", ".join(m.name for m in self.members if not m.ready)
                raise ClusterError(f"not ready after {START_TIMEOUT_S:.0f} s: {late}")
            time.sleep(_POLL_S)

    def watch(self) -> None:
        """Stays with them, and starts again what ends.

        Raises:
            ClusterError: one of them ended and is not to be started again, or does not come up.
        """
        while True:
            for member in self.members:
                code = member.ended()
                if code is None:
                    self._look(member)
                else:
                    self._start_again(member, code)
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """End them all."""
        running = [m.process for m in self.members if m.process is not None]
        for process in running:
            signal_group(process, signal.SIGTERM)
        for process in running:
            stop_group(process)

    def _look(self, member: Member) -> None:
        if not member.ready and is_ready(member.url):
            member.ready, member.failed_starts = True, 0
            assert member.process is not None
            self._say(f"{member.name} is ready: {member.url} (process {member.process.pid})")

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
        assert member.process is not None
        stop_group(member.process)  # what it had started
        member.start(self._folder)
