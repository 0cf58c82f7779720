"""Segments from whatever timestamps the model wrote, and the signs of invented text."""

import math

import numpy as np
import pytest

from speech.audio import SAMPLE_RATE
from speech.chunks import Chunk, Piece
from speech.prompts import WhisperVocabulary
from speech.segments import (
    Decoded,
    chunk_segments,
    compression_ratio,
    is_silent,
    joined,
    needs_fallback,
    without_loop,
)

VOCABULARY = WhisperVocabulary(51_865)


def text(words: str) -> list[int]:
    return VOCABULARY.tokenizer.encode(words)


def at(seconds: float) -> int:
    return VOCABULARY.first_timestamp + round(seconds / 0.02)


def chunk(seconds: float = 10.0, start: float = 100.0) -> Chunk:
    samples = np.zeros(int(seconds * SAMPLE_RATE), np.float32)
    return Chunk(0, samples, (Piece(0.0, start, seconds),), ((0.5, seconds - 1),))


def times(tokens: list[int], audio: Chunk | None = None) -> list[tuple[float, float, str]]:
    segments = chunk_segments(audio or chunk(), Decoded(tuple(tokens)), VOCABULARY)
    return [(s.start, s.end, s.text) for s in segments]


def test_pairs_of_timestamps():
    tokens = [*text(" One."), at(2), at(3), *text(" Two."), at(5.5)]
    assert times(tokens) == [(100, 102, " One."), (103, 105.5, " Two.")]


def test_single_timestamps_end_one_segment_and_begin_the_next():
    tokens = [at(0.2), *text(" One."), at(2), *text(" Two."), at(4)]
    assert times(tokens) == [(100.2, 102, " One."), (102, 104, " Two.")]


def test_a_missing_last_timestamp_is_the_end_of_the_speech():
    assert times([*text(" One."), at(2), *text(" Two.")])[1] == (102, 109, " Two.")


def test_without_any_timestamps_the_speech_tells():
    assert times(text(" One. Two.")) == [(100.5, 109, " One. Two.")]


@pytest.mark.parametrize(
    "tokens",
    [
        [*text(" One."), at(3), *text(" Two."), at(1), *text(" Three."), at(4)],
        [*text(" One."), at(29.9), *text(" Two."), at(3)],
        [at(1), at(1), at(1), *text(" One."), at(1), *text(" Two."), at(1)],
    ],
    ids=["backwards", "past the end", "all the same"],
)
def test_odd_timestamps_keep_the_order_and_the_text(tokens):
    found = times(tokens)
    assert "".join(words for *_, words in found) == VOCABULARY.decode(tokens)
    for start, end, _ in found:
        assert 100 <= start < end <= 110
    assert sorted(found) == found


def test_nothing_said_is_no_segment():
    assert times([]) == []
    assert times([at(0), at(3)]) == []
    assert times([*text(" "), at(3)]) == []


def test_times_pass_over_silence_that_was_taken_out():
    audio = Chunk(
        0,
        np.zeros(4 * SAMPLE_RATE, np.float32),
        (Piece(0.0, 10.0, 2.0), Piece(2.0, 50.0, 2.0)),
        ((0.0, 2.0), (2.0, 4.0)),
    )
    tokens = [*text(" One."), at(2), at(2), *text(" Two."), at(4)]
    assert times(tokens, audio) == [(10, 12, " One."), (50, 52, " Two.")]


def test_ids_seeks_tokens_and_scores():
    tokens = (at(0.1), *text(" One."), at(2), *text(" Two."), at(4))
    decoded = Decoded(tokens, (-0.5,) * (len(tokens) + 1), 0.25, 0.2)
    first, second = chunk_segments(chunk(), decoded, VOCABULARY, first_id=7)
    assert (first.id, second.id) == (7, 8)
    assert first.seek == second.seek == 10_000
    assert first.tokens + second.tokens == tokens
    assert first.avg_logprob == pytest.approx(-0.5)
    assert (first.temperature, first.no_speech_prob) == (0.2, 0.25)
    assert first.compression_ratio == pytest.approx(compression_ratio(" One. Two."))


def test_fallback_rules_are_openai_whispers():
    sure = Decoded((1,) * 9, (-0.1,) * 10, 0.1)
    unsure = Decoded((1,) * 9, (-1.5,) * 10, 0.1)
    silent = Decoded((1,) * 9, (-1.5,) * 10, 0.9)
    plain, loop = "Some words that differ.", "the same words " * 40
    assert not needs_fallback(sure, plain)
    assert needs_fallback(sure, loop)
    assert needs_fallback(unsure, plain)
    assert is_silent(silent) and not needs_fallback(silent, plain)
    assert not is_silent(Decoded((1,) * 9, (-0.1,) * 10, 0.9))
    assert not is_silent(Decoded((1,) * 9, (-1.5,) * 10, math.nan))


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4] + [7] * 20, [1, 2, 3, 4, 7]),
        ([1, 2] + [5, 6, 7] * 9 + [5, 6], [1, 2, 5, 6, 7]),
        ([1, 2, 3, 4, 3, 4], [1, 2, 3, 4, 3, 4]),
        ([9, 9, 9], [9, 9, 9]),
        ([], []),
    ],
)
def test_loops_are_cut(tokens, expected):
    assert list(without_loop(tokens)) == expected


@pytest.mark.parametrize(
    ("before", "after", "language", "expected"),
    [
        ("", " One", "en", "One"),
        ("One.", " Two", "en", "One. Two"),
        ("One.", "Two", "en", "One. Two"),
        ("One. ", " Two", "en", "One. Two"),
        ("一。", "二", "zh", "一。二"),
        ("One.", "", "en", "One."),
    ],
)
def test_joining(before, after, language, expected):
    assert before + joined(before, after, language) == expected
