"""`sglang-ext captions --translate LANG` against the WebSocket of a server with fake models."""

import json
import threading
import wave

import pytest
import uvicorn
from fastapi import FastAPI
from starlette.routing import WebSocketRoute

from sglang_ext.api.realtime.realtime_route import TRANSLATIONS, Realtime
from sglang_ext.cli import main
from sglang_ext.servers import processes
from tests.eventually import eventually
from tests.unit.api.realtime.fake_whisper import WORDS, spoken
from tests.unit.api.realtime.test_realtime_route import backend
from tests.unit.api.realtime.test_translation_route import Sentences, TextServer, reached

RATE = 16_000
SAID = ["Alpha bravo charlie.", "Delta echo foxtrot.", "Golf hotel india."]


@pytest.fixture
def text_server(monkeypatch):
    return reached(TextServer(), monkeypatch)


@pytest.fixture
def url(text_server):
    """A server, over a real socket."""
    options = {"translate_with": "http://text:1", "translate_key": "secret"}
    made = Realtime(lambda: backend(Sentences(), options=options, api_key="key"))
    app = FastAPI()
    app.router.routes.append(WebSocketRoute(TRANSLATIONS, made.translations))
    port = processes.free_port()
    config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    eventually(lambda: server.started, what="the server starts")
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(10)


@pytest.fixture
def clip(tmp_path):
    path = tmp_path / "clip.wav"
    samples = [*spoken(WORDS[:6], 1.0), *spoken(WORDS[6:9])]
    with wave.open(str(path), "wb") as wav:
        wav.setnchannels(1)
        wav.setsampwidth(2)
        wav.setframerate(RATE)
        wav.writeframes(b"".join(round(s * 32767).to_bytes(2, "little") for s in samples))
    return path


def captions(*args):
    return main(["captions", *map(str, args)])


def finals(logged, kind, *fields):
    last = {r["sentence"]: r for r in logged if r["type"] == kind and r["final"]}
    return ["".join(last[i][f] for f in fields) for i in sorted(last)]


@pytest.mark.parametrize("finished", [False, True])
def test_captions_and_their_translation_come_over_the_socket(
    url, clip, tmp_path, capsys, finished, text_server
):
    log = tmp_path / "log.jsonl"
    more = ["--finished-only"] if finished else []
    key = ["--api-key", "key"]
    options = ["--translate", "fr", "--step", "0.2", "--silence", "0.5", "--json-lines", log]
    assert captions(clip, "--asr-url", url + "/v1", *key, *options, *more) == 0
    logged = [json.loads(line) for line in log.read_text().splitlines()]
    assert finals(logged, "caption", "committed", "unstable") == SAID
    translations = [text.upper() for text in SAID]
    assert finals(logged, "translation", "stable", "unstable") == translations
    assert logged[-1]["words"] == 9 and logged[-1]["translation_words"] == 9
    assert "caption 2: Delta echo foxtrot.\n" in capsys.readouterr().out
    if finished:
        assert logged[-1]["translation_ne"] == 0 and len(text_server.manager.requests) == 3
    prompt = text_server.manager.tokenizer.decode(text_server.manager.requests[0].input_ids)
    assert "from English to French" in prompt


def test_what_the_server_refuses_is_said_before_the_audio_plays(url, clip, capsys):
    for args, reason in (
        (("--translate", "fr"), "401"),
        (("--translate", "xx", "--api-key", "key"), "audio.output.language must be"),
        (("--translate", "fr", "--asr-url", "http://127.0.0.1:9"), "http://127.0.0.1:9"),
    ):
        server = [] if "--asr-url" in args else ["--asr-url", url]
        assert captions(clip, *server, *args) == 2
        assert reason in capsys.readouterr().err


def test_what_it_needs_is_said(clip, capsys):
    started = ("--translate", "fr", "--translate-model", "m")
    for args, reason in (
        (("--translate", "fr"), "needs a text server"),
        (("--translate", "fr", "--asr-url", "http://h", "--translate-url", "http://h"), "its own"),
        ((*started, "--speed", "0"), "--speed must be above 0"),
        ((*started, "--step", "9"), "expected 0.1 to 5"),
        (("--finished-only",), "goes with --translate"),
    ):
        assert captions(clip, *args) == 2
        assert reason in capsys.readouterr().err


def test_errors_and_a_lost_text_server_are_told_and_end_with_1(url, clip, capsys, text_server):
    text_server.dead = True
    options = ["--translate", "fr", "--silence", "0.5", "--api-key", "key"]
    assert captions(clip, "--asr-url", url, *options) == 1
    shown = capsys.readouterr()
    assert "caption 3: Golf hotel india." in shown.out
    assert "nobody there; the transcription goes on" in shown.out + shown.err
