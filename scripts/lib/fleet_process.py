"""A server of a fleet without SGLang: the drafter and the datastore that a server has.

It serves known outputs (known_outputs.py) one by one, and writes what happens as JSON lines:
`{"served": k, "at": t}` when a server would answer, `{"found": k, "at": t}` when output k has
become a draft, once a line `k` on stdin has asked for it, and `{"role": name, "at": t}`. Times are
CLOCK_MONOTONIC's, in seconds, which all processes of a machine share.

    python -m scripts.lib.fleet_process FOLDER FIRST STEP
"""

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil  # type: ignore[import-untyped]

from scripts.lib.known_outputs import drafter_on, drafts_from, serve
from sglang_ext.servers import processes

SERVE_EVERY_S = 0.02
_LOOK_EVERY_S = 0.005
# Compiled code may have to be made, beside other programs.
_WAIT_S = 300.0


class FleetProcess:
    """One such process, seen from the check that starts and kills it.

    Args:
        folder: the datastore's, which all share.
        first, step: it serves the outputs first, first + step, ...
    """

    def __init__(self, folder: str, first: int, step: int) -> None:
        self.served: dict[int, float] = {}
        """When each output was acknowledged."""
        self.found: dict[int, float] = {}
        self.role = ""
        self.role_at = 0.0
        self._step = step
        self._next = first
        self._changed = threading.Condition()
        self._process = processes.start(
            [sys.executable, "-m", "scripts.lib.fleet_process", folder, str(first), str(step)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def next(self) -> int:
        """The output behind all that it may have served."""
        # The kill may have come between the log and the acknowledgement.
        return max([self._next, *(k + 2 * self._step for k in self.served)])

    def wait(self, condition: Callable[["FleetProcess"], Any], timeout_s: float = _WAIT_S) -> bool:
        """Whether it comes true in time."""
        with self._changed:
            return bool(self._changed.wait_for(lambda: condition(self), timeout_s))

    def wait_for_outputs(self, count: int) -> bool:
        """Whether it serves so many more in time."""
        before = len(self.served)
        return self.wait(lambda s: len(s.served) >= before + count)

    def finds(self, k: int) -> bool:
        """Whether output k becomes a draft there in time."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{k}\n".encode())
        self._process.stdin.flush()
        return self.wait(lambda s: k in s.found)

    def kill(self) -> float:
        """kill -9; when that was. Returns when the process and what it started have ended."""
        at = time.monotonic()
        for child in psutil.Process(self._process.pid).children():
            child.kill()
        self._process.wait()
        self._reader.join()
        return at

    def close(self) -> None:
        """End it, whatever it does."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.kill()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.endswith(b"\n"):
                return  # killed as it wrote
            event = json.loads(line)
            with self._changed:
                if "served" in event:
                    self.served[event["served"]] = event["at"]
                elif "found" in event:
                    self.found[event["found"]] = event["at"]
                else:
                    self.role, self.role_at = event["role"], event["at"]
                self._changed.notify_all()


def main() -> None:
    """The process."""
    folder, k, step = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    drafter = drafter_on(folder, shared=True)
    wanted: list[int] = []
    threading.Thread(target=_read_wanted, args=(wanted,), daemon=True).start()
    role, due = "", time.monotonic()
    while True:
        if drafter.datastore.role != role:
            role = drafter.datastore.role
            _tell(role=role)
        if time.monotonic() >= due:
            serve(drafter, k)
            _tell(served=k)
            k, due = k + step, due + SERVE_EVERY_S
        for asked in list(wanted):
            if drafts_from(drafter, asked):
                wanted.remove(asked)
                _tell(found=asked)
        time.sleep(_LOOK_EVERY_S)


def _tell(**event: Any) -> None:
    print(json.dumps(event | {"at": time.monotonic()}), flush=True)


def _read_wanted(wanted: list[int]) -> None:
    for line in sys.stdin:
        wanted.append(int(line))


if __name__ == "__main__":
    main()
