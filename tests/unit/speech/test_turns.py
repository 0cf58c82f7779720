"""Turns in scripted speech probabilities."""

import numpy as np

from speech.turns import TurnChange, TurnDetector
from speech.vad import FRAMES_PER_SECOND, runs, speech_mask

SILENCE_S = 0.5
SILENCE = round(SILENCE_S * FRAMES_PER_SECOND)


def changes(probabilities, size=1, **settings):
    detector = TurnDetector(0.5, SILENCE_S, **settings)
    pieces = [probabilities[i : i + size] for i in range(0, len(probabilities), size)]
    return [change for piece in pieces for change in detector.push(piece)]


def frames(*stretches):
    """(probability, frames) of each stretch."""
    return np.concatenate([np.full(n, p) for p, n in stretches])


def test_a_turn_begins_with_speech_and_ends_behind_silence():
    given = frames((0, 30), (0.9, 40), (0, 30))
    expected = [TurnChange(30, True), TurnChange(70 + SILENCE, False)]
    for size in (1, 7, 100):
        assert changes(given, size) == expected


def test_short_silences_do_not_end_a_turn_and_short_sounds_begin_none():
    given = frames((0, 10), (0.9, 20), (0, SILENCE - 1), (0.9, 20), (0, 40))
    assert [c.frame for c in changes(given)] == [10, 65 + SILENCE]
    assert changes(frames((0, 10), (0.9, 3), (0, 40))) == []
    # Two sounds that a gap of three frames bridges are one.
    assert changes(frames((0, 10), (0.9, 2), (0, 3), (0.9, 2)))[0] == TurnChange(10, True)


def test_a_click_does_not_prolong_a_turn():
    given = frames((0.9, 20), (0, 10), (0.9, 1), (0, 40))
    assert changes(given)[-1] == TurnChange(20 + SILENCE, False)


def test_speech_goes_on_until_it_falls_well_below_the_threshold():
    assert len(changes(frames((0.9, 10), (0.4, 100)))) == 1
    assert len(changes(frames((0.4, 100)))) == 0


def test_a_turn_that_had_begun_ends():
    assert changes(frames((0, 40)), speaking=True, frame=100) == [TurnChange(100 + SILENCE, False)]


def test_turns_hold_the_speech_that_speech_mask_finds():
    random = np.random.default_rng(0)
    for _ in range(200):
        given = np.clip(np.repeat(random.random(60), random.integers(1, 30, 60)), 0, 1)
        found = changes(given)
        starts = [c.frame for c in found if c.started]
        ends = [c.frame for c in found if not c.started] + [len(given)]
        turns = list(zip(starts, ends, strict=False))
        assert all(a < b for a, b in turns)
        for start, end in runs(speech_mask(given)):
            assert any(a <= start and end <= b for a, b in turns), (start, end, turns)
