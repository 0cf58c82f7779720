"""What a client of a realtime session sends, as far as all events have it."""

import base64
import json
from collections.abc import Mapping
from typing import Any

from sglang_ext.api.http import ApiError
from sglang_ext.request_options import shown

_LONGEST_EVENT_ID = 512


def parsed(text: str) -> dict[str, Any]:
    """A client event.

    Raises:
        ApiError: it is no JSON object.
    """
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        raise ApiError("the message is no JSON", code="invalid_payload") from None
    if not isinstance(given, dict):
        raise ApiError("an event must be a JSON object", code="invalid_payload")
    return given


def event_id(given: Mapping[str, Any]) -> str | None:
    """What the client calls its event; None where that is nothing to send back."""
    name = given.get("event_id")
    if not isinstance(name, str) or len(name) > _LONGEST_EVENT_ID or not name.isprintable():
        return None
    return name


def audio_bytes(given: Mapping[str, Any]) -> bytes:
    """The bytes of an append.

    Raises:
        ApiError: there are none.
    """
    audio = given.get("audio")
    if not isinstance(audio, str):
        raise ApiError(
            f"audio must be text (base64), got {shown(audio)}", param="audio", code="invalid_value"
        )
    try:
        return base64.b64decode(audio, validate=True)
    except ValueError:
        raise ApiError("audio is no base64", param="audio", code="invalid_audio") from None
