"""JSON bodies, read within a limit and looked at before a route does."""

import traceback
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request

from sglang_ext.admission.errors import AdmissionError
from sglang_ext.admission.sampling_params import check_depth
from sglang_ext.api.http import ApiError, read_body

# SGLang's own JSON goes through pickle and pydantic, which give up at some hundred levels.
DEEPEST = 100
_ARRIVES_S = 120.0
# Routes of SGLang that compute their answer of the body alone: what fails there is in the body.
_OF_THE_BODY = frozenset({"/parse_function_call", "/separate_reasoning"})
_METHODS = frozenset({"POST", "PUT", "PATCH", "DELETE"})


class JsonBodies:
    """ASGI middleware that refuses bodies that no route can use, and answers for routes that fail
    on one.

    A body is refused if it is longer than `max_bytes` (413), has not come in 120 s (408), or,
    where it is JSON, if it is no object, is nested deeper than 100, or holds NaN, an infinity or
    half a surrogate pair (400). Forms go by: their routes read them within limits of their own.

    Args:
        app: the next ASGI application.
        max_bytes: of a body.
    """

    def __init__(self, app: Any, max_bytes: int):
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] not in _METHODS:
            return await self._app(scope, receive, send)
        kind = _header(scope, b"content-type", "application/json")
        if kind.startswith("multipart/"):
            return await self._app(scope, receive, send)
        try:
            body = await self._read(Request(scope, receive))
        except ClientDisconnect:
            return
        except ApiError as error:
            return await error.response()(scope, receive, send)
        try:
            # SGLang's RequestDecompressionMiddleware comes later.
            if not _header(scope, b"x-body-compressed", ""):
                _check(body, is_json="json" in kind)
        except AdmissionError as error:
            return await _refused(str(error), 400).response()(scope, receive, send)
        try:
            await self._app(scope, _again(body, receive), send)
        except Exception as error:
            if scope["path"] not in _OF_THE_BODY and not _is_of_parsing(error):
                raise
            message = f"the body cannot be read: {type(error).__name__}: {str(error)[:200]}"
            await _refused(message, 400).response()(scope, receive, send)

    async def _read(self, request: Request) -> bytes:
        """The body.

        Raises:
            ApiError: it is too long or late.
            ClientDisconnect: the client has gone.
        """
        body = await read_body(request, self._max_bytes, _ARRIVES_S)
        if body.late:
            raise _refused(f"the body did not arrive within {_ARRIVES_S:.0f} s", 408)
        if body.too_long:
            raise _refused(
                f"the body is longer than the {self._max_bytes >> 20} MiB that this server takes "
                "(--max-body-mb)",
                413,
            )
        return body.data


def _refused(message: str, status: int) -> ApiError:
    return ApiError(message, status, code=status)


def _check(body: bytes, is_json: bool) -> None:
    """Refuse JSON that is no object or that cannot travel.

    Raises:
        AdmissionError: it is refused.
    """
    if not body.strip():
        return
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        if is_json:
            raise AdmissionError(f"the body is not JSON: {error}") from None
        return  # its route may want another format, and refuses what it cannot read
    if not isinstance(value, Mapping):
        raise AdmissionError(f"the body must be a JSON object, not {_named(value)}")
    check_depth("the body", value, DEEPEST)


def _named(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _is_of_parsing(error: Exception) -> bool:
    """Whether FastAPI was making a route's arguments: SGLang's validators fail on odd bodies."""
    return any(
        frame.f_code.co_name == "solve_dependencies"
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )


def _header(scope: Any, name: bytes, default: str) -> str:
    for key, value in scope["headers"]:
        if key == name:
            return str(value.decode("latin-1")).strip().lower()
    return default


def _again(body: bytes, receive: Any) -> Any:
    """A `receive` that gives the body, and then what else the client does."""
    given = False

    async def again() -> Any:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
