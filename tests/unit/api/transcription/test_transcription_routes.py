"""The audio routes, with work behind them that the test steers."""

import asyncio
from types import SimpleNamespace

import pytest
from fastapi import FastAPI

from sglang_ext.api.http import answering
from sglang_ext.api.transcription import transcriptions
from sglang_ext.api.transcription.transcriber import Delta
from sglang_ext.options import Options
from speech.prompts import WhisperVocabulary
from speech.segments import Transcript
from tests.unit.api.asgi import Call

HEADERS = {"content-type": "multipart/form-data; boundary=b"}


class Work:
    """Stands in for a Transcription; it waits before each event until it may go on."""

    def __init__(self):
        self.go = asyncio.Semaphore(0)
        self.began = self.ended = False
        self.error: Exception | None = None
        self.file = None

    def __call__(self, engine, request, limits, aligner):
        self.file = request.file
        return self

    async def run(self):
        self.began = True
        try:
            for event in (Delta("Hé"), Transcript("transcribe", "en", text="Hé")):
                await self.go.acquire()
                if self.error is not None:
                    raise self.error
                yield event
        finally:
            assert not self.file.closed, "the upload is read until the work has ended"
            self.ended = True


@pytest.fixture
def work(monkeypatch):
    made = Work()
    engine = SimpleNamespace(vocabulary=WhisperVocabulary(51_865), model_names=["w"])
    monkeypatch.setattr(transcriptions, "_engine", lambda: engine)
    monkeypatch.setattr(transcriptions, "_options", Options)
    monkeypatch.setattr(transcriptions, "Transcription", made)
    return made


def call(stream):
    fields = {"model": "w", "stream": stream, "language": "en"}
    parts = [f'name="{name}"\r\n\r\n{value}' for name, value in fields.items()]
    parts.append('name="file"; filename="a.wav"\r\n\r\naudio')
    body = "".join(f"--b\r\nContent-Disposition: form-data; {part}\r\n" for part in parts)
    app = FastAPI()
    endpoint = answering(transcriptions.transcriptions, transcriptions._refusal)
    app.add_api_route("/", endpoint, methods=["POST"], response_model=None)
    return Call(app, "POST", "/", f"{body}--b--\r\n".encode(), HEADERS)


@pytest.mark.parametrize("stream", ["false", "true"])
def test_a_client_that_leaves_ends_its_work_at_once(work, stream):
    async def run():
        leaving = call(stream)
        while not work.began:
            await asyncio.sleep(0)
        leaving.leave()
        assert (await leaving.answer())[0] == 499
        assert work.ended and work.file.closed

    asyncio.run(asyncio.wait_for(run(), 5))


def test_a_client_that_leaves_a_stream_midway_ends_its_work(work):
    async def run():
        leaving = call("true")
        work.go.release()
        await leaving.begin()
        await leaving.event()
        leaving.leave()
        await leaving.task
        assert work.ended and work.file.closed

    asyncio.run(asyncio.wait_for(run(), 5))


def test_a_stream_is_openais_events_to_the_last(work):
    async def run():
        streaming = call("true")
        work.go.release()
        assert await streaming.begin() == 200
        work.go.release()
        delta, done = await streaming.event(), await streaming.event()
        assert delta == {"data": {"type": "transcript.text.delta", "delta": "Hé"}}
        assert (done["data"]["type"], done["data"]["text"]) == ("transcript.text.done", "Hé")
        assert await streaming.event() is None and work.file.closed

    asyncio.run(asyncio.wait_for(run(), 5))


def test_an_error_before_the_first_event_is_a_status_and_later_an_event(work, caplog):
    async def run():
        work.error = ValueError("no such drafter")
        work.go.release()
        status, body = await call("true").answer()
        assert (status, body["error"]["message"]) == (400, "no such drafter")
        work.error = None
        streaming = call("true")
        work.go.release()
        assert await streaming.begin() == 200
        work.error = OSError("disk")
        work.go.release()
        await streaming.event()
        last = (await streaming.event())["data"]["error"]
        assert (last["type"], last["message"]) == ("server_error", "OSError: disk")
        assert "a transcription failed" in caplog.text

    asyncio.run(asyncio.wait_for(run(), 5))
