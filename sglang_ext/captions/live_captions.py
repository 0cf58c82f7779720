"""Audio that plays, its captions and their translation, all at once."""

import asyncio
import contextlib
import time
from collections.abc import Sequence

from sglang_ext.api.translation.sentence_translations import LiveTranslation, Translated
from sglang_ext.captions.display import Display, DisplayError, Moment
from sglang_ext.captions.playback import Playback
from sglang_ext.captions.session_summary import Delays, Erasure, Summary
from speech.agreement import split_words
from speech.audio import AudioError
from speech.sentences import Sentence, Sentences
from speech.streaming import StreamingRecognizer, Update

_SAME_ERROR_S = 10.0  # an error is shown again after so long


class Captions:
    """What is shown, and what is measured of it.

    Args:
        translated: whether there are translations.
    """

    def __init__(self, playback: Playback, displays: Sequence[Display], translated: bool):
        self._playback = playback
        self._displays = displays
        self._translated = translated
        self._sentences = Sentences()
        self._captions, self._translations, self._stable = Erasure(), Erasure(), Erasure()
        self._delays = Delays()
        self._errors = 0
        self._shown_errors: dict[str, float] = {}

    def heard(self, update: Update) -> list[Sentence]:
        """Show a hypothesis; returns the sentences that it changed."""
        now = self._playback.elapsed
        for word in update.committed:
            self._delays.seconds.append(now - self._playback.played_at(word.end))
        committed, unstable = ([w.text for w in ws] for ws in (update.committed, update.unstable))
        return self._show(self._sentences.update(committed, unstable))

    def end(self) -> list[Sentence]:
        """No more hypotheses will come; returns the sentences that this changed."""
        return self._show(self._sentences.end())

    def translation(self, translated: Translated) -> None:
        """Show a translation."""
        for erasure, text in (
            (self._translations, translated.text),
            (self._stable, translated.stable),
        ):
            erasure.show(translated.index, split_words(text), translated.final)
        for display in self._displays:
            display.translation(translated, self._now())

    def error(self, message: str) -> None:
        """Show an error, unless it was shown a moment ago."""
        self._errors += 1
        now = time.monotonic()
        if now - self._shown_errors.get(message, -_SAME_ERROR_S) >= _SAME_ERROR_S:
            self._shown_errors[message] = now
            for display in self._displays:
                display.error(message, self._now())

    def close(self, lost_s: float) -> None:
        """Show the figures.

        Args:
            lost_s: seconds of audio that recognition was too late for.
        """
        summary = Summary(
            audio_s=self._playback.position,
            words=len(self._delays.seconds),
            delay_mean_s=self._delays.mean,
            delay_p90_s=self._delays.p90,
            caption_ne=self._captions.value,
            translation_words=self._translations.words if self._translated else None,
            translation_ne=self._translations.value if self._translated else None,
            translation_stable_ne=self._stable.value if self._translated else None,
            lost_s=lost_s,
            errors=self._errors,
        )
        for display in self._displays:
            display.close(summary)

    def _show(self, changed: list[Sentence]) -> list[Sentence]:
        for sentence in changed:
            self._captions.show(sentence.index, split_words(sentence.text), sentence.final)
            for display in self._displays:
                display.caption(sentence, self._now())
        return changed

    def _now(self) -> Moment:
        return Moment(self._playback.elapsed, self._playback.position)


async def follow(
    captions: Captions,
    playback: Playback,
    recognizer: StreamingRecognizer,
    translation: LiveTranslation | None,
    wait: bool,
) -> bool:
    """Play the audio to its end, with captions and translations; the figures come last.

    Args:
        wait: let the audio wait for recognition.

    Returns:
        Whether all of it was heard, and translated.

    Raises:
        DisplayError: captions cannot be shown.
    """
    try:
        async with asyncio.TaskGroup() as group:
            feeding = group.create_task(_feed(captions, playback, recognizer, wait))
            group.create_task(_hear(captions, recognizer, translation))
            if translation is not None:
                group.create_task(translation.run())
        complete = translation is None or not translation.unfinished
        return feeding.result() and complete and not recognizer.lost_s
    except ExceptionGroup as group:
        for error in group.exceptions:
            if isinstance(error, OSError):
                raise DisplayError(f"captions cannot be written: {error}") from None
        raise
    finally:
        with contextlib.suppress(OSError):  # which has been raised already
            captions.end()
            captions.close(recognizer.lost_s)
        if translation is not None:
            await translation.close()


async def _feed(
    captions: Captions, playback: Playback, recognizer: StreamingRecognizer, wait: bool
) -> bool:
    """Returns whether the audio could be read to its end."""
    try:
        async with contextlib.aclosing(playback.pieces()) as pieces:
            async for piece in pieces:
                recognizer.feed(piece)
                if wait:
                    await recognizer.caught_up()
        if not playback.position:
            raise AudioError("no audio came")
    except (AudioError, OSError) as error:
        captions.error(f"audio: {error}")
        return False
    finally:
        recognizer.end()
    return True


async def _hear(
    captions: Captions, recognizer: StreamingRecognizer, translation: LiveTranslation | None
) -> None:
    async with contextlib.aclosing(recognizer.updates()) as updates:
        async for update in updates:
            changed = captions.heard(update)
            if translation is not None:
                translation.update(changed)
    changed = captions.end()
    if translation is not None:
        translation.update(changed)
        translation.end()
