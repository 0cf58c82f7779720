"""The fields of a transcription request, checked: OpenAI's, and a few of our own."""

import json
import math
from collections.abc import Sequence
from typing import Annotated, Any, BinaryIO

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SkipValidation,
    ValidationError,
)
from starlette.datastructures import FormData, UploadFile

from sglang_ext.api.fields import Unexpected, explain
from sglang_ext.api.http import ApiError, model_not_found
from sglang_ext.request_options import shown
from speech.formats import FORMATS, TIMED
from speech.prompts import GRANULARITIES, LanguageError, WhisperVocabulary

_DEEPEST = 32
_TRUE, _FALSE = frozenset({"true", "1", "yes", "on"}), frozenset({"false", "0", "no", "off"})


def _flag(given: str | bool) -> bool:
    if isinstance(given, bool):
        return given
    if given.lower() not in _TRUE | _FALSE:
        raise Unexpected("true or false", code=None)
    return given.lower() in _TRUE


def _number(given: Any) -> float:
    try:
        return float(given)
    except (TypeError, ValueError, OverflowError):  # a JSON integer may be past any float
        return math.nan


def _format(given: str) -> str:
    if given not in FORMATS:
        raise Unexpected(f"one of {', '.join(FORMATS)}")
    return given


def _object(given: str | dict[str, Any]) -> dict[str, Any]:
    """A JSON object, as text; what sends it to the scheduler recurses."""
    value: Any = given
    if isinstance(given, str):
        try:
            value = json.loads(given)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, dict):
        raise Unexpected("a JSON object", code=None)
    if _depth(value) > _DEEPEST:
        raise Unexpected(f"nested at most {_DEEPEST} levels deep", code=None)
    return value


def _depth(value: Any) -> int:
    """Levels of a JSON value's lists and objects, without recursion."""
    depth, level = 0, [value]
    while level := [v for v in level if isinstance(v, dict | list)]:
        depth += 1
        level = [inner for v in level for inner in (v.values() if isinstance(v, dict) else v)]
    return depth


_Flag = Annotated[bool, BeforeValidator(_flag)]
_Number = Annotated[float, BeforeValidator(_number)]


class FormFields(BaseModel):
    """Fields that are right or wrong by themselves; a form holds each as text."""

    model_config = ConfigDict(strict=True, frozen=True, arbitrary_types_allowed=True)

    prompt: str = ""
    response_format: Annotated[str, AfterValidator(_format)] = Field(
        "json", json_schema_extra={"enum": list(FORMATS)}
    )
    temperature: _Number = Field(0.0, ge=0, le=1, allow_inf_nan=False)
    stream: _Flag = False
    custom_params: Annotated[dict[str, Any], BeforeValidator(_object)] = Field(default_factory=dict)
    return_token_ids: _Flag = False
    temperature_fallback: _Flag = True
    progress: _Flag = False


class TranscriptionRequest(FormFields):
    """What a client asked for.

    Attributes:
        file: the audio, as uploaded.
        task: "transcribe" or "translate".
        language: ISO code; None: to be detected.
        threshold, padding_s, min_silence_s: of chunking_strategy; None: the server's.
        custom_params: SGLang's, for the drafter (not OpenAI's).
        return_token_ids: add the output ids of each pass over a chunk (not OpenAI's).
        temperature_fallback: decode again at higher temperatures what looks invented, as OpenAI
            describes temperature 0 (switching it off is not OpenAI's).
        progress: stream how far it is, and the result in any format (not OpenAI's).
    """

    file: SkipValidation[BinaryIO]
    task: str
    language: str | None = None
    granularities: tuple[str, ...] = ("segment",)
    logprobs: bool = False
    threshold: float | None = None
    padding_s: float | None = None
    min_silence_s: float | None = None

    @property
    def words(self) -> bool:
        """Whether words are to be aligned."""
        return self.response_format == "verbose_json" and "word" in self.granularities


class _ServerVad(BaseModel):
    """Numbers of a chunking_strategy of type server_vad."""

    model_config = ConfigDict(strict=True, frozen=True)

    threshold: _Number = Field(0.0, ge=0, le=1, allow_inf_nan=False)
    prefix_padding_ms: _Number = Field(0.0, ge=0, le=2000, allow_inf_nan=False)
    silence_duration_ms: _Number = Field(0.0, ge=0, le=10_000, allow_inf_nan=False)


# OpenAI's name -> ours, and its unit in ours.
_CHUNKING = {
    "threshold": ("threshold", 1.0),
    "prefix_padding_ms": ("padding_s", 1e-3),
    "silence_duration_ms": ("min_silence_s", 1e-3),
}


def parse(
    form: FormData, task: str, vocabulary: WhisperVocabulary, models: Sequence[str]
) -> TranscriptionRequest:
    """Check a form.

    Args:
        task: "transcribe" or "translate".
        models: names of the served model, the public one first.

    Raises:
        ApiError: a field is missing or wrong; it names the field.
    """
    _check_model(form, models)
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise ApiError("the field 'file' with the audio is missing", param="file")
    if not file.size:
        raise ApiError("the file is empty", param="file", code="invalid_value")
    if task == "translate" and not vocabulary.multilingual:
        raise ApiError("this model knows only English and cannot translate", param="model")
    fields = _fields(form)
    return TranscriptionRequest(
        file=file.file,
        task=task,
        language=_language(form, vocabulary),
        granularities=_granularities(form, fields.response_format),
        logprobs=_logprobs(form, fields.response_format),
        **_chunking(form),
        **dict(fields),
    )


def _fields(form: FormData) -> FormFields:
    texts = {name: text for name in FormFields.model_fields if (text := _text(form, name))}
    try:
        fields = FormFields.model_validate(texts)
    except ValidationError as error:
        raise explain(error, FormFields, texts) from None
    if fields.stream and fields.response_format in TIMED and not fields.progress:
        raise ApiError(
            f"stream=true needs response_format json or text, not {fields.response_format}",
            param="response_format",
        )
    return fields


def _check_model(form: FormData, models: Sequence[str]) -> None:
    model = _text(form, "model")
    if not model:
        raise ApiError("you must provide a model parameter", param="model")
    if model not in models:
        raise model_not_found(f"`{model[:100]}`", f"`{models[0]}`")


def _language(form: FormData, vocabulary: WhisperVocabulary) -> str | None:
    language = _text(form, "language")
    if not language:
        return None if vocabulary.multilingual else "en"
    try:
        return vocabulary.language_code(language)
    except LanguageError as error:
        raise ApiError(str(error), param="language", code="invalid_language_format") from None


def _granularities(form: FormData, response_format: str) -> tuple[str, ...]:
    given = _list(form, "timestamp_granularities")
    if wrong := [g for g in given if g not in GRANULARITIES]:
        raise ApiError(
            f"timestamp_granularities must be of {' and '.join(GRANULARITIES)}, got "
            f"{wrong[0][:40]!r}",
            param="timestamp_granularities",
            code="invalid_value",
        )
    if "word" in given and response_format != "verbose_json":
        raise ApiError(
            "timestamp_granularities word needs response_format verbose_json",
            param="timestamp_granularities",
        )
    return tuple(dict.fromkeys(given)) or ("segment",)


def _logprobs(form: FormData, response_format: str) -> bool:
    include = _list(form, "include")
    if wrong := [i for i in include if i != "logprobs"]:
        raise ApiError(f"include may hold logprobs, got {wrong[0][:40]!r}", param="include")
    if include and response_format != "json":
        raise ApiError("include logprobs needs response_format json", param="include")
    return bool(include)


def _chunking(form: FormData) -> dict[str, Any]:
    """Fields of the request from chunking_strategy (auto, JSON, or with brackets)."""
    text = _text(form, "chunking_strategy")
    settings = _settings(text) if text not in ("", "auto") else {}
    prefix = "chunking_strategy["
    for key, value in form.multi_items():
        if key.startswith(prefix) and isinstance(value, str):
            settings[key.removeprefix(prefix).rstrip("]")] = value
    if not settings:
        return {}
    if settings.get("type") != "server_vad":
        raise ApiError(
            "chunking_strategy must be auto or of type server_vad", param="chunking_strategy"
        )
    try:
        vad = _ServerVad.model_validate(settings)
    except ValidationError as error:
        raise explain(error, _ServerVad, settings, within="chunking_strategy") from None
    given = vad.model_dump(exclude_unset=True)
    return {field: given[name] * unit for name, (field, unit) in _CHUNKING.items() if name in given}


def _settings(text: str) -> dict[str, Any]:
    try:
        return _object(text)
    except Unexpected as error:
        raise ApiError(
            f"chunking_strategy must be {error}, got {shown(text)}", param="chunking_strategy"
        ) from None


def _text(form: FormData, name: str) -> str:
    value = form.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ApiError(f"{name} must be text, not a file", param=name)
    return value


def _list(form: FormData, name: str) -> list[str]:
    """Values of `name[]`, as OpenAI's client sends lists, and of `name`."""
    values = [*form.getlist(f"{name}[]"), *form.getlist(name)]
    texts = [value for value in values if isinstance(value, str)]
    if len(texts) < len(values):
        raise ApiError(f"{name} must be text, not a file", param=name)
    return [text for text in texts if text]
