"""The fields of a transcription request, checked: OpenAI's, and a few of our own."""

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from starlette.datastructures import FormData, UploadFile

from sglang_ext.api.transcription.uploads import ApiError
from speech.formats import FORMATS, TIMED
from speech.prompts import GRANULARITIES, LanguageError, WhisperVocabulary

_DEEPEST = 32
_TRUE, _FALSE = frozenset({"true", "1", "yes", "on"}), frozenset({"false", "0", "no", "off"})


@dataclass(frozen=True)
class TranscriptionRequest:
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

    file: BinaryIO
    task: str
    language: str | None = None
    prompt: str = ""
    response_format: str = "json"
    temperature: float = 0.0
    granularities: tuple[str, ...] = ("segment",)
    stream: bool = False
    logprobs: bool = False
    threshold: float | None = None
    padding_s: float | None = None
    min_silence_s: float | None = None
    custom_params: dict[str, Any] = field(default_factory=dict)
    return_token_ids: bool = False
    temperature_fallback: bool = True
    progress: bool = False

    @property
    def words(self) -> bool:
        """Whether words are to be aligned."""
        return self.response_format == "verbose_json" and "word" in self.granularities


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
    response_format = _choice(form, "response_format", FORMATS, "json")
    stream, progress = _flag(form, "stream", False), _flag(form, "progress", False)
    if stream and response_format in TIMED and not progress:
        raise ApiError(
            f"stream=true needs response_format json or text, not {response_format}",
            param="response_format",
        )
    threshold, padding_s, min_silence_s = _chunking(form)
    return TranscriptionRequest(
        file=file.file,
        task=task,
        language=_language(form, vocabulary),
        prompt=_text(form, "prompt"),
        response_format=response_format,
        temperature=_number(form, "temperature", 0.0, 0.0, 1.0),
        granularities=_granularities(form, response_format),
        stream=stream,
        logprobs=_logprobs(form, response_format),
        threshold=threshold,
        padding_s=padding_s,
        min_silence_s=min_silence_s,
        custom_params=_object(form, "custom_params"),
        return_token_ids=_flag(form, "return_token_ids", False),
        temperature_fallback=_flag(form, "temperature_fallback", True),
        progress=progress,
    )


def _check_model(form: FormData, models: Sequence[str]) -> None:
    model = _text(form, "model")
    if not model:
        raise ApiError("you must provide a model parameter", param="model")
    if model not in models:
        raise ApiError(
            f"The model `{model[:100]}` does not exist; this server has `{models[0]}`",
            404,
            "model",
            "model_not_found",
        )


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


def _chunking(form: FormData) -> tuple[float | None, float | None, float | None]:
    """Threshold, padding and least silence of chunking_strategy (auto, JSON, or with brackets)."""
    text = _text(form, "chunking_strategy")
    settings: dict[str, Any] = {}
    if text and text != "auto":
        settings = _object(form, "chunking_strategy")
    prefix = "chunking_strategy["
    for key, value in form.multi_items():
        if key.startswith(prefix) and isinstance(value, str):
            settings[key.removeprefix(prefix).rstrip("]")] = value
    if not settings:
        return None, None, None
    if settings.get("type") != "server_vad":
        raise ApiError(
            "chunking_strategy must be auto or of type server_vad", param="chunking_strategy"
        )

    def number(name: str, high: float, scale: float) -> float | None:
        if name not in settings:
            return None
        return _checked_number(settings[name], f"chunking_strategy.{name}", 0.0, high) * scale

    return (
        number("threshold", 1.0, 1.0),
        number("prefix_padding_ms", 2000.0, 1e-3),
        number("silence_duration_ms", 10_000.0, 1e-3),
    )


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


def _choice(form: FormData, name: str, choices: Collection[str], default: str) -> str:
    value = _text(form, name) or default
    if value not in choices:
        raise ApiError(
            f"{name} must be one of {', '.join(choices)}, got {value[:40]!r}",
            param=name,
            code="invalid_value",
        )
    return value


def _flag(form: FormData, name: str, default: bool) -> bool:
    text = _text(form, name).lower()
    if text and text not in _TRUE | _FALSE:
        raise ApiError(f"{name} must be true or false, got {text[:40]!r}", param=name)
    return text in _TRUE if text else default


def _number(form: FormData, name: str, default: float, low: float, high: float) -> float:
    text = _text(form, name)
    return _checked_number(text, name, low, high) if text else default


def _checked_number(value: Any, name: str, low: float, high: float) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):  # a JSON integer may be past any float
        number = math.nan
    if not low <= number <= high:  # so that NaN is refused too
        raise ApiError(
            f"{name} must be a number from {low:g} to {high:g}, got {str(value)[:40]!r}",
            param=name.partition(".")[0],
            code="invalid_value",
        )
    return number


def _object(form: FormData, name: str) -> dict[str, Any]:
    text = _text(form, name)
    if not text:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ApiError(f"{name} must be a JSON object, got {text[:40]!r}", param=name)
    if _depth(value) > _DEEPEST:  # what sends it to the scheduler recurses
        raise ApiError(f"{name} may nest {_DEEPEST} levels deep", param=name)
    return value


def _depth(value: Any) -> int:
    """Levels of a JSON value's lists and objects, without recursion."""
    depth, level = 0, [value]
    while level := [v for v in level if isinstance(v, dict | list)]:
        depth += 1
        level = [inner for v in level for inner in (v.values() if isinstance(v, dict) else v)]
    return depth
