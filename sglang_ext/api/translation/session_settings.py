"""The JSON bodies of translation sessions, read within a limit and checked."""

import asyncio
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from fastapi import Request

from sglang_ext.api.languages import NAMES
from sglang_ext.api.transcription.uploads import ApiError
from sglang_ext.request_options import shown

_BODY_S = 30.0
_LONGEST_TEMPLATE = 8000
_LONGEST_LANGUAGE = 64
_MOST_MASKED = 4096
_MOST_METADATA, _LONGEST_KEY, _LONGEST_VALUE = 16, 64, 512  # OpenAI's
# A character outside the BMP is 12 bytes of JSON escapes; the rest is for the other fields.
_BYTES_PER_CHAR, _OTHER_BYTES = 12, 256 << 10


@dataclass(frozen=True)
class SessionSettings:
    """What a session is opened with.

    Attributes:
        source_language, target_language: English names.
        template: the user message, with {source} and maybe {source_language} and
            {target_language}; None: the default one.
        beta: bias towards the last translation, 0 to 1; None: the server's.
        mask: so many tokens at the end of the output are shown as unstable (display-only mask-k).
        trim_draft: so many tokens at the draft's end are not drafted (mask-k that trims the draft).
        realign, retrieve: as in custom_params.ssbd.
        temperature: 0 to 2; 0: greedy.
        max_tokens: of a translation; None: as many as its source may need.
        seed: of sampling.
        model: the name it was asked for by.
        metadata: the client's own.
    """

    source_language: str
    target_language: str
    template: str | None = None
    beta: float | None = None
    mask: int = 0
    trim_draft: int = 0
    realign: bool = True
    retrieve: bool = True
    temperature: float = 0.0
    max_tokens: int | None = None
    seed: int | None = None
    model: str | None = None
    metadata: dict[str, str] | None = None


@dataclass(frozen=True)
class Update:
    """A change of a session's source.

    Attributes:
        keep: so many characters of the source stay; None: all.
        text: what follows them.
        field: the field that `text` came in.
        final: all of the output is stable, and joins the datastore.
        stream: the client wants the text while it is written.
    """

    keep: int | None
    text: str
    field: str
    final: bool = False
    stream: bool = False

    def applied(self, source: str, max_chars: int) -> str:
        """The source after the change.

        Raises:
            ApiError: `keep` is more than there is, or the result is longer than `max_chars` (413).
        """
        if self.keep is not None and self.keep > len(source):
            raise ApiError(
                f"keep must be at most {len(source)}, the characters of the source so far, "
                f"got {self.keep}",
                param="keep",
            )
        changed = source[: self.keep] + self.text
        if len(changed) > max_chars:
            raise ApiError(
                f"the source would have {len(changed)} characters; this server takes "
                f"{max_chars} (--translation-max-source-chars)",
                413,
                self.field,
                "source_too_long",
            )
        return changed


def body_limit(max_source_chars: int) -> int:
    """How many bytes the JSON of a source of so many characters may take, and its options."""
    return max_source_chars * _BYTES_PER_CHAR + _OTHER_BYTES


async def read_json(request: Request, max_bytes: int) -> dict[str, Any]:
    """The request's body, a JSON object; an empty body is an empty object.

    Raises:
        ApiError: it is larger than `max_bytes` (413), slow to come (408), or no JSON object.
    """
    received, kept = 0, bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            # To its end also where it is too large: who is still sending reads no answer.
            async for chunk in request.stream():
                received += len(chunk)
                if received <= max_bytes:
                    kept += chunk
                else:
                    kept.clear()
    except TimeoutError:
        status = 413 if received > max_bytes else 408
        raise ApiError(f"the body did not come within {_BODY_S:g} seconds", status) from None
    if received > max_bytes:
        raise too_large(max_bytes)
    return parse_json(bytes(kept)) if kept else {}


def too_large(max_bytes: int) -> ApiError:
    """The refusal of a body of more than `max_bytes`."""
    return ApiError(
        f"the body is larger than the {max_bytes} bytes that this server takes "
        "(--translation-max-source-chars)",
        413,
        code="body_too_large",
    )


def parse_json(text: str | bytes) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ApiError: it is none.
    """
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ApiError(f"the body must be a JSON object, got {shown(body)}")
    return body


def parse_settings(body: Mapping[str, Any], models: Sequence[str]) -> SessionSettings:
    """Check the body that opens a session; null is the same as not given.

    Args:
        models: names of the served model, the public one first.

    Raises:
        ApiError: a field is missing, wrong or unknown; it names the field.
    """
    _check_known(body, [f.name for f in fields(SessionSettings)])
    model = _text(body, "model")
    if model is not None and model not in models:
        raise ApiError(
            f"The model {shown(model)} does not exist; this server has {models[0]!r}",
            404,
            "model",
            "model_not_found",
        )
    return SessionSettings(
        source_language=_language(body, "source_language"),
        target_language=_language(body, "target_language"),
        template=_template(body),
        beta=_number(body, "beta", 0, 1),
        mask=_whole(body, "mask", 0, _MOST_MASKED) or 0,
        trim_draft=_whole(body, "trim_draft", 0, _MOST_MASKED) or 0,
        realign=_flag(body, "realign", True),
        retrieve=_flag(body, "retrieve", True),
        temperature=_number(body, "temperature", 0, 2) or 0.0,
        max_tokens=_whole(body, "max_tokens", 1, 1 << 20),
        seed=_whole(body, "seed", -(1 << 63), (1 << 63) - 1),
        model=model,
        metadata=_metadata(body),
    )


def parse_update(body: Mapping[str, Any]) -> Update:
    """Check the body of an update; null is the same as not given.

    Raises:
        ApiError: a field is missing, wrong or unknown; it names the field.
    """
    _check_known(body, ("append", "source", "keep", "final", "stream"))
    append, source = _text(body, "append"), _text(body, "source")
    keep = _whole(body, "keep", 0, None)
    if (append is None) == (source is None):
        raise ApiError(
            "an update needs one of append (more text) and source (the whole text)",
            param="source" if source is not None else "append",
        )
    if source is not None and keep is not None:
        raise ApiError("keep goes with append, not with source", param="keep")
    final, stream = _flag(body, "final", False), _flag(body, "stream", False)
    if source is not None:
        return Update(0, source, "source", final, stream)
    return Update(keep, append or "", "append", final, stream)


def _check_known(body: Mapping[str, Any], names: Collection[str]) -> None:
    for name in body:
        if name not in names:
            raise ApiError(
                f"unknown field {shown(name)}; known: {', '.join(names)}",
                param=name if name.isascii() and name.isidentifier() else None,
                code="unknown_parameter",
            )


def _language(body: Mapping[str, Any], name: str) -> str:
    value = (_text(body, name) or "").strip()
    if len(value) == 2 and value.isascii():
        if value.lower() in NAMES:
            return NAMES[value.lower()]
    elif 2 < len(value) <= _LONGEST_LANGUAGE and value.isprintable():
        return value
    raise _wrong(name, "a language's English name or ISO 639-1 code", body.get(name))


def _template(body: Mapping[str, Any]) -> str | None:
    template = _text(body, "template")
    if template is None:
        return None
    if len(template) > _LONGEST_TEMPLATE or template.count("{source}") != 1:
        expected = f"text of at most {_LONGEST_TEMPLATE} characters with {{source}} once"
        raise _wrong("template", expected, template)
    return template


def _metadata(body: Mapping[str, Any]) -> dict[str, str] | None:
    metadata = body.get("metadata")
    if metadata is None:
        return None
    good = (
        isinstance(metadata, dict)
        and len(metadata) <= _MOST_METADATA
        and all(isinstance(value, str) for value in metadata.values())
        and all(len(k) <= _LONGEST_KEY and len(v) <= _LONGEST_VALUE for k, v in metadata.items())
        and all(_encodable(k) and _encodable(v) for k, v in metadata.items())
    )
    if not good:
        raise _wrong(
            "metadata",
            f"an object of at most {_MOST_METADATA} strings of up to {_LONGEST_VALUE} characters, "
            f"their names of up to {_LONGEST_KEY}",
            metadata,
        )
    return metadata


def _text(body: Mapping[str, Any], name: str) -> str | None:
    value = body.get(name)
    if value is not None and not (isinstance(value, str) and _encodable(value)):
        raise _wrong(name, "text (valid Unicode)", value)
    return value


def _encodable(text: str) -> bool:
    """JSON may escape half a surrogate pair, which is no character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _flag(body: Mapping[str, Any], name: str, default: bool) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise _wrong(name, "true or false", value)
    return default if value is None else value


def _number(body: Mapping[str, Any], name: str, low: float, high: float) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not low <= value <= high:  # so that NaN is refused too
        raise _wrong(name, f"a number from {low:g} to {high:g}", value)
    return float(value)


def _whole(body: Mapping[str, Any], name: str, low: int, high: int | None) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int or value < low or (high is not None and value > high):
        expected = f"a whole number of at least {low}"
        raise _wrong(name, expected + (f" and at most {high}" if high is not None else ""), value)
    return value


def _wrong(name: str, expected: str, value: Any) -> ApiError:
    return ApiError(f"{name} must be {expected}, got {shown(value)}", 400, name, "invalid_value")
