"""Audio decoded in other processes, so that a fault in a codec costs one request, not the server.

A few processes (speech/decoder_process.py) are started as they are needed and kept. A file is
decoded stretch by stretch, and one whose reader takes its time holds no process: another file may
take its place, and it is decoded again up to where it was.
"""

import contextlib
import io
import itertools
import logging
import os
import shutil
import stat
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from speech.audio import BLOCK_SAMPLES
from speech.audio_errors import AudioError, AudioTooLong, DecoderDied, DecodersBusy
from speech.decoder_client import DecoderEnded, DecoderProcess
from speech.mono import SAMPLE_RATE

logger = logging.getLogger(__name__)

_FIRST_BLOCKS, _MOST_BLOCKS = 2, 36  # 33 s, which most files fit in, to 10 minutes of audio
_STRETCH_S = 600.0  # of audio, which the time limit is for
_WALL_SECONDS = 10.0  # that one of CPU time may take, on a busy machine
_sessions = itertools.count(1)


class DecoderPool:
    """Decoder processes, started when they are first needed and after one has died.

    Args:
        processes: how many at most.
        queue: files that may wait for one.
        memory_mb: MiB that decoding a file may add to an idle process.
        cpu_seconds: CPU time for each ten minutes of audio, begun.
    """

    def __init__(
        self, processes: int = 4, queue: int = 64, memory_mb: int = 256, cpu_seconds: float = 20.0
    ):
        self._most, self._queue = processes, queue
        self._memory_mb, self._cpu_seconds = memory_mb, cpu_seconds
        self._changed = threading.Condition()
        self._idle: list[DecoderProcess] = []  # the longest idle first
        self._busy = 0
        self._waiting: deque[object] = deque()
        self.deaths = 0
        """Processes that ended while they decoded: by a crash, or at a limit."""

    @property
    def idle_pids(self) -> list[int]:
        """Ids of the processes that have nothing to do."""
        with self._changed:
            return [process.pid for process in self._idle]

    @property
    def waiting(self) -> int:
        """Files that wait for a process."""
        return len(self._waiting)

    def open(self, file: IO[bytes] | Path, max_seconds: float = float("inf")) -> "DecodedAudio":
        """An audio file's samples, as an AudioReader gives them.

        Args:
            file: path of a regular file, or a seekable binary file.
            max_seconds: longest audio to accept.

        Raises:
            OSError: the file cannot be opened.
        """
        return DecodedAudio(self, _descriptor(file), max_seconds)

    def run(self, job: dict[str, Any], file: int, out: int) -> dict[str, Any]:
        """Have a process do a job; the arguments are DecoderProcess.run's.

        Raises:
            AudioError: the file cannot be decoded, or decoding it ended the process.
            DecodersBusy: too many files wait already.
            RuntimeError: no process can be started, or the samples cannot be written.
        """
        stretches = 1 + (job["skip"] + job["take"]) * BLOCK_SAMPLES / SAMPLE_RATE // _STRETCH_S
        job = job | {"cpu_seconds": self._cpu_seconds * stretches}
        process = self._acquire(job["session"], refusing=not job["skip"])
        try:
            while True:
                process = process or DecoderProcess(self._memory_mb)
                try:
                    answer = process.run(job, file, out, _WALL_SECONDS * job["cpu_seconds"])
                    break
                except DecoderEnded as error:
                    self.deaths += 1
                    logger.warning("an audio decoder ended while it decoded a file: %s", error)
                    used, process = process.jobs > 1, None
                    # What an earlier file has damaged must not cost this one its answer.
                    if not used or str(error) == "time":
                        raise self._death(str(error), job["cpu_seconds"]) from None
        except BaseException:
            if process is not None:
                process.end()
            self._release(None)
            raise
        if answer["retiring"]:
            process.end()
        self._release(None if answer["retiring"] else process)
        return self._checked(answer)

    def forget(self, session: int) -> None:
        """Close a session's file where a process has it open."""
        with self._changed:
            for process in self._idle:
                if process.session == session:
                    process.forget()

    def close(self) -> None:
        """End the processes that are idle; the others end with this process."""
        with self._changed:
            idle, self._idle = self._idle, []
        for process in idle:
            process.end()

    def _acquire(self, session: int, refusing: bool) -> DecoderProcess | None:
        """A process for a session once there is one, None where one is to be started.

        Args:
            refusing: whether a full queue is an error; not for a file that has been begun.
        """
        ticket = object()
        with self._changed:
            full = self._busy >= self._most and len(self._waiting) >= self._queue
            if refusing and full:
                raise DecodersBusy(
                    f"{len(self._waiting)} audio files wait to be decoded; try again later"
                )
            self._waiting.append(ticket)
            try:
                self._changed.wait_for(
                    lambda: self._waiting[0] is ticket and self._busy < self._most
                )
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()
            self._busy += 1
            return self._chosen(session)

    def _chosen(self, session: int) -> DecoderProcess | None:
        """The idle process that has the session's file open, else the one that is missed least."""
        idle = self._idle
        for wanted in (session, 0):
            for process in idle:
                if process.session == wanted:
                    idle.remove(process)
                    return process
        if self._busy + len(idle) <= self._most:
            return None
        return idle.pop(0)

    def _release(self, process: DecoderProcess | None) -> None:
        with self._changed:
            self._busy -= 1
            if process is not None:
                self._idle.append(process)
            self._changed.notify_all()

    def _checked(self, answer: dict[str, Any]) -> dict[str, Any]:
        """The answer of a job that was done."""
        match answer.get("error"):
            case None:
                return answer
            case "memory":
                raise DecoderDied(
                    f"decoding the audio takes more than {self._memory_mb} MiB of memory; "
                    "it is damaged, or made to be large"
                )
            case "output":
                raise RuntimeError(f"decoded audio cannot be written: {answer['message']}")
            case "AudioTooLong":
                raise AudioTooLong(answer["message"])
        raise AudioError(answer["message"])

    @staticmethod
    def _death(reason: str, cpu_seconds: float) -> DecoderDied:
        if reason == "time":
            return DecoderDied(
                f"decoding the audio takes more than {cpu_seconds:g} seconds of CPU time; "
                "it is damaged, or made to be slow"
            )
        return DecoderDied(
            f"the audio cannot be decoded: the decoder ended with {reason}; "
            "it is damaged, or in a format that is not supported"
        )


class DecodedAudio:
    """The samples of an audio file, decoded by a pool.

    Args:
        descriptor: of the file; closed with this.
        max_seconds: longest audio to accept.
    """

    def __init__(self, pool: DecoderPool, descriptor: int, max_seconds: float):
        self._pool = pool
        self._file = descriptor
        self._max_seconds = max_seconds
        self._session = next(_sessions)
        self._read = 0

    @property
    def seconds_read(self) -> float:
        """Seconds of audio read so far; after the last block, the audio's duration."""
        return self._read / SAMPLE_RATE

    def blocks(self, first_blocks: int = _FIRST_BLOCKS) -> Iterator[np.ndarray]:
        """float32[n] in -1..1 at 16 kHz; n is BLOCK_SAMPLES but for the last one.

        Args:
            first_blocks: how many to decode at first; then twice as many each time.

        Raises:
            AudioError: nothing can be decoded, the audio is too long, or the decoder ended.
            DecodersBusy: too many files wait already.
        """
        skip, take, last = 0, first_blocks, False
        with tempfile.TemporaryFile(buffering=0) as out:
            while not last:
                job = {
                    "session": self._session,
                    "skip": skip,
                    "take": take,
                    "max_seconds": self._max_seconds,
                }
                answer = self._pool.run(job, self._file, out.fileno())
                for first in range(0, answer["samples"], BLOCK_SAMPLES):
                    block = np.empty(min(BLOCK_SAMPLES, answer["samples"] - first), np.float32)
                    _read(out.fileno(), block, first * block.itemsize)
                    self._read += len(block)
                    yield block
                skip, take = skip + take, min(2 * take, _MOST_BLOCKS)
                last = answer["end"]

    def first(self, samples: int) -> np.ndarray:
        """At most so many samples from the beginning, float32[n].

        Raises:
            AudioError, DecodersBusy: as blocks().
        """
        parts, count = [np.empty(0, np.float32)], 0
        for block in self.blocks(-(-samples // BLOCK_SAMPLES)):
            parts.append(block)
            count += len(block)
            if count >= samples:
                break
        return np.concatenate(parts)[:samples]

    def close(self) -> None:
        """Free the file, here and in the decoder."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            self._pool.forget(self._session)

    def __enter__(self) -> "DecodedAudio":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read(descriptor: int, block: np.ndarray, position: int) -> None:
    """Fill an array from a file.

    Raises:
        OSError: the file is shorter.
    """
    data = block.data.cast("B")
    while data:
        done = os.preadv(descriptor, [data], position)
        if not done:
            raise OSError("the decoder's samples are cut short")
        data, position = data[done:], position + done


def _descriptor(file: IO[bytes] | Path) -> int:
    """A descriptor of one's own of a file; what is in memory only is copied."""
    if isinstance(file, Path):
        # A pipe or device would be waited for, or never end.
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(f"{file} is no regular file")
        return descriptor
    with contextlib.suppress(io.UnsupportedOperation, AttributeError):
        file.flush()
        return os.dup(file.fileno())
    file.seek(0)
    descriptor = os.memfd_create("sglang-ext-audio")
    with open(descriptor, "wb", closefd=False) as copy:
        shutil.copyfileobj(file, copy)
    return descriptor
