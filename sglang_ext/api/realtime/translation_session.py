"""A translation session of OpenAI's realtime protocol, without its socket.

A transcription session runs within it; its sentences are translated as they settle, by the
translation sessions of a text server. Neither waits for the other: what the text server is too
slow for is dropped and told, and transcription goes on without it.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from sglang_ext.api.http import ApiError
from sglang_ext.api.languages import NAMES
from sglang_ext.api.realtime.realtime_events import (
    OUTPUT_TAIL,
    TAIL,
    Event,
    error_event,
    event,
    transcript_event,
)
from sglang_ext.api.realtime.realtime_session import RealtimeSession, SessionParts
from sglang_ext.api.realtime.realtime_settings import GA
from sglang_ext.api.realtime.transcripts import Spoken, SpokenSentences, Transcript
from sglang_ext.api.realtime.translation_settings import TranslationSettings
from sglang_ext.api.translation.sentence_translations import LiveTranslation, Translated
from speech.agreement import split_words
from speech.prompts import language_name

logger = logging.getLogger(__name__)

MOST_WAITING = 32
"""Sentences that may wait for their translation; then the oldest is given up."""
_LAST_TRANSLATIONS_S = 60.0

_TEXT = "conversation.item.input_audio_transcription."
_PASSED = frozenset({"session.created", "session.updated", "error", TAIL})


class TranslationSession:
    """One session.

    Args:
        parts: of the transcription, with the parser of translation settings.
        client: of the text server; closed with the session.
        send: takes each server event; must not wait.
        broken: called once if the session cannot go on.
    """

    def __init__(
        self,
        parts: SessionParts,
        client: httpx.AsyncClient,
        send: Callable[[Event], None],
        broken: Callable[[], None],
    ):
        self._send = send
        self._client = client
        self._spoken = RealtimeSession(parts, self._take, broken)
        self._append = self._spoken.handlers["input_audio_buffer.append"]
        self._spoken.handlers = {
            GA: self._spoken.handlers[GA],
            "session.input_audio_buffer.append": self._append_unless_closing,
            "session.close": self._close,
        }
        self._translation = LiveTranslation(
            client,
            self._session_settings,
            self._show,
            self._tell_failure,
            MOST_WAITING,
            self._tell_dropped,
        )
        self._said = ""  # a delta whose end in the audio is not known yet
        self._input, self._output = Transcript(), Transcript()
        self._sentences = SpokenSentences()
        self._closing = asyncio.Event()
        self._failing = self._behind = False

    async def run(self) -> None:
        """Returns when the client has had the session closed, and all of it is translated."""
        tasks = [
            asyncio.create_task(self._spoken.run()),
            translating := asyncio.create_task(self._translate()),
        ]
        try:
            await self._closing.wait()
            await self._spoken.finish()
            self._translation.end()
            await asyncio.wait({translating}, timeout=_LAST_TRANSLATIONS_S)
            if self._translation.unfinished:
                self._tell_failure("the last sentences could not be translated")
            self._send(event("session.closed"))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def handle(self, text: str) -> None:
        """Answer one client event; what is wrong with it is told as an error event."""
        await self._spoken.handle(text)

    def abandon(self) -> "set[asyncio.Task[None]]":
        """Give up what runs, here and on the text server; these tasks do it."""
        return {*self._spoken.abandon(), asyncio.create_task(self._leave())}

    async def _leave(self) -> None:
        await self._translation.close()
        await self._client.aclose()

    async def _translate(self) -> None:
        try:
            await self._translation.run()
        except Exception:
            logger.exception("a realtime session's translation failed")
            self._tell_failure("internal error; this session translates no more")

    async def _append_unless_closing(self, given: Mapping[str, Any]) -> None:
        if self._closing.is_set():
            raise ApiError("the session is being closed, and takes no more audio", 409)
        await self._append(given)

    async def _close(self, given: Mapping[str, Any]) -> None:
        self._closing.set()

    @property
    def _settings(self) -> TranslationSettings:
        settings = self._spoken.settings
        assert isinstance(settings, TranslationSettings)
        return settings

    def _take(self, told: Event) -> None:
        """What the transcription says, as a translation session says it."""
        kind, settings = told["type"], self._settings
        if kind in _PASSED or settings.transcription_events:
            # What Whisper itself translates is no transcript, and what of it may change stays here.
            own = kind == TAIL and settings.task == "translate"
            self._send(told | {"text": "", "words": []} if own else told)
        if kind == _TEXT + "delta":
            self._said = told["delta"]
        elif kind == TAIL and told["item_id"] is not None:
            self._hear(told)
        elif kind in (_TEXT + "completed", _TEXT + "failed"):
            if kind.endswith("failed"):
                self._send(event("error", error=told["error"] | {"event_id": None}))
            self._follow(self._sentences.end_item(told["item_id"]))

    def _hear(self, tail: Event) -> None:
        """Take what a hypothesis settled, and where that ends in the audio."""
        words = [(word["word"], word["end_ms"]) for word in tail["words"]]
        said, self._said = self._said, ""
        if said and self._settings.shows_source and self._settings.task == "transcribe":
            delta = self._input.grown(tail["item_id"], said)
            self._send(transcript_event("input", delta, words[-1][1], item_id=tail["item_id"]))
        self._follow(self._sentences.update(tail["item_id"], tail["language"], words, tail["text"]))

    def _follow(self, changed: list[Spoken]) -> None:
        """Have sentences translated, as far as they are settled."""
        settings = self._settings
        if settings.target is None:
            for sentence in changed:
                self._sentences.forget(sentence.index)
            return
        wanted = [s for s in changed if s.final or not settings.finished_only]
        self._translation.update([sentence.settled for sentence in wanted])

    def _session_settings(self, index: int) -> Mapping[str, Any] | None:
        """Of a sentence's session on the text server; None: it is in the target language."""
        settings, sentence = self._settings, self._sentences.get(index)
        if sentence is None or settings.target is None or settings.task == "translate":
            return None
        if sentence.language == settings.target_code:
            return None
        return {
            "source_language": spoken_name(sentence.language),
            "target_language": settings.target,
            "append_only": True,
            "beta": settings.beta,
        }

    def _show(self, translated: Translated) -> None:
        """Send what is settled of a translation, and what is not."""
        if translated.text:
            self._failing = self._behind = False
        sentence = self._sentences.get(translated.index)
        if sentence is None:  # it was given up
            return
        place = {"item_id": sentence.item_id, "sentence": translated.index}
        elapsed = sentence.end_ms(translated.source)
        delta = self._output.shown(translated.index, translated.stable, translated.final)
        if delta:
            self._send(transcript_event("output", delta, elapsed, **place))
        rest = "" if translated.final else shown_tail(translated.unstable, self._settings.mask)
        tail = event(
            OUTPUT_TAIL,
            text=self._output.space(translated.index, rest) + rest,
            source=translated.source,
            elapsed_ms=elapsed,
            final=translated.final,
            **place,
        )
        self._send(tail)
        if translated.final:
            self._sentences.forget(translated.index)

    def _tell_failure(self, message: str) -> None:
        """Tell once that translations fail, until one is made again."""
        if not self._failing:
            self._failing = True
            reason = f"{message}; the transcription goes on"
            self._send(error_event(ApiError(reason, 503, code="translation_failed")))

    def _tell_dropped(self, index: int) -> None:
        """Tell once that sentences go untranslated, until one is translated again."""
        self._sentences.forget(index)
        if not self._behind:
            self._behind = True
            reason = (
                f"the text server is too slow: {MOST_WAITING} sentences wait for it, and older "
                "ones stay untranslated; the transcription goes on"
            )
            self._send(error_event(ApiError(reason, 503, code="translation_behind")))


def shown_tail(unstable: str, mask: int) -> str:
    """What is shown of what is not settled: all but its last words, which change most (mask-k,
    Arivazhagan et al. 2020, section 4.2)."""
    if mask == 0:
        return unstable
    held = sum(len(word) for word in split_words(unstable)[-mask:])
    return unstable[: max(0, len(unstable) - held)]


def spoken_name(code: str) -> str:
    """A language of Whisper's by its English name."""
    return NAMES.get(code) or language_name(code).title()
