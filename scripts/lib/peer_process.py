"""Programs of the peers' environment (`make peers`), asked one JSON line at a time.

What we compare with has pins of its own, so it runs in an environment of its own, and in a process
whose CPU time is its alone.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from sglang_ext.servers import processes

PYTHON = Path(sys.prefix) / "peers" / "bin" / "python"
"""Where `make peers` puts the environment's interpreter."""


class PeerError(RuntimeError):
    """A peer cannot be had or has failed; the message says which, and what to do."""


class PeerProcess:
    """A script that reads a JSON object a line, and answers each with one.

    Args:
        script: a file beside this one; it imports nothing of ours.
        args: of its command line.
        python: the interpreter that has what the script imports.

    Raises:
        PeerError: there is no such interpreter.
    """

    def __init__(self, script: str, args: Sequence[str], python: Path = PYTHON) -> None:
        if not python.exists():
            raise PeerError(
                f"there is no {python}: `make peers` builds it, or name another --peers PYTHON"
            )
        self._name = script
        self._process = processes.start(
            [str(python), str(Path(__file__).with_name(script)), *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            self.loaded = self._answer()
        except BaseException:
            self.stop()
            raise

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer to a request.

        Raises:
            PeerError: it has ended, or could not do it.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PeerError(f"{self._name} has ended; its last lines are above") from None
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"{self._name} has ended; its last lines are above")
        answer: Mapping[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(f"{self._name}: {answer['error']}")
        return dict(answer)

    def stop(self) -> None:
        """End it."""
        processes.stop_group(self._process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
