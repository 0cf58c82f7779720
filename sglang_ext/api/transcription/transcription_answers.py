"""The form and the answers of OpenAI's audio API, for /openapi.json."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from sglang_ext.api.openapi import EVENTS, REFUSALS, TAG, form_body
from sglang_ext.api.transcription.transcription_request import FormFields
from speech.prompts import GRANULARITIES


class TranscriptionForm(FormFields):
    """OpenAI's fields, and a few of our own (docs/transcription.md)."""

    file: Annotated[str, Field(json_schema_extra={"format": "binary"})]
    model: Annotated[str, Field(description="the served model's name")]
    language: Annotated[str | None, Field(description="ISO 639-1; left out: detected")] = None
    timestamp_granularities: Annotated[
        list[Annotated[str, Field(json_schema_extra={"enum": list(GRANULARITIES)})]],
        Field(alias="timestamp_granularities[]", description="word needs verbose_json"),
    ] = Field(default_factory=list)
    include: Annotated[
        list[Literal["logprobs"]], Field(alias="include[]", description="needs json")
    ] = Field(default_factory=list)
    chunking_strategy: Annotated[
        str, Field(description="auto, or the JSON of an object of type server_vad")
    ] = "auto"


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class AudioSeconds(_Answer):
    """OpenAI's usage: seconds of audio, rounded up."""

    type: Literal["duration"]
    seconds: int


class AudioLogprob(_Answer):
    """A token of the text."""

    token: str
    bytes: list[int]
    logprob: float


class TextAnswer(_Answer):
    """Format json. logprobs and token_ids: where they were asked for."""

    text: str
    usage: AudioSeconds
    logprobs: list[AudioLogprob] | None = None
    token_ids: list[list[int]] | None = None


class TimedWord(_Answer):
    """A word, with its times in seconds."""

    word: str
    start: float
    end: float


class TimedSegment(_Answer):
    """A segment, with its times in seconds."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class VerboseAnswer(_Answer):
    """Format verbose_json. segments, words and token_ids: where they were asked for."""

    task: str
    language: str
    duration: float
    text: str
    segments: list[TimedSegment] | None = None
    words: list[TimedWord] | None = None
    usage: AudioSeconds
    token_ids: list[list[int]] | None = None


_TEXT = {"schema": {"type": "string"}}

DESCRIPTION: dict[str, Any] = {
    "response_model": TextAnswer | VerboseAnswer,
    "responses": {
        200: {"content": {"text/plain": _TEXT, "text/vtt": _TEXT, **EVENTS}},
        **REFUSALS,
    },
    "openapi_extra": form_body(TranscriptionForm),
    "tags": [TAG],
}
"""What FastAPI is told of both routes."""
