"""What a chat completion's `prediction` may be, and its counts in whole and streamed answers."""

import asyncio
import json

import pytest

from sglang_ext.admission.predictions import Prediction
from sglang_ext.api.http import ApiError
from sglang_ext.api.predicted_outputs import counted_events, prediction_usage, text_of
from sglang_ext.request_options import LONGEST_PREDICTION

USAGE = {"prompt_tokens": 3, "completion_tokens": 8, "reasoning_tokens": 0}
PREDICTED = [1, 2, 3, 4, 5]
OUTPUTS = [[1, 2, 3, 4, 5, 0], [9, 8]]


def test_text_comes_whole_or_in_parts():
    assert text_of({"type": "content", "content": "a b"}) == "a b"
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    assert text_of({"type": "content", "content": parts}) == "a b"


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ("a", "prediction"),
        ({"content": "a"}, "prediction.type"),
        ({"type": "text", "content": "a"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": []}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content"),
        ({"type": "content", "content": [{"type": "text", "text": 1}]}, "prediction.content"),
        ({"type": "content", "content": "a" * (LONGEST_PREDICTION + 1)}, "prediction.content"),
    ],
)
def test_anything_else_is_refused_by_the_fields_name(wrong, param):
    with pytest.raises(ApiError) as raised:
        text_of(wrong)
    assert (raised.value.status, raised.value.param) == (400, param)
    assert param in str(raised.value)


def test_counts_add_up_over_choices_and_keep_what_is_there():
    details = prediction_usage(USAGE, PREDICTED, OUTPUTS)["completion_tokens_details"]
    assert details == {
        "reasoning_tokens": 0, "accepted_prediction_tokens": 5, "rejected_prediction_tokens": 5
    }  # fmt: skip
    thought = USAGE | {"completion_tokens_details": {"reasoning_tokens": 4}}
    assert prediction_usage(thought, PREDICTED, [])["completion_tokens_details"] == {
        "reasoning_tokens": 4, "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0
    }  # fmt: skip


def streamed(*answers, wants_ids=False, head=""):
    prediction = Prediction("a")
    prediction.tokens = tuple(PREDICTED)

    async def events():
        for answer in answers:
            text = answer if isinstance(answer, str) else json.dumps(answer, separators=(",", ":"))
            yield f"{head}data: {text}\n\n"

    async def collected():
        return [e async for e in counted_events(events(), prediction, wants_ids)]

    return asyncio.run(collected())


def data(event: str) -> dict:
    return json.loads(event.partition("data: ")[2])


TEXT = {"choices": [{"delta": {"content": '"choices":[] "usage":{'}}], "usage": USAGE}
IDS = {"choices": [], "sglext": {"output_ids": OUTPUTS}}
LAST = {"choices": [], "usage": USAGE}


def test_the_last_usage_of_a_stream_has_the_counts_and_the_ids_are_taken_out():
    text, usage, done = streamed(TEXT, IDS, LAST, "[DONE]")
    assert data(text) == TEXT and done == "data: [DONE]\n\n"
    assert data(usage)["usage"] == prediction_usage(USAGE, PREDICTED, OUTPUTS)


def test_ids_and_what_stands_beside_them_stay_for_who_asked():
    beside = {"choices": [], "sglext": {"output_ids": OUTPUTS, "input_ids": [1]}}
    assert [data(e) for e in streamed(IDS, wants_ids=True)] == [IDS]
    [kept] = streamed(beside, head="event: sglext_ids\n")
    assert kept.startswith("event: sglext_ids\ndata: ") and data(kept)["sglext"] == {
        "input_ids": [1]
    }


def test_an_aborted_answer_keeps_its_usage():
    assert [data(e) for e in streamed(LAST)] == [LAST]
