"""Live speech through OpenAI's own client, on a real Whisper server."""

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import jiwer
import numpy as np
import openai
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed
from whisper.normalizers import EnglishTextNormalizer

from scripts.lib.http_client import HTTP
from scripts.speech_data import FOLDER, read_audio
from tests.server.servers import Server
from tests.server.speech.conftest import JFK
from tests.unit.speech.test_wire_audio import encoded

COMPLETED = "conversation.item.input_audio_transcription.completed"
DELTA = "conversation.item.input_audio_transcription.delta"
TAIL = "sglang_ext.input_audio_transcription.tail"
FORMATS = [
    {"type": "audio/pcm", "rate": 16_000},
    {"type": "audio/pcm", "rate": 24_000},
    {"type": "audio/pcm", "rate": 48_000},
    {"type": "audio/pcmu"},
    {"type": "audio/pcma"},
]

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="the speech clips are not here")
normalized = EnglishTextNormalizer()


def address(server: Server) -> str:
    return server.base_url.replace("http", "ws") + "/v1"


def client(server: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=server.base_url + "/v1", websocket_base_url=address(server), api_key="none"
    )


async def until(connection: AsyncIterator[Any], *kinds: str) -> list[Any]:
    """The events up to the first of these types."""
    told = []
    async with asyncio.timeout(120):
        async for event in connection:
            told.append(event)
            if event.type in kinds:
                return told
    raise AssertionError("the connection ended")


async def transcribed(server: Server, wire: dict[str, Any], manual: bool) -> tuple[str, list[Any]]:
    """The transcript of the JFK clip in a format, and all events."""
    rate = wire.get("rate", 8_000)
    data = encoded(read_audio(FOLDER / "jfk.flac").mono(rate), wire["type"])
    given: dict[str, Any] = {"format": wire, "transcription": {"language": "en"}}
    if manual:
        given["turn_detection"] = None
    else:
        # One item: the pauses in it are shorter.
        given["turn_detection"] = {"type": "server_vad", "silence_duration_ms": 2000}
        data += encoded(np.zeros(3 * rate, np.float32), wire["type"])
    async with client(server).realtime.connect(extra_query={"intent": "transcription"}) as session:
        await session.session.update(
            session={"type": "transcription", "audio": {"input": given}}  # type: ignore[typeddict-item]
        )
        told = await until(session, "session.updated", "error")
        assert told[-1].type == "session.updated", told[-1]
        for first in range(0, len(data), rate // 5):
            piece = base64.b64encode(data[first : first + rate // 5]).decode()
            await session.input_audio_buffer.append(audio=piece)
        if manual:
            await session.input_audio_buffer.commit()
        told += await until(session, COMPLETED, "error")
        return told[-1].transcript, told


def test_openais_client_hears_every_format_and_deltas_are_the_transcript(whisper_server):
    async def run() -> None:
        jobs = [
            transcribed(whisper_server, wire, manual)
            for wire in FORMATS
            for manual in (True, False)
        ]
        for text, told in await asyncio.gather(*jobs):
            # 8 kHz costs a word here and there.
            assert jiwer.wer(normalized(JFK), normalized(text)[-len(JFK) :]) < 0.3, text
            assert "".join(e.delta for e in told if e.type == DELTA) == text
            assert [e for e in told if e.type == TAIL]

    asyncio.run(run())


def test_a_closed_socket_frees_its_request_within_a_second(whisper_server):
    async def run() -> None:
        samples = read_audio(FOLDER / "jfk.flac").mono(24_000)
        event = json.dumps(
            {
                "type": "input_audio_buffer.append",
                "audio": base64.b64encode(encoded(samples, "audio/pcm")).decode(),
            }
        )
        # Events that nobody reads must not keep the client from hearing that it is closed.
        url = address(whisper_server) + "/realtime"
        socket = await connect(url, max_size=None, max_queue=None)
        await socket.recv()
        await socket.send(event)
        await wait_until(lambda: running(whisper_server) > 0, 30)
        await socket.close()
        await wait_until(lambda: running(whisper_server) == 0, 1.0)

    asyncio.run(run())


def running(server: Server) -> int:
    """Requests that the server works on."""
    loads = HTTP.get(f"{server.base_url}/v1/loads").json()["loads"]
    return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)


async def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline, "too late"
        await asyncio.sleep(0.02)


def test_bad_input_is_told_and_others_are_unharmed(whisper_server):
    async def run() -> None:
        fine = asyncio.create_task(transcribed(whisper_server, FORMATS[1], True))
        url = address(whisper_server) + "/realtime"
        async with connect(url, max_size=None) as socket:
            await socket.recv()
            for message in ("{", '{"type": "nonsense"}', b"\0\1"):
                await socket.send(message)
                error = json.loads(await socket.recv())["error"]
                assert set(error) == {"message", "type", "param", "code", "event_id"}
            await socket.send(json.dumps({"type": "x", "audio": "A" * 10_000_000}))
            assert json.loads(await socket.recv())["error"]["code"] == "message_too_big"
            with pytest.raises(ConnectionClosed) as closed:
                await socket.recv()
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1009
        assert normalized((await fine)[0]).endswith(normalized(JFK))

    asyncio.run(run())
