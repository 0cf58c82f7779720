"""A decoder process (speech/decoder_process.py) as seen from the server that started it."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

MODULE = "speech.decoder_process"
"""What a decoder process runs."""

_START_S = 60.0
_EXIT_S = 1.0  # a process that crashes closes its socket a little before it is gone
# What Python and its loader read. The server's keys are no business of a process that FFmpeg's
# faults may hand over to a stranger.
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "LANG", "LC_ALL")


class DecoderEnded(Exception):
    """The process ended during a job, or was ended because it took too long."""


class DecoderProcess:
    """One decoder process; not for several threads at once.

    Attributes:
        pid: its process id.
        jobs: how many it was given.
        session: the session whose file it may still have open, 0 for none.

    Args:
        memory_mb: MiB that decoding a file may take.

    Raises:
        RuntimeError: it does not start; its own words are in the server's log.
    """

    def __init__(self, memory_mb: int):
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            number = theirs.fileno()
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", MODULE, str(number), str(memory_mb)],
                    stdin=subprocess.PIPE,  # nobody writes to it: see end_with_parent
                    stdout=subprocess.DEVNULL,
                    pass_fds=(number,),
                    cwd=Path(__file__).parents[1],
                    env=_environment(),
                )
            except OSError as error:  # no memory, no descriptors
                self._control.close()
                raise RuntimeError(f"an audio decoder does not start: {error}") from None
        self.pid = self._process.pid
        self.jobs = 0
        self.session = 0
        try:
            self._receive(_START_S)
        except DecoderEnded as error:
            raise RuntimeError(f"an audio decoder does not start: {error}") from None

    def run(self, job: dict[str, Any], file: int, out: int, seconds: float) -> dict[str, Any]:
        """Do a job.

        Args:
            job: session, skip, take, max_seconds and cpu_seconds.
            file, out: descriptors of the audio and of the file for its samples.
            seconds: wall-clock time that it may take.

        Raises:
            DecoderEnded: it ended on the way; the message says by what.
        """
        self.jobs += 1
        self.session = job["session"]
        with contextlib.suppress(OSError):  # it has ended, as is seen next
            socket.send_fds(self._control, [json.dumps(job).encode()], [file, out])
        answer = self._receive(seconds)
        if "error" in answer or answer["end"]:
            self.session = 0
        return answer

    def forget(self) -> None:
        """Have it close the file that it has open."""
        self.session = 0
        with contextlib.suppress(OSError):
            self._control.send(b"{}")

    def end(self) -> int:
        """Stop it; returns its exit status, or minus the signal that ended it."""
        self._control.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.kill()
        return self._process.wait()

    def _receive(self, seconds: float) -> dict[str, Any]:
        self._control.settimeout(seconds)
        try:
            message = self._control.recv(1 << 16)
        except TimeoutError:
            self.end()
            raise DecoderEnded("time") from None
        except OSError:
            message = b""
        if not message:
            raise DecoderEnded(self._reason())
        return json.loads(message)

    def _reason(self) -> str:
        """What ended it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_S)
        status = self.end()
        if status == -signal.SIGPROF:
            return "time"
        return f"exit status {status}" if status >= 0 else signal.Signals(-status).name


def _environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    return kept | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
