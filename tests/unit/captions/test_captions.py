"""The whole command against two HTTP servers that act as Whisper and as a translator."""

import io
import json
import signal
import subprocess
import sys
import threading
import wave
from email.parser import BytesParser
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from scripts.lib.data_folder import data_folder
from sglang_ext.cli import main
from sglang_ext.servers import processes
from speech.audio import SAMPLE_RATE, decode
from tests.eventually import eventually

CLIP = data_folder("speech") / "jfk.flac"
TEXT = (
    "And so my fellow Americans, ask not what your country can do for you. "
    "Ask what you can do for your country."
)
WORDS = TEXT.split()
# When each word ends, in seconds: four stretches of speech with pauses between them.
ENDS = np.concatenate(
    [
        np.linspace(start, end, words)
        for start, end, words in ((0.8, 2.1, 5), (3.8, 4.3, 2), (5.7, 7.5, 7), (8.5, 10.3, 8))
    ]
)

pytestmark = pytest.mark.skipif(not CLIP.is_file(), reason="the speech clips are not here")


class Fake(BaseHTTPRequestHandler):
    """Transcribes parts of jfk.flac by where they lie in it; translates into capitals."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.answer(200, {"data": [{"id": "fake"}]})

    def do_POST(self):
        server = self.server
        body = self.rfile.read(int(self.headers["content-length"]))
        server.requests.append(self.path)
        if server.failures and not self.path.endswith("sessions"):
            status = server.failures.pop(0)
            return self.answer(status, {"error": {"message": "provoked"}})
        if self.path == "/v1/audio/transcriptions":
            return self.answer(200, self.transcribe(body))
        return self.answer(*self.translate(self.path.split("/")[3:], json.loads(body)))

    def do_DELETE(self):
        self.server.requests.append(self.path)
        self.server.sessions.pop(self.path.split("/")[-1], None)
        self.answer(200, {"deleted": True})

    def transcribe(self, body: bytes) -> dict:
        header = f"Content-Type: {self.headers['content-type']}\r\n\r\n".encode()
        parts = {
            part.get_param("name", header="content-disposition"): part.get_payload(decode=True)
            for part in BytesParser().parsebytes(header + body).get_payload()
        }
        assert parts["model"] == b"fake" and parts["language"] == b"en"
        with wave.open(io.BytesIO(parts["file"])) as wav:
            data = np.frombuffer(wav.readframes(wav.getnframes()), "<i2").astype(np.float32)
        assert len(data) <= 28.1 * SAMPLE_RATE
        start = place(data)
        seconds = len(data) / SAMPLE_RATE
        said = [w for w, end in zip(WORDS, ENDS - start, strict=True) if 0.1 < end < seconds]
        return {"segments": [{"start": 0.3, "end": seconds, "text": " " + " ".join(said)}]}

    def translate(self, path: list[str], body: dict) -> tuple[int, dict]:
        sessions = self.server.sessions
        if len(path) == 1:
            if body["target_language"] == "Nowhere":
                return 400, {"error": {"message": "target_language must be a language"}}
            name = f"trs-{len(self.server.requests)}"
            sessions[name] = ""
            self.server.settings = body
            return 200, {"id": name}
        if path[1] not in sessions:
            return 404, {"error": {"message": "no such session"}}
        if path[2] == "finish":
            return 200, self.shown(sessions.pop(path[1]), True)
        sessions[path[1]] = body["source"].upper()
        self.server.sources.append((path[1], body["source"], body["final"]))
        return 200, self.shown(body["source"].upper(), body["final"])

    def shown(self, text: str, final: bool) -> dict:
        cut = len(text) if final else max(0, len(text) - 4)
        return {"stable": text[:cut], "unstable": text[cut:], "final": final}

    def answer(self, status: int, body: dict) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@cache
def clip_samples() -> np.ndarray:
    return (decode(CLIP) * 32767).astype("<i2")


def place(part: np.ndarray) -> float:
    """Where a part of the clip begins in it, in seconds: the peak of their correlation."""
    clip = clip_samples().astype(np.float32)
    size = 2 * len(clip)
    product = np.fft.rfft(clip, size) * np.conj(np.fft.rfft(part, size))
    return int(np.argmax(np.fft.irfft(product)[: len(clip)])) / SAMPLE_RATE


@pytest.fixture
def server():
    fake = ThreadingHTTPServer(("127.0.0.1", 0), Fake)
    fake.sessions, fake.sources, fake.requests, fake.failures = {}, [], [], []
    fake.url = f"http://127.0.0.1:{fake.server_port}"
    thread = threading.Thread(target=fake.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield fake
    fake.shutdown()
    fake.server_close()


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def finals(logged: list[dict], kind: str, *fields: str) -> list[str]:
    last = {r["sentence"]: r for r in logged if r["type"] == kind and r["final"]}
    return ["".join(last[i][f] for f in fields) for i in sorted(last)]


def captions(server, *args: str | Path, asr: bool = True, translate: bool = True) -> int:
    urls = (["--asr-url", server.url] if asr else []) + (
        ["--translate-url", server.url + "/v1"] if translate else []
    )
    return main(["captions", *urls, *map(str, args)])


SENTENCES = [" ".join(WORDS[:14]), " ".join(WORDS[14:])]


def test_captions_and_translations_of_a_file(server, tmp_path, capsys):
    log = tmp_path / "log.jsonl"
    assert captions(server, CLIP, "--speed", "8", "--mask", "3", "--json-lines", log) == 0
    logged = records(log)
    assert finals(logged, "caption", "committed", "unstable") == SENTENCES
    assert finals(logged, "translation", "stable", "unstable") == [s.upper() for s in SENTENCES]
    summary = logged[-1]
    assert summary["words"] == len(WORDS) and summary["translation_words"] == len(WORDS)
    assert summary["audio_s"] == pytest.approx(11, abs=0.1)
    assert 0 < summary["delay_mean_s"] <= summary["delay_p90_s"] < 2
    assert server.settings["mask"] == 3 and server.settings["source_language"] == "English"
    assert server.sessions == {}  # all are finished
    shown = capsys.readouterr().out
    assert f"caption 1: {SENTENCES[0]}\n" in shown and "flicker of translation:" in shown


def test_each_sentence_has_a_session_and_grows_in_it(server, tmp_path):
    captions(server, CLIP, "--speed", "4")
    sessions = list(dict.fromkeys(name for name, _, _ in server.sources))
    assert len(sessions) == 2
    sources = [source for name, source, _ in server.sources if name == sessions[0]]
    assert len(sources) > 3 and len(set(sources)) == len(sources)
    assert sources[-1] == SENTENCES[0] and sources[0] in SENTENCES[0]


def test_captions_alone(server, tmp_path, capsys):
    assert captions(server, CLIP, "--speed", "0", translate=False) == 0
    shown = capsys.readouterr().out
    assert f"caption 2: {SENTENCES[1]}\n" in shown and "translation" not in shown
    assert not any("translation" in path for path in server.requests)


def test_errors_are_told_and_the_audio_goes_on(server, tmp_path, capsys):
    server.failures = [503, 500, 429, 404]
    log = tmp_path / "log.jsonl"
    assert captions(server, CLIP, "--speed", "2", "--json-lines", log) == 0
    logged = records(log)
    assert finals(logged, "caption", "committed", "unstable") == SENTENCES
    assert finals(logged, "translation", "stable", "unstable") == [s.upper() for s in SENTENCES]
    assert 3 <= logged[-1]["errors"] <= 4
    assert "HTTP 503: provoked" in capsys.readouterr().err


def test_what_is_wrong_is_said_before_the_audio_begins(server, capsys):
    def fails(*args, **kwargs) -> str:
        assert captions(server, *args, **kwargs) == 2
        return capsys.readouterr().err

    assert "nowhere.wav: no such file" in fails("nowhere.wav")
    assert "the file is empty, damaged" in fails(__file__)
    assert "--source-language Klingon: expected" in fails(CLIP, "--source-language", "Klingon")
    assert "--beta 1.5: expected a number from 0 to 1" in fails(CLIP, "--beta", "1.5")
    assert "--speed -1" in fails(CLIP, "--speed=-1")
    assert "--step 0:" in fails(CLIP, "--step", "0")
    assert "target_language must be" in fails(CLIP, "--target-language", "Nowhere")
    assert "expected http://HOST:PORT" in fails(CLIP, "--asr-url", "localhost", asr=False)
    assert "http://127.0.0.1:9" in fails(CLIP, "--asr-url", "http://127.0.0.1:9", asr=False)


def piped(server, data: bytes, *args: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "sglang_ext.cli", "captions", "-", "--asr-url", server.url]
    return subprocess.run([*command, *args], input=data, capture_output=True, timeout=60)


def test_raw_audio_from_standard_input(server):
    done = piped(server, clip_samples().tobytes() + b"x", "--speed", "0")
    assert done.returncode == 0, done.stderr.decode()
    assert SENTENCES[1].encode() in done.stdout


def test_a_wav_stream_of_another_rate_from_standard_input(server):
    file = io.BytesIO()
    with wave.open(file, "wb") as wav:
        wav.setnchannels(2)
        wav.setsampwidth(2)
        wav.setframerate(SAMPLE_RATE // 2)
        wav.writeframes(np.repeat(clip_samples()[::2], 2).tobytes())
    data = bytearray(file.getvalue())
    data[4:8] = data[40:44] = b"\xff\xff\xff\xff"  # a stream does not know its length
    done = piped(server, bytes(data), "--speed", "0")
    assert done.returncode == 0, done.stderr.decode()
    assert SENTENCES[1].encode() in done.stdout
    assert b"11.0 s" in done.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_it_with_the_figures(server, number):
    command = [
        sys.executable, "-m", "sglang_ext.cli", "captions", "-",
        "--asr-url", server.url, "--translate-url", server.url,
    ]  # fmt: skip
    # The pipe stays open and silent: nothing may wait for it.
    process = processes.start(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None
    process.stdin.write(clip_samples()[: 5 * SAMPLE_RATE].tobytes())
    process.stdin.flush()
    eventually(lambda: server.sources, what="the server gets something to translate")
    processes.signal_group(process, number)
    process.wait(timeout=60)
    out, errors = process.stdout.read().decode(), process.stderr.read().decode()
    assert process.returncode == 128 + signal.SIGINT, errors
    assert "delay of captions:" in out
    assert "Traceback" not in errors
    assert server.sessions == {}
