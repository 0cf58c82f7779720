"""One chunk of audio -> its text: decoded again where it looks invented, and where the model left
something out.
"""

import asyncio
import dataclasses
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from sglang_ext.api.transcription.whisper_engine import WhisperEngine
from speech.alignment import Aligner
from speech.chunks import Chunk
from speech.coverage import left_out
from speech.segments import (
    MAX_COMPRESSION_RATIO,
    MAX_NO_SPEECH_PROB,
    Decoded,
    Segment,
    Word,
    chunk_segments,
    compression_ratio,
    is_silent,
    joined,
    needs_fallback,
    without_loop,
)

FALLBACK_TEMPERATURES = (0.2, 0.4, 0.6, 0.8, 1.0)  # openai-whisper's
# A chunk is divided so often at most for what was left out of it.
_DEEPEST = 3

_aligning = ThreadPoolExecutor(1, thread_name_prefix="sglang-ext-align")

Deltas = asyncio.Queue[str | None]
"""Text as it is written, where the request streams; None ends it."""


@dataclass
class ChunkResult:
    """What a chunk says.

    Attributes:
        segments: numbered from 0.
        logprobs: (token, log probability) of the text's tokens.
        token_ids: output ids of each pass over it or a part of it, as they came.
        end: of the chunk in the audio, in seconds.
    """

    text: str
    segments: list[Segment]
    words: list[Word]
    logprobs: list[tuple[int, float]]
    token_ids: list[tuple[int, ...]]
    end: float
    prompt_tokens: int


class DecodeRequest(Protocol):
    """What decoding reads of a request; TranscriptionRequest says what each is."""

    @property
    def task(self) -> str: ...
    @property
    def prompt(self) -> str: ...
    @property
    def temperature(self) -> float: ...
    @property
    def temperature_fallback(self) -> bool: ...
    @property
    def stream(self) -> bool: ...
    @property
    def progress(self) -> bool: ...
    @property
    def custom_params(self) -> Mapping[str, Any]: ...


class ChunkDecoder:
    """Decodes the chunks of one request.

    Args:
        aligner: for word timestamps; None where the request asks for none.
        most_tokens: of a pass over a chunk or a part of it; None: as many as Whisper can write.
    """

    def __init__(
        self,
        engine: WhisperEngine,
        request: DecodeRequest,
        aligner: Aligner | None,
        most_tokens: int | None = None,
    ):
        self._most_tokens = most_tokens
        self._engine = engine
        self._request = request
        self._aligner = aligner
        self._live = request.stream and not request.progress
        self._temperatures: tuple[float, ...] = (request.temperature,)
        # What has been streamed cannot be taken back.
        if not request.temperature and request.temperature_fallback and not self._live:
            self._temperatures += FALLBACK_TEMPERATURES

    async def decode(self, chunk: Chunk, language: str, deltas: Deltas) -> ChunkResult:
        """A chunk's text.

        Args:
            language: ISO code.
            deltas: takes what is written meanwhile, and None at the end.

        Raises:
            ApiError, ValueError: as WhisperEngine.decode.
        """
        result = ChunkResult("", [], [], [], [], chunk.source_end, 0)
        try:
            await self._add(result, chunk, language, deltas, 0)
        finally:
            deltas.put_nowait(None)
        return result

    async def _add(
        self, result: ChunkResult, chunk: Chunk, language: str, deltas: Deltas, depth: int
    ) -> None:
        """Decode a chunk or a part of one, and then what was left out of it."""
        vocabulary = self._engine.vocabulary
        prompt = vocabulary.prompt(
            language,
            self._request.task,
            timestamps=True,
            previous=self._request.prompt,
            context=self._engine.context,
        )
        decoded = await self._trusted(chunk, prompt, language, result.text, deltas)
        result.token_ids.append(decoded.tokens)
        result.prompt_tokens += len(prompt)
        rest: list[Chunk] = []
        if is_silent(decoded):
            decoded = _first(decoded, 0)
        elif compression_ratio(vocabulary.decode(decoded.tokens)) > MAX_COMPRESSION_RATIO:
            decoded = _first(decoded, len(without_loop(decoded.tokens)))
        elif depth < _DEEPEST:
            kept, rest = left_out(chunk, decoded, vocabulary, language)
            if self._live and kept is not decoded:
                rest = []
            else:
                decoded = kept
        await self._take(result, chunk, decoded, language)
        for part in rest:
            if part.speech:
                await self._add(result, part, language, deltas, depth + 1)

    async def _take(
        self, result: ChunkResult, chunk: Chunk, decoded: Decoded, language: str
    ) -> None:
        vocabulary = self._engine.vocabulary
        text = vocabulary.decode(decoded.tokens)
        result.text += joined(result.text, text, language) if result.text else text
        result.segments += chunk_segments(chunk, decoded, vocabulary, len(result.segments))
        result.logprobs += [
            pair
            for pair in zip(decoded.tokens, decoded.logprobs, strict=False)
            if pair[0] < vocabulary.end
        ]
        if self._aligner is not None:
            loop = asyncio.get_running_loop()
            result.words += await loop.run_in_executor(
                _aligning, self._aligner.words, chunk, text, language, self._request.task
            )

    async def _trusted(
        self, chunk: Chunk, prompt: list[int], language: str, before: str, deltas: Deltas
    ) -> Decoded:
        """What the model writes at the first temperature where it looks like speech."""
        for temperature in self._temperatures:
            decoded = await self._once(chunk, prompt, temperature, language, before, deltas)
            if not needs_fallback(decoded, self._engine.vocabulary.decode(decoded.tokens)):
                break
        return decoded

    async def _once(
        self,
        chunk: Chunk,
        prompt: list[int],
        temperature: float,
        language: str,
        before: str,
        deltas: Deltas,
    ) -> Decoded:
        emitted, decoded = "", None
        async for decoded in self._engine.decode(
            chunk,
            prompt,
            temperature,
            self._request.custom_params,
            stream=self._live,
            most_tokens=self._most_tokens,
        ):
            if not self._live:
                continue
            # A character may end in the next token.
            text = self._engine.vocabulary.decode(decoded.tokens).rstrip("\ufffd")
            if (
                text.startswith(emitted)
                and len(text) > len(emitted)
                and _like_speech(decoded, text)
            ):
                delta = text[len(emitted) :]
                first = before and not emitted
                deltas.put_nowait(joined(before, delta, language) if first else delta)
                emitted = text
        assert decoded is not None, "SGLang ended a request without an output"
        return decoded


def _first(decoded: Decoded, count: int) -> Decoded:
    """Its first tokens."""
    return dataclasses.replace(
        decoded,
        tokens=decoded.tokens[:count],
        logprobs=decoded.logprobs[:count],
        frames=decoded.frames[:count],
    )


def _like_speech(decoded: Decoded, text: str) -> bool:
    """Whether what is being written looks like speech so far."""
    return not (
        decoded.no_speech_prob > MAX_NO_SPEECH_PROB
        or compression_ratio(text) > MAX_COMPRESSION_RATIO
    )
