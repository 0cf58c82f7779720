"""A session's WebSocket: events are read one by one, and written by a task of their own."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, Protocol

from fastapi import WebSocket, WebSocketDisconnect

from sglang_ext.api.http import ApiError
from sglang_ext.api.realtime.realtime_events import TAILS, Event, error_event

logger = logging.getLogger(__name__)

NORMAL, POLICY, TOO_BIG, INTERNAL, TRY_LATER = 1000, 1008, 1009, 1011, 1013
"""Close codes (RFC 6455, section 7.4.1, and IANA's registry)."""

_MOST_UNSENT = 512  # events
_UNSENT_TAILS = 64  # beyond it, what will be replaced anyway is left out
_LAST_WORDS_S = 1.0


class SocketSession(Protocol):
    """What runs over a socket."""

    async def run(self) -> None:
        """Returns when the session is over."""

    async def handle(self, text: str) -> None:
        """Answer one client event."""

    def abandon(self) -> "set[asyncio.Task[None]]":
        """Give up what runs; it has ended once these tasks are done."""


class RealtimeSocket:
    """Runs a session over a socket.

    Args:
        socket: accepted.
        session: makes the session, of what sends its events and what tells that it is broken.
        max_bytes: of a message.
    """

    def __init__(
        self,
        socket: WebSocket,
        session: Callable[[Callable[[Event], None], Callable[[], None]], SocketSession],
        max_bytes: int,
    ):
        self._socket = socket
        self._max_bytes = max_bytes
        self._unsent: asyncio.Queue[Event] = asyncio.Queue(_MOST_UNSENT)
        self._ended: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()
        self._session = session(self.send, self._break)

    async def run(self) -> None:
        """Returns when the client has gone, or was closed; nothing of the session runs then."""
        writing = asyncio.create_task(self._write())
        tasks: set[asyncio.Future[Any]] = {
            writing,
            asyncio.create_task(self._run_session()),
            asyncio.create_task(self._read()),
            self._ended,
        }
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if self._ended.done() and not self._ended.cancelled():
                await self._close(writing, *self._ended.result())
            for task in tasks:
                task.cancel()
            await asyncio.wait({*tasks, *self._session.abandon()})

    def send(self, event: Event) -> None:
        """Have an event written; a client that does not read is let go."""
        if event["type"] in TAILS and self._unsent.qsize() >= _UNSENT_TAILS:
            return
        try:
            self._unsent.put_nowait(event)
        except asyncio.QueueFull:
            self._end(POLICY, f"the client does not read: {_MOST_UNSENT} events wait for it")

    async def _run_session(self) -> None:
        try:
            await self._session.run()
        except Exception:
            logger.exception("a realtime session failed")
            self._break()
        else:
            self._end(NORMAL, "the session is over")

    def _break(self) -> None:
        self.send(error_event(ApiError("the session failed", 500, code="internal_error")))
        self._end(INTERNAL, "the session failed")

    def _end(self, code: int, reason: str) -> None:
        if not self._ended.done():
            self._ended.set_result((code, reason))

    async def _read(self) -> None:
        """Returns when the client has gone."""
        while True:
            message = await self._socket.receive()
            if message["type"] == "websocket.disconnect":
                return
            text = message.get("text")
            size = len(text or message.get("bytes") or b"")
            if size > self._max_bytes:
                reason = f"a message of {size} bytes; at most {self._max_bytes} may come at once"
                self.send(error_event(ApiError(reason, 413, code="message_too_big")))
                self._end(TOO_BIG, reason)
                await asyncio.Event().wait()  # until run() has closed it
            if text is None:
                error = ApiError(
                    "binary messages are not taken: audio comes as base64 in "
                    "input_audio_buffer.append",
                    code="invalid_payload",
                )
                self.send(error_event(error))
                continue
            await self._session.handle(text)

    async def _write(self) -> None:
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):  # it has gone
            while True:
                event = await self._unsent.get()
                await self._socket.send_json(event)
                self._unsent.task_done()

    async def _close(self, writing: asyncio.Task[None], code: int, reason: str) -> None:
        """Close with a reason, behind what is still unsent if the client reads it."""
        done = asyncio.create_task(self._unsent.join())
        await asyncio.wait(
            {writing, done}, timeout=_LAST_WORDS_S, return_when=asyncio.FIRST_COMPLETED
        )
        done.cancel()
        writing.cancel()
        with contextlib.suppress(TimeoutError, WebSocketDisconnect, RuntimeError):
            async with asyncio.timeout(_LAST_WORDS_S):
                await self._socket.close(code, reason[:120])  # a close frame holds 125 bytes


async def turn_away(socket: WebSocket, error: ApiError, code: int) -> None:
    """Tell an accepted client why it has no session: browsers see no refused handshake."""
    with contextlib.suppress(WebSocketDisconnect, RuntimeError):
        await socket.send_json(error_event(error))
        await socket.close(code, str(error)[:120])
