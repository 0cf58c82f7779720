"""Recognition of speech while it is spoken: a growing audio buffer, transcribed again and again.

A policy says what of a hypothesis is committed: what two successive ones agree on
(speech/agreement.py), or what attends to audio that has passed (speech/alignatt.py). The buffer is
cut at committed sentence ends that lie in a silence, behind silences that end an utterance, and in
any case before it outgrows Whisper's window. There is one request at a time, made of all the audio
that is there by then: a slow recogniser gets fewer windows, not older ones.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from speech.agreement import CommitPolicy, Evidence, LocalAgreement, ends_sentence
from speech.audio import SAMPLE_RATE
from speech.buffer import AudioBuffer, SpeechProbabilities
from speech.hypotheses import Span as Span  # of whoever transcribes
from speech.hypotheses import Word as Word
from speech.hypotheses import is_sure, parted, timed_words, without_invented
from speech.vad import FRAME_SAMPLES, FRAMES_PER_SECOND, default_detector, runs, speech_mask

_PROMPT_CHARS = 200  # as whisper_streaming (Macháček et al. 2023, section 2.1)
_BEHIND_S = 0.2  # a hypothesis has heard the end of speech if so much silence followed
_NEAR_S = 0.5  # Whisper's times are off by so much
_LAST_TRIES = 3  # when no more audio comes, so many failures in a row end it


@dataclass(frozen=True)
class StreamOptions:
    """When to transcribe, and where to cut.

    Attributes:
        step_s: seconds of new audio after which it is transcribed again.
        least_s: so much speech at least is transcribed the first time: of less, Whisper invents.
        window_s: longest window.
        silence_s: so long a silence ends what was said: it is committed, and the audio is cut.
        padding_s: silence left before and after speech.
        least_cut_s: a shorter window is not cut at the end of a sentence.
        most_late_s: with more audio than this in the buffer, recognition is hopelessly late, and
            all but the last window is dropped.
        threshold: least probability of speech, 0 to 1.
        policy: makes what says which words are committed, for each stretch of audio.
    """

    step_s: float = 1.0
    least_s: float = 0.8
    window_s: float = 28.0
    silence_s: float = 1.5
    padding_s: float = 0.4
    least_cut_s: float = 5.0
    most_late_s: float = 120.0
    threshold: float = 0.5
    policy: Callable[[], CommitPolicy] = LocalAgreement


@dataclass(frozen=True)
class Window:
    """Audio to transcribe.

    Attributes:
        samples: float32[n] at 16 kHz.
        start: where it begins in the audio, in seconds.
        prompt: what was said before it.
        final: it ends in a silence or with the audio, and will not be transcribed again.
        probabilities: float32[frames] of speech, of its frames of 32 ms.
    """

    samples: np.ndarray
    start: float
    prompt: str
    final: bool
    probabilities: np.ndarray


@dataclass(frozen=True)
class Update:
    """What a hypothesis changed.

    Attributes:
        committed: words that are settled now; they follow the ones of earlier updates.
        unstable: what comes behind them, for now.
        heard: seconds of the audio that the hypothesis covers.
    """

    committed: tuple[Word, ...]
    unstable: tuple[Word, ...]
    heard: float


Transcribe = Callable[[Window], Awaitable[Sequence[Span] | None]]
"""Transcribes a window. None: it failed; it is tried again a step of audio later, or at once where
no more comes."""


class StreamingRecognizer:
    """Captions of one audio, given piece by piece.

    Args:
        transcribe: called with one window at a time.
        detector: default: Silero VAD.
    """

    def __init__(
        self,
        transcribe: Transcribe,
        options: StreamOptions | None = None,
        detector: SpeechProbabilities | None = None,
    ):
        self._transcribe = transcribe
        self._options = options or StreamOptions()
        self._audio = AudioBuffer(detector or default_detector().stream())
        self._begin()
        self._prompt = ""  # the text before the buffer's first sample
        self._heard = 0  # frames that the last request covered
        self._ended = False
        self._failures, self._retry_at = 0, 0  # in a row; the audio's frame to try again at
        self._news, self._idle = asyncio.Event(), asyncio.Event()
        self.lost_s = 0.0
        """Seconds of audio that were dropped since recognition was too late for them."""

    @property
    def held_s(self) -> float:
        """Seconds of audio that are kept: not heard yet, or not settled."""
        return self._audio.frames / FRAMES_PER_SECOND

    @property
    def lag_s(self) -> float:
        """Seconds of audio from what the last hypothesis has heard to the end of speech."""
        spoken = np.flatnonzero(self._audio.speech(self._options.threshold))
        if not len(spoken):
            return 0.0
        first = max(self._heard - self._audio.origin, int(spoken[0]))
        return max(0, int(spoken[-1]) + 1 - first) / FRAMES_PER_SECOND

    def feed(self, samples: np.ndarray) -> None:
        """Take the next samples, float32[n] at 16 kHz."""
        self._audio.push(samples)
        if self._audio.frames > _frames(self._options.most_late_s):
            self._drop_late()
        self._tell()

    def end(self) -> None:
        """No more audio will come."""
        self._audio.push(np.empty(0, np.float32), last=True)
        self._ended, self._failures = True, 0
        self._tell()

    async def caught_up(self) -> None:
        """Returns when all that is due has been transcribed; `updates` must be running."""
        await self._idle.wait()

    async def updates(self) -> AsyncGenerator[Update]:
        """Every hypothesis's outcome, until the audio has ended and all of it is committed."""
        while True:
            self._news.clear()
            due = self._next()
            if isinstance(due, Update):
                yield due
            elif due is not None:
                start = self._audio.origin
                spans = await self._transcribe(due)
                if (update := self._outcome(due, start, spans)) is not None:
                    yield update
            elif self._ended:
                self._idle.set()
                return
            else:
                self._idle.set()
                await self._news.wait()

    def _tell(self) -> None:
        self._idle.clear()
        self._news.set()

    def _next(self) -> Window | Update | None:
        """What to transcribe now, if anything, or what needs not be transcribed again."""
        options, audio = self._options, self._audio
        if self._failures and not self._ended and audio.end < self._retry_at:
            return None
        speech = audio.speech(options.threshold)
        if not speech.any():
            audio.drop(audio.frames - (0 if self._ended else _frames(options.padding_s)))
            self._begin()
            return None
        spoken = np.flatnonzero(speech)
        skipped = audio.drop(int(spoken[0]) - _frames(options.padding_s))
        speech, end = speech[skipped:], int(spoken[-1]) + 1 - skipped
        if audio.frames > _frames(options.window_s):
            return self._window(self._place_to_cut(speech), final=True)
        if self._ended or audio.frames - end >= _frames(options.silence_s):
            frames = min(audio.frames, end + _frames(options.padding_s))
            sure = all(is_sure(word.logprob) for word in self._words[self._settled :])
            if sure and self._heard - audio.origin >= end + _frames(_BEHIND_S):
                return self._settle(frames)
            return self._window(frames, final=True)
        heard = max(self._heard - audio.origin, 0)
        fresh = audio.frames - max(heard, int(spoken[0]) - skipped)
        step_s = options.step_s if heard else max(options.step_s, options.least_s)
        if end > heard and fresh >= _frames(step_s):
            return self._window(audio.frames, final=False)
        return None

    def _settle(self, frames: int) -> Update:
        """Commit the last hypothesis as it is: nothing was said since."""
        rest, _ = self._shown(self._words, self._settled, len(self._words), final=True)
        self._cut(self._words, frames)
        self._begin()
        return Update(tuple(rest), (), self._audio.origin / FRAMES_PER_SECOND)

    def _begin(self) -> None:
        """No hypothesis of what is in the buffer was heard yet."""
        self._policy = self._options.policy()
        self._words: list[Word] = []  # the last hypothesis
        self._settled = 0  # so many of them are committed
        self._owes = False  # the last of these was, without the punctuation behind it

    def _window(self, frames: int, final: bool) -> Window:
        start = self._audio.origin / FRAMES_PER_SECOND
        probabilities = self._audio.probabilities[:frames]
        samples = self._audio.first(frames)
        return Window(samples, start, self._prompt, final, probabilities)

    def _spoken(self, window: Window) -> float:
        """Where speech ends in a window, in seconds of the audio."""
        frames = np.flatnonzero(speech_mask(window.probabilities, self._options.threshold))
        return window.start + (int(frames[-1]) + 1 if len(frames) else 0) / FRAMES_PER_SECOND

    def _place_to_cut(self, speech: np.ndarray) -> int:
        """The frame to cut a full window before: in its longest silence, or its quietest frame."""
        high = _frames(self._options.window_s)
        silences = [run for run in runs(~speech[:high]) if run[0] > high // 3]
        if silences:
            start, end = max(silences, key=lambda run: run[1] - run[0])
            return (start + end) // 2
        return self._audio.quietest(high * 2 // 3, high)

    def _outcome(self, window: Window, start: int, spans: Sequence[Span] | None) -> Update | None:
        """Make the hypothesis the last one, cut the buffer; None where there is none to take.

        Args:
            start: the window's first frame.
        """
        if spans is None:
            self._failures += 1
            self._retry_at = self._audio.end + _frames(self._options.step_s)
            if self._ended and self._failures >= _LAST_TRIES:
                self.lost_s += self._audio.frames / FRAMES_PER_SECOND
                self._audio.drop(self._audio.frames)
            return None
        self._failures = 0
        if start != self._audio.origin:
            return None  # its audio was dropped meanwhile
        words, ends = timed_words(spans, window.start)
        words = without_invented(words, self._spoken(window))
        seconds = len(window.samples) / SAMPLE_RATE
        heard = window.start + seconds
        evidence = [
            Evidence(None if word.look is None else heard - word.look, word.logprob)
            for word in words
        ]
        texts = [word.text for word in words]
        first, last = self._policy.hear(texts, window.final, evidence, seconds)
        frames = len(window.samples) // FRAME_SAMPLES
        self._heard = start + frames
        committed, unstable = self._shown(words, first, last, window.final)
        if window.final:
            self._cut(words, frames)
            self._begin()
        else:
            self._words, self._settled = words, last
            self._cut_at_sentence(words[: last - self._owes], ends)
        return Update(tuple(committed), tuple(unstable), heard)

    def _shown(
        self, words: Sequence[Word], first: int, last: int, final: bool
    ) -> tuple[list[Word], list[Word]]:
        """What is committed of a hypothesis, and what stands behind it.

        Whisper ends what breaks off with a full stop. Where a policy commits a hypothesis' last
        word, that comes later, with the next one, as what it is by then.

        Args:
            first, last: the words that are committed now.
        """
        committed, unstable = list(words[first:last]), list(words[last:])
        if self._owes and first:
            mark = parted(words[first - 1])[1]
            self._owes = not (committed or final)
            (unstable if self._owes else committed)[:0] = [] if mark is None else [mark]
        if self._policy.guided and not final and first < last == len(words):
            committed[-1], mark = parted(words[-1])
            self._owes = mark is not None
            unstable += [] if mark is None else [mark]
        return committed, unstable

    def _cut_at_sentence(
        self, committed: Sequence[Word], ends: Sequence[tuple[int, float]]
    ) -> None:
        """Cut behind the last sentence whose span is committed and ends in a silence.

        Args:
            ends: of each span, how many words there are up to it, and where it ends, in seconds.
        """
        full = self._audio.frames > _frames(self._options.window_s * 2 / 3)
        for count, seconds in reversed(ends):
            frame = _frames(seconds) - self._audio.origin
            if count == 0 or frame < _frames(self._options.least_cut_s):
                return
            if count > len(committed):
                continue
            sentence = ends_sentence(committed[count - 1].text)
            place = self._silence_near(frame) if sentence or full else None
            if place is not None:
                self._policy.forget([word.text for word in committed[:count]])
                self._cut(committed[:count], place)
                self._words, self._settled = self._words[count:], self._settled - count
                return

    def _silence_near(self, frame: int) -> int | None:
        """The middle of the silence that is nearest to a frame; None: there is none near it."""
        near = [
            (max(start - frame, frame - end, 0), (start + end) // 2)
            for start, end in runs(~self._audio.speech(self._options.threshold))
        ]
        distance, middle = min(near, default=(_frames(_NEAR_S) + 1, 0))
        return middle if distance <= _frames(_NEAR_S) else None

    def _cut(self, words: Sequence[Word], frame: int) -> None:
        """Drop the frames before `frame`, in which `words` were said."""
        self._audio.drop(frame)
        self._prompt += "".join(word.text for word in words)
        if len(self._prompt) > _PROMPT_CHARS:
            # A word that is cut in two is left out.
            self._prompt = re.sub(r"^\S+(?=\s)", "", self._prompt[-_PROMPT_CHARS:])

    def _drop_late(self) -> None:
        dropped = self._audio.drop(self._audio.frames - _frames(self._options.window_s))
        self.lost_s += dropped / FRAMES_PER_SECOND
        self._begin()
        self._prompt = ""


def _frames(seconds: float) -> int:
    return round(seconds * FRAMES_PER_SECOND)
