"""What the routes of translation sessions answer, for /openapi.json."""

from typing import Annotated, Any, Literal

from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, create_model

from sglang_ext.api.openapi import EVENTS, REFUSALS, TAG, Refusal, json_body
from sglang_ext.api.translation.session_settings import SECRETS, SessionSettings, UpdateBody


class _SessionState(BaseModel):
    """A session as it is, with the settings that it was opened with."""

    model_config = ConfigDict(extra="forbid")

    id: str
    object: Literal["translation.session"]
    created: Annotated[int, Field(description="Unix time in seconds")]
    expires_at: Annotated[int, Field(description="Unix time in seconds, unless it is used before")]
    status: Literal["open", "finished"]
    revision: int
    source: str
    stable: str
    unstable: str
    final: bool


_SETTINGS: dict[str, Any] = {
    name: (field.rebuild_annotation(), ...)
    for name, field in SessionSettings.model_fields.items()
    if name not in SECRETS
}
SessionAnswer = create_model(
    "SessionAnswer", __base__=_SessionState, __doc__=_SessionState.__doc__, **_SETTINGS
)


class DeletedSession(BaseModel):
    """A session that is gone."""

    model_config = ConfigDict(extra="forbid")

    id: str
    object: Literal["translation.session"]
    deleted: Literal[True]


class TranslationUsage(BaseModel):
    """Tokens of one translation; 0 where nothing was generated."""

    model_config = ConfigDict(extra="forbid")

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    accepted_draft_tokens: int


class UpdateAnswer(BaseModel):
    """The translation after an update: stable and unstable together are its text."""

    model_config = ConfigDict(extra="forbid")

    object: Literal["translation.update"]
    session: str
    revision: int
    stable: str
    unstable: str
    text: str
    final: bool
    finish_reason: str | None
    usage: TranslationUsage


_OF_ROUTES: dict[str, dict[str, Any]] = {
    "open": {"response_model": SessionAnswer, "openapi_extra": json_body(SessionSettings)},
    "show": {"response_model": SessionAnswer},
    "delete": {"response_model": DeletedSession},
    "update": {
        "response_model": UpdateAnswer,
        "responses": {200: {"content": EVENTS}, **REFUSALS},
        "openapi_extra": json_body(UpdateBody),
    },
    "finish": {"response_model": UpdateAnswer},
    "events": {
        "response_class": StreamingResponse,
        "responses": {
            200: {"content": EVENTS, "description": "UpdateAnswer as events, until its end"},
            204: {"description": "It has ended, and the client has seen its last update."},
            **REFUSALS,
        },
    },
    "no_socket": {"response_model": Refusal, "status_code": 426},
}


def description(endpoint: str) -> dict[str, Any]:
    """What FastAPI is told of a route: arguments of add_api_route, none of which it acts upon.

    Args:
        endpoint: the name of its function in session_routes.
    """
    common: dict[str, Any] = {"response_model": None, "responses": REFUSALS, "tags": [TAG]}
    return common | _OF_ROUTES[endpoint]
