"""Text between two vocabularies: spelling, committed text for the draft, drafts for the target."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from speech.specasr.draft_tree import ROOT, DraftTree, to_target
from speech.specasr.transcript import Transcript
from speech.specasr.vocabulary import Vocabularies, Vocabulary, words
from tests.unit.speech.specasr_models import vocabulary, write_whisper

JOINED = ["om", " c", " com", "ar", "par", " compar", "at"]
TARGET = vocabulary([*JOINED, "ly", " t", " th", " the", "in", " m"])
DRAFT = vocabulary([*JOINED, " comparat", " t", " th", " the"], multilingual=False)
DIFFERENT = Vocabularies(TARGET, DRAFT)
SAME = Vocabularies(TARGET, vocabulary([*JOINED, "ly", " t", " th", " the", "in", " m"]))
PROMPT = [TARGET.special[name] for name in ("<|startoftranscript|>", "<|en|>", "<|transcribe|>",
                                            "<|notimestamps|>")]  # fmt: skip


def text_of(vocabulary: Vocabulary, tokens) -> bytes:
    return b"".join(vocabulary.bytes_of[token] or b"" for token in tokens)


@given(st.binary(max_size=40) | st.text(max_size=20).map(str.encode))
def test_words_and_spelling_lose_no_byte(text):
    assert b"".join(words(text)) == text
    assert text_of(TARGET, TARGET.spell_text(text)) == text


def test_words_are_cut_as_gpt2_cuts_them():
    text = b" It's 1455, the (big)  book\n\n of Mayence_"
    assert words(text) == [
        b" It", b"'s", b" 1455", b",", b" the", b" (", b"big", b")", b" ", b" book", b"\n\n",
        b" of", b" Mayence", b"_",
    ]  # fmt: skip


def test_lowest_ids_join_first():
    assert [TARGET.bytes_of[t] for t in TARGET.spell(b" comparatly")] == [b" compar", b"at", b"ly"]
    assert [DRAFT.bytes_of[t] for t in DRAFT.spell(b" comparatly")] == [b" comparat", b"l", b"y"]


def test_vocabularies_know_whether_text_tokens_are_the_same():
    assert SAME.direct and not DIFFERENT.direct
    assert DIFFERENT.special_to_draft(TARGET.special["<|0.02|>"]) == DRAFT.special["<|0.02|>"]
    assert DIFFERENT.special_to_target(DRAFT.end) == TARGET.end


def test_case_and_space_make_no_difference_to_a_key():
    assert TARGET.key(TARGET.spell(b" the")[0]) == b"the"
    assert DRAFT.key(DRAFT.special["<|en|>"]) == DRAFT.special["<|en|>"]


def test_vocabulary_of_a_folder(tmp_path):
    write_whisper(tmp_path, ["ab"])
    loaded = Vocabulary.load(tmp_path)
    assert loaded.bytes_of[:257] == vocabulary(["ab"]).bytes_of[:257]
    assert loaded.special == vocabulary(["ab"]).special
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        Vocabulary.load(tmp_path / "nowhere")


@given(st.lists(st.sampled_from([*range(32, 127), *range(256, 269)]), max_size=30), st.data())
def test_transcript_spells_as_the_draft_model_would(tokens, data):
    whole = Transcript(DIFFERENT, PROMPT)
    whole.append(tokens)
    parts = Transcript(DIFFERENT, PROMPT)
    rest = tokens
    while rest:
        n = data.draw(st.integers(1, len(rest)))
        parts.append(rest[:n])
        rest = rest[n:]
    text = text_of(TARGET, tokens)
    head = [DRAFT.special[name] for name in ("<|startoftranscript|>", "<|notimestamps|>")]
    assert parts.spelled() == whole.spelled()
    assert text_of(DRAFT, parts.spelled()) == text
    assert parts.spelled() == head + DRAFT.spell_text(text)
    if parts.tail_tokens is not None:
        assert text_of(TARGET, parts.tail_tokens) == parts.tail


def test_equal_vocabularies_map_token_by_token():
    transcript = Transcript(SAME, PROMPT)
    odd = [ord(char) for char in " the"]  # not as the tokenizer would write it
    transcript.append(odd)
    assert transcript.spelled() == PROMPT + odd
    assert transcript.tail == b""


def test_prompts_of_earlier_text_and_sglangs_placeholders():
    target, draft = TARGET.special, DRAFT.special
    previous = [target["<|startofprev|>"], *TARGET.spell_text(b" the")]
    transcript = Transcript(DIFFERENT, [0] * 50 + previous + PROMPT)
    assert transcript.spelled() == [
        draft["<|startofprev|>"], *DRAFT.spell_text(b" the"), draft["<|startoftranscript|>"],
        draft["<|notimestamps|>"],
    ]  # fmt: skip
    assert (
        Transcript(DIFFERENT, [0] * 50 + PROMPT).spelled()
        == Transcript(DIFFERENT, PROMPT).spelled()
    )


def test_other_languages_are_not_for_an_english_draft():
    special = TARGET.special
    french = [special["<|startoftranscript|>"], special["<|fr|>"], special["<|transcribe|>"]]
    assert Transcript(DIFFERENT, PROMPT).can_draft
    assert not Transcript(DIFFERENT, french).can_draft
    assert Transcript(SAME, french).can_draft
    # A language that the target found itself comes with its output.
    detecting = Transcript(DIFFERENT, french[:1])
    detecting.append(french[1:])
    assert not detecting.can_draft


def test_a_multilingual_draft_of_an_english_target_is_told_so():
    english = Vocabularies(vocabulary(["ab"], multilingual=False), vocabulary(["ab"]))
    start = english.target.special["<|startoftranscript|>"]
    names = ("<|startoftranscript|>", "<|en|>", "<|transcribe|>")
    expected = [english.draft.special[name] for name in names]
    assert Transcript(english, [start]).spelled() == expected


def chain(texts, prob=0.9) -> DraftTree:
    tree = DraftTree()
    node = ROOT
    for text in texts:
        node = tree.add(node, DRAFT.bytes_of.index(text.encode()), prob)
        tree.trunk.append(node)
    return tree


def started(text: bytes) -> Transcript:
    transcript = Transcript(DIFFERENT, PROMPT)
    transcript.append(TARGET.spell_text(text))
    return transcript


def test_a_draft_is_spelled_in_the_targets_tokens():
    tree = to_target(chain([" comparat", "l", "y", " the"]), started(b" the"), DIFFERENT, 10)
    assert [TARGET.bytes_of[t] for t in tree.tokens] == [b" compar", b"at", b"ly", b" the"]
    assert tree.parents.tolist() == [-1, 0, 1, 2]
    # " compar" ends within the first token, "ly" with the third.
    assert tree.probs == pytest.approx([0.9, 0.9, 0.9**3, 0.9**4])
    assert tree.covered.tolist() == [0, 1, 3, 4]
    assert tree.trunk == 4


def test_a_draft_goes_on_within_an_open_word():
    transcript = started(b" the compar")
    assert transcript.tail == b" compar"
    tree = DraftTree()
    node = tree.add(ROOT, DRAFT.bytes_of.index(b" comparat"), 0.8, b"at")
    tree.trunk = [node, tree.add(node, DRAFT.bytes_of.index(b"l"), 1.0)]
    spelled = to_target(tree, transcript, DIFFERENT, 10)
    assert [TARGET.bytes_of[t] for t in spelled.tokens] == [b"at", b"l"]


def test_a_word_that_the_target_spells_oddly_goes_on_byte_by_byte():
    transcript = Transcript(DIFFERENT, PROMPT)
    transcript.append([TARGET.bytes_of.index(text) for text in (b" c", b"o", b"m")])
    spelled = to_target(chain(["par", "at"]), transcript, DIFFERENT, 10)
    assert [TARGET.bytes_of[t] for t in spelled.tokens] == [b"par", b"at"]


def test_paths_that_spell_alike_share_nodes_and_their_chances():
    tree = DraftTree()
    whole = tree.add(ROOT, DRAFT.bytes_of.index(b" comparat"), 0.5)
    part = tree.add(ROOT, DRAFT.bytes_of.index(b" compar"), 0.3)
    tree.add(part, DRAFT.bytes_of.index(b"s"), 0.5)
    tree.trunk = [whole]
    spelled = to_target(tree, started(b" the"), DIFFERENT, 10)
    assert [TARGET.bytes_of[t] for t in spelled.tokens] == [b" compar", b"at", b"s"]
    assert spelled.probs == pytest.approx([0.8, 0.5, 0.15])


def test_special_tokens_are_mapped_and_unknown_ones_end_a_path():
    tree = DraftTree()
    node = tree.add(ROOT, DRAFT.bytes_of.index(b"s"), 0.9)
    tree.add(node, DRAFT.end, 0.9)
    spelled = to_target(tree, started(b" the"), DIFFERENT, 10)
    assert spelled.tokens.tolist() == [ord("s"), TARGET.end]


def test_a_special_token_that_the_target_lacks_ends_a_path():
    fewer = vocabulary([*JOINED, "ly", " t", " th", " the", "in", " m"])
    del fewer.special["<|0.02|>"]
    tree = DraftTree()
    node = tree.add(ROOT, DRAFT.bytes_of.index(b"s"), 0.9)
    tree.add(tree.add(node, DRAFT.special["<|0.02|>"], 0.9), ord("t"), 0.9)
    spelled = to_target(tree, started(b" the"), Vocabularies(fewer, DRAFT), 10)
    assert spelled.tokens.tolist() == [ord("s")]


@given(st.data())
def test_any_draft_gives_a_tree(data):
    tokens = st.sampled_from([*range(32, 127), *range(256, 267), DRAFT.end])
    tree = DraftTree()
    for _ in range(data.draw(st.integers(0, 25))):
        parent = data.draw(st.integers(-1, len(tree) - 1))
        tree.add(parent, data.draw(tokens), data.draw(st.floats(0, 1)))
    transcript = started(data.draw(st.sampled_from([b"", b" the", b" com", b" the m"])))
    limit = data.draw(st.integers(0, 30))
    spelled = to_target(tree, transcript, DIFFERENT, limit)
    assert len(spelled) <= limit
    above = np.concatenate((spelled.probs, [1.0]))[spelled.parents]
    assert (spelled.parents < np.arange(len(spelled))).all()
    assert (spelled.probs <= above).all()
    assert (np.diff(spelled.probs) <= 0).all()
    siblings = list(zip(spelled.parents.tolist(), spelled.tokens.tolist(), strict=True))
    assert len(set(siblings)) == len(siblings)
