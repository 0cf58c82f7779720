"""What the HTTP services share: refusals in OpenAI's shape, bodies within a limit, clients that
leave, and server-sent events.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.requests import ClientDisconnect

logger = logging.getLogger(__name__)
T = TypeVar("T")
Endpoint = Callable[..., Awaitable[Response]]

DONE = "data: [DONE]\n\n"
"""The server-sent event that ends a stream, as OpenAI's API has it."""
KEEP_ALIVE = ": keep-alive\n\n"
"""A comment for a stream that has nothing to say: proxies close what is silent."""
# nginx's status for a client that did not wait for its answer; nobody sees it.
_CLIENT_CLOSED_REQUEST = 499


def error_body(
    message: str, status: int, param: str | None = None, code: str | int | None = None
) -> dict[str, Any]:
    """OpenAI's error object.

    Args:
        status: HTTP status.
        param: the field at fault.
        code: OpenAI's code for it, or one like them.
    """
    kind = "invalid_request_error" if status < 500 else "server_error"
    # Lone surrogates, which a client may send, are in no encoding.
    message = message.encode(errors="replace").decode()
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class ApiError(Exception):
    """A request that is refused, as OpenAI's error object says it.

    Args:
        status: HTTP status.
        param: the field at fault.
        code: OpenAI's code for it, or one like them.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        param: str | None = None,
        code: str | int | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return error_body(str(self), self.status, self.param, self.code)

    def response(self) -> JSONResponse:
        """The error as a response."""
        return JSONResponse(self.body(), self.status)


def refusal(error: Exception, what: str) -> ApiError:
    """The error as OpenAI's API would give it: itself, or a 500 that is logged.

    Args:
        what: what failed, for the log.
    """
    if isinstance(error, ApiError):
        return error
    logger.error("%s failed", what, exc_info=error)
    return ApiError(f"{type(error).__name__}: {error}", 500)


def answering(endpoint: Endpoint, refused: Callable[[Exception], ApiError]) -> Endpoint:
    """The endpoint, with its errors as OpenAI's API would give them.

    Args:
        refused: what an error is for the client.
    """

    @wraps(endpoint)
    async def answer(*args: Any, **kwargs: Any) -> Response:
        try:
            return await endpoint(*args, **kwargs)
        except ClientDisconnect:
            return Response(status_code=_CLIENT_CLOSED_REQUEST)
        except Exception as error:
            return refused(error).response()

    return answer


def model_not_found(asked: str, served: str) -> ApiError:
    """The refusal of a model that is not served.

    Args:
        asked, served: names, quoted for the message.
    """
    return ApiError(
        f"The model {asked} does not exist; this server has {served}",
        404,
        "model",
        "model_not_found",
    )


@dataclass(frozen=True)
class Body:
    """A request's body.

    Attributes:
        data: all of it; empty where it is too long or late.
        too_long: there was more than may come.
        late: its end did not come in time.
    """

    data: bytes = b""
    too_long: bool = False
    late: bool = False


async def read_body(request: Request, max_bytes: int, seconds: float) -> Body:
    """Read a body to its end, also where it is too long: who is still sending reads no answer.

    Args:
        max_bytes: no more is kept.
        seconds: in which all of it must come.

    Raises:
        ClientDisconnect: the client has gone.
    """
    parts: list[bytes] = []
    length = 0
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                length += len(part)
                if length > max_bytes:
                    parts.clear()
                else:
                    parts.append(part)
    except TimeoutError:
        return Body(too_long=length > max_bytes, late=True)
    return Body(b"".join(parts), length > max_bytes)


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The work's result; if the client goes, the work is cancelled, and has ended on return.

    Args:
        request: its body must have been read.

    Raises:
        ApiError: the client has gone; nobody will see it.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_left(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ApiError("the client has gone", _CLIENT_CLOSED_REQUEST)
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def until_one_ends(tasks: "set[asyncio.Task[Any]]") -> None:
    """Wait until one of them ends; the others are cancelled, and have ended on return."""
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _left(request: Request) -> None:
    """Return when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def event(data: Mapping[str, Any], event_id: int | None = None) -> str:
    """A server-sent event with JSON as its data.

    Args:
        event_id: what a client sends as Last-Event-ID when it comes back; None: nothing.
    """
    first = "" if event_id is None else f"id: {event_id}\n"
    return f"{first}data: {json.dumps(data, ensure_ascii=False)}\n\n"


def event_stream(events: AsyncIterator[str]) -> StreamingResponse:
    """Server-sent events as a response."""
    return StreamingResponse(events, media_type="text/event-stream")


def checked_meta(output: Mapping[str, Any]) -> Mapping[str, Any]:
    """The meta_info of an output of SGLang's TokenizerManager.generate_request.

    Raises:
        ApiError: SGLang aborted the request, with the status that it gives.
    """
    meta = output["meta_info"]
    reason = meta.get("finish_reason")
    if isinstance(reason, Mapping) and reason.get("type") == "abort":
        message = reason.get("message") or "the server gave the request up"
        raise ApiError(message, int(reason.get("status_code") or 500))
    return meta


def tokenizer_manager() -> Any:
    """SGLang's TokenizerManager of the server that this process is."""
    from sglang.srt.entrypoints.http_server import get_global_state

    return get_global_state().tokenizer_manager
