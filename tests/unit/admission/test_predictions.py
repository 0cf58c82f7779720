"""Predictions on their way to a scheduler: as tokens, in a limit, tokenized behind the prompt."""

from array import array
from types import SimpleNamespace

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput
from transformers import AutoTokenizer

from sglang_ext.admission.errors import AdmissionError
from sglang_ext.admission.predictions import (
    Prediction,
    bring_tokens,
    tokenize_early,
    tokens_behind,
)
from sglang_ext.drafters.predicted_text import MOST_TOKENS, TOKENS_KEY, tokens_of
from sglang_ext.models import resolve
from sglang_ext.request_options import LONGEST_PREDICTION, RequestOptionError, RequestOptions


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(str(resolve("smollm2-135m-instruct")))


def tokenized(params, ids=(1, 2)):
    sampling = SimpleNamespace(custom_params=params)
    return SimpleNamespace(sampling_params=sampling, input_ids=array("q", ids))


def brought(params, tokenizer):
    request = tokenized(params)
    bring_tokens(request, tokenizer)
    return request.sampling_params.custom_params


def test_a_scheduler_gets_tokens_in_place_of_the_text(tokenizer):
    given = {"prediction": "Hello there", "ingest": False}
    params = brought(given, tokenizer)
    assert set(params) == {"ingest", TOKENS_KEY} and given["prediction"] == "Hello there"
    assert tokenizer.decode(tokens_of(params, len(tokenizer))) == "Hello there"
    RequestOptions.parse(params, [])


def test_a_client_cannot_send_tokens_by_the_schedulers_key(tokenizer):
    assert brought({TOKENS_KEY: "AAAA"}, tokenizer) == {}
    assert brought({TOKENS_KEY: "AAAA", "prediction": ""}, tokenizer) == {}
    assert brought(None, tokenizer) is None and brought({"ingest": True}, None) == {"ingest": True}


def test_too_many_tokens_and_no_tokenizer_are_refused(tokenizer):
    long = Prediction("a b " * MOST_TOKENS)
    with pytest.raises(AdmissionError, match=f"at most {MOST_TOKENS}"):
        brought({"prediction": long}, tokenizer)
    assert f"{MOST_TOKENS}" in long.refused
    with pytest.raises(AdmissionError, match="no tokenizer"):
        brought({"prediction": "a"}, None)


@pytest.mark.parametrize("wrong", [3, ["a"], {"type": "content"}, "a" * (LONGEST_PREDICTION + 1)])
def test_what_is_no_text_or_too_long_is_refused(wrong):
    with pytest.raises(RequestOptionError, match=r"custom_params\.prediction must be text"):
        RequestOptions.parse({"prediction": wrong}, [])


def test_a_chats_prediction_is_tokenized_before_the_event_loop_has_it(tokenizer):
    prediction = Prediction("Hello")
    sampling = {"custom_params": {"prediction": prediction}}
    tokenize_early(GenerateReqInput(input_ids=[1, 2], sampling_params=sampling), tokenizer)
    assert tokenizer.decode(prediction.tokens) == "Hello"
    params = brought({"prediction": prediction}, None.__class__)  # it is not asked again
    assert tokens_of(params, len(tokenizer)) == list(prediction.tokens)
    for other in (GenerateReqInput(text=["a", "b"]), SimpleNamespace(sampling_params=None)):
        tokenize_early(other, tokenizer)


class Sentencepiece:
    """Puts a space in front of a text, as Llama 2's tokenizer; a token is a character."""

    def __len__(self):
        return 0x110000

    def encode(self, text, add_special_tokens):
        return [ord(c) for c in " " + text]

    def decode(self, ids, **_options):
        text = "".join(map(chr, ids))
        return text.removeprefix(" ")


def test_no_space_is_put_in_front_of_what_stands_behind_the_prompt(tokenizer):
    made = Sentencepiece()
    assert "".join(map(chr, tokens_behind(made, "Yes", (ord("\n"),)))) == "Yes"
    assert "".join(map(chr, tokens_behind(made, "Yes", ()))) == "Yes"
    prompt = tuple(tokenizer.encode("<|im_start|>assistant\n"))
    for text in ("Hello", " Hello", "\n\nHello"):
        assert tokenizer.decode(tokens_behind(tokenizer, text, prompt)) == text
    # The prompt's last token and the text's first make one: the text stands alone.
    joined = tokens_behind(tokenizer, "lo there", tuple(tokenizer.encode("Hel")))
    assert tokenizer.decode(joined) == "lo there"
