"""What clients of /v1/realtime do wrong, and whether the server answers it as it should."""

import asyncio
import base64
import contextlib
import json
import math
import time
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from scripts.lib.http_client import HTTP

_WAIT_S = 60.0
_SPOKEN_S = 25.0  # less than a session may hold
_BYTES_PER_SECOND = 2 * 24_000
_FLOOD = 100_000
_REASONS = (1008, 1009)


class Hostile:
    """Wrong clients of one server.

    Args:
        base_url: http://HOST:PORT.
    """

    def __init__(self, base_url: str, api_key: str):
        self._base_url = base_url
        self._url = base_url.replace("http", "ws", 1) + "/v1/realtime"
        self._key = {"Authorization": f"Bearer {api_key}"}

    async def failures(self) -> list[str]:
        """What was not answered with an error event, a refusal or a reason."""
        cases = {
            "no key": self._no_key(),
            "wrong event": self._answered('{"type": "response.create"}'),
            "no JSON": self._answered("{"),
            "garbage frame": self._answered(bytes(range(256))),
            "no base64": self._answered('{"type": "input_audio_buffer.append", "audio": "?"}'),
            "wrong rate": self._answered(_update({"format": {"type": "audio/pcm", "rate": 11025}})),
            "10 MB in one event": self._too_big(),
            "never reads": self._never_reads(),
        }
        failed = []
        for name, case in cases.items():
            try:
                async with asyncio.timeout(_WAIT_S):
                    right = await case
            except (TimeoutError, OSError, ConnectionClosed, InvalidStatus) as error:
                right = False
                print(f"bad input, {name}: {type(error).__name__} {error}")
            if not right:
                failed.append(name)
        return failed

    async def closed_frees_s(self, data: bytes) -> float:
        """Seconds from closing a socket to no request running.

        Args:
            data: PCM at 24 kHz, some seconds of speech; it is sent again and again, so that there
                is a request for some seconds.
        """
        socket = await self._open()
        audio = base64.b64encode(data).decode()
        for _ in range(math.ceil(_SPOKEN_S * _BYTES_PER_SECOND / len(data))):
            await socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))
        async with asyncio.timeout(_WAIT_S):
            while not await asyncio.to_thread(self._running):
                await asyncio.sleep(0.01)
        await socket.close()
        start = time.monotonic()
        async with asyncio.timeout(_WAIT_S):
            while await asyncio.to_thread(self._running):
                await asyncio.sleep(0.01)
        return time.monotonic() - start

    def _running(self) -> int:
        answer = HTTP.get(f"{self._base_url}/v1/loads", headers=self._key).json()
        return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in answer["loads"])

    async def _open(self) -> ClientConnection:
        socket = await connect(self._url, additional_headers=self._key, max_size=None)
        await socket.recv()
        return socket

    async def _no_key(self) -> bool:
        try:
            await connect(self._url)
        except InvalidStatus as refused:
            return refused.response.status_code == 401
        return False

    async def _answered(self, message: str | bytes) -> bool:
        """Whether it is an error event, and the session goes on."""
        socket = await self._open()
        async with contextlib.aclosing(_Closing(socket)):
            await socket.send(message)
            error = json.loads(await socket.recv())
            await socket.send(_update({}))
            after = json.loads(await socket.recv())
        return error["type"] == "error" and after["type"] == "session.updated"

    async def _too_big(self) -> bool:
        socket = await self._open()
        async with contextlib.aclosing(_Closing(socket)):
            try:
                await socket.send("x" * 10_000_000)
                while True:
                    await socket.recv()
            except ConnectionClosed as closed:
                return closed.rcvd is not None and closed.rcvd.code in _REASONS
        return False

    async def _never_reads(self) -> bool:
        """Whether the server lets go of a client that makes it answer and takes no answer."""
        socket = await self._open()
        async with contextlib.aclosing(_Closing(socket)):
            socket.transport.pause_reading()
            try:
                for _ in range(_FLOOD):
                    await socket.send("x")
            except ConnectionClosed:
                return True
            socket.transport.resume_reading()
            try:
                while True:
                    await socket.recv()
            except ConnectionClosed as closed:
                return closed.rcvd is not None and closed.rcvd.code in _REASONS
        return False


class _Closing:
    """A socket that is let go of at once, whatever state it is in."""

    def __init__(self, socket: ClientConnection):
        self._socket = socket

    async def aclose(self) -> None:
        self._socket.transport.abort()


def _update(given: dict[str, Any]) -> str:
    session = {"type": "transcription", "audio": {"input": given}}
    return json.dumps({"type": "session.update", "session": session})
