"""OpenAI's Predicted Outputs on /v1/chat/completions.

SGLang's models of the request and of `usage` (entrypoints/openai/protocol.py) have no field for
them, and pydantic drops what they do not declare. So the field is taken from the body, travels in
`custom_params`, and is counted in the finished answer, whose token ids SGLang gives (`sglext`).
"""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import orjson
from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from sglang_ext import sglang_points
from sglang_ext.admission.predictions import PREDICTION_KEY, Prediction
from sglang_ext.api.http import ApiError
from sglang_ext.api.openapi import Schema
from sglang_ext.drafters.predicted_text import PredictedText
from sglang_ext.request_options import LONGEST_PREDICTION, shown
from sglang_ext.sglang_points.hooking import hook

# SGLang's header for the same as its field return_output_ids_in_sglext.
_IDS_HEADER = "x-sglext-return-output-ids"
# A streamed event without choices: the ids, or the usage. In a text the quotes are escaped.
_NO_CHOICES = '"choices":[]'


class PredictedPart(BaseModel):
    """A part of a predicted text."""

    # What OpenAI's clients send beside is ignored.
    model_config = ConfigDict(extra="allow")

    type: Literal["text"]
    text: Annotated[str, Field(max_length=LONGEST_PREDICTION)]


class PredictedContent(BaseModel):
    """OpenAI's `prediction`: text that the answer will probably be, a draft and no more."""

    model_config = ConfigDict(extra="allow")

    type: Literal["content"]
    content: (
        Annotated[str, Field(max_length=LONGEST_PREDICTION)]
        | Annotated[list[str | PredictedPart], Field(min_length=1)]
    )


def describe_field(schema: Schema) -> None:
    """Put the field into what /openapi.json says of chat completions."""
    schemas = schema.get("components", {}).get("schemas", {})
    if "ChatCompletionRequest" not in schemas:
        return
    made = PredictedContent.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(made.pop("$defs"))
    schemas["PredictedContent"] = made
    reference = {"$ref": "#/components/schemas/PredictedContent"}
    properties = schemas["ChatCompletionRequest"]["properties"]
    properties[PREDICTION_KEY] = {"anyOf": [reference, {"type": "null"}]}


def register(is_ours: Callable[[], bool]) -> None:
    """Hook this into SGLang.

    Args:
        is_ours: whether this server speculates with our algorithm; others are left as they are.
    """

    async def answer(original: Any, serving: Any, request: Any, raw_request: Any = None) -> Any:
        given = await _given(request, raw_request) if is_ours() else None
        if given is None:
            return await original(serving, request, raw_request)
        try:
            prediction = _checked(given, request)
        except ApiError as refused:
            return refused.response()
        request.custom_params = {**(request.custom_params or {}), PREDICTION_KEY: prediction}
        wants_ids = _wants_ids(request, raw_request)
        request.return_output_ids_in_sglext = True
        made = await original(serving, request, raw_request)
        if prediction.refused is not None:
            return ApiError(prediction.refused, param=PREDICTION_KEY, code="too_long").response()
        return await _counted(made, prediction, wants_ids)

    hook(sglang_points.ANSWER, answer)


def text_of(prediction: Any) -> str:
    """The text that a `prediction` holds.

    Raises:
        ApiError: it is none of OpenAI's, or too long.
    """
    if not isinstance(prediction, Mapping):
        raise _refused(f"an object with type and content, got {shown(prediction)}")
    if prediction.get("type") != "content":
        raise _refused(f'"content", got {shown(prediction.get("type"))}', "type")
    content = prediction.get("content")
    parts = content if isinstance(content, list) and content else [content]
    texts = [
        part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else part
        for part in parts
    ]
    words = [text for text in texts if isinstance(text, str)]
    if len(words) < len(texts):
        raise _refused(
            f'text, or a list of {{"type": "text", "text": ...}}, got {shown(content)}', "content"
        )
    text = "".join(words)
    if len(text) > LONGEST_PREDICTION:
        raise _refused(f"at most {LONGEST_PREDICTION} characters, got {len(text)}", "content")
    return text


def prediction_usage(
    usage: Mapping[str, Any], tokens: Sequence[int], outputs: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """A `usage` with OpenAI's counts of predicted tokens.

    Those that stand in an answer, in their place, are accepted, the others are rejected: together
    as many as the prediction has, for each answer.

    Args:
        usage: SGLang's.
        tokens: of the prediction.
        outputs: token ids of each answer.
    """
    accepted = sum(_written(tokens, output) for output in outputs)
    details = usage.get("completion_tokens_details") or {
        "reasoning_tokens": usage.get("reasoning_tokens") or 0
    }
    counts = {
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": len(tokens) * len(outputs) - accepted,
    }
    return {**usage, "completion_tokens_details": {**details, **counts}}


def _written(tokens: Sequence[int], output: Sequence[int]) -> int:
    followed = PredictedText(tokens)
    followed.follow(output)
    return followed.accepted


async def _given(request: Any, raw_request: Any) -> Any:
    """The `prediction` of a chat completion's body; None: it has none."""
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

    if not isinstance(request, ChatCompletionRequest) or not isinstance(raw_request, Request):
        return None
    body = await raw_request.json()  # parsed already, for the request
    return body.get(PREDICTION_KEY) if isinstance(body, Mapping) else None


def _checked(given: Any, request: Any) -> Prediction:
    text = text_of(given)
    if request.tools and request.tool_choice != "none":
        raise ApiError(
            "prediction cannot be used with tools: leave one of them out, or send tool_choice none",
            param=PREDICTION_KEY,
            code="unsupported_parameter",
        )
    if (request.custom_params or {}).get(PREDICTION_KEY) is not None:
        raise ApiError(
            "prediction is given twice, as itself and in custom_params: leave one of them out",
            param=PREDICTION_KEY,
            code="invalid_value",
        )
    return Prediction(text)


def _refused(expected: str, field: str = "") -> ApiError:
    path = f"{PREDICTION_KEY}.{field}" if field else PREDICTION_KEY
    return ApiError(f"{path} must be {expected}", param=path, code="invalid_value")


def _wants_ids(request: Any, raw_request: Request) -> bool:
    """Whether the client, or the server for all, asks for the output's token ids."""
    from sglang.srt.runtime_context import get_serving

    by_header = raw_request.headers.get(_IDS_HEADER) == "1"
    by_server = get_serving().return_output_ids
    return bool(request.return_output_ids_in_sglext or by_header or by_server)


async def _counted(made: Any, prediction: Prediction, wants_ids: bool) -> Any:
    """SGLang's answer, its usage with the counts; what is no answer is left as it is."""
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionResponse

    if isinstance(made, StreamingResponse):
        made.body_iterator = counted_events(made.body_iterator, prediction, wants_ids)
        return made
    if not isinstance(made, ChatCompletionResponse):
        return made
    answer = made.model_dump(mode="json", by_alias=True)
    outputs = _take_ids(answer, wants_ids)
    answer["usage"] = await _usage(answer["usage"], prediction, outputs)
    return Response(orjson.dumps(answer), media_type="application/json")


async def counted_events(
    events: AsyncIterable[Any], prediction: Prediction, wants_ids: bool
) -> AsyncIterator[Any]:
    """SGLang's events of a streamed answer, the last one's usage with the counts.

    Args:
        wants_ids: whether the client gets the event with the output's token ids.
    """
    outputs: list[list[int]] = []
    async for event in events:
        if not isinstance(event, str) or _NO_CHOICES not in event:
            yield event
            continue
        head, _, data = event.partition("data: ")
        answer = orjson.loads(data)
        brings_ids = answer.get("sglext") is not None
        outputs = _take_ids(answer, wants_ids) or outputs
        if answer.get("usage") is not None:
            answer["usage"] = await _usage(answer["usage"], prediction, outputs)
        elif brings_ids and not answer.get("sglext"):
            continue  # there was nothing else in it
        yield f"{head}data: {orjson.dumps(answer).decode()}\n\n"


def _take_ids(answer: dict[str, Any], keep: bool) -> list[list[int]]:
    """The token ids of an answer's choices; without `keep` it has them no more."""
    extension = answer.get("sglext") or {}
    outputs: list[list[int]] = extension.get("output_ids") or []
    # With n > 1 SGLang leaves an empty list of another field beside them.
    if not keep and extension.pop("output_ids", None) is not None and not any(extension.values()):
        del answer["sglext"]
    return outputs


async def _usage(
    usage: Mapping[str, Any], prediction: Prediction, outputs: Sequence[Sequence[int]]
) -> Mapping[str, Any]:
    if not outputs or prediction.tokens is None:
        return usage  # of an answer that was aborted
    # In a thread: an answer of thousands of tokens takes a moment, others' must not wait.
    return await asyncio.to_thread(prediction_usage, usage, prediction.tokens, outputs)
