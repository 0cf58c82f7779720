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
from speech.chunks import ChunkOptions, single_chunk
from speech.prompts import WhisperVocabulary
from speech.segments import Segment
from speech.streaming import Span, Window

logger = logging.getLogger(__name__)

_RETRY_S = 0.5


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
    """

    def __init__(
        self,
        engine: WhisperEngine,
        settings: SessionSettings,
        before: str,
        params: Mapping[str, Any],
        rehears: bool = False,
    ):
        self._rehears = rehears
        self._hearing = (-1.0, "")  # where the audio begins that is heard again, and its name
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
        said = f"{self._before}{window.prompt}".strip()
        request = _WindowRequest(
            prompt=f"{self._settings.prompt} {said}".strip(),
            # What will be heard again is worth neither: decoding again, nor remembering.
            temperature_fallback=window.final,
            custom_params=self._params_of(window),
            task=self._settings.task,
        )
        deltas: Deltas = asyncio.Queue()
        result = await ChunkDecoder(self._engine, request, None).decode(
            chunk, self.language, deltas
        )
        return [_span(segment, self._engine.vocabulary) for segment in result.segments]

    def _params_of(self, window: Window) -> dict[str, Any]:
        params = dict(self._params)
        if not window.final:
            params["ingest"] = False
        if window.guided:
            params[FRAMES] = MOST_FRAMES
        if self._rehears:
            start, name = self._hearing
            if start != window.start:
                name = str(uuid.uuid4())
            self._hearing = window.start, name
            params |= {"drafter": PARAMETER, PARAMETER: name}
        return params


def _span(segment: Segment, vocabulary: WhisperVocabulary) -> Span:
    """A segment with what its tokens attend to; one that ends in the middle of a character counts
    to that character."""
    looks, said = [], b""
    for token, second in zip(segment.tokens, segment.looks, strict=False):
        if token < vocabulary.end:
            said += vocabulary.token_bytes(token)
            whole = said.decode("utf-8", "ignore")
            looks.append((len(whole) + (len(whole.encode()) < len(said)), second))
    known = tuple(look for look in looks if not math.isnan(look[1]))
    return Span(segment.start, segment.end, segment.text, known)
