"""Counting transcripts that differ."""

from dataclasses import replace

import pytest

from scripts.check_speech import (
    compare,
    differing,
    first_difference,
    undrafted,
    word_error_figures,
)
from scripts.lib.speech_client import Transcript
from tests.unit.scripts.test_speech_data import CLIPS


def transcripts(*texts: str) -> list[Transcript]:
    return [Transcript([ord(c) for c in text], text, 1.0) for text in texts]


PLAIN = {1: transcripts("abc", "de", "f", ""), 8: transcripts("abc", "de", "fx", "")}


def test_each_batch_size_is_compared_with_its_own():
    answers = {("TSP", 1): PLAIN[1], ("TSP", 8): PLAIN[1]}
    assert differing(PLAIN, answers) == {("TSP", 1): set(), ("TSP", 8): {2}}


def test_differences_are_counted_and_shown_but_not_where_plain_is_unstable(capsys):
    answers = {
        ("TSP", 1): transcripts("abd", "de", "fg", ""),
        ("ASP", 8): transcripts("abc", "de", "fx", "y"),
    }
    figures = compare(CLIPS, PLAIN, answers, {1: {2}, 8: set()})
    assert figures["mismatches"] == 2
    assert figures["plain_mismatches"] == 1
    assert figures["transcripts_compared"] == 3 + 4
    assert figures["clips"] == 4
    assert figures["tokens"] == 6
    assert figures["minutes"] == pytest.approx((2 + 3 + 4 + 5) / 60)
    out = capsys.readouterr().out
    assert "0 from token 2" in out
    assert "3 from token 0" in out
    assert "2 from token" not in out


def test_a_mode_that_never_drafted_is_named():
    drafted = [replace(PLAIN[1][0], accept_length=2.5), *PLAIN[1][1:]]
    answers = {("TSP", 1): drafted, ("ASP", 8): PLAIN[8], ("no drafts", 1): PLAIN[1]}
    assert undrafted(answers) == ["ASP, batch 8"]


@pytest.mark.parametrize(
    ("expected", "got", "at"), [([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([], [4], 0)]
)
def test_first_difference(expected, got, at):
    assert first_difference(expected, got) == at


def test_word_errors_are_counted_where_there_are_references():
    clips = [replace(CLIPS[0], reference=said) for said in ("the cat sat down", None)]
    exact = transcripts("the cat sat down", "x")
    figures = word_error_figures(clips, exact, transcripts("the hat sat down", "y"))
    assert figures["wer_fp32"] == 0
    assert figures["wer"] == pytest.approx(0.25)
    assert figures["wer_points_lost"] == pytest.approx(25)
    assert figures["clips_with_reference"] == 1
    with pytest.raises(ValueError, match="no clip has a reference"):
        word_error_figures(clips[1:], exact[1:], exact[1:])
