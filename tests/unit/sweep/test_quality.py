"""Word errors and normalized erasure, by request."""

import sys

from sglang_ext.sweep.items import Item
from sglang_ext.sweep.quality import ERASURE, WORD_ERRORS, qualities, word_errors


def clip(name, reference=""):
    return Item(name, "c", (), 9, audio="data:", reference=reference)


def update(name, stream):
    return Item(name, "c", (1,), 9, stream=stream)


def test_word_errors_after_normalization():
    assert word_errors("Mr. Smith, it's blue!", "mister smith it is blue") == [0, 5]
    # One substituted, one inserted, one deleted.
    assert word_errors("red green blue white", "dead green green blue") == [3, 4]
    assert word_errors("red green", "") == [2, 2]
    assert word_errors("?!", "words") is None


def test_no_word_errors_without_jiwer(monkeypatch):
    monkeypatch.setitem(sys.modules, "jiwer", None)
    assert word_errors("one", "two") is None
    assert qualities([clip("a", "one")], {"a": [1]}, lambda ids: "two") == {}


def test_clips_without_reference_or_answer_tell_nothing():
    items = [clip("a", "well said"), clip("b"), clip("c", "never answered")]
    texts = {1: "well sad", 2: "anything"}
    found = qualities(items, {"a": [1], "b": [2]}, lambda ids: texts[ids[0]])
    assert found == {"a": {WORD_ERRORS: [1, 2]}}


def test_erasure_is_what_an_update_takes_back():
    texts = ["le chat", "le chien est", "le chien est noir", "un", "un deux"]
    items = [update(str(n), "a" if n < 3 else "b") for n in range(5)]
    found = qualities(items, {str(n): [n] for n in range(5)}, lambda ids: texts[ids[0]])
    assert {name: ratios[ERASURE] for name, ratios in found.items()} == {
        "0": [0, 0], "1": [1, 0], "2": [0, 4], "3": [0, 0], "4": [0, 2]
    }  # fmt: skip


def test_streams_with_a_failed_update_are_left_out():
    items = [update("0", "a"), update("1", "a"), update("2", "b")]
    found = qualities(items, {"0": [1], "2": [1]}, lambda ids: "x")
    assert found == {"2": {ERASURE: [0, 1]}}


def test_text_is_not_decoded_where_nothing_is_told():
    items = [Item("a", "c", (1,), 9)]
    assert qualities(items, {"a": [1]}, lambda ids: 1 / 0) == {}
