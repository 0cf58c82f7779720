"""One item of a session: its audio, from where it begins to its commit, and its text."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from sglang_ext.api.http import ApiError
from sglang_ext.api.realtime.live_audio import Frames, Given
from sglang_ext.api.realtime.realtime_settings import SessionSettings
from sglang_ext.api.realtime.window_decoder import WindowDecoder
from speech.streaming import Span, StreamingRecognizer, StreamOptions, Update, Window, Word
from speech.vad import FRAMES_PER_SECOND

# The session refuses audio before there is so much of it.
_NEVER_S = 1e9


class Turn:
    """An item that is being spoken, or waits for its last words.

    Args:
        start: number of its first frame, counted from the session's beginning.
        settings: of the session when it began.
    """

    def __init__(self, item_id: str, start: int, settings: SessionSettings):
        self.item_id = item_id
        self.start = start
        self.settings = settings
        self.text = ""
        """What its deltas said."""
        self.tail = ""
        """What may follow, for now."""
        self.decoder: WindowDecoder | None = None
        """Set before anything is transcribed."""
        self.task: asyncio.Task[None] | None = None
        """What follows its transcription."""
        self._given = Given()
        self._frames = 0
        options = StreamOptions(
            step_s=settings.policy.steps,
            threshold=settings.threshold,
            most_late_s=_NEVER_S,
            policy=settings.policy.made,
        )
        self.recognizer = StreamingRecognizer(self._transcribe, options, self._given)

    @property
    def seconds(self) -> float:
        """Of audio that it has."""
        return self._frames / FRAMES_PER_SECOND

    @property
    def language(self) -> str | None:
        """What it is spoken in, an ISO code; None: that is not known yet."""
        return self.settings.language if self.decoder is None else self.decoder.language

    @property
    def error(self) -> ApiError | None:
        """Why some of it is missing, once all is transcribed; None: nothing is."""
        if not self.recognizer.lost_s or self.decoder is None:
            return None
        return self.decoder.error or ApiError("the transcription failed", 500)

    def feed(self, frames: Frames) -> None:
        """Take the next frames."""
        self._frames += len(frames)
        self._given.give(frames.probabilities)
        self.recognizer.feed(frames.samples)

    def take(self, update: Update) -> tuple[str, Sequence[Word]]:
        """Follow a hypothesis; returns what it adds to the text, and those words with their ends in
        seconds of the session's audio."""
        words = update.committed
        delta = "".join(word.text for word in words)
        delta = delta if self.text else delta.lstrip()
        self.text += delta
        rest = "".join(word.text for word in update.unstable)
        self.tail = rest if self.text else rest.lstrip()
        offset = self.start / FRAMES_PER_SECOND
        return delta, [replace(word, end=word.end + offset) for word in words]

    async def _transcribe(self, window: Window) -> Sequence[Span] | None:
        assert self.decoder is not None
        return await self.decoder.transcribe(window)
