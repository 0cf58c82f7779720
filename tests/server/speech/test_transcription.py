"""OpenAI's audio API on a real Whisper server, through OpenAI's own client where it can."""

import base64
import io
import json
import re
import subprocess
import sys
import wave
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jiwer
import numpy as np
import openai
import psutil  # type: ignore[import-untyped]
import pytest
from whisper.normalizers import EnglishTextNormalizer

from scripts.lib.http_client import HTTP
from scripts.speech_data import FOLDER, FORMATS, Clip, encode, read_audio, read_references
from tests.server.servers import Server
from tests.server.speech.conftest import JFK, MAX_UPLOAD_MB
from tests.server.speech.conftest import WHISPER as MODEL
from tests.unit.speech.wav_files import wav_file

RATE = 16_000
LIMIT_S = 4 * 3600

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="the speech clips are not here")
normalized = EnglishTextNormalizer()


@pytest.fixture(scope="module")
def server(whisper_server: Server) -> Server:
    return whisper_server


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base_url + "/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def jfk() -> Clip:
    return read_audio(FOLDER / "jfk.flac")


@pytest.fixture(scope="module")
def long_clip() -> Clip:
    """Eight sentences with pauses of 0.3 to 4 s, 70 s in all, and what is said in them."""
    references = list(read_references(FOLDER).items())[:8]
    pauses = np.random.default_rng(0).uniform(0.3, 1.5, len(references))
    pauses[3] = 4.0
    parts, said = [], []
    for (name, reference), pause in zip(references, pauses, strict=True):
        parts += [read_audio(FOLDER / name).mono(RATE), np.zeros(int(pause * RATE), np.float32)]
        said.append(reference)
    return Clip("long.wav", np.concatenate(parts)[None], RATE, " ".join(said))


def post(server: Server, data: bytes | None = None, path: str = "transcriptions", **fields: Any):
    files = {} if data is None else {"file": ("audio.bin", data)}
    return HTTP.post(
        f"{server.base_url}/v1/audio/{path}", files=files or {"x": ("", b"")},
        data={"model": MODEL} | fields, timeout=600,
    )  # fmt: skip


def noise(seconds: float, level: float = 0.05) -> Clip:
    samples = np.random.default_rng(1).normal(0, level, (1, int(seconds * RATE)))
    return Clip("noise", samples.astype(np.float32), RATE)


def silence(seconds: float, rate: int = RATE) -> Clip:
    return Clip("silence", np.zeros((1, int(seconds * rate)), np.float32), rate)


def error_of(response: httpx.Response) -> dict[str, Any]:
    """OpenAI's error object, complete."""
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and isinstance(error["message"], str)
    return error


# Formats


@pytest.mark.parametrize("format", sorted(FORMATS))
@pytest.mark.parametrize(("rate", "channels"), [(8_000, 1), (44_100, 2)])
def test_audio_formats(server, jfk, format, rate, channels):
    clip = Clip("jfk", np.tile(jfk.mono(rate), (channels, 1)), rate)
    response = post(server, encode(clip, format), language="en")
    assert response.is_success, response.text
    # 8 kHz costs a word here and there.
    assert jiwer.wer(normalized(JFK), normalized(response.json()["text"])[-len(JFK) :]) < 0.3


def test_json_and_text(client, jfk):
    file = ("jfk.flac", (FOLDER / "jfk.flac").read_bytes())
    made = client.audio.transcriptions.create(file=file, model=MODEL)
    assert made.text.endswith(JFK)
    assert made.usage is not None and made.usage.type == "duration" and made.usage.seconds == 11
    text = client.audio.transcriptions.create(file=file, model=MODEL, response_format="text")
    assert text.strip() == made.text


def test_verbose_json_with_segments_and_words(client):
    made = client.audio.transcriptions.create(
        file=FOLDER / "jfk.flac", model=MODEL, response_format="verbose_json",
        timestamp_granularities=["segment", "word"],
    )  # fmt: skip
    assert (made.language, made.duration) == ("english", 11.0)
    assert made.model_extra is not None and made.model_extra["task"] == "transcribe"
    assert made.text == "".join(s.text for s in made.segments or []).strip()
    for segment in made.segments or []:
        assert 0 <= segment.start < segment.end <= 11
        assert segment.tokens and -1 < segment.avg_logprob < 0
        assert 0 < segment.no_speech_prob < 0.5
        assert segment.compression_ratio < 2.4
    assert made.words is not None
    assert normalized(" ".join(w.word for w in made.words)) == normalized(made.text)
    times = [t for w in made.words for t in (w.start, w.end)]
    assert times == sorted(times) and times[-1] <= 11
    # Heard in the clip: "country" at 5.8 s and, last, at 10.0 s.
    found = [w.start for w in made.words if "country" in w.word]
    assert found == pytest.approx([5.8, 10.0], abs=0.3)


def test_words_alone(server, jfk):
    body = post(
        server, encode(jfk), response_format="verbose_json", language="en",
        **{"timestamp_granularities[]": "word"},
    ).json()  # fmt: skip
    assert body["words"] and "segments" not in body


def test_srt_and_vtt(client, server, long_clip):
    file = ("long.wav", encode(long_clip))
    srt = client.audio.transcriptions.create(file=file, model=MODEL, response_format="srt")
    cues = [cue.splitlines() for cue in srt.strip().split("\n\n")]
    assert [cue[0] for cue in cues] == [str(i + 1) for i in range(len(cues))]
    times = [t for cue in cues for t in re.findall(r"\d\d:\d\d:\d\d,\d{3}", cue[1])]
    assert len(times) == 2 * len(cues) and times == sorted(times)
    said = " ".join(" ".join(cue[2:]) for cue in cues)
    assert jiwer.wer(normalized(long_clip.reference), normalized(said)) < 0.15
    vtt = post(server, encode(long_clip), response_format="vtt", language="en")
    assert vtt.headers["content-type"].startswith("text/vtt")
    assert vtt.text.startswith("WEBVTT\n\n00:00:0")


# Long audio


def test_long_audio_doubles_and_loses_no_word(server, long_clip):
    body = post(server, encode(long_clip), language="en", response_format="verbose_json").json()
    assert body["duration"] == pytest.approx(long_clip.seconds, abs=0.1)
    made = jiwer.process_words(normalized(long_clip.reference), normalized(body["text"]))
    assert made.wer < 0.12
    assert made.insertions <= 3 and made.deletions <= 3
    starts = [s["start"] for s in body["segments"]]
    assert starts == sorted(starts)
    assert [s["id"] for s in body["segments"]] == list(range(len(starts)))
    assert len({s["seek"] for s in body["segments"]}) > 1


def test_eight_at_once_get_what_one_gets(server, long_clip):
    data = encode(long_clip)
    alone = post(server, data, language="en", return_token_ids="true").json()
    with ThreadPoolExecutor(8) as pool:
        bodies = pool.map(
            lambda _: post(server, data, language="en", return_token_ids="true").json(), range(8)
        )
        assert all(body == alone for body in bodies)
    assert len(alone["token_ids"]) >= 2


@pytest.mark.parametrize("stream", ["false", "true"])
def test_silence_and_noise_say_nothing(server, stream):
    for clip in (silence(1), silence(45), noise(20)):
        response = post(server, encode(clip, "flac"), stream=stream)
        assert response.is_success, response.text
        last = response.text.strip().splitlines()[-1].removeprefix("data: ")
        assert json.loads(last)["text"] == ""


def test_silence_around_speech_says_no_more(server, jfk):
    samples = jfk.mono(RATE)
    gap = np.zeros(40 * RATE, np.float32)
    clip = Clip("gaps", np.concatenate([gap, samples, gap])[None], RATE)
    body = post(server, encode(clip), language="en", response_format="verbose_json").json()
    assert body["text"].endswith(JFK) and len(body["text"]) < len(JFK) + 40
    assert body["segments"][0]["start"] >= 39.5 and body["segments"][-1]["end"] <= 51.5


def test_three_hours_of_silence(server):
    """Also that memory does not grow with the audio."""
    data = encode(silence(3 * 3600), "flac")
    memory = resident_mb(server)
    response = post(server, data)
    assert response.json()["text"] == "" and response.json()["usage"]["seconds"] == 3 * 3600
    assert resident_mb(server) - memory < 200


def http_process(server: Server) -> psutil.Process:
    """The one below its supervisor."""
    below = psutil.Process(server.pid).children()
    (process,) = [child for child in below if "serve" in child.cmdline()]
    return process


def resident_mb(server: Server) -> float:
    """Memory of the HTTP process."""
    return http_process(server).memory_info().rss / (1 << 20)


# Languages, prompts, sampling


def test_language_is_detected_or_given(server, jfk):
    for language in ("en", "English", ""):
        body = post(server, encode(jfk), language=language, response_format="verbose_json").json()
        assert body["language"] == "english"
    german = post(server, encode(jfk), language="de", response_format="verbose_json").json()
    assert german["language"] == "german"


def test_translation(client):
    made = client.audio.translations.create(
        file=FOLDER / "jfk.flac", model=MODEL, response_format="verbose_json"
    )
    assert made.language == "english" and "country" in made.text


def test_a_prompt_changes_the_spelling(server):
    clip = (FOLDER / "hotwords.mp3").read_bytes()
    plain = post(server, clip, language="en").json()["text"]
    prompted = post(server, clip, language="en", prompt="ComfyUI.").json()["text"]
    assert "ComfyUI" not in plain and "ComfyUI" in prompted


def test_custom_params_reach_sglang(server, jfk):
    response = post(server, encode(jfk), language="en", custom_params='{"drafter": "none"}')
    assert response.is_success, response.text


def test_logprobs(client):
    made = client.audio.transcriptions.create(
        file=FOLDER / "jfk.flac", model=MODEL, language="en", include=["logprobs"]
    )
    assert made.logprobs
    spelled = b"".join(bytes(int(b) for b in p.bytes or ()) for p in made.logprobs).decode()
    assert spelled.strip() == made.text
    assert all(p.logprob is not None and p.logprob <= 0 for p in made.logprobs)


# Streaming


def test_streaming(client, server):
    whole = client.audio.transcriptions.create(
        file=FOLDER / "jfk.flac", model=MODEL, language="en"
    ).text
    stream = client.audio.transcriptions.create(
        file=FOLDER / "jfk.flac", model=MODEL, language="en", stream=True
    )
    events = list(stream)
    assert [e.type for e in events[:-1]] == ["transcript.text.delta"] * (len(events) - 1)
    assert len(events) > 10
    last = events[-1]
    assert last.type == "transcript.text.done"
    assert "".join(e.delta for e in events[:-1]) == last.text == whole
    assert last.usage is not None and last.usage.total_tokens > 100


def test_streaming_long_audio(client, long_clip):
    file = ("long.wav", encode(long_clip))
    whole = client.audio.transcriptions.create(file=file, model=MODEL, language="en").text
    *deltas, last = client.audio.transcriptions.create(
        file=file, model=MODEL, language="en", stream=True
    )
    assert "".join(d.delta for d in deltas) == last.text == whole


# Bad input


BAD_FIELDS = [
    ({"model": "whisper-9"}, 404, "model", "model_not_found"),
    ({"model": ""}, 400, "model", None),
    ({"language": "xx"}, 400, "language", "invalid_language_format"),
    ({"language": "<|en|>"}, 400, "language", "invalid_language_format"),
    ({"response_format": "xml"}, 400, "response_format", "invalid_value"),
    ({"temperature": "1.5"}, 400, "temperature", "invalid_value"),
    ({"temperature": "nan"}, 400, "temperature", "invalid_value"),
    ({"timestamp_granularities[]": "line"}, 400, "timestamp_granularities", "invalid_value"),
    ({"timestamp_granularities[]": "word"}, 400, "timestamp_granularities", None),
    ({"timestamp_granularities": "Word", "response_format": "verbose_json"}, 400,
     "timestamp_granularities", "invalid_value"),
    ({"stream": "true", "response_format": "srt"}, 400, "response_format", None),
    ({"stream": "maybe"}, 400, "stream", None),
    ({"include[]": "thoughts"}, 400, "include", None),
    ({"custom_params": "[1]"}, 400, "custom_params", None),
    ({"chunking_strategy": "random"}, 400, "chunking_strategy", None),
    (
        {"chunking_strategy": '{"type": "server_vad", "threshold": %s}' % ("9" * 400)},
        400, "chunking_strategy", "invalid_value",
    ),
    ({"chunking_strategy": "[" * 100_000}, 400, "chunking_strategy", None),
    ({"custom_params": '{"a":' * 900 + "1" + "}" * 900}, 400, "custom_params", None),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "status", "param", "code"), BAD_FIELDS)
def test_bad_fields(server, jfk, fields, status, param, code):
    response = post(server, encode(jfk), **fields)
    assert response.status_code == status, response.text
    error = error_of(response)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error["code"] == code


def wav(samples: int) -> bytes:
    """Silence with the plainest of headers, 44 bytes."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes(bytes(2 * samples))
    return buffer.getvalue()


@pytest.mark.parametrize("stream", ["false", "true"])
@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "invalid_value"),
        (b"no audio, just words " * 100, "invalid_value"),
        (wav(RATE)[:20], "invalid_value"),
        (wav(0), "audio_too_short"),
        (wav(160), "audio_too_short"),
        (encode(silence(LIMIT_S + 60, rate=8_000), "flac"), "audio_too_long"),
    ],
    ids=["empty", "text", "header", "0 seconds", "10 ms", "too long"],
)
def test_bad_audio(server, data, code, stream):
    response = post(server, data, stream=stream)
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert (error["param"], error["code"]) == ("file", code)


@pytest.mark.parametrize("channels", [8, 64])
def test_many_channels_are_transcribed(server, jfk, channels):
    pcm = np.round(jfk.mono(RATE) * 32767).astype(np.int16)
    response = post(server, wav_file(np.tile(pcm[:, None], channels), RATE), language="en")
    assert response.is_success, response.text
    assert response.json()["text"].endswith(JFK)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (wav_file(np.zeros((100, 65), np.int16), RATE), "65 channels; expected 1 to 64"),
        (wav_file(np.zeros((20_000, 1), np.int16), 10), "10 samples per second; expected"),
        (wav(RATE).replace(b"fmt \x10\0\0\0\x01\0", b"fmt \x10\0\0\0\x34\x12"), "no codec"),
    ],
    ids=["channels", "rate", "codec"],
)
@pytest.mark.parametrize("route", ["transcriptions", "generate"])
def test_what_is_beyond_is_refused_by_name(server, data, said, route):
    if route == "generate":
        response = generate(server, data)
        assert response.status_code == 400 and said in response.text
    else:
        response = post(server, data)
        assert response.status_code == 400 and said in error_of(response)["message"]
        assert error_of(response)["param"] == "file"


def generate(server: Server, data: bytes) -> httpx.Response:
    url = "data:audio/wav;base64," + base64.b64encode(data).decode()
    body = {"text": "", "audio_data": url, "modalities": ["audio"]}
    return HTTP.post(server.base_url + "/generate", json=body, timeout=600)


def test_decoders_that_died_are_replaced(server, jfk):
    process = psutil.Process(server.pid)

    def decoders() -> list[psutil.Process]:
        children = process.children(recursive=True)
        running = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
        return [child for child in running if "speech.decoder_process" in child.cmdline()]

    assert post(server, encode(silence(1))).is_success
    before = decoders()
    assert 1 <= len(before) <= 4
    for decoder in before:
        decoder.kill()
    body = post(server, encode(jfk), language="en").json()
    assert body["text"].endswith(JFK)
    assert not {child.pid for child in before} & {child.pid for child in decoders()}


def test_a_missing_file_and_other_bodies(server):
    assert error_of(post(server))["param"] == "file"
    url = server.base_url + "/v1/audio/transcriptions"
    response = HTTP.post(url, json={"model": MODEL}, timeout=60)
    assert response.status_code == 400 and "multipart" in error_of(response)["message"]
    broken = {"Content-Type": "multipart/form-data; boundary=x"}
    response = HTTP.post(url, content=b"--y\r\nnonsense", headers=broken, timeout=60)
    assert response.status_code == 400 and error_of(response)


def test_openais_client_raises_its_own_errors(client):
    file = io.BytesIO(b"nothing")
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.audio.transcriptions.create(file=file, model="gpt-4o-transcribe")
    with pytest.raises(openai.BadRequestError, match="not supported"):
        client.audio.transcriptions.create(file=io.BytesIO(b"nothing"), model=MODEL)
    with pytest.raises(openai.BadRequestError, match="language"):
        client.audio.transcriptions.create(file=FOLDER / "jfk.flac", model=MODEL, language="zz")


class Zeros:
    """A file of a gibibyte that is in nobody's memory."""

    def __init__(self, size: int):
        self.left = size

    def __iter__(self) -> Iterator[bytes]:
        while self.left > 0:
            self.left -= 1 << 20
            yield bytes(1 << 20)


def test_a_gibibyte_is_refused_and_not_kept(server):
    memory = resident_mb(server)
    head = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    response = HTTP.post(
        server.base_url + "/v1/audio/transcriptions",
        content=(part for part in (head, *Zeros(1 << 30))),
        headers={"Content-Type": "multipart/form-data; boundary=x"},
        timeout=120,
    )
    assert response.status_code == 413, response.text
    assert f"{MAX_UPLOAD_MB} MiB" in error_of(response)["message"]
    assert resident_mb(server) - memory < 200


def test_clients_that_leave_are_forgotten(server, long_clip):
    data = encode(long_clip)
    for stream in ("false", "true"):
        with pytest.raises(httpx.TimeoutException):
            HTTP.post(
                server.base_url + "/v1/audio/transcriptions",
                files={"file": data}, data={"model": MODEL, "stream": stream}, timeout=0.3,
            )  # fmt: skip
    assert post(server, encode(silence(1))).is_success


def test_no_files_are_left(server):
    """Uploads lie in unnamed files, if in any."""
    process = http_process(server)
    post(server, encode(silence(60)))  # too long to lie in memory alone
    open_now = [f.path for f in process.open_files() if "/tmp" in f.path]
    assert [path for path in open_now if not path.endswith(".log")] == []


# The command line


def transcribe(*args: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sglang_ext.cli", "transcribe", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def test_command_prints_the_transcript(server):
    done = transcribe(FOLDER / "jfk.flac", "--server", server.base_url, "--language", "en")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith(JFK)
    assert "11/11 s" in done.stderr


def test_command_writes_files_and_names_what_fails(server, tmp_path):
    (tmp_path / "bad.wav").write_bytes(b"no audio")
    done = transcribe(
        FOLDER / "jfk.flac", tmp_path / "bad.wav", "--server", server.base_url,
        "--format", "srt", "--output", tmp_path / "out",
    )  # fmt: skip
    assert done.returncode == 1
    assert "bad.wav: the file is empty, damaged" in done.stderr
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["jfk.flac.srt"]
    assert "--> " in (tmp_path / "out" / "jfk.flac.srt").read_text()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere.wav"], "nowhere.wav: no such file"),
        ([FOLDER / "jfk.flac", "--words"], "--words needs"),
        ([FOLDER / "jfk.flac", "--server", "localhost"], "expected http://HOST:PORT"),
        ([FOLDER / "jfk.flac", "--server", "http://127.0.0.1:9"], "does not answer"),
    ],
)
def test_command_says_what_is_wrong(args, message):
    done = transcribe(*args)
    assert done.returncode == 2
    assert message in done.stderr
