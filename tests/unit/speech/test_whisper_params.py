"""What sampling_params say of a Whisper request, as sglang.Engine brings them: its language."""

from types import SimpleNamespace

import pytest

from sglang_ext.whisper.audio_processor import take_prompt
from speech.prompts import WhisperVocabulary

VOCABULARY = WhisperVocabulary(51_865)
SIZE = 51_865


def request(**params: object) -> SimpleNamespace:
    return SimpleNamespace(input_ids=None, sampling_params={"temperature": 0, **params})


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"language": "xx"}, "unknown language 'xx'.*'en'.*'english'"),
        ({"language": 7}, "language must be text, got '7'"),
        ({"language": []}, "language must be text"),
        ({"timestamp_granularities": ["line"]}, r"list of segment and word, got .*line"),
        ({"timestamp_granularities": "word"}, "list of segment and word, got 'word'"),
        ({"timestamp_granularities": {"word": 1}}, "list of segment and word"),
        ({"timestamp_granularities": [["word"]]}, "list of segment and word"),
        ({"timestamp_granularities": 0}, "list of segment and word, got '0'"),
    ],
)
@pytest.mark.parametrize("input_ids", [None, [50_258]], ids=["", "with a prompt"])
def test_what_whisper_does_not_know_is_refused(params, message, input_ids):
    made = request(**params)
    made.input_ids = input_ids
    with pytest.raises(ValueError, match=message):
        take_prompt(made, VOCABULARY, SIZE)


@pytest.mark.parametrize(
    ("params", "language", "timestamps"),
    [
        ({}, "en", False),
        ({"language": None, "timestamp_granularities": None}, "en", False),
        ({"language": "French", "timestamp_granularities": []}, "fr", False),
        ({"language": "de", "timestamp_granularities": ["segment", "word"]}, "de", True),
    ],
)
def test_what_it_knows_makes_the_prompt(params, language, timestamps):
    made = request(**params)
    expected = VOCABULARY.prompt(language, timestamps=timestamps)
    assert take_prompt(made, VOCABULARY, SIZE) == expected
    assert made.sampling_params == {"temperature": 0}


def test_prompts_of_a_batch_have_the_language_that_was_given_once():
    shared = {"language": "fr", "timestamp_granularities": ["segment"]}
    batch = [SimpleNamespace(input_ids=None, sampling_params=shared) for _ in range(3)]
    expected = VOCABULARY.prompt("fr", timestamps=True)
    assert [take_prompt(one, VOCABULARY, SIZE) for one in batch] == [expected] * 3
    assert all(one.sampling_params == {} for one in batch)
