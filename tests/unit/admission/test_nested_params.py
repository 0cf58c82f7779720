"""Our keys of `custom_params`, apart from others' in an object of their own."""

import pytest
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_ext import plugin
from sglang_ext.request_options import RequestOptionError, flattened


@pytest.fixture
def verified(monkeypatch):
    """What SGLang's check of sampling parameters leaves of custom_params, with ours behind it."""
    hooks = []
    monkeypatch.setattr(plugin, "hook", lambda _point, function: hooks.append(function))
    monkeypatch.setattr(plugin, "_is_ours", lambda: True)
    plugin._check_request_options()

    def verify(params):
        sampling = SamplingParams(custom_params=params)
        hooks[0](None, sampling, 100)
        return sampling.custom_params

    return verify


def test_nested_keys_stand_beside_the_others(verified):
    given = {"mine": 1, "sglang_ext": {"drafter": "none", "corpora": ["a"]}}
    assert verified(given) == {"mine": 1, "drafter": "none", "corpora": ["a"]}
    assert "sglang_ext" in given  # prompts of a batch share it
    assert verified({"sglang_ext": None}) == {} and verified(None) is None
    assert verified({"ingest": False, "sglang_ext": {"ingest": False}}) == {"ingest": False}


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"sglang_ext": "sssd"}, "custom_params.sglang_ext must be an object"),
        ({"sglang_ext": {"namespace": "a"}, "namespace": "b"}, "sglang_ext.namespace contradicts"),
        ({"sglang_ext": {"drafter": "nothing"}}, "custom_params.drafter must be one of"),
    ],
)
def test_wrong_ones_are_refused_as_those_outside_are(verified, params, words):
    with pytest.raises(RequestOptionError, match=words):
        verified(params)


def test_what_has_none_is_the_same_object():
    params = {"ingest": True}
    assert flattened(params) is params
