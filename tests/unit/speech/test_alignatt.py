"""AlignAtt over made attention, and over a Whisper's that was recorded."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from speech.agreement import CommitPolicy, Evidence, LocalAgreement, split_words
from speech.alignatt import AlignAtt
from speech.audio import SAMPLE_RATE
from speech.hypotheses import Token, timed_words
from speech.streaming import Span, StreamingRecognizer, StreamOptions, Update, Window
from tests.unit.speech.test_streaming import TALK, Speaker, recognise, said, speak

# Each hypothesis of a growing clip: seconds heard, text, and what its tokens attend to.
RECORDED = json.loads((Path(__file__).parent / "recorded_looks.json").read_text())


def hear(
    policy: CommitPolicy,
    text: str,
    *behind: float | None,
    last: bool = False,
    logprobs: Mapping[int, float] | None = None,
    seconds: float = 10.0,
) -> str:
    words = split_words(text)
    known = logprobs or {}
    evidence = [Evidence(place, known.get(i, -0.25)) for i, place in enumerate(behind)]
    first, end = policy.hear(words, last, evidence, seconds)
    return "".join(words[first:end]).strip()


def test_words_are_committed_up_to_the_first_that_attends_to_the_end():
    policy = AlignAtt(20)
    assert hear(policy, "And so my fell", 0.9, 0.5, 0.18, 0.1) == "And so"
    # What lies behind the one that waits waits too, wherever it looks.
    assert hear(policy, "And so our fellow Americans ask", 2, 2, 0.18, 1, 0.1, 0.6) == ""
    assert hear(policy, "And so her fellow Americans ask", 3, 3, 1, 0.9, 0.2, 0.1) == (
        "her fellow Americans"
    )


def test_at_the_limit_a_word_is_committed_whatever_the_rounding():
    for heard in (0.3, 1.1, 7.7, 28.02):
        behind = heard - (heard - 0.2)
        assert hear(AlignAtt(20), "so my", behind, 0.1) == "so"
        assert hear(AlignAtt(22), "so my", behind, 0.1) == ""


def test_a_last_word_may_be_the_beginning_of_a_longer_one():
    policy = AlignAtt(20)
    assert hear(policy, "at present concern", 1.2, 0.9, 0.98) == "at present"
    assert hear(AlignAtt(20), "at present concern", 1.2, 1.0, 1.0) == "at present concern"
    # One that two hypotheses have is more likely to be whole; a full stop tells nothing of it.
    assert hear(policy, "at present concern.", 1.22, 0.92, 0.9) == ""
    assert hear(policy, "at present concern.", 1.22, 0.92, 0.78) == ""
    assert hear(policy, "at present concern.", 1.3, 1.0, 0.8) == "concern."


def test_a_sure_word_that_two_hypotheses_agree_on_is_committed_once_it_has_passed():
    policy = AlignAtt(20)
    assert hear(policy, "And so my fellow", 0.9, 0.5, 0.1, 0.1) == "And so"
    assert hear(policy, "And so my fellows ask", 1.2, 0.8, 0.1, 0.15, 0.1) == "my"
    # What is settled is not compared again, and the rest is what the last hypothesis had.
    assert hear(policy, "And so my fellows as", 1.4, 1, 0.5, 0.0, 0.0) == "fellows"
    assert hear(policy, "And so my fellows asked", 1.6, 1.2, 0.7, 0.4, 0.98) == ""


def test_agreement_settles_nothing_that_is_still_to_be_said():
    policy = AlignAtt(20)
    hear(policy, "metal letters of", -0.3, 0.1, 0.1)
    assert hear(policy, "metal letters of", -0.2, 0.15, 0.1) == ""
    assert hear(policy, "metal letters of", 0.0, 0.2, 0.1) == "metal letters"


def test_a_word_that_is_not_sure_waits_longer():
    policy, unsure = AlignAtt(20), {2: -0.26}
    text = "metal letters made justly be"
    assert hear(policy, text, 2, 1.5, 1.38, 1.2, 0.9, logprobs=unsure) == "metal letters"
    # Heard otherwise, for all of them.
    text = "metal letters may justly be"
    assert hear(policy, text, 2, 1.5, 1.38, 1.2, 0.9, logprobs=unsure) == ""
    text = "metal letters made justly be"
    assert hear(policy, text, 2, 1.5, 1.4, 1.2, 0.9, logprobs=unsure) == "made justly"


def test_agreed_on_a_word_that_is_not_sure_waits_less():
    policy, unsure = AlignAtt(20), {0: -0.4}
    hear(policy, "metal letters be", 0.3, 0.2, 0.1, logprobs=unsure)
    assert hear(policy, "metal letters be", 0.48, 0.4, 0.2, logprobs=unsure) == ""
    assert hear(policy, "metal letters be", 0.5, 0.4, 0.2, logprobs=unsure) == "metal letters"


@pytest.mark.parametrize(
    ("before", "now", "waits"),
    [(-0.1, -0.31, True), (-0.1, -0.29, False), (-0.6, -0.79, False), (-0.6, -0.81, True)],
)
def test_an_agreed_word_that_more_audio_makes_less_likely_may_be_another(before, now, waits):
    for behind, settled in ((0.78, "" if waits else "made just"), (0.8, "made just")):
        policy = AlignAtt(20)
        hear(policy, "made just be", 0.1, 0.1, 0.1, logprobs={0: before})
        assert hear(policy, "made just of", behind, 0.5, 0.2, logprobs={0: now}) == settled


def test_without_log_probabilities_a_word_waits_for_all_frames_or_half_of_them():
    policy, unknown = AlignAtt(20), [Evidence(0.4), Evidence(0.38), Evidence(0.0)]
    assert policy.hear(split_words("metal letters of"), False, unknown) == (0, 1)
    assert policy.hear(split_words("metal letters of"), False, [Evidence(0.2)] * 3) == (1, 2)


def test_little_audio_settles_less():
    for behind, seconds, settled in ((0.58, 1.2, ""), (0.6, 1.2, "The"), (0.58, 1.3, "The")):
        policy = AlignAtt(20)
        assert hear(policy, "The form", behind, 0.1, seconds=seconds) == settled


def test_what_is_not_known_waits_and_the_last_hypothesis_does_not():
    policy = AlignAtt(20)
    assert hear(policy, "And so my fellow", 1.0, None, None, 0.1) == "And"
    assert hear(policy, "And so") == ""
    # What comes behind it has passed, and so has it.
    assert hear(policy, "And so my fellow", 1.5, None, 1.0, 0.1) == "so my"
    assert hear(policy, "And so my fellow", last=True) == "fellow"


def test_reworded_words_are_not_committed_again():
    policy = AlignAtt(5)
    assert hear(policy, "ask not what your", 1, 1, 1, 0.9) == "ask not what your"
    assert hear(policy, "asked not what the country", 2, 2, 2, 2, 0.7) == "country"
    policy.forget(split_words("Asked not, what"))
    assert hear(policy, "the country can", 2, 2, 0.9) == "can"


def test_a_limit_below_zero_is_refused():
    with pytest.raises(ValueError, match="0 frames or more, got -1"):
        AlignAtt(-1)


class Attentive(Speaker):
    """A speaker whose words attend to their middle, and what is misheard to the window's end."""

    async def transcribe(self, window: Window) -> list[Span] | None:
        found = await super().transcribe(window) or []
        return [self._looking(span, window) for span in found]

    def _looking(self, span: Span, window: Window) -> Span:
        looks, done = [], 0
        said = {word: (start + end) / 2 - window.start for word, start, end in self.words}
        for word in split_words(span.text):
            done += len(word)
            looks.append(Token(done, said.get(word.strip(), len(window.samples) / SAMPLE_RATE)))
        return Span(span.start, span.end, span.text, tuple(looks))


def unlike(count: int) -> Attentive:
    """So many words, a multiple of 9, no two alike."""
    made = speak(" ".join(f"w{i}." if i % 9 == 8 else f"w{i}" for i in range(count)))
    return Attentive(made.words, made.seconds)


def guided(frames: int, step_s: float = 0.3) -> StreamOptions:
    return StreamOptions(step_s=step_s, policy=lambda: AlignAtt(frames))


@pytest.mark.parametrize("step_s", [0.2, 0.5, 2.5])
def test_every_word_of_a_stream_is_committed_once(step_s):
    speaker = unlike(117)
    updates, recognizer = recognise(speaker, guided(5, step_s))
    assert said(updates) == " ".join(word for word, _, _ in speaker.words)
    assert recognizer.lost_s == 0


def test_a_stream_that_tells_nothing_loses_nothing():
    assert said(recognise(speak(TALK), guided(5))[0]) == TALK


def test_words_are_settled_sooner_than_two_hypotheses_agree():
    speaker = unlike(63)
    once, twice = (
        lateness(recognise(speaker, options)[0], speaker)
        for options in (guided(5), StreamOptions(step_s=0.3))
    )
    assert once < twice - 0.2


def lateness(updates: list[Update], speaker: Speaker) -> float:
    """Mean seconds of audio from a word's end to what the hypothesis that settled it had heard."""
    heard = [u.heard for u in updates for word in u.committed if word.text.strip(" .")]
    ends = [end for _, _, end in speaker.words]
    return sum(h - e for h, e in zip(heard, ends, strict=True)) / len(ends)


async def _nothing(window: Window) -> list[Span]:
    return []


def words_of(text: str, looks: list[list[float]]) -> list[tuple[str, float | None]]:
    recognizer = StreamingRecognizer(_nothing, detector=Silence())
    audio = recognizer._audio
    window = Window(audio.first(0), 10.0, "", False, audio.probabilities)
    span = Span(0.0, 1.0, text, tuple(Token(int(end), second) for end, second in looks))
    update = recognizer._outcome(window, 0, [span])
    assert update is not None
    return [(word.text, word.look) for word in update.unstable]


class Silence:
    def push(self, samples, last=False):
        return samples[:0]


def test_a_word_looks_as_far_as_its_last_token():
    looks = [[3, 1.0], [7, 2.0], [9, 1.5], [10, 3.0]]
    # What ends a sentence attends to what comes next, if it is a token of its own.
    assert words_of(" so tired.", looks) == [(" so", 11.0), (" tired.", 12.0)]
    assert words_of(" so tired.", [[3, 1.0], [10, 3.0]]) == [(" so", 11.0), (" tired.", 13.0)]
    # The first word of a text without a space gets one.
    assert words_of("so tired", [[2, 1.0], [8, 2.0]]) == [(" so", 11.0), (" tired", 12.0)]
    assert words_of(" so tired", [[3, 1.0]]) == [(" so", 11.0), (" tired", None)]


def test_recorded_attention_settles_what_a_whole_clip_confirms():
    """A clip as whisper-base hears it every half second, and what its alignment heads attend to;
    LocalAgreement-2 hears it every second."""
    last = split_words(RECORDED[-1]["text"])
    shown, agreed = settled(AlignAtt(20), RECORDED[:-1]), settled(LocalAgreement(), RECORDED[:-1:2])
    assert len(shown) >= len(agreed) > 15
    words = [word for word, _ in shown]
    assert [w.strip(" .,").lower() for w in words] == [
        w.strip(" .,").lower() for w in last[: len(words)]
    ]
    gained = [b - a for (_, a), (_, b) in zip(shown, agreed, strict=False)]
    assert sum(gained) / len(agreed) > 0.3


def settled(policy: CommitPolicy, hypotheses: list[dict[str, Any]]) -> list[tuple[str, float]]:
    """Each word, and how much audio had been heard when it was settled."""
    made = []
    for heard in hypotheses:
        span = Span(0.0, 1.0, heard["text"], tuple(Token(*look) for look in heard["looks"]))
        words, _ = timed_words([span], 0.0)
        evidence = [
            Evidence(None if word.look is None else heard["seconds"] - word.look) for word in words
        ]
        first, end = policy.hear([word.text for word in words], False, evidence)
        made += [(word.text, heard["seconds"]) for word in words[first:end]]
    return made
