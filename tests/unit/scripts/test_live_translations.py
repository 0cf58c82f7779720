"""Figures of live translations: flicker, LongYAAL, and what a stream's events make."""

import math

import pytest

from scripts.lib.live_translations import INPUT, OUTPUT, TAIL, TranslatedRun, TranslatedWord
from scripts.lib.live_translations import long_yaal as yaal


def output(delta, sentence, ms):
    return {
        "type": OUTPUT, "delta": delta, "elapsed_ms": ms,
        "sglang_ext": {"sentence": sentence, "item_id": "i"},
    }  # fmt: skip


def tail(text, sentence, source, final=False):
    return {"type": TAIL, "text": text, "sentence": sentence, "source": source, "final": final}


def test_a_run_follows_what_is_shown():
    run = TranslatedRun()
    for at, event in enumerate(
        (
            {"type": INPUT, "delta": "One two."},
            tail("Un deux", 0, "One"),
            output("Un", 0, 500),
            tail(" trois", 0, "One two"),
            output(" quatre.", 0, 900),
            tail("", 0, "One two.", True),
            output(" Cinq.", 1, 1500),
            tail("", 1, "Five.", True),
            {"type": "error", "error": {"message": "slow"}},
        )
    ):
        run.take(event, float(at))
    assert (run.source, run.text) == ("One two.", "Un quatre. Cinq.")
    assert run.sentences == {0: "Un quatre.", 1: " Cinq."}
    assert run.sources == {0: ["One", "One two", "One two."], 1: ["Five."]}
    assert run.erasure.value == pytest.approx(2 / 3)  # deux and trois, of three words
    assert run.words[1] == TranslatedWord("quatre.", 4.0, 0.9)
    assert run.errors == ["slow"]


def test_long_yaal_is_of_each_segment_by_its_own_clock():
    words = [
        TranslatedWord("a", 2.0, 1.0),
        TranslatedWord("b", 3.0, 2.0),
        TranslatedWord("c", 7.0, 5.5),
        TranslatedWord("d", 12.0, 7.0),  # behind the recording's end
    ]
    # The first: 2 words in 4 s: 2 - 0, 3 - 2. The second, whose gamma counts d too: 7 - 4.
    assert yaal(words, [(0, 4), (4, 8)], 10) == pytest.approx((1.5 + 3.0) / 2)
    assert math.isnan(yaal([], [(0, 4)], 10))
