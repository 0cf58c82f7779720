"""Streaming recognition over scripted speech: nothing is lost, doubled or taken back."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from speech.agreement import LocalAgreement, aligned_prefix, ends_sentence, split_words
from speech.audio import SAMPLE_RATE
from speech.streaming import Span, StreamingRecognizer, StreamOptions, Update, Window, Word
from speech.vad import FRAME_SAMPLES

PIECE = SAMPLE_RATE // 10
TALK = (
    "And so, my fellow Americans, ask not what your country can do for you. Ask what you can do "
    "for your country. My fellow citizens of the world, ask not what America will do for you, but "
    "what together we can do for the freedom of man. Finally, whether you are citizens of America "
    "or citizens of the world, ask of us here the same high standards of strength and sacrifice "
    "which we ask of you."
)


class Loudness:
    """Speech is what is loud."""

    def __init__(self) -> None:
        self._rest = np.empty(0, np.float32)

    def push(self, samples: np.ndarray, last: bool = False) -> np.ndarray:
        samples = np.concatenate([self._rest, samples])
        if last:
            samples = np.pad(samples, (0, -len(samples) % FRAME_SAMPLES))
        whole = len(samples) // FRAME_SAMPLES * FRAME_SAMPLES
        self._rest = samples[whole:]
        return (np.abs(samples[:whole]).reshape(-1, FRAME_SAMPLES).mean(1) > 0.1).astype(np.float32)


@dataclass
class Speaker:
    """Says words at given times, and recognises them as a Whisper would.

    What is cut off at the window's end is misheard, and a hypothesis ends with a full stop.
    """

    words: list[tuple[str, float, float]]
    seconds: float
    windows: list[Window] = field(default_factory=list)

    @property
    def samples(self) -> np.ndarray:
        made = np.zeros(round(self.seconds * SAMPLE_RATE), np.float32)
        for _, start, end in self.words:
            made[round(start * SAMPLE_RATE) : round(end * SAMPLE_RATE)] = 0.5
        return made

    async def transcribe(self, window: Window) -> list[Span] | None:
        self.windows.append(window)
        stop = window.start + len(window.samples) / SAMPLE_RATE
        heard = []
        for word, start, end in self.words:
            if window.start - 0.05 <= start and end <= stop + 0.05:
                heard.append((word, start - window.start, end - window.start))
            elif start < stop - 0.05 and end > window.start + 0.05:
                heard.append((word[:2] + "mm", max(start - window.start, 0), end - window.start))
        return spans(heard)


def spans(words: Sequence[tuple[str, float, float]]) -> list[Span]:
    """One for each sentence."""
    made, part = [], []
    for i, word in enumerate(words):
        part.append(word)
        if ends_sentence(word[0]) or i == len(words) - 1:
            text = " ".join(w for w, _, _ in part)
            text = text if ends_sentence(text) else text.rstrip(",") + "."
            made.append(Span(part[0][1], part[-1][2], " " + text))
            part = []
    return made


def speak(text: str, word_s: float = 0.3, sentence_gap_s: float = 0.5, start: float = 0.6):
    """A speaker of the text, with a gap behind each sentence and none inside."""
    words, at = [], start
    for word in text.split():
        words.append((word, at, at + word_s))
        at += word_s + (sentence_gap_s if ends_sentence(word) else 0.0)
    return Speaker(words, at + 0.5)


def recognise(
    speaker: Speaker,
    options: StreamOptions | None = None,
    transcribe: Callable | None = None,
    pieces: Sequence[int] | None = None,
) -> tuple[list[Update], StreamingRecognizer]:
    """All updates of a talk that is as slow as its recognition."""

    async def run():
        recognizer = StreamingRecognizer(
            transcribe or speaker.transcribe, options, detector=Loudness()
        )
        updates: list[Update] = []

        async def collect():
            async for update in recognizer.updates():
                updates.append(update)

        collecting = asyncio.create_task(collect())
        samples, at = speaker.samples, 0
        sizes = iter(pieces or [])
        while at < len(samples):
            size = next(sizes, PIECE)
            recognizer.feed(samples[at : at + size])
            at += size
            await recognizer.caught_up()
        recognizer.end()
        await asyncio.wait_for(collecting, 10)
        return updates, recognizer

    return asyncio.run(run())


def said(updates: Sequence[Update]) -> str:
    return "".join(word.text for update in updates for word in update.committed).strip()


# Words


def test_words_keep_their_spaces_and_all_text():
    assert split_words("And so,  my") == [" And", " so,", "  my"]
    assert split_words(" I'm 3.5 m") == [" I'm", " 3.5", " m"]
    assert split_words("我们 走。ok") == ["我", "们", " 走。", "ok"]
    assert "".join(split_words("ไปไหน มา")) == "ไปไหน มา"
    assert split_words("  ") == []


@pytest.mark.parametrize("word", ["you.", "you?", 'you!"', "走。", "you.)", "2016."])
def test_sentence_ends(word):
    assert ends_sentence(word)


@pytest.mark.parametrize("word", ["you", "you,", "Mr.", "U.S.", "J.", "so...", "...", ""])
def test_no_sentence_ends(word):
    assert not ends_sentence(word)


@pytest.mark.parametrize(
    ("wanted", "given", "expected"),
    [
        ("a b c", "a b c d", 3),
        ("a b c", "a x c d", 3),
        ("a b c", "a b x d", 3),
        ("a b c", "a b b c d", 4),
        ("a b c d", "a c d e", 3),
        ("a a a", "a a a a", 3),
        ("a b", "", 0),
        ("", "a", 0),
    ],
)
def test_alignment_finds_the_committed_words_though_they_changed(wanted, given, expected):
    assert aligned_prefix(wanted.split(), given.split()) == expected


# Local agreement


def hear(agreement: LocalAgreement, text: str, last: bool = False) -> str:
    words = split_words(text)
    first, end = agreement.hear(words, last)
    return "".join(words[first:end]).strip()


def test_what_two_hypotheses_agree_on_is_committed():
    agreement = LocalAgreement()
    assert hear(agreement, "And so my fell") == ""
    assert hear(agreement, "And so, my fellow Americans") == "And so, my"
    assert hear(agreement, "And so, my fellow American") == "fellow"
    assert hear(agreement, "And so, my fellow Americans. Ask") == ""
    assert hear(agreement, "And so, my fellow Americans, ask not") == "Americans, ask"
    assert hear(agreement, "And so, my fellow Americans, ask not.", last=True) == "not."


def test_a_full_stop_at_the_end_is_committed_only_if_it_stays():
    agreement = LocalAgreement()
    hear(agreement, "my fellow Americans.")
    assert hear(agreement, "my fellow Americans") == "my fellow"
    assert hear(agreement, "my fellow Americans") == "Americans"


def test_committed_words_are_not_committed_again():
    agreement = LocalAgreement()
    hear(agreement, "ask not what your country")
    assert hear(agreement, "ask not what your country can") == "ask not what your country"
    # It breaks off, then rewords what was committed.
    assert hear(agreement, "ask not") == ""
    assert hear(agreement, "ask not what the country can do for") == ""
    assert hear(agreement, "asked not what the country can do for you") == "can do for"


def test_a_cut_forgets_the_words_before_it():
    agreement = LocalAgreement()
    hear(agreement, "One two. Three four")
    assert hear(agreement, "One two. Three four five") == "One two. Three four"
    agreement.forget(split_words("One, to."))
    assert hear(agreement, "Three four five six") == "five"


# The stream


@pytest.mark.parametrize("step_s", [0.5, 1.0, 2.5])
def test_every_word_is_committed_once(step_s):
    speaker = speak(TALK)
    updates, recognizer = recognise(speaker, StreamOptions(step_s=step_s))
    assert said(updates) == TALK
    assert recognizer.lost_s == 0


def test_pieces_of_any_length_give_the_same_text():
    speaker = speak(TALK)
    sizes = random.Random(0).choices([1, 511, 513, 7000, 20000], k=400)
    assert said(recognise(speaker, pieces=sizes)[0]) == TALK


def test_two_hypotheses_stand_behind_what_is_committed_early():
    """A word that was heard once is not settled while its sentence goes on."""
    speaker = speak(TALK)
    hypotheses: list[set[str]] = []

    async def transcribe(window: Window):
        found = await speaker.transcribe(window)
        hypotheses.append({w.strip(" .,") for s in found for w in split_words(s.text)})
        return found

    updates, _ = recognise(speaker, transcribe=transcribe)
    heard = enumerate(zip(speaker.windows, updates, strict=False))
    early = [(i, update) for i, (window, update) in heard if not window.final and update.committed]
    assert early
    for i, update in early:
        for word in update.committed:
            assert word.text.strip(" .,") in hypotheses[i] & hypotheses[i - 1]


def test_the_step_sets_how_often_it_is_transcribed():
    speaker = speak(TALK, sentence_gap_s=0.0)
    recognise(speaker, StreamOptions(step_s=2.0, least_cut_s=100.0))
    ends = [w.start + len(w.samples) / SAMPLE_RATE for w in speaker.windows if not w.final]
    assert np.diff(ends) == pytest.approx(2.0, abs=0.15)


def test_so_much_speech_is_transcribed_the_first_time_whatever_the_step():
    speaker = speak(TALK)
    recognise(speaker, StreamOptions(step_s=0.2, least_s=0.8))
    first, second = speaker.windows[:2]
    begin = speaker.words[0][1]
    heard = [w.start + len(w.samples) / SAMPLE_RATE - begin for w in (first, second)]
    assert 0.7 < heard[0] < 1.0 and heard[1] - heard[0] == pytest.approx(0.2, abs=0.1)


def test_the_window_is_cut_at_sentence_ends():
    speaker = speak(TALK)
    recognise(speaker)
    starts = sorted({round(window.start, 2) for window in speaker.windows})
    gaps = [end for word, _, end in speaker.words if ends_sentence(word)]
    assert len(starts) == 3  # the first sentence by itself is too short
    for start in starts[1:]:
        assert any(0 <= start - gap <= 0.55 for gap in gaps)
    assert max(len(window.samples) for window in speaker.windows) < 16 * SAMPLE_RATE


def test_the_text_before_a_cut_is_the_prompt():
    speaker = speak(TALK)
    recognise(speaker)
    first, *_, last = speaker.windows
    assert first.prompt == ""
    said_before = TALK[: TALK.index("Finally")].strip()
    assert 100 < len(last.prompt.strip()) <= 200
    assert said_before.endswith(last.prompt.strip())


@pytest.mark.parametrize("gap_s", [0.0, 0.2])
def test_speech_without_an_end_fits_the_window(gap_s):
    """No sentence ends, and hypotheses that never agree: cut where it is quiet, or anyhow."""
    words = [(f"word{i}", 0.5 + i * (0.4 + gap_s), 0.9 + i * (0.4 + gap_s)) for i in range(200)]
    speaker = Speaker(words, words[-1][2] + 0.1)

    async def transcribe(window: Window):
        found = await speaker.transcribe(window)
        if window.final:
            return found
        noise = len(speaker.windows)
        return [Span(s.start, s.end, s.text.replace("word", f"x{noise}")) for s in found]

    updates, _ = recognise(speaker, StreamOptions(step_s=3.0), transcribe)
    assert max(len(window.samples) for window in speaker.windows) <= 28.1 * SAMPLE_RATE
    got = [word.strip(".") for word in said(updates).split()]
    if gap_s:
        assert got == [word for word, _, _ in words]
    else:  # the words that a cut divides may be misheard
        assert len(set(got) & {word for word, _, _ in words}) >= 190


def test_silence_is_never_transcribed():
    speaker = Speaker([("Hello", 3.0, 3.4), ("there.", 3.4, 4.0)], 60.0)
    updates, _ = recognise(speaker)
    assert said(updates) == "Hello there."
    assert len(speaker.windows) == 2
    assert speaker.windows[0].start == pytest.approx(2.6, abs=0.1)
    assert speaker.windows[-1].final
    assert recognise(Speaker([], 20.0))[0] == []


def test_a_silence_commits_what_was_said():
    speaker = Speaker([("Hello", 0.5, 0.9), ("there.", 0.9, 1.3), ("Again.", 9.0, 9.5)], 12.0)
    updates, _ = recognise(speaker)
    first = next(u for u in updates if u.committed)
    assert [word.text for word in first.committed] == [" Hello", " there."]
    assert first.heard < 2.0
    assert said(updates) == "Hello there. Again."


def test_what_was_heard_whole_is_not_transcribed_again():
    speaker = Speaker([("Hello", 0.5, 0.7), ("there.", 0.7, 1.2)], 6.0)
    updates, _ = recognise(speaker)
    assert said(updates) == "Hello there."
    assert len(speaker.windows) == 1 and not speaker.windows[0].final
    assert len(updates) == 2 and updates[0].committed == ()


def test_word_times_are_those_of_the_audio():
    speaker = speak(TALK)
    updates, _ = recognise(speaker)
    committed: list[Word] = [word for update in updates for word in update.committed]
    for word, (text, _, end) in zip(committed, speaker.words, strict=True):
        assert word.text.strip() == text
        assert word.end == pytest.approx(end, abs=1.5)  # interpolated by characters


def test_a_slow_recogniser_gets_all_the_audio_so_far():
    """Windows are made when they are sent, so none is older than the audio that is there."""
    speaker = speak(TALK)
    samples = speaker.samples

    async def run():
        fed, behind, updates = 0, [], []

        async def transcribe(window: Window):
            end = round(window.start * SAMPLE_RATE) + len(window.samples)
            if not window.final:
                behind.append(fed - end)
            await asyncio.sleep(0.02)  # in which 2.5 s of audio come
            return await speaker.transcribe(window)

        recognizer = StreamingRecognizer(transcribe, detector=Loudness())

        async def collect():
            async for update in recognizer.updates():
                updates.append(update)

        collecting = asyncio.create_task(collect())
        while fed < len(samples):
            recognizer.feed(samples[fed : fed + PIECE])
            fed += PIECE
            await asyncio.sleep(0.0008)
        recognizer.end()
        await asyncio.wait_for(collecting, 10)
        return behind, updates

    behind, updates = asyncio.run(run())
    assert behind and max(behind) < FRAME_SAMPLES
    assert len(speaker.windows) < speaker.seconds
    assert said(updates) == TALK


def test_a_failed_request_is_made_again_with_more_audio():
    speaker = speak(TALK)
    failing = random.Random(1)

    async def transcribe(window: Window):
        found = await speaker.transcribe(window)
        return None if failing.random() < 0.4 else found

    updates, recognizer = recognise(speaker, transcribe=transcribe)
    assert said(updates) == TALK
    assert recognizer.lost_s == 0


def test_a_dead_server_ends_it_after_the_audio():
    speaker = speak(TALK)
    asked = []

    async def transcribe(window: Window):
        asked.append(window)
        return None

    updates, recognizer = recognise(speaker, transcribe=transcribe)
    assert updates == []
    assert 0 < recognizer.lost_s < speaker.seconds
    assert max(len(window.samples) for window in asked) <= 28.1 * SAMPLE_RATE


def test_hopelessly_late_audio_is_dropped_and_counted():
    text = " ".join(f"Sentence number{i} is spoken here." for i in range(60))
    speaker = speak(text)

    async def run():
        go, updates = asyncio.Event(), []

        async def transcribe(window: Window):
            await go.wait()
            return await speaker.transcribe(window)

        recognizer = StreamingRecognizer(
            transcribe, StreamOptions(most_late_s=40.0), detector=Loudness()
        )

        async def collect():
            async for update in recognizer.updates():
                updates.append(update)

        collecting = asyncio.create_task(collect())
        samples = speaker.samples
        for at in range(0, len(samples), PIECE):
            recognizer.feed(samples[at : at + PIECE])
            await asyncio.sleep(0)
        go.set()
        recognizer.end()
        await asyncio.wait_for(collecting, 10)
        return updates, recognizer.lost_s

    updates, lost_s = asyncio.run(run())
    assert speaker.seconds - 41 < lost_s < speaker.seconds - 27
    assert said(updates).endswith("Sentence number59 is spoken here.")
    assert "number3 " not in said(updates)
