"""The JSON bodies of translation sessions, read within a limit and checked."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Request
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from sglang_ext.admission.requests import LONGEST_TEXT_FIELD
from sglang_ext.api.fields import Text, Unexpected, explain
from sglang_ext.api.http import ApiError, model_not_found, read_body
from sglang_ext.api.languages import NAMES
from sglang_ext.request_options import shown

_BODY_S = 30.0
_LONGEST_TEMPLATE = 8000
_LONGEST_LANGUAGE = 64
MOST_MASKED = 4096
"""Tokens at a translation's end that may be held back."""
_MOST_METADATA, _LONGEST_KEY, _LONGEST_VALUE = 16, 64, 512  # OpenAI's
# A character outside the BMP is 12 bytes of JSON escapes; the rest is for the other fields.
_BYTES_PER_CHAR, _OTHER_BYTES = 12, 256 << 10


LANGUAGE = "a language's English name or ISO 639-1 code"
"""What a language must be."""
_METADATA = (
    f"an object of at most {_MOST_METADATA} strings of up to {_LONGEST_VALUE} characters, "
    f"their names of up to {_LONGEST_KEY}"
)


def _language(given: str) -> str:
    """A language's English name, which may be given as its code."""
    name = given.strip()
    if len(name) == 2 and name.isascii():
        if name.lower() in NAMES:
            return NAMES[name.lower()]
    elif 2 < len(name) <= _LONGEST_LANGUAGE and name.isprintable():
        return name
    raise Unexpected(LANGUAGE)


def _template(template: str) -> str:
    if len(template) > _LONGEST_TEMPLATE or template.count("{source}") != 1:
        raise Unexpected(f"text of at most {_LONGEST_TEMPLATE} characters with {{source}} once")
    return template


Language = Annotated[Text, AfterValidator(_language)]
"""A language by its English name; its ISO 639-1 code is taken, too."""

_Key = Annotated[Text, StringConstraints(max_length=_LONGEST_KEY)]
_Value = Annotated[Text, StringConstraints(max_length=_LONGEST_VALUE)]
_Salt = Annotated[Text, StringConstraints(max_length=LONGEST_TEXT_FIELD)]


class _Body(BaseModel):
    """A JSON object that a client sends; null is the same as not given."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        known = cls.model_fields
        return {n: value for n, value in given.items() if value is not None or n not in known}


class SessionSettings(_Body):
    """What a session is opened with.

    Attributes:
        source_language, target_language: English names; codes become them.
        template: the user message, with {source} and maybe {source_language} and
            {target_language}; None: the default one.
        beta: bias towards the last translation, 0 to 1; None: the server's.
        mask: so many tokens at the end of the output are shown as unstable (display-only mask-k).
        trim_draft: so many tokens at the draft's end are not drafted (mask-k that trims the draft).
        append_only: what was stable stays: it is what two successive translations begin with
            alike, and the next ones are made to begin with it.
        realign, retrieve: as in custom_params.ssbd.
        temperature: 0 to 2; 0: greedy.
        max_tokens: of a translation; None: as many as its source may need.
        seed: of sampling.
        model: the name it was asked for by.
        cache_salt, extra_key: as in SGLang's requests; they name the session's namespace.
        metadata: the client's own.
    """

    source_language: Language = Field(description=LANGUAGE)
    target_language: Language = Field(description=LANGUAGE)
    template: Annotated[Text, AfterValidator(_template)] | None = None
    beta: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    mask: int = Field(0, ge=0, le=MOST_MASKED)
    trim_draft: int = Field(0, ge=0, le=MOST_MASKED)
    append_only: bool = False
    realign: bool = True
    retrieve: bool = True
    temperature: float = Field(0.0, ge=0, le=2, allow_inf_nan=False)
    max_tokens: int | None = Field(None, ge=1, le=1 << 20)
    seed: int | None = Field(None, ge=-(1 << 63), le=(1 << 63) - 1)
    model: Text | None = None
    cache_salt: _Salt | None = None
    extra_key: _Salt | None = None
    metadata: dict[_Key, _Value] | None = Field(
        None, max_length=_MOST_METADATA, description=_METADATA
    )


SECRETS = {"cache_salt", "extra_key"}
"""Fields of the settings that are not shown again."""


class UpdateBody(_Body):
    """A change of a session's source: append, behind its first `keep` characters, or source.

    With final nothing is held back, and the translation joins the datastore. With stream the
    answer is server-sent events.
    """

    append: Text | None = None
    source: Text | None = None
    keep: int | None = Field(None, ge=0)
    final: bool = False
    stream: bool = False


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
    body = await read_body(request, max_bytes, _BODY_S)
    if body.late:
        status = 413 if body.too_long else 408
        raise ApiError(f"the body did not come within {_BODY_S:g} seconds", status)
    if body.too_long:
        raise too_large(max_bytes)
    return parse_json(body.data) if body.data else {}


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
    try:
        settings = SessionSettings.model_validate(body)
    except ValidationError as error:
        raise explain(error, SessionSettings, body) from None
    if settings.model is not None and settings.model not in models:
        raise model_not_found(shown(settings.model), repr(models[0]))
    return settings


def parse_update(body: Mapping[str, Any]) -> Update:
    """Check the body of an update; null is the same as not given.

    Raises:
        ApiError: a field is missing, wrong or unknown; it names the field.
    """
    try:
        given = UpdateBody.model_validate(body)
    except ValidationError as error:
        raise explain(error, UpdateBody, body) from None
    if (given.append is None) == (given.source is None):
        raise ApiError(
            "an update needs one of append (more text) and source (the whole text)",
            param="source" if given.source is not None else "append",
        )
    if given.source is None:
        return Update(given.keep, given.append or "", "append", given.final, given.stream)
    if given.keep is not None:
        raise ApiError("keep goes with append, not with source", param="keep")
    return Update(0, given.source, "source", given.final, given.stream)
