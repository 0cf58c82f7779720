"""Salts that name a tenant: names, contradictions, and requests as a scheduler gets them."""

from array import array
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_ext.admission.cache_salts import name_by_salts, salt_namespace
from sglang_ext.request_options import RequestOptionError, check_namespace

KEY = "secret"
TEXTS = st.text(max_size=8) | st.none()


def named(extra_key=None, cache_salt=None, params=None):
    """The custom_params of a tokenized request, after."""
    request = TokenizedGenerateReqInput(
        input_text="a", input_ids=array("q", [1]), input_embeds=None, mm_inputs=None,
        token_type_ids=None, sampling_params=SamplingParams(custom_params=params),
        return_logprob=False, logprob_start_len=-1, top_logprobs_num=0, token_ids_logprob=None,
        stream=False, rid="r", extra_key=extra_key, cache_salt=cache_salt,
    )  # fmt: skip
    name_by_salts(request, KEY)
    return request.sampling_params.custom_params


@given(TEXTS, TEXTS, TEXTS, TEXTS)
def test_two_requests_share_a_name_only_with_equal_salts(extra, salt, other_extra, other_salt):
    fields, others = (extra or None, salt or None), (other_extra or None, other_salt or None)
    same = salt_namespace(extra, salt, KEY) == salt_namespace(other_extra, other_salt, KEY)
    assert same == (fields == others)


def test_a_name_can_name_a_namespace_and_hides_its_salt():
    name = salt_namespace("key", "pepper", KEY)
    assert check_namespace(name, "namespace") == name and "pepper" not in name
    assert name != salt_namespace("key", "pepper", "another secret")


def test_names_stay_over_versions():
    """A datastore on disk has them."""
    assert salt_namespace(None, "pepper", "") == "salt:0da416324ec2ae03a512141829637142"


def test_salts_name_the_namespace_and_leave_other_options():
    params = {"ingest": False}
    got = named(cache_salt="pepper", params=params)
    assert got == {"ingest": False, "namespace": salt_namespace(None, "pepper", KEY)}
    assert params == {"ingest": False}  # prompts of a batch may share it
    assert named(params=params) == params and named() is None
    assert named(extra_key="a")["namespace"] != named(cache_salt="a")["namespace"]


def test_the_salts_own_name_is_no_contradiction():
    name = salt_namespace(None, "pepper", KEY)
    assert named(cache_salt="pepper", params={"namespace": name})["namespace"] == name


@pytest.mark.parametrize(
    ("salts", "fields"),
    [
        ({"cache_salt": "a"}, "contradicts cache_salt, which"),
        ({"extra_key": "a", "cache_salt": "b"}, "contradicts extra_key and cache_salt, which"),
    ],
)
def test_another_namespace_is_a_contradiction(salts, fields):
    with pytest.raises(RequestOptionError, match=fields):
        named(**salts, params={"namespace": "acme"})


def test_embeddings_have_no_namespace():
    request = SimpleNamespace(sampling_params=None, extra_key="a")
    name_by_salts(request, KEY)
    assert request.sampling_params is None
