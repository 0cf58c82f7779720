"""One transcription: audio decoded in another process and cut in a thread, chunks decoded side by
side by the server, and joined in order. What is held grows with the text, not with the audio.
"""

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass

import numpy as np

from sglang_ext.api.http import ApiError
from sglang_ext.api.transcription.chunk_decoder import ChunkDecoder, ChunkResult, Deltas
from sglang_ext.api.transcription.transcription_request import TranscriptionRequest
from sglang_ext.api.transcription.whisper_engine import WhisperEngine
from sglang_ext.whisper import audio_decoders
from speech.alignment import Aligner
from speech.chunks import Chunk, ChunkOptions, chunks
from speech.decoders import DecodedAudio
from speech.segments import Transcript, joined

SHORTEST_S = 0.1
"""OpenAI's API refuses shorter audio."""


@dataclass(frozen=True)
class Delta:
    """Text that follows what came before."""

    text: str
    logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Progress:
    """How many seconds of the audio are done."""

    seconds: float


@dataclass
class _Running:
    """A chunk that is being decoded."""

    task: asyncio.Task[ChunkResult]
    deltas: Deltas


@dataclass(frozen=True)
class Limits:
    """What a request may cost.

    Attributes:
        max_seconds: longest audio.
        parallel: most chunks of one request in the server at once.
        threshold: of the VAD, where the request names none.
    """

    max_seconds: float
    parallel: int
    threshold: float


class Transcription:
    """One request's work.

    Args:
        aligner: for word timestamps; None where the request asks for none.
    """

    def __init__(
        self,
        engine: WhisperEngine,
        request: TranscriptionRequest,
        limits: Limits,
        aligner: Aligner | None = None,
    ):
        self._engine = engine
        self._request = request
        self._limits = limits
        self._decoder = ChunkDecoder(engine, request, aligner)
        self._language = request.language
        self._stop = threading.Event()
        self._free = asyncio.Semaphore(limits.parallel)
        self._order: asyncio.Queue[_Running | None] = asyncio.Queue()
        self._tasks: set[asyncio.Task[ChunkResult]] = set()
        self._duration = 0.0

    async def run(self) -> AsyncGenerator[Delta | Progress | Transcript]:
        """Deltas where the request streams, progress after each chunk, the transcript at last.

        Raises:
            AudioError: the audio cannot be read or is too long.
            DecodersBusy: too much audio waits to be decoded.
            ApiError: the audio is too short, or the server gave up.
            ValueError: SGLang refuses the request.
        """
        feeding = asyncio.create_task(self._feed())
        transcript = Transcript(self._request.task, self._language or "en")
        try:
            while (running := await self._next(feeding)) is not None:
                emitted = ""
                while (delta := await running.deltas.get()) is not None:
                    text = delta
                    if not emitted:
                        text = joined(transcript.text, delta, self._known_language)
                    emitted += text
                    if text:
                        yield Delta(text)
                result = await running.task
                rest = self._append(transcript, result, emitted)
                if rest and self._request.stream:
                    yield Delta(rest)
                yield Progress(result.end)
            await feeding
            transcript.language = self._known_language
            transcript.duration = self._duration
            transcript.text = transcript.text.strip()
            yield transcript
        finally:
            await self._abandon(feeding)

    @property
    def _known_language(self) -> str:
        return self._language or "en"

    async def _next(self, feeding: asyncio.Task[None]) -> _Running | None:
        """The next chunk in order, None after the last; what stops the feeding is raised here."""
        getting = asyncio.create_task(self._order.get())
        await asyncio.wait({getting, feeding}, return_when=asyncio.FIRST_COMPLETED)
        if not getting.done() and feeding.done():
            if feeding.exception() is not None:
                getting.cancel()
            feeding.result()
        return await getting

    async def _feed(self) -> None:
        """Start a task for each chunk, as many at once as allowed, then put None."""
        loop, threads = asyncio.get_running_loop(), audio_decoders.threads()
        reader = await loop.run_in_executor(threads, self._open)
        try:
            source = self._chunks(reader)
            while True:
                await self._free.acquire()
                chunk = await _uninterrupted(loop.run_in_executor(threads, next, source, None))
                if chunk is None:
                    break
                if self._language is None:
                    self._language = await self._engine.detect_language(
                        chunk, self._request.custom_params
                    )
                deltas: Deltas = asyncio.Queue()
                work = self._decoder.decode(chunk, self._language, deltas)
                task = asyncio.create_task(work)
                self._tasks.add(task)
                task.add_done_callback(self._done)
                self._order.put_nowait(_Running(task, deltas))
            self._duration = reader.seconds_read
            if self._duration < SHORTEST_S:
                raise ApiError(
                    f"the audio is too short: {self._duration:.3f} seconds, "
                    f"expected at least {SHORTEST_S}",
                    param="file",
                    code="audio_too_short",
                )
            self._order.put_nowait(None)
        finally:
            reader.close()

    def _done(self, task: asyncio.Task[ChunkResult]) -> None:
        self._tasks.discard(task)
        self._free.release()
        if not task.cancelled():
            task.exception()  # seen, also if another chunk's is raised first

    def _open(self) -> DecodedAudio:
        return audio_decoders.pool().open(self._request.file, self._limits.max_seconds)

    def _chunks(self, reader: DecodedAudio) -> Iterator[Chunk]:
        request, default = self._request, ChunkOptions()
        options = ChunkOptions(
            threshold=self._limits.threshold if request.threshold is None else request.threshold,
            padding_s=default.padding_s if request.padding_s is None else request.padding_s,
            min_silence_s=(
                default.min_silence_s if request.min_silence_s is None else request.min_silence_s
            ),
        )

        def blocks() -> Iterator[np.ndarray]:
            for block in reader.blocks():
                if self._stop.is_set():
                    return
                yield block

        return chunks(blocks(), options)

    def _append(self, transcript: Transcript, result: ChunkResult, emitted: str) -> str:
        """Add a chunk to the transcript; returns what of its text has not been streamed."""
        text = joined(transcript.text, result.text, self._known_language)
        offset = len(transcript.segments)
        transcript.text += text
        transcript.segments += [dataclasses.replace(s, id=offset + s.id) for s in result.segments]
        transcript.words += result.words
        transcript.token_ids += result.token_ids
        if self._request.logprobs:
            transcript.logprobs += result.logprobs
        transcript.prompt_tokens += result.prompt_tokens
        transcript.output_tokens += sum(map(len, result.token_ids))
        return text[len(emitted) :] if text.startswith(emitted) else ""

    async def _abandon(self, feeding: asyncio.Task[None]) -> None:
        """Leave nothing running: SGLang aborts what is cancelled here."""
        self._stop.set()
        tasks = [feeding, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _uninterrupted(future: asyncio.Future[Chunk | None]) -> Chunk | None:
    """The result; if this task is cancelled, only once the thread is done with the audio."""
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        with contextlib.suppress(Exception):
            await future
        raise
