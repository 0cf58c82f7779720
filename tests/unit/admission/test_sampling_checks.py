"""Sampling parameters that would end or stall a scheduler are refused, the others are not."""

import pytest

from sglang_ext.admission.errors import AdmissionError
from sglang_ext.admission.patterns import check_stop_regex
from sglang_ext.admission.sampling_params import check_depth, check_sampling

VOCABULARY = 100


def nested(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"stop_token_ids": [100]}, "stop_token_ids has the token id 100"),
        ({"stop_token_ids": [-1]}, "token id -1"),
        ({"stop_token_ids": "5"}, "must be a list"),
        ({"stop_token_ids": [True]}, "whole numbers"),
        ({"stop_token_ids": list(range(50)) * 30}, "more than 1024"),
        ({"logit_bias": {"100": 1.0}}, "logit_bias has the token id 100"),
        ({"logit_bias": {"1_0": 1.0}}, "a key must be a token id"),
        ({"logit_bias": {"1": float("inf")}}, "a bias must be"),
        ({"logit_bias": {"1": float("nan")}}, "a bias must be"),
        ({"logit_bias": {"1": 10**400}}, "logit_bias"),
        ({"top_k": 1 << 31}, "top_k must be"),
        ({"min_new_tokens": 1 << 31, "max_new_tokens": None}, "min_new_tokens must be"),
        ({"max_new_tokens": 1 << 40}, "max_new_tokens must be"),
        ({"max_new_tokens": "5"}, "max_new_tokens: Expected"),
        ({"temperature": 10**400}, "temperature"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"temperature": -1}, "temperature must be at least 0"),
        ({"repetition_penalty": 5e-324}, "repetition_penalty must be"),
        ({"stream_interval": 0}, "stream_interval must be"),
        ({"stop": [1]}, "stop: Expected"),
        ({"stop": "\ud800"}, "surrogate"),
        ({"stop_regex": "(a+)+b"}, "backtrack"),
        ({"json_schema": "[" * 65}, "nested deeper"),
        ({"regex": "a" * 70_000}, "longer than"),
        ({"is_normalized": True}, "no field"),
        ({"stop_strs": ["a"]}, "no field"),
        ({"custom_params": "x"}, "custom_params must be an object"),
        ({"custom_params": [1]}, "custom_params must be an object"),
        ({"custom_params": {"a": nested(900)}}, "nested deeper than 32"),
        ("x", "must be an object"),
    ],
)
def test_what_would_hurt_a_scheduler_is_refused(params, message):
    with pytest.raises(AdmissionError, match=message):
        check_sampling(params, VOCABULARY)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"language": "en", "timestamp_granularities": ["word"]},  # of Whisper's processor
        {"temperature": 0, "max_new_tokens": 5, "top_k": -1, "stop": ["a", "\n"]},
        {"stop_token_ids": [0, 99, None], "min_new_tokens": 3, "ignore_eos": 1},
        {"logit_bias": {"0": -1e9, "99": 100}, "repetition_penalty": 1.3, "top_p": None},
        {"custom_params": {"ssbd": {"draft": [1, 2]}}, "regex": r"\d+", "seed": None}
        | {"sampling_seed": -(1 << 63)},
    ],
)
def test_what_clients_send_is_not(params):
    params.pop("seed", None)
    check_sampling(params, VOCABULARY)


@pytest.mark.parametrize("pattern", [r"\d+\.", ".*x", "a{0,40}b{0,40}", "(foo|bar){1,8}", "^a?$"])
def test_a_stop_regex_with_few_ways_is_taken(pattern):
    check_stop_regex(pattern)


@pytest.mark.parametrize("pattern", [".*.*", "(a*)*", "(a|a)*b", r"(a)\1", "(a{1,99}){1,99}", "["])
def test_a_stop_regex_with_many_ways_is_refused(pattern):
    with pytest.raises(AdmissionError):
        check_stop_regex(pattern)


def test_depth_is_that_of_the_deepest_part():
    check_depth("x", {"a": [1, {"b": []}]}, 4)
    with pytest.raises(AdmissionError, match="x is nested deeper than 3"):
        check_depth("x", {"a": [1, {"b": []}]}, 3)
