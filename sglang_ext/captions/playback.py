"""Audio at the pace at which it would be heard, from a file or from standard input."""

import asyncio
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import av
import numpy as np

from speech.audio import SAMPLE_RATE, AudioReader
from speech.audio_errors import AudioError
from speech.mono import MonoResampler

PIECE_SAMPLES = SAMPLE_RATE // 10
_BYTES_PER_SAMPLE = 2
_RECENT = 6000  # pieces whose time is remembered, 10 minutes
_AHEAD = 4  # blocks that are read before they are played


def file_blocks(path: Path) -> Iterator[np.ndarray]:
    """Samples of an audio file, float32[n] each at 16 kHz.

    Raises:
        AudioError: when it is called, if the file cannot be read; later, if its audio cannot.
    """
    reader = AudioReader(path)

    def blocks() -> Iterator[np.ndarray]:
        with reader:
            yield from reader.blocks()

    return blocks()


def stream_blocks(descriptor: int) -> Iterator[np.ndarray]:
    """Samples of a pipe, as soon as they come: float32[n] each at 16 kHz.

    A wav stream is known by its first bytes and may have any rate and channels; all else is raw
    s16le at 16 kHz, mono.

    Raises:
        AudioError: the wav stream cannot be decoded.
    """
    pipe = _Pipe(descriptor)
    if pipe.start() in (b"RIFF", b"RF64"):
        yield from _wav_blocks(pipe)
        return
    rest = b""
    while data := pipe.read(PIECE_SAMPLES * _BYTES_PER_SAMPLE):
        data = rest + data
        whole = len(data) // _BYTES_PER_SAMPLE * _BYTES_PER_SAMPLE
        rest = data[whole:]
        yield np.frombuffer(data[:whole], "<i2").astype(np.float32) / 32768


class _Pipe:
    """A file without an end that is known, for PyAV."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self._start = b""

    def start(self) -> bytes:
        """The first four bytes, which are read again."""
        while len(self._start) < 4 and (data := os.read(self._descriptor, 4 - len(self._start))):
            self._start += data
        return self._start

    def read(self, size: int) -> bytes:
        """What is there, at most `size` bytes; none at the end."""
        if self._start:
            data, self._start = self._start[:size], self._start[size:]
            return data
        return os.read(self._descriptor, size)


def _wav_blocks(pipe: _Pipe) -> Iterator[np.ndarray]:
    mono = MonoResampler()
    try:
        with av.open(pipe, "r", format="wav", metadata_errors="ignore") as container:
            for frame in container.decode(audio=0):
                yield from mono.push(frame)
            yield from mono.flush()
    except AudioError:
        raise
    except (av.FFmpegError, ValueError, IndexError) as error:
        raise AudioError(f"the wav stream cannot be decoded: {error}") from None


class Playback:
    """Plays blocks of samples.

    Args:
        blocks: float32[n] each, consecutive samples at 16 kHz; read in a thread.
        speed: 1 is real time; 0 does not wait at all.
    """

    def __init__(self, blocks: Iterator[np.ndarray], speed: float):
        self._blocks = blocks
        self._speed = speed
        self._played: deque[tuple[float, float]] = deque(maxlen=_RECENT)
        self._start = time.monotonic()
        self.position = 0.0
        """Seconds of audio that were played."""

    @property
    def elapsed(self) -> float:
        """Seconds since it began to play."""
        return time.monotonic() - self._start

    def played_at(self, seconds: float) -> float:
        """When a place of the audio was played, in seconds since the beginning of the play."""
        at = self.elapsed
        for position, moment in reversed(self._played):
            if position < seconds:
                break
            at = moment
        return at

    async def pieces(self) -> AsyncGenerator[np.ndarray]:
        """The samples, each piece of 0.1 s at most when its end would be heard.

        Raises:
            AudioError: the audio cannot be read on.
        """
        self._start = time.monotonic()
        async with contextlib.aclosing(_in_thread(self._blocks)) as blocks:
            async for block in blocks:
                for first in range(0, len(block), PIECE_SAMPLES):
                    piece = block[first : first + PIECE_SAMPLES]
                    self.position += len(piece) / SAMPLE_RATE
                    if self._speed:
                        await asyncio.sleep(self.position / self._speed - self.elapsed)
                    self._played.append((self.position, self.elapsed))
                    yield piece


async def _in_thread(blocks: Iterator[np.ndarray]) -> AsyncGenerator[np.ndarray]:
    """The blocks, read ahead in a thread that nobody waits for: a pipe may be silent for ever."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[np.ndarray | Exception | None] = asyncio.Queue()
    room = threading.Semaphore(_AHEAD)
    stopped = threading.Event()

    def put(item: np.ndarray | Exception | None) -> None:
        room.acquire()
        if not stopped.is_set():
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(queue.put_nowait, item)

    def read() -> None:
        try:
            for block in blocks:
                put(block)
                if stopped.is_set():
                    return
            put(None)
        except Exception as error:
            put(error)

    threading.Thread(target=read, name="sglang-ext-playback", daemon=True).start()
    try:
        while (item := await queue.get()) is not None:
            room.release()
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        stopped.set()
        room.release()
