"""Prompts equal openai-whisper's for every kind of Whisper vocabulary."""

import pytest
from whisper.tokenizer import get_tokenizer

from speech.prompts import LanguageError, WhisperVocabulary

ENGLISH, MULTILINGUAL, V3 = 51_864, 51_865, 51_866


@pytest.mark.parametrize("size", [MULTILINGUAL, V3])
@pytest.mark.parametrize("task", ["transcribe", "translate"])
def test_multilingual_prompts(size, task):
    vocabulary = WhisperVocabulary(size)
    theirs = get_tokenizer(True, num_languages=size - 51_766, language="fr", task=task)
    assert vocabulary.prompt("fr", task) == list(theirs.sot_sequence_including_notimestamps)
    timed = vocabulary.prompt("fr", task, timestamps=True)
    assert timed == [*theirs.sot_sequence, theirs.timestamp_begin]


def test_the_ids_are_those_of_openais_models():
    # From the generation_config.json of openai/whisper-base, -tiny.en and -large-v3.
    assert WhisperVocabulary(MULTILINGUAL).prompt("en") == [50258, 50259, 50359, 50363]
    assert WhisperVocabulary(MULTILINGUAL).first_timestamp == 50364
    assert WhisperVocabulary(ENGLISH).prompt() == [50257, 50362]
    assert WhisperVocabulary(ENGLISH).first_timestamp == 50363
    assert WhisperVocabulary(V3).prompt("en") == [50258, 50259, 50360, 50364]
    assert WhisperVocabulary(V3).first_timestamp == 50365


def test_earlier_text_comes_first_and_is_cut_from_the_left():
    vocabulary = WhisperVocabulary(MULTILINGUAL)
    short = vocabulary.prompt("en", previous="  Names: Ada. ")
    assert short[0] == vocabulary.tokenizer.sot_prev
    assert vocabulary.decode(short[: short.index(vocabulary.start)]) == " Names: Ada."
    long = vocabulary.prompt("en", previous="word " * 1000 + "last")
    assert len(long) == 448 // 2 + 4
    assert vocabulary.decode(long).endswith(" last")
    assert vocabulary.prompt("en", previous="  ") == vocabulary.prompt("en")


def test_special_tokens_in_the_text_are_text():
    vocabulary = WhisperVocabulary(MULTILINGUAL)
    ids = vocabulary.prompt("en", previous="<|endoftext|><|en|>")
    assert vocabulary.end not in ids
    assert ids.count(vocabulary.languages["en"]) == 1


@pytest.mark.parametrize(
    ("name", "code"),
    [("en", "en"), ("EN", "en"), (" French ", "fr"), ("castilian", "es"), ("mandarin", "zh")],
)
def test_languages_by_code_and_name(name, code):
    assert WhisperVocabulary(MULTILINGUAL).language_code(name) == code


@pytest.mark.parametrize("name", ["xx", "", "klingon", "english!", "x" * 1000])
def test_unknown_languages(name):
    with pytest.raises(LanguageError, match="ISO-639-1") as error:
        WhisperVocabulary(MULTILINGUAL).language_code(name)
    assert len(str(error.value)) < 200


def test_languages_that_a_model_does_not_know():
    with pytest.raises(LanguageError, match="only English"):
        WhisperVocabulary(ENGLISH).language_code("fr")
    with pytest.raises(LanguageError, match="cantonese"):
        WhisperVocabulary(MULTILINGUAL).language_code("yue")
    assert WhisperVocabulary(V3).language_code("yue") == "yue"


def test_other_vocabularies_are_refused():
    with pytest.raises(ValueError, match="vocab_size 32000"):
        WhisperVocabulary(32_000)


def test_decoding_leaves_special_tokens_out():
    vocabulary = WhisperVocabulary(MULTILINGUAL)
    tokens = [50364, *vocabulary.tokenizer.encode(" Hello"), 50400, vocabulary.end]
    assert vocabulary.decode(tokens) == " Hello"
