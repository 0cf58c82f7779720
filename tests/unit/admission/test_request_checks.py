"""Whole requests: sizes, shapes, types and ids, with SGLang's own request objects."""

from array import array

import pytest
import torch
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.io_struct import GenerateReqInput, TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_ext.admission.errors import AdmissionError, refusing
from sglang_ext.admission.requests import Limits, RequestCheck

CHECK = RequestCheck(Limits(choices=8, prompts=16, logprobs=4), vocab_size=100, hidden_size=2)


def admit(**fields):
    """As hooks.py does around SGLang's normalization."""
    request = GenerateReqInput(**fields)
    with refusing("its fields do not fit together"):
        CHECK.before(request)
        request.normalize_batch_and_arguments()
        CHECK.after(request)


def send(**fields):
    values = {
        "input_text": "a", "input_ids": array("q", [1]), "input_embeds": None, "mm_inputs": None,
        "token_type_ids": None, "sampling_params": SamplingParams(), "return_logprob": False,
        "logprob_start_len": -1, "top_logprobs_num": 0, "token_ids_logprob": None, "stream": False,
        "rid": "r",
    }  # fmt: skip
    CHECK.tokenized(TokenizedGenerateReqInput(**values | fields), prompt_is_tokens=True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sampling_params": {"n": 1 << 31}}, "n must be a whole number of 1 to 8"),
        ({"sampling_params": {"n": None}}, "n must be"),
        ({"sampling_params": {"n": True}}, "n must be"),
        ({"sampling_params": {"beam_width": 1 << 40}}, "beam_width must be"),
        ({"text": ["a"] * 9, "sampling_params": {"n": 2}}, "asks for 18 answers"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "1 entries, prompts: 2"),
        ({"sampling_params": []}, "sampling_params must be"),
        ({"sampling_params": ["x"], "text": ["a"]}, "must be an object"),
        ({"lora_id": ["a"]}, "lora_id cannot be set"),
        ({"http_worker_ipc": "tcp://example.org:1"}, "http_worker_ipc cannot be set"),
        ({"encoder_urls": ["http://x"]}, "encoder_urls cannot be set"),
        ({"return_logprob": True, "top_logprobs_num": 5}, "top_logprobs must be 0 to 4"),
        ({"return_logprob": True, "top_logprobs_num": -1}, "top_logprobs must be"),
        ({"top_logprobs_num": [1]}, "top_logprobs_num must be a whole number"),
        ({"token_ids_logprob": [1, 2, 3, 4, 5]}, "at most 4 token ids"),
        ({"token_ids_logprob": [100]}, "token id 100"),
        ({"text": None, "input_ids": [1, 100]}, "input_ids has the token id 100"),
        ({"text": None, "input_ids": [[1], [-3]]}, "token id -3"),
        ({"rid": "a\nb"}, "printable"),
        ({"rid": ["a", 5], "text": ["a", "b"]}, "rid must be a string"),
        ({"text": "\ud800"}, "surrogate"),
        ({"extra_key": "x" * 5000}, "extra_key must be at most"),
        ({"text": ["a", "b"], "lora_path": ["x"]}, "one value for each prompt|do not fit"),
        ({"text": None, "input_embeds": [[1.0, float("nan")]]}, "finite"),
        ({"text": None, "input_embeds": [[1.0]]}, "must hold 2 finite"),
    ],
)
def test_a_request_that_no_scheduler_should_see_is_refused(fields, message):
    with pytest.raises(AdmissionError, match=message):
        admit(**{"text": "a", **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"sampling_params": {"n": 8}},
        {"text": ["a", "b"], "sampling_params": {"n": 2}, "rid": ["x", "y"]},
        {"text": None, "input_ids": [0, 99], "return_logprob": True, "top_logprobs_num": 4},
        {"token_ids_logprob": [0, 99], "return_logprob": True, "logprob_start_len": 0},
        {"text": None, "input_embeds": [[1.0, 2.0]]},
    ],
)
def test_what_clients_ask_for_is_admitted(fields):
    admit(**{"text": "a", **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logprob_start_len": -5}, "logprob_start_len must be -1 or more"),
        ({"lora_id": ["a"]}, "lora_id: Expected"),
        ({"input_ids": array("q", [100])}, "token id 100"),
        ({"input_ids": array("q", [])}, "the prompt holds no token"),
        ({"rid": "x" * 513}, "longer than 512 bytes"),
        ({"rid": "é" * 300}, "longer than 512 bytes"),
        ({"token_indices_to_pool": [1]}, "token_indices_to_pool"),
        ({"routed_experts_start_len": "x"}, "routed_experts_start_len: Expected"),
        ({"positional_embed_overrides": []}, "positional_embed_overrides cannot be set"),
        ({"positional_embed_overrides": {"embeds": []}}, "positional_embed_overrides cannot be"),
    ],
)
def test_fields_of_the_wrong_type_are_refused_as_they_are_sent(fields, message):
    with pytest.raises(AdmissionError, match=message):
        send(**fields)


def test_a_request_as_sglang_makes_it_is_sent():
    send()
    send(sampling_params=SamplingParams(stop_token_ids=[5], custom_params={"ssbd": {"a": [1]}}))
    send(positional_embed_overrides=PositionalEmbeds(embeds=torch.zeros(1, 4), positions=[0]))
