"""SSBD's metrics, on outputs that can be counted by hand."""

import pytest

from scripts.lib import ssbd_metrics
from scripts.lib.ssbd_metrics import (
    Language,
    Ratio,
    acceptance,
    bleu_tokenizer,
    common_prefix,
    displayed,
    erasure,
    row,
    tokenizer_for,
    words,
)
from scripts.lib.ssbd_streams import Update

# Token ids to text: what a tokenizer's decode does. 7 and 8 are the two bytes of one character.
PIECES = {1: "Un", 2: " hom", 3: "me", 4: " court", 5: ".", 6: " marche", 9: " vite"}


def decode(token_ids) -> str:
    text = "".join(PIECES.get(t, "") for t in token_ids if t < 7 or t == 9)
    if 7 in token_ids:
        text += "é" if 8 in token_ids else "\ufffd"
    return text


FRENCH = Language("French", words, decode)


def update(
    step: int, final: bool, *token_ids: int, stream: int = 0, seconds: float = 2.0
) -> Update:
    return Update(
        stream=stream, mode="any", batch=1, step=step, final=final, source="s",
        token_ids=token_ids, text=decode(token_ids), tokens=len(token_ids) + 1, seconds=seconds,
    )  # fmt: skip


def test_erasure_counts_what_leaves_the_display_behind_the_common_prefix():
    shown = [["a", "b", "c"], ["a", "x", "c", "d"], ["a", "x", "c", "d", "e"]]
    assert erasure(shown) == Ratio(2, 5)  # b and c, though c comes back; then nothing


def test_erasure_of_an_output_that_shrinks_and_of_one_that_stays_alone():
    assert erasure([["a", "b"], ["a"], []]) == Ratio(2, 0)
    assert Ratio(2, 0).value == 0
    assert erasure([["a"]]) == Ratio(0, 1)
    assert erasure([]) == Ratio(0, 0)


def test_ratios_are_summed_before_they_are_divided():
    assert (Ratio(1, 2) + Ratio(1, 8)).value == pytest.approx(0.2)


def test_common_prefix():
    assert common_prefix("abc", "abd") == 2
    assert common_prefix("ab", "abc") == 2
    assert common_prefix([], "abc") == 0


def test_the_last_k_tokens_are_held_back():
    ids = [1, 2, 3, 4, 5]
    assert displayed(ids, 0, decode) == "Un homme court."
    assert displayed(ids, 2, decode) == "Un homme"
    assert displayed(ids, 9, decode) == ""


def test_a_cut_word_is_displayed_unless_whole_words_are_asked_for():
    ids = [1, 2, 3, 4]
    assert displayed(ids, 2, decode) == "Un hom"
    assert displayed(ids, 2, decode, whole_words=True) == "Un "
    assert displayed(ids, 1, decode, whole_words=True) == "Un homme"


def test_a_cut_character_is_not_displayed():
    assert displayed([1, 7, 8], 1, decode) == "Un"


def test_accepted_draft_tokens_are_the_common_prefix():
    by_draft, by_output = acceptance([[], [1, 2, 3], [1, 2, 4, 5]], [[1, 2, 3], [1, 2, 4, 5], [9]])
    assert by_draft == Ratio(2, 7)
    assert by_output == Ratio(2, 8)


def test_a_row_is_over_all_streams():
    outputs = {
        # "Un homme." -> "Un homme court." erases 1 of 3 words.
        0: [update(0, False, 1, 2, 3, 5), update(1, True, 1, 2, 3, 4, 5)],
        # "Un marche" -> "Un court" erases 1 of 2 words.
        3: [
            update(0, False, 1, 6, stream=3),
            update(1, True, 1, 4, stream=3, seconds=1.0),
        ],
    }
    references = ["Un homme court.", "", "", "Un court"]
    found = row("any", outputs, references, FRENCH)
    assert (found.streams, found.chrf) == (2, pytest.approx(100))
    assert found.ne == pytest.approx(2 / 5)
    assert found.ad == pytest.approx((3 + 1) / (4 + 2))
    assert found.ao == pytest.approx((3 + 1) / (4 + 5 + 2 + 2))
    assert found.tokens_per_s == pytest.approx((5 + 6 + 3 + 3) / 7)


def test_trimming_shortens_the_draft_and_a_mask_the_display():
    outputs = {0: [update(0, False, 1, 2, 3, 5), update(1, True, 1, 2, 3, 4, 5)]}
    found = row("any", outputs, ["Un homme court."], FRENCH, mask=1, trim=1)
    assert found.ad == pytest.approx(1.0)  # 1 2 3 of 1 2 3
    assert found.ne == 0.0
    plain = row("any", outputs, ["Un homme court."], FRENCH, trim=None)
    assert (plain.ad, plain.ao) == (0, 0)


def test_the_final_output_is_displayed_whole():
    outputs = {0: [update(0, True, 1, 2, 3, 4)]}
    assert row("any", outputs, ["Un homme court"], FRENCH, mask=3).ne == 0
    masked = {0: [update(0, False, 1, 2, 3, 4, 9), update(1, True, 1, 2, 3, 6)]}
    # "Un homme" stays: what the mask held back was never erased.
    assert row("any", masked, ["x"], FRENCH, mask=2).ne == 0
    assert row("any", masked, ["x"], FRENCH).ne == pytest.approx(2 / 3)


def test_bleu_of_the_last_outputs():
    good = {0: [update(0, True, 1, 2, 3, 4, 9, 5)]}
    assert row("any", good, ["Un homme court vite."], FRENCH).bleu == pytest.approx(100)
    assert row("any", good, ["Rien de tel ici"], FRENCH).bleu < 10


def test_no_stream_is_an_error():
    with pytest.raises(ValueError, match="AR: no stream"):
        row("AR", {}, [], FRENCH)


def test_bleu_tokenizers():
    assert bleu_tokenizer("French") == "13a"
    assert bleu_tokenizer("Chinese") == "zh"
    assert bleu_tokenizer("Japanese") == "flores200"


def test_languages_without_spaces_count_flores200_pieces(monkeypatch):
    assert tokenizer_for("French") is words
    monkeypatch.setattr(ssbd_metrics, "_flores200", lambda: lambda text: " ".join(text))
    assert tokenizer_for("Chinese")("你好") == ["你", "好"]


def test_a_flores200_model_that_cannot_be_had_says_where_to_put_it(monkeypatch):
    from sacrebleu.tokenizers import tokenizer_spm

    def offline(*args, **kwargs):
        raise OSError("no route to host")

    monkeypatch.setattr(tokenizer_spm, "download_file", offline)
    monkeypatch.setattr(tokenizer_spm, "SACREBLEU_DIR", "/nonexistent")
    ssbd_metrics._flores200.cache_clear()
    with pytest.raises(ValueError, match=r"no route to host.*flores200sacrebleuspm"):
        tokenizer_for("Japanese")
