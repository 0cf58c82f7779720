"""Windows of live audio -> text, by the served Whisper in this process."""

import asyncio
import logging
import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_ext.api.http import ApiError
from sglang_ext.api.realtime.realtime_settings import SessionSettings
from sglang_ext.api.transcription.chunk_decoder import ChunkDecoder, Deltas
from sglang_ext.api.transcription.whisper_engine import WhisperEngine
from sglang_ext.drafters.rehearing import PARAMETER
from sglang_ext.request_options import MOST_FRAMES
from sglang_ext.step.token_info import FRAMES
from sglang_ext.whisper.audio_context import PARAMETER as AUDIO_CTX
from speech.audio import SAMPLE_RATE
from speech.chunks import FRAME_S, Chunk, ChunkOptions, single_chunk
from speech.hypotheses import Span, Token
from speech.prompts import WhisperVocabulary
from speech.segments import Segment
from speech.streaming import Window

logger = logging.getLogger(__name__)

_RETRY_S = 0.5
# Whisper's own limit: 448 tokens for 30 seconds.
_MOST_TOKENS, _MOST_TOKENS_A_SECOND = 12, 15


@dataclass
class _Hearing:
    """Audio that is heard again and again.

    Attributes:
        start: where it begins, in seconds.
        name: the drafter's.
        samples, tokens: of the last hypothesis.
    """

    start: float
    name: str
    samples: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class _WindowRequest:
    """What chunk_decoder.DecodeRequest asks for."""

    prompt: str
    temperature_fallback: bool
    custom_params: Mapping[str, Any]
    task: str = "transcribe"
    temperature: float = 0.0
    stream: bool = False
    progress: bool = False


class WindowDecoder:
    """Transcribes the windows of one item.

    Args:
        before: what was said before the item.
        params: custom_params of every request.
        rehears: whether the server drafts with what the same audio was heard as before
            (drafters/rehearing.py).
        guided: whether it tells what tokens attend to (step/attended_frames.py).
    """

    def __init__(
        self,
        engine: WhisperEngine,
        settings: SessionSettings,
        before: str,
        params: Mapping[str, Any],
        rehears: bool = False,
        guided: bool = False,
    ):
        self._guided = guided
        self._rehears = rehears
        self._hearing = _Hearing(-1.0, "")
        self._engine = engine
        self._settings = settings
        self._before = before
        self._params = params
        self.language = settings.language
        """ISO code; None: it was not detected yet."""
        self.error: ApiError | None = None
        """Why the last window that failed did."""

    async def transcribe(self, window: Window) -> list[Span] | None:
        """The window's text; None where it failed, a moment later."""
        try:
            return await self._spans(window)
        except ApiError as error:
            self.error = error
        except ValueError as error:  # SGLang's refusals
            self.error = ApiError(str(error))
        except Exception:
            logger.exception("a window of live audio failed")
            self.error = ApiError("the transcription failed", 500)
        await asyncio.sleep(_RETRY_S)
        return None

    async def _spans(self, window: Window) -> list[Span]:
        options = ChunkOptions(threshold=self._settings.threshold)
        chunk = single_chunk(window.samples, window.probabilities, options)
        if chunk is None:
            return []
        if self.language is None:
            self.language = await self._engine.detect_language(chunk, self._params)
        if window.start != self._hearing.start:
            self._hearing = _Hearing(window.start, str(uuid.uuid4()))
        said = f"{self._before}{window.prompt}".strip()
        request = _WindowRequest(
            prompt=f"{self._settings.prompt} {said}".strip(),
            # What will be heard again is worth neither: decoding again, nor remembering.
            temperature_fallback=window.final,
            custom_params=self._params_of(window, chunk),
            task=self._settings.task,
        )
        deltas: Deltas = asyncio.Queue()
        decoder = ChunkDecoder(self._engine, request, None, self._most_tokens(window))
        result = await decoder.decode(chunk, self.language, deltas)
        if not window.final:
            self._hearing.samples = len(window.samples)
            self._hearing.tokens = max(map(len, result.token_ids))
        return [_span(segment, self._engine.vocabulary) for segment in result.segments]

    def _most_tokens(self, window: Window) -> int | None:
        """So many tokens may a hypothesis have: what runs on, as Whisper does where speech breaks
        off, holds the next one up. The last one has no limit: some scripts take many tokens."""
        if window.final:
            return None
        fresh = (len(window.samples) - self._hearing.samples) / SAMPLE_RATE
        return self._hearing.tokens + math.ceil(_MOST_TOKENS + _MOST_TOKENS_A_SECOND * fresh)

    def _params_of(self, window: Window, chunk: Chunk) -> dict[str, Any]:
        params = dict(self._params)
        if not window.final:
            params["ingest"] = False
            heard = math.ceil((chunk.duration + self._settings.policy.padding_s) / FRAME_S)
            params[AUDIO_CTX] = min(heard, MOST_FRAMES)
        if self._guided:
            params[FRAMES] = MOST_FRAMES
        if self._rehears:
            params |= {"drafter": PARAMETER, PARAMETER: self._hearing.name}
        return params


def _span(segment: Segment, vocabulary: WhisperVocabulary) -> Span:
    """A segment with its tokens; one that ends in the middle of a character counts to that
    character."""
    tokens, said = [], b""
    unknown = (math.nan,) * len(segment.tokens)
    looks, logprobs = segment.looks or unknown, segment.logprobs or unknown
    for token, look, logprob in zip(segment.tokens, looks, logprobs, strict=True):
        if token < vocabulary.end:
            said += vocabulary.token_bytes(token)
            whole = said.decode("utf-8", "ignore")
            end = len(whole) + (len(whole.encode()) < len(said))
            tokens.append(Token(end, look, logprob))
    return Span(segment.start, segment.end, segment.text, tuple(tokens))
