"""Sentences and figures of live captions."""

import pytest

from sglang_ext.captions.session_summary import Delays, Erasure
from speech.agreement import split_words
from speech.sentences import MOST_WORDS, Sentence, Sentences


def update(sentences: Sentences, committed: str, unstable: str = "") -> list[tuple]:
    changed = sentences.update(split_words(committed), split_words(unstable))
    return [(s.index, s.committed, s.unstable, s.final) for s in changed]


def test_a_sentence_grows_and_ends():
    sentences = Sentences()
    assert update(sentences, "", "And so") == [(0, "", "And so", False)]
    assert update(sentences, "And so, my", "fell") == [(0, "And so, my", " fell", False)]
    assert update(sentences, "fellow", "") == [(0, "And so, my fellow", "", False)]
    assert update(sentences, "Americans. Ask", "not") == [
        (0, "And so, my fellow Americans.", "", True),
        (1, "Ask", " not", False),
    ]
    assert update(sentences, "not.") == [(1, "Ask not.", "", True)]
    assert sentences.end() == []


def test_small_letters_go_on_after_a_full_stop():
    sentences = Sentences()
    assert update(sentences, "Americans.", "ask not") == [(0, "Americans.", " ask not", False)]
    assert update(sentences, "Ask not") == [(0, "Americans.", "", True), (1, "Ask not", "", False)]


def test_unstable_sentences_may_vanish():
    sentences = Sentences()
    assert update(sentences, "My", "fellow. Ask. Not") == [
        (0, "My", " fellow.", False),
        (1, "", "Ask.", False),
        (2, "", "Not", False),
    ]
    assert update(sentences, "", "fellow. Ask not") == [
        (1, "", "Ask not", False),
        (2, "", "", False),
    ]
    assert update(sentences, "", "fellows, ask") == [
        (0, "My", " fellows, ask", False),
        (1, "", "", False),
    ]
    assert update(sentences, "", "fellows, ask") == []


def test_without_full_stops_a_sentence_ends_somewhere():
    sentences = Sentences()
    words = [f" w{i}" for i in range(150)]
    finals = [s for s in sentences.update(words, []) if s.final]
    assert [len(s.text.split()) for s in finals] == [MOST_WORDS, MOST_WORDS]
    assert sentences.end() == [Sentence(2, "".join(words[120:]).strip(), "", True)]


def test_the_end_drops_what_is_unstable():
    sentences = Sentences()
    update(sentences, "My fellow", "Americans. Ask")
    assert [(s.index, s.text, s.final) for s in sentences.end()] == [
        (0, "My fellow", True),
        (1, "", False),
    ]


def test_erasure_counts_words_that_disappear():
    erasure = Erasure()
    for text, final in (("a b c", False), ("a x c d", False), ("a x c d", True)):
        erasure.show(0, text.split(), final)
    assert erasure.value == pytest.approx(2 / 4)  # b and c went
    erasure.show(1, ["e"], False)
    erasure.show(1, ["e", "f", "g", "h"], True)
    assert erasure.value == pytest.approx(2 / 8)
    assert Erasure().value == 0.0


def test_delays():
    delays = Delays([1.0, 2.0, 3.0])
    assert delays.mean == 2.0
    assert delays.p90 == pytest.approx(2.8)
    assert Delays().p90 == 0.0
