"""What a chat completion's `prediction` may be, and its counts in whole and streamed answers."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from sglang.srt.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionStreamResponse,
    SglExt,
    UsageInfo,
)

from sglang_ext import sglang_points
from sglang_ext.admission.predictions import Prediction
from sglang_ext.api import predicted_outputs
from sglang_ext.api.http import ApiError
from sglang_ext.api.predicted_outputs import counted_events, prediction_usage, text_of
from sglang_ext.request_options import LONGEST_PREDICTION

USAGE = {"prompt_tokens": 3, "completion_tokens": 8, "reasoning_tokens": 0}
PREDICTED = [1, 2, 3, 4, 5]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
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


class Served:
    """SGLang's `handle_request` as it is hooked, answering with fixed token ids."""

    def __init__(self, monkeypatch):
        hooks = {}
        monkeypatch.setattr(predicted_outputs, "hook", hooks.__setitem__)
        predicted_outputs.register(lambda: self.ours)
        self._hook = hooks[sglang_points.ANSWER]
        self.ours, self.seen, self.streams = True, None, False

    async def _answer(self, serving, request, raw_request):
        self.seen = request
        prediction = (request.custom_params or {}).get("prediction")
        if isinstance(prediction, Prediction):
            prediction.tokens = tuple(PREDICTED)
            if prediction == "long":
                prediction.refused = "prediction has 9 tokens too many"
                return Response(status_code=400)
        extension = (
            SglExt(output_ids=OUTPUTS, spec_tokens_details=[])
            if request.return_output_ids_in_sglext
            else None
        )
        usage = UsageInfo(prompt_tokens=3, completion_tokens=8, total_tokens=11)
        if request.stream:
            chunk = ChatCompletionStreamResponse(
                id="a", model="m", choices=[], usage=usage, sglext=extension
            )
            return StreamingResponse(self._stream(chunk.model_dump_json()))
        return ChatCompletionResponse(id="a", model="m", choices=[], usage=usage, sglext=extension)

    async def _stream(self, text):
        yield f"data: {text}\n\n"

    def ask(self, **body):
        body = {"model": "m", "messages": [{"role": "user", "content": "a"}], **body}
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/", "headers": headers}

        async def receive():
            return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

        async def run():
            raw = Request(scope, receive)
            made = await self._hook(self._answer, None, ChatCompletionRequest(**body), raw)
            if isinstance(made, StreamingResponse):
                [event] = [event async for event in made.body_iterator]
                return data(event)
            return made

        return asyncio.run(run())


@pytest.fixture
def served(monkeypatch):
    monkeypatch.setattr(
        "sglang.srt.runtime_context.get_serving", lambda: SimpleNamespace(return_output_ids=False)
    )
    return Served(monkeypatch)


ASKED = {"type": "content", "content": "a b"}
COUNTS = {"reasoning_tokens": 0, "accepted_prediction_tokens": 5, "rejected_prediction_tokens": 5}


@pytest.mark.parametrize("stream", [False, True])
def test_sglangs_own_answer_gets_the_counts_and_loses_the_ids(served, stream):
    made = served.ask(prediction=ASKED, stream=stream, custom_params={"ingest": False})
    answer = made if stream else json.loads(made.body)
    assert answer["usage"]["completion_tokens_details"] == COUNTS and "sglext" not in answer
    assert served.seen.custom_params == {"ingest": False, "prediction": "a b"}


def test_a_request_without_a_prediction_or_of_another_algorithm_passes_as_it_is(served):
    assert isinstance(served.ask(), ChatCompletionResponse)
    assert isinstance(served.ask(prediction=None), ChatCompletionResponse)
    served.ours = False
    assert isinstance(served.ask(prediction=ASKED), ChatCompletionResponse)
    assert served.seen.custom_params is None and not served.seen.return_output_ids_in_sglext


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prediction": "a"}, "an object"),
        ({"prediction": ASKED, "custom_params": {"prediction": "a"}}, "twice"),
        ({"prediction": ASKED, "tools": [TOOL]}, "with tools"),
        ({"prediction": ASKED | {"content": "long"}}, "too many"),
    ],
)
def test_refusals_have_openais_shape(served, body, words):
    made = served.ask(**body)
    error = json.loads(made.body)["error"]
    assert made.status_code == 400 and error["param"] == "prediction" and words in error["message"]


def test_tools_that_are_not_to_be_called_stand_in_no_prediction(served):
    made = served.ask(prediction=ASKED, tools=[TOOL], tool_choice="none")
    assert json.loads(made.body)["usage"]["completion_tokens_details"] == COUNTS
