"""A translation session over one WebSocket: update bodies in; deltas, updates and errors out."""

import asyncio
import contextlib
from collections.abc import Callable

from fastapi import WebSocket, WebSocketDisconnect

from sglang_ext.api.http import ApiError, until_one_ends
from sglang_ext.api.translation.session import Session
from sglang_ext.api.translation.session_settings import parse_json, parse_update, too_large
from sglang_ext.api.translation.session_update import Message, RunningUpdate, unknown

GONE = 4404
"""Close code when the session was deleted or has expired."""
_MOST_UNREAD = 8


class SessionSocket:
    """Messages are answered one after the other; who sends faster is slowed down: eight are kept.

    Args:
        socket: accepted.
        use: the session, looked up again for each message; raises ApiError once it is gone.
        max_bytes: of a message.
    """

    def __init__(
        self, socket: WebSocket, session: Session, use: Callable[[], Session], max_bytes: int
    ):
        self._socket = socket
        self._session = session
        self._use = use
        self._max_bytes = max_bytes
        # What is too long is not kept: None stands for it.
        self._messages: asyncio.Queue[str | bytes | None] = asyncio.Queue(_MOST_UNREAD)

    async def run(self) -> None:
        """Returns when the client goes, which leaves the session open, or the session does."""
        reading = asyncio.create_task(self._read())
        answering = asyncio.create_task(self._answer_all())
        gone = asyncio.create_task(self._session.gone.wait())
        # Also aborts an update that runs: nobody would see its answer.
        await until_one_ends({reading, answering, gone})
        if not answering.cancelled() and not isinstance(answering.exception(), WebSocketDisconnect):
            answering.result()
        # The reader was cancelled, so the client was still there.
        if self._session.gone.is_set() and reading.cancelled():
            with contextlib.suppress(WebSocketDisconnect, RuntimeError):  # it has gone since
                await self._socket.send_json(unknown(self._session.id).body())
                await self._socket.close(GONE)

    async def _read(self) -> None:
        """Returns when the client has gone."""
        while True:
            message = await self._socket.receive()
            if message["type"] == "websocket.disconnect":
                return
            await self._messages.put(self._bounded(message.get("text") or message.get("bytes")))

    def _bounded(self, text: str | bytes | None) -> str | bytes | None:
        return text or "" if len(text or "") <= self._max_bytes else None

    async def _answer_all(self) -> None:
        while True:
            text = await self._messages.get()
            try:
                await self._answer(self._start(text))
            except ApiError as error:
                if not self._session.gone.is_set():  # of which run() tells
                    await self._send(error.body())

    def _start(self, text: str | bytes | None) -> RunningUpdate:
        """What a message asks for.

        Raises:
            ApiError: it cannot be done.
        """
        if text is None:
            raise too_large(self._max_bytes)
        body = parse_json(text)
        if "finish" not in body:
            return self._use().update(parse_update(body), stream=True)
        if body != {"finish": True}:
            raise ApiError("finish must be true, and alone in its message", param="finish")
        return self._use().finish()

    async def _answer(self, running: RunningUpdate) -> None:
        try:
            async for delta in running.deltas():
                await self._send(delta)
            await self._send(await running.result())
        finally:
            running.cancel()

    async def _send(self, message: Message) -> None:
        await self._socket.send_json(message)
