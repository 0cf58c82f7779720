"""What /openapi.json says of our routes: bodies that they read themselves, answers and refusals.

FastAPI finds parameters and parsed bodies by itself. Nothing here is run for a request: routes
check what comes with the same models, in their own words.
"""

from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict

Schema = dict[str, Any]

TAG = "sglang-ext"
"""The tag of our routes."""
EVENTS: Schema = {"text/event-stream": {"schema": {"type": "string"}}}
"""The content of server-sent events."""


class Refused(BaseModel):
    """Why a request was refused."""

    model_config = ConfigDict(extra="forbid")

    message: str
    type: str
    param: str | None
    code: str | int | None


class Refusal(BaseModel):
    """OpenAI's error object."""

    model_config = ConfigDict(extra="forbid")

    error: Refused


class SglangRefusal(BaseModel):
    """SGLang's error object: of bodies and parameters that FastAPI checks, and of unknown keys."""

    object: str
    message: str
    type: str
    param: str | None = None
    code: int


class KeyRefusal(BaseModel):
    """SGLang's answer to a request without the key that it needs."""

    error: str


class NoSuchPath(BaseModel):
    """FastAPI's answer to a path that is no route's; a name with a line feed makes one."""

    detail: str


REFUSALS: dict[int | str, Schema] = {
    "4XX": {
        "model": Refusal | SglangRefusal | KeyRefusal | NoSuchPath,
        "description": "The request is at fault; the message names the field.",
    },
    "5XX": {"model": Refusal, "description": "The server cannot do it, now or at all."},
}
"""What any of our routes may answer instead."""


def json_body(model: type[BaseModel], required: bool = True) -> Schema:
    """openapi_extra of a route that reads a JSON object itself."""
    return _body("application/json", model.model_json_schema(), required)


def form_body(model: type[BaseModel]) -> Schema:
    """openapi_extra of a route that reads a multipart form itself."""
    return _body("multipart/form-data", model.model_json_schema(), True)


def change_schema(app: FastAPI, change: Callable[[Schema], None]) -> None:
    """Have a change made to the application's schema when it is first asked for.

    Args:
        change: is given the schema, to work on.
    """
    changes: list[Callable[[Schema], None]] | None = getattr(app.state, "schema_changes", None)
    if changes is None:
        changes = app.state.schema_changes = []
        _run_changes(app, changes)
    changes.append(change)


def describe(schema: Schema, routes: Sequence[APIRoute]) -> None:
    """Put routes into a schema, in place of what it has for their paths and methods."""
    made = get_openapi(title="", version="", routes=routes)
    for path, operations in made["paths"].items():
        schema["paths"].setdefault(path, {}).update(operations)
    described = schema.setdefault("components", {}).setdefault("schemas", {})
    described.update(made.get("components", {}).get("schemas", {}))


def _run_changes(app: FastAPI, changes: Sequence[Callable[[Schema], None]]) -> None:
    original = app.openapi

    def openapi() -> Schema:
        if app.openapi_schema is None:
            schema = original()  # keeps it as app.openapi_schema
            for change in changes:
                change(schema)
        assert app.openapi_schema is not None
        return app.openapi_schema

    # FastAPI's documented way to extend a schema.
    app.openapi = openapi  # type: ignore[method-assign]


def _body(media_type: str, schema: Schema, required: bool) -> Schema:
    assert "$defs" not in schema, "references would lead nowhere in the whole schema"
    return {"requestBody": {"required": required, "content": {media_type: {"schema": schema}}}}
