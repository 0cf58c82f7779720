"""Fields of a settings update, in the shape of OpenAI's API and of the beta before it, checked."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from sglang_ext.api.fields import Text, explain
from sglang_ext.api.http import ApiError
from sglang_ext.request_options import shown
from speech.wire_audio import ALAW, G711_RATE, PCM, PCM_RATES, ULAW

M = TypeVar("M", bound=BaseModel)

EXTENSION = "sglang_ext"
"""The key under which a session has settings that OpenAI's API lacks."""

LOCAL_AGREEMENT, ALIGNATT = "localagreement", "alignatt"
"""Policies that say when words are settled."""

_MOST_PROMPT_CHARS = 4096
ECHOED = ("id", "object", "expires_at", "client_secret")
"""Fields that clients send back as session.created has told them."""


def _whole(given: Any) -> Any:
    """JSON's 300.0 is a whole number too."""
    return int(given) if isinstance(given, float) and given.is_integer() else given


_Milliseconds = Annotated[int, BeforeValidator(_whole)]


class Vad(BaseModel):
    """turn_detection."""

    model_config = ConfigDict(strict=True)

    type: Literal["server_vad"] = Field(description="server_vad, or turn_detection null")
    threshold: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    prefix_padding_ms: _Milliseconds | None = Field(None, ge=0, le=5000)
    silence_duration_ms: _Milliseconds | None = Field(None, ge=100, le=10_000)
    # Of sessions that answer; these do not.
    create_response: bool | None = None
    interrupt_response: bool | None = None
    idle_timeout_ms: None = Field(None, description="null: nothing is answered here")
    eagerness: None = Field(None, description="null: it belongs to semantic_vad")


class AudioFormat(BaseModel):
    """format."""

    model_config = ConfigDict(strict=True)

    type: Literal["audio/pcm", "audio/pcmu", "audio/pcma"] = Field(
        description=f"{PCM}, {ULAW} or {ALAW}"
    )
    rate: _Milliseconds | None = Field(
        None, description=f"one of {', '.join(map(str, PCM_RATES))} for {PCM}, else {G711_RATE}"
    )


class Transcription(BaseModel):
    """transcription."""

    model_config = ConfigDict(strict=True)

    model: Text | None = None
    language: Text | None = None
    prompt: Text | None = Field(
        None, max_length=_MOST_PROMPT_CHARS, description=f"at most {_MOST_PROMPT_CHARS} characters"
    )


class NoiseReduction(BaseModel):
    """noise_reduction."""

    model_config = ConfigDict(strict=True)

    type: Literal["near_field", "far_field"] | None = Field(
        None, description="near_field, far_field or null"
    )


VIEW_NAME = r"[A-Za-z0-9_-]{16,64}"
"""What a session's view may be called: who knows the name may watch."""


class Extension(BaseModel):
    """What OpenAI's API lacks."""

    model_config = ConfigDict(strict=True)

    step_ms: _Milliseconds | None = Field(None, ge=100, le=5000)
    live_policy: Literal["localagreement", "alignatt"] | None = Field(
        None, description=f"{LOCAL_AGREEMENT} or {ALIGNATT}"
    )
    alignatt_frames: Annotated[int, BeforeValidator(_whole)] | None = Field(None, ge=0, le=500)
    view: Text | None = Field(
        None,
        pattern=f"^{VIEW_NAME}$",
        description="16 to 64 letters, digits, - and _, chosen at random, or null",
    )


Given = dict[str, tuple[str, Any]]
"""Fields of an update by their name: where they stood, and their value."""


def ga_fields(session: Mapping[str, Any]) -> Given:
    """Those of `session.update`.

    Raises:
        ApiError: it is no transcription session, or a field is unknown.
    """
    if session.get("type") != "transcription":
        expected = "transcription: this server transcribes, and holds no conversation"
        raise wrong("session.type", expected, session.get("type"))
    known_fields(session, ("type", "audio", "include", EXTENSION, *ECHOED), "session")
    audio = object_of(session, "audio", "session.audio") or {}
    known_fields(audio, ("input",), "session.audio")
    given = object_of(audio, "input", "session.audio.input") or {}
    names = ("format", "transcription", "turn_detection", "noise_reduction")
    known_fields(given, names, "session.audio.input")
    found: Given = {n: (f"session.audio.input.{n}", given[n]) for n in names if n in given}
    return found | extension_of(session)


def beta_fields(session: Mapping[str, Any]) -> Given:
    """Those of `transcription_session.update`.

    Raises:
        ApiError: a field is unknown.
    """
    names = {
        "input_audio_format": "format",
        "input_audio_transcription": "transcription",
        "turn_detection": "turn_detection",
        "input_audio_noise_reduction": "noise_reduction",
    }
    known_fields(session, (*names, "include", "modalities", EXTENSION, *ECHOED), "session")
    found: Given = {
        name: (f"session.{long}", session[long]) for long, name in names.items() if long in session
    }
    return found | extension_of(session)


def extension_of(session: Mapping[str, Any]) -> Given:
    """Our own field, where it is there."""
    return {EXTENSION: (f"session.{EXTENSION}", session[EXTENSION])} if EXTENSION in session else {}


def check_include(session: Mapping[str, Any]) -> None:
    """Refuse what is not sent.

    Raises:
        ApiError: session.include asks for something.
    """
    if session.get("include"):
        raise ApiError(
            "session.include must be null or empty: live transcripts come without logprobs",
            param="session.include",
            code="not_supported",
        )


def checked(model: type[M], value: Any, path: str) -> M:
    """An object's fields.

    Raises:
        ApiError: the field that is wrong, and what was expected.
    """
    if not isinstance(value, dict):
        raise wrong(path, "an object or null", value)
    known_fields(value, list(model.model_fields), path)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        name = error.errors(include_url=False)[0]["loc"][0]
        raise replace_param(explain(error, model, value, within=path), f"{path}.{name}") from None


def object_of(given: Mapping[str, Any], name: str, path: str) -> Mapping[str, Any] | None:
    """A field that is an object; None where it is left out.

    Raises:
        ApiError: it is something else.
    """
    value = given.get(name)
    if value is not None and not isinstance(value, dict):
        raise wrong(path, "an object", value)
    return value


def known_fields(given: Iterable[str], names: Sequence[str], path: str) -> None:
    """Refuse fields that are none of `names`.

    Raises:
        ApiError: the first one.
    """
    for name in given:
        if name not in names:
            raise ApiError(
                f"{path} has no field {shown(name)}; known: {', '.join(names)}",
                param=path,
                code="unknown_parameter",
            )


def wrong(path: str, expected: str, value: Any) -> ApiError:
    """The refusal of a value."""
    return ApiError(f"{path} must be {expected}, got {shown(value)}", 400, path, "invalid_value")


def replace_param(error: ApiError, param: str) -> ApiError:
    """The same error, of another field."""
    return ApiError(str(error), error.status, param, error.code)
