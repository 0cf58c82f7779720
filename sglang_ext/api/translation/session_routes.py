"""Translation sessions over HTTP, server-sent events and WebSockets (docs/translation.md):

POST   /v1/translation/sessions                open
GET    /v1/translation/sessions/{id}           source, translation, settings
DELETE /v1/translation/sessions/{id}           forget; a running update is aborted
POST   /v1/translation/sessions/{id}/updates   a grown or revised source; its translation
POST   /v1/translation/sessions/{id}/finish    show what is held back; no more updates
GET    /v1/translation/sessions/{id}/events    every update, as server-sent events
WS     /v1/translation/sessions/{id}/ws        updates in, translations out
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeVar

from fastapi import FastAPI, Request, WebSocket
from fastapi.responses import JSONResponse, Response
from starlette.requests import HTTPConnection

from datastores import DEFAULT_NAMESPACE
from sglang_ext.admission.cache_salts import agreed_namespace
from sglang_ext.api.handshake import check_key, deny, header_namespace
from sglang_ext.api.http import (
    DONE,
    KEEP_ALIVE,
    ApiError,
    answering,
    event,
    event_stream,
    refusal,
    tokenizer_manager,
    while_connected,
)
from sglang_ext.api.open_streams import Stream, Streams
from sglang_ext.api.translation.session import Session
from sglang_ext.api.translation.session_answers import description
from sglang_ext.api.translation.session_settings import (
    SessionSettings,
    body_limit,
    parse_settings,
    parse_update,
    read_json,
)
from sglang_ext.api.translation.session_socket import SessionSocket
from sglang_ext.api.translation.session_table import SessionTable
from sglang_ext.api.translation.session_update import RunningUpdate
from sglang_ext.api.translation.translator import Translator
from sglang_ext.options import Options
from sglang_ext.request_options import RequestOptionError

T = TypeVar("T")

_PATH = "/v1/translation/sessions"
_KEEP_ALIVE_S = 15.0


@dataclass(frozen=True)
class Backend:
    """What the routes work with.

    Attributes:
        api_key: SGLang's --api-key; None: all may connect.
        workers: processes that serve HTTP.
    """

    translator: Translator | None
    table: SessionTable
    options: Options
    api_key: str | None = None
    workers: int = 1


def add_routes(app: FastAPI, backend: Callable[[], Backend] | None = None) -> None:
    """Add the routes to SGLang's application, one by one (see routes.add_routes).

    Args:
        backend: makes what they work with, at the first request; None: of SGLang's own.
    """
    routes = _Routes(backend or _backend)
    one = _PATH + "/{session_id}"
    for method, path, endpoint in (
        ("POST", _PATH, routes.open),
        ("GET", one, routes.show),
        ("DELETE", one, routes.delete),
        ("POST", one + "/updates", routes.update),
        ("POST", one + "/finish", routes.finish),
        ("GET", one + "/events", routes.events),
        ("GET", one + "/ws", routes.no_socket),
    ):
        answer = answering(endpoint, _refusal)
        app.add_api_route(path, answer, methods=[method], **description(endpoint.__name__))
    app.add_api_websocket_route(one + "/ws", routes.socket)
    app.state.forget_sessions = routes.forget


class _Routes:
    """The endpoints."""

    def __init__(self, backend: Callable[[], Backend]):
        self._backend = cache(backend)
        self._streams = cache(self._new_streams)

    async def open(self, request: Request) -> Response:
        """Open a session."""
        backend = self._backend()
        if backend.workers > 1:
            raise ApiError(
                "translation sessions live in one HTTP process and this server has "
                f"{backend.workers}: start it with --tokenizer-worker-num 1, or use "
                "/v1/chat/completions with custom_params.ssbd.session",
                501,
            )
        if backend.translator is None:
            raise ApiError("this server has no tokenizer (--skip-tokenizer-init)", 501)
        body = await self._body(request)
        settings = parse_settings(body, backend.translator.model_names)
        owner = self._namespace(request)
        session = Session(
            self._salted(settings, owner),
            settings,
            backend.translator,
            backend.options.translation_max_source_chars,
            owner=owner,
        )
        backend.table.add(session)
        return JSONResponse(backend.table.message(session))

    async def show(self, request: Request, session_id: str) -> Response:
        """The session as it is."""
        return JSONResponse(self._backend().table.message(self._session(request, session_id)))

    async def delete(self, request: Request, session_id: str) -> Response:
        """Forget a session; a running update is aborted."""
        self._backend().table.delete(session_id, self._namespace(request))
        return JSONResponse({"id": session_id, "object": "translation.session", "deleted": True})

    def forget(self, namespace: str | None, session_id: str | None) -> None:
        """What deletions call (datastore/routes.py), as SessionTable.forget."""
        self._backend().table.forget(namespace, session_id)

    async def update(self, request: Request, session_id: str) -> Response:
        """Change the source and translate it."""
        update = parse_update(await self._body(request))
        running = self._session(request, session_id).update(update, update.stream)
        if not update.stream:
            return JSONResponse(await _until_gone(request, running, running.result()))
        # The first text tells that all is well, while a status can tell otherwise.
        await _until_gone(request, running, running.begun())
        return event_stream(_written(running))

    async def finish(self, request: Request, session_id: str) -> Response:
        """Show what is held back; no more updates."""
        await self._body(request)
        running = self._session(request, session_id).finish()
        return JSONResponse(await _until_gone(request, running, running.result()))

    async def events(self, request: Request, session_id: str) -> Response:
        """Every update from the last one on, until the session ends."""
        session = self._session(request, session_id)
        last = request.headers.get("last-event-id", "")
        seen = int(last) if last.isdecimal() and len(last) < 19 else None
        if session.finished and seen == session.state.revision:
            return Response(status_code=204)  # a browser would come back for ever otherwise
        slot = self._streams().enter(session.namespace)
        return event_stream(_updates(session, seen, slot))

    async def socket(self, socket: WebSocket) -> None:
        """Updates in, translations out. SGLang checks keys of HTTP requests only."""
        backend, session_id = self._backend(), socket.path_params["session_id"]
        try:
            check_key(socket, backend.api_key)
            owner = self._namespace(socket)
            session = backend.table.get(session_id, owner)
            slot = self._streams().enter(session.namespace)
        except ApiError as error:
            return await deny(socket, error)
        with slot:
            await socket.accept()
            limit = body_limit(backend.options.translation_max_source_chars)
            use = partial(backend.table.get, session_id, owner)
            await SessionSocket(socket, session, use, limit).run()

    async def no_socket(self, session_id: str) -> Response:
        """A plain GET where a WebSocket belongs, or a server that cannot speak it."""
        raise ApiError(
            "this address is a WebSocket's; if you did ask for one, the server lacks the package "
            "websockets",
            426,
        )

    def _new_streams(self) -> Streams:
        options = self._backend().options
        share = options.namespace_share if options.namespace_header else 1.0
        return Streams(options.max_streams, share)

    async def _body(self, request: Request) -> dict[str, Any]:
        limit = body_limit(self._backend().options.translation_max_source_chars)
        return await read_json(request, limit)

    def _session(self, request: Request, session_id: str) -> Session:
        return self._backend().table.get(session_id, self._namespace(request))

    def _salted(self, settings: SessionSettings, owner: str) -> str:
        """The namespace whose outputs a session reads and joins: its salts', else its owner's."""
        options = self._backend().options
        if not options.salt_namespaces:
            return owner
        given = None if owner == DEFAULT_NAMESPACE else owner
        extra_key, cache_salt = settings.extra_key, settings.cache_salt
        try:
            name = agreed_namespace(given, extra_key, cache_salt, options.namespace_key)
        except RequestOptionError as error:
            param = "extra_key" if extra_key else "cache_salt"
            raise ApiError(str(error), param=param) from None
        return name or owner

    def _namespace(self, connection: HTTPConnection) -> str:
        """The namespace that the header names."""
        return header_namespace(connection, self._backend().options.namespace_header)


async def _written(running: RunningUpdate) -> AsyncGenerator[str]:
    """An update as events: the text while it is written, then the update or an error."""
    try:
        async for delta in running.deltas():
            yield event(delta)
        yield event(await running.result())
        yield DONE
    except ApiError as error:
        yield event(error.body())
    finally:
        running.cancel()


async def _updates(session: Session, seen: int | None, slot: Stream) -> AsyncGenerator[str]:
    """A session's updates as events with their revisions as ids."""
    with slot, session.listening(seen) as updates:
        while True:
            try:
                async with asyncio.timeout(_KEEP_ALIVE_S):
                    update = await updates.get()
            except TimeoutError:
                yield KEEP_ALIVE
                continue
            if update is None:
                break
            yield event(update, update["revision"])
    yield DONE


async def _until_gone(request: Request, running: RunningUpdate, work: Coroutine[Any, Any, T]) -> T:
    """The work's result; if the client goes, the update is given up.

    Raises:
        ApiError: the work's, or the client has gone and nobody will see it.
    """
    try:
        return await while_connected(request, work)
    except BaseException:
        running.cancel()
        raise


def _refusal(error: Exception) -> ApiError:
    """An error of a route as OpenAI's API would give it."""
    return refusal(error, "a request of a translation session")


def _backend() -> Backend:
    """What the routes work with, of the server that this process is."""
    from sglang.srt.runtime_context import get_serving

    options, serving = Options.from_env(), get_serving()
    manager = tokenizer_manager()
    return Backend(
        None
        if manager.tokenizer is None
        else Translator(manager, serving.default_chat_template_kwargs),
        SessionTable(
            options.translation_sessions,
            options.translation_idle_seconds,
            stopping=lambda: manager.gracefully_exit,
            # Only the header names the namespace of a session.
            share=options.namespace_share if options.namespace_header else 1.0,
        ),
        options,
        serving.api_key,
        serving.tokenizer_worker_num,
    )
