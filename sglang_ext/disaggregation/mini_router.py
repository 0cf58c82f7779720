"""SGLang's mini load balancer as tenants need it: headers and deletions reach its servers.

sglang_router/mini_lb.py (0.3.2) sends prefill and decode servers the body of a request without any
of its headers, so that all clients would share one namespace and no key would arrive. Its flags:

    python -m sglang_ext.disaggregation.mini_router --pd-disaggregation --mini-lb \
        --prefill URL BOOTSTRAP_PORT --decode URL
"""

import logging
from collections.abc import Collection, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain
from types import SimpleNamespace
from typing import Any

import aiohttp
from fastapi import Request
from fastapi.responses import JSONResponse
from yarl import URL

from sglang_ext.api.http import ApiError
from sglang_ext.options import Options

logger = logging.getLogger(__name__)

AUTHORIZATION = "authorization"
_Headers = tuple[tuple[str, str], ...]
_carried: ContextVar[_Headers] = ContextVar("sglang_ext_carried_headers", default=())
# A deletion answers when files are rewritten (api/datastore/control_client.py); 404: a server that
# keeps nothing, as prefill servers do; 409: one that reads the datastore of another.
_DELETION_S = 90.0
_NOTHING_THERE = (404, 409)


class CarriedHeaders:
    """ASGI middleware that remembers some headers of a request for what is sent on its behalf.

    Args:
        app: the next ASGI application.
        names: of the headers.
    """

    def __init__(self, app: Any, names: Collection[str]) -> None:
        self._app = app
        self._names = {name.lower().encode() for name in names}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        # Each as often as it came: servers refuse a namespace that comes twice.
        found = tuple(
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in scope["headers"]
            if name in self._names
        )
        token = _carried.set(found)
        try:
            await self._app(scope, receive, send)
        finally:
            _carried.reset(token)


def client_session(*args: Any, **options: Any) -> aiohttp.ClientSession:
    """An aiohttp.ClientSession whose requests have the headers of the request being served."""
    given = options.pop("headers", None) or {}
    return aiohttp.ClientSession(*args, headers=[*_carried.get(), *given.items()], **options)


def extend(mini_lb: Any, namespace_header: str) -> None:
    """Have the module `sglang_router.mini_lb` carry headers, pass deletions on, and answer in
    OpenAI's shape where a server is down (503) or takes too long (504).

    Args:
        namespace_header: empty: Authorization alone is carried.
    """
    names = [AUTHORIZATION, *([namespace_header] if namespace_header else [])]
    # In the name that this module alone looks up: it makes its sessions where they are used.
    mini_lb.aiohttp = SimpleNamespace(**vars(aiohttp) | {"ClientSession": client_session})
    mini_lb.app.add_middleware(CarriedHeaders, names=names)

    async def delete(request: Request) -> JSONResponse:
        urls = list(chain(mini_lb.lb.prefill_urls, mini_lb.lb.decode_urls))
        return await delete_everywhere(urls, request)

    for path in ("/datastore/namespaces/{namespace}", "/datastore/requests/{rid:path}"):
        mini_lb.app.add_api_route(path, delete, methods=["DELETE"])
    mini_lb.app.add_exception_handler(TimeoutError, _late)
    # Not made in time, a connection is both: the nearer base class, this one, counts.
    mini_lb.app.add_exception_handler(aiohttp.ClientConnectionError, _unreachable)


async def _late(_request: Request, _error: Exception) -> JSONResponse:
    logger.warning("a request took too long behind the router")
    message = "a server behind this router has not answered in time, try again later"
    return ApiError(message, 504, code="server_timeout").response()


async def _unreachable(_request: Request, error: Exception) -> JSONResponse:
    logger.warning("a request could not be passed on: %s", error)
    message = "a server behind this router cannot be reached, try again later"
    return ApiError(message, 503, code="server_unavailable").response()


@dataclass(frozen=True)
class _Reply:
    url: str
    status: int
    body: Any


async def delete_everywhere(urls: Sequence[str], request: Request) -> JSONResponse:
    """What every server answers to a deletion, as one: the tokens in all, or what failed."""
    timeout = aiohttp.ClientTimeout(total=_DELETION_S)
    async with client_session(timeout=timeout) as session:
        # One by one: of servers that share a datastore, the first one counts what is deleted.
        replies = [await _delete(session, url, request) for url in urls]
    done = [r for r in replies if r.status == 200]
    failed = [r for r in replies if r.status != 200 and r.status not in _NOTHING_THERE]
    if not done and not failed:
        failed = [max(replies, key=lambda r: r.status)]
    if failed:
        first = failed[0]
        message = f"{first.url} did not delete: {_message(first.body)}"
        if done:
            message += f"; {len(done)} of {len(urls)} servers did"
        return ApiError(message, first.status, code=first.status).response()
    return JSONResponse({"deleted_tokens": sum(r.body["deleted_tokens"] for r in done)})


async def _delete(session: aiohttp.ClientSession, url: str, request: Request) -> _Reply:
    path = request.scope["raw_path"].decode("latin-1")
    query = request.scope["query_string"].decode("latin-1")
    target = URL(f"{url}{path}" + (f"?{query}" if query else ""), encoded=True)
    try:
        async with session.delete(target) as answer:
            return _Reply(url, answer.status, await answer.json(content_type=None))
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        return _Reply(url, 503, f"{type(error).__name__}: {error}")


def _message(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)


def main() -> None:
    """sglang_router's launcher with its mini load balancer."""
    from sglang_router import mini_lb  # type: ignore[import-untyped]
    from sglang_router.launch_router import main as launch  # type: ignore[import-untyped]

    extend(mini_lb, Options.from_env().namespace_header)
    launch()


if __name__ == "__main__":
    main()
