"""The process that decodes audio for a server: `python -m speech.decoder_process`.

FFmpeg's parsers and codecs read what strangers send. Here they may crash, loop or ask for memory:
this process holds nothing but the file that it decodes, and speech/decoders.py starts another one.

A job comes as JSON with two descriptors (SCM_RIGHTS): the file, and where samples go, float32 at
16 kHz from offset 0. The answer is one line of JSON. Jobs of the same session go on where the last
one ended, as long as no other session came between.
"""

import array
import fcntl
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np

from speech.audio import BLOCK_SAMPLES, AudioReader
from speech.audio_errors import AudioError
from speech.mono import MonoResampler

MESSAGE_BYTES = 16_384
_LARGE = 4  # one part of the memory limit that a job may leave behind, as leaks or fragments


class OutputError(Exception):
    """Samples cannot be written, which is not the file's fault."""


class Session:
    """One file that is being decoded.

    Args:
        descriptor: of the file; closed with the session.
    """

    def __init__(self, number: int, descriptor: int, max_seconds: float):
        self.number = number
        self.blocks_read = 0
        try:
            # Through /proc: a position of its own, which nobody else moves.
            self._file = Path(f"/proc/self/fd/{descriptor}").open("rb")  # noqa: SIM115
        finally:
            os.close(descriptor)
        try:
            self._reader = AudioReader(self._file, max_seconds)
        except BaseException:
            self._file.close()
            raise
        self._blocks: Iterator[np.ndarray] = self._reader.blocks()

    @property
    def seconds_read(self) -> float:
        return self._reader.seconds_read

    def next(self) -> np.ndarray | None:
        """The next block, None after the last."""
        block = next(self._blocks, None)
        self.blocks_read += block is not None
        return block

    def close(self) -> None:
        self._reader.close()
        self._file.close()


class Decoder:
    """Does the jobs that come over a socket, one at a time.

    Args:
        memory_bytes: what decoding a file may add to the process.
    """

    def __init__(self, control: socket.socket, memory_bytes: int):
        self._control = control
        self._memory_bytes = memory_bytes
        self._idle_bytes = _virtual_bytes()
        limit = self._idle_bytes + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        self._session: Session | None = None

    def serve(self) -> None:
        """Until the other side is gone, or too much memory has been left behind."""
        self._answer({"ready": True})
        while True:
            message, descriptors = _receive(self._control)
            if not message:
                return
            job = json.loads(message)
            if "take" not in job:  # the session's client has gone
                self._end_session()
                continue
            retiring = self._serve_job(job, *descriptors)
            if retiring:
                return

    def _serve_job(self, job: dict[str, Any], file: int, out: int) -> bool:
        signal.setitimer(signal.ITIMER_PROF, job["cpu_seconds"])  # at its end, SIGPROF kills
        try:
            answer = self._decode(job, file, out)
        except MemoryError:
            answer = {"error": "memory"}
        except OutputError as error:
            answer = {"error": "output", "message": str(error)}
        except AudioError as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        except Exception as error:
            answer = {"error": "AudioError", "message": f"{type(error).__name__}: {error}"}
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        os.close(out)
        if "error" in answer or answer["end"]:
            self._end_session()
        left = _virtual_bytes() - self._idle_bytes
        retiring = answer.get("error") == "memory" or left > self._memory_bytes // _LARGE
        self._answer(answer | {"retiring": retiring})
        return retiring

    def _decode(self, job: dict[str, Any], file: int, out: int) -> dict[str, Any]:
        session = self._open(job, file)
        while session.blocks_read < job["skip"]:
            if session.next() is None:
                raise AudioError("the file changed while it was read")
        written = 0
        for _ in range(job["take"]):
            block = session.next()
            if block is None or len(block) < BLOCK_SAMPLES:
                written += _write(out, block, written)
                return {"samples": written, "end": True, "seconds": session.seconds_read}
            written += _write(out, block, written)
        return {"samples": written, "end": False, "seconds": session.seconds_read}

    def _open(self, job: dict[str, Any], file: int) -> Session:
        session = self._session
        if session and session.number == job["session"] and session.blocks_read == job["skip"]:
            os.close(file)
            return session
        self._end_session()
        self._session = Session(job["session"], file, job["max_seconds"])
        return self._session

    def _end_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _answer(self, answer: dict[str, Any]) -> None:
        if "message" in answer:
            answer["message"] = answer["message"][:1000]
        self._control.send(json.dumps(answer).encode())


def _write(out: int, block: np.ndarray | None, samples: int) -> int:
    """Put a block behind those samples; returns how many it has."""
    if block is None:
        return 0
    data = np.ascontiguousarray(block, "<f4").data.cast("B")
    position = samples * 4
    while data:
        try:
            done = os.pwrite(out, data, position)
        except OSError as error:
            raise OutputError(error.strerror) from None
        data, position = data[done:], position + done
    return len(block)


def _receive(control: socket.socket) -> tuple[bytes, list[int]]:
    descriptors = array.array("i")
    message, ancillary, _, _ = control.recvmsg(
        MESSAGE_BYTES, socket.CMSG_SPACE(2 * descriptors.itemsize)
    )
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return message, list(descriptors)


def _virtual_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def end_with_parent(lifeline: int) -> None:
    """Have the kernel end this process when the other end of a pipe is closed, also in a codec.

    SIGIO's default action is to end the process. (PR_SET_PDEATHSIG would come when the thread
    ends that started this process.)

    Args:
        lifeline: descriptor of the pipe's reading end; nobody writes to the other.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(lifeline, fcntl.F_GETFL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, flags | os.O_ASYNC | os.O_NONBLOCK)
    try:
        ended = os.read(lifeline, 1) == b""
    except BlockingIOError:
        ended = False
    if ended:  # before SIGIO was asked for
        sys.exit(0)


def main() -> None:
    control, memory_mb = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's; it closes the pipe
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    end_with_parent(sys.stdin.fileno())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    av.logging.set_level(None)
    _warm_up()
    Decoder(control, memory_mb << 20).serve()


def _warm_up() -> None:
    """Load what a first file would load, so that the memory limit is for files alone."""
    mono = MonoResampler()
    frame = av.AudioFrame.from_ndarray(np.zeros((1, 4410), np.float32), "flt", "mono")
    frame.sample_rate = 44_100
    for _ in (*mono.push(frame), *mono.flush()):
        pass


if __name__ == "__main__":
    main()
