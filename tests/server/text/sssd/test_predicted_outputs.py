"""OpenAI's `prediction` with its own client: the answer is plain SGLang's, and what was right of
the prediction is counted.
"""

import openai
import pytest

from scripts.lib.http_client import HTTP
from tests.server.conftest import MODEL

MESSAGES = [{"role": "user", "content": "Explain in detail how photosynthesis works."}]
TOKENS = 64


def client_of(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base_url + "/v1", api_key="none", max_retries=0)


def chat(server, prediction=None, **options):
    """A greedy answer; `prediction` is its text."""
    if prediction is not None:
        options["prediction"] = {"type": "content", "content": prediction}
    asked = {"model": MODEL, "messages": MESSAGES, "max_tokens": TOKENS, "temperature": 0}
    return client_of(server).chat.completions.create(**(asked | options))


@pytest.fixture(scope="module")
def expected(plain_server) -> str:
    return chat(plain_server).choices[0].message.content


def predictions(expected: str) -> dict[str, str]:
    words = expected.split(" ")
    return {
        "right": expected,
        "edited": " ".join([*words[:6], "surely", *words[6:12], *words[14:]]),
        "cut": expected[: len(expected) // 2],
        "unrelated": "def f(x):\n    return [y * y for y in x if y > 0]\n" * 3,
        "empty": "",
    }


@pytest.mark.parametrize("kind", predictions(""))
def test_the_answer_is_plain_and_the_counts_add_up(kind, sssd_server, expected):
    prediction = predictions(expected)[kind]
    answer = chat(sssd_server, prediction, n=2)
    assert [choice.message.content for choice in answer.choices] == [expected] * 2
    assert not (answer.model_extra or {}).get("sglext")
    details = answer.usage.completion_tokens_details
    accepted, rejected = details.accepted_prediction_tokens, details.rejected_prediction_tokens
    length = (accepted + rejected) / 2
    if kind in ("right", "cut"):
        assert rejected == 0 and accepted > 40
    elif kind == "edited":
        assert 0 < rejected < accepted
    elif kind == "unrelated":
        assert accepted <= 4 and length > 40
    else:
        assert length == 0
    assert accepted <= answer.usage.completion_tokens == 2 * TOKENS


def test_a_stream_counts_as_a_whole_answer_does(sssd_server, expected):
    parts = [{"type": "text", "text": expected[:40]}, {"type": "text", "text": expected[40:]}]
    whole = chat(sssd_server, parts).usage.completion_tokens_details
    events = list(chat(sssd_server, parts, stream=True, stream_options={"include_usage": True}))
    text = "".join(e.choices[0].delta.content or "" for e in events if e.choices)
    assert text == expected
    last = events[-1].usage.completion_tokens_details
    assert last == whole and last.accepted_prediction_tokens > 40
    assert not any((e.model_extra or {}).get("sglext") for e in events)


def test_who_asks_for_token_ids_still_gets_them(sssd_server, expected):
    extra = {"return_output_ids_in_sglext": True}
    [ids] = chat(sssd_server, expected, extra_body=extra).model_extra["sglext"]["output_ids"]
    stream = chat(sssd_server, expected, extra_body=extra, stream=True)
    [streamed] = [e.model_extra["sglext"] for e in stream if (e.model_extra or {}).get("sglext")]
    assert streamed["output_ids"] == [ids] and len(ids) == TOKENS


def test_the_prediction_is_what_drafts(sssd_server, plain_server, expected):
    def generate(server, **params):
        sampling = {"temperature": 0, "max_new_tokens": TOKENS, "custom_params": params}
        body = {"text": "The planets, one a line:\n", "sampling_params": sampling}
        return HTTP.post(server.base_url + "/generate", json=body, timeout=300).json()

    alone = {"datastore": False, "ingest": False}
    plain = generate(plain_server)
    got = generate(sssd_server, prediction=plain["text"], **alone)
    without = generate(sssd_server, **alone)
    assert got["output_ids"] == without["output_ids"] == plain["output_ids"]
    lengths = [answer["meta_info"]["spec_accept_length"] for answer in (got, without)]
    assert lengths[0] > 8 > lengths[1], lengths
    body = {"model": MODEL, "prompt": "The planets, one a line:\n", "temperature": 0}
    custom = {"custom_params": {"prediction": plain["text"], **alone}}
    completion = client_of(sssd_server).completions.create(
        **body, max_tokens=TOKENS, extra_body=custom
    )
    assert completion.choices[0].text == plain["text"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prediction": "text"}, "prediction"),
        ({"prediction": {"type": "audio", "content": "a"}}, "prediction.type"),
        ({"prediction": {"type": "content", "content": 3}}, "prediction.content"),
        ({"prediction": {"type": "content", "content": []}}, "prediction.content"),
        ({"prediction": {"type": "content", "content": "a b " * 70_000}}, "prediction.content"),
        ({"prediction": {"type": "content", "content": "a b " * 20_000}}, "prediction"),
        (
            {
                "prediction": {"type": "content", "content": "a"},
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
            },
            "prediction",
        ),
        (
            {
                "prediction": {"type": "content", "content": "a"},
                "custom_params": {"prediction": "a"},
            },
            "prediction",
        ),
    ],
)
def test_a_wrong_prediction_is_a_400_that_names_it(body, param, sssd_server):
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4, **body}
    answer = HTTP.post(sssd_server.base_url + "/v1/chat/completions", json=body, timeout=60)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param, answer.text
    assert error["type"] == "invalid_request_error" and "prediction" in error["message"]


def test_a_wrong_prediction_in_custom_params_is_a_400(sssd_server):
    sampling = {"max_new_tokens": 4, "custom_params": {"prediction": ["a"]}}
    body = {"text": "a", "sampling_params": sampling}
    answer = HTTP.post(sssd_server.base_url + "/generate", json=body, timeout=60)
    assert answer.status_code == 400 and "custom_params.prediction" in answer.text
