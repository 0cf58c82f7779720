"""Audio streamed in real time to /v1/realtime through OpenAI's own client, and when words came."""

import asyncio
import base64
import difflib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import av
import numpy as np
import openai
from whisper.normalizers import EnglishTextNormalizer  # type: ignore[import-untyped]

from scripts.speech_data import Clip

PIECE_S = 0.1
SILENCE_S = 1.0  # behind each clip, so that the VAD hears it end
ANSWER_S = 300.0
TAIL = "sglang_ext.input_audio_transcription.tail"
TEXT = "conversation.item.input_audio_transcription."
FORMATS: tuple[dict[str, Any], ...] = (
    {"type": "audio/pcm", "rate": 24_000},
    {"type": "audio/pcm", "rate": 16_000},
    {"type": "audio/pcm", "rate": 48_000},
    {"type": "audio/pcmu"},
    {"type": "audio/pcma"},
)
_CODECS = {"audio/pcmu": "pcm_mulaw", "audio/pcma": "pcm_alaw"}
_G711_RATE = 8_000
# So many words in a row that nothing stands for are lost; fewer, one recogniser heard otherwise.
_LOST_RUN = 4

_normalized = EnglishTextNormalizer()


@dataclass
class LiveRun:
    """What a stream gave.

    Attributes:
        text: all its transcripts.
        mismatches: items whose deltas are not their transcript.
        shown: each word of the deltas, and when it came, in seconds since the audio began.
        errors: messages of error events and of items that failed.
        lags: seconds, of each event that told one.
    """

    text: str = ""
    mismatches: int = 0
    shown: list[tuple[str, float]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)


def wire_bytes(samples: np.ndarray, wire: Mapping[str, Any]) -> bytes:
    """float32[n] as PCM, or as G.711 by FFmpeg's encoder."""
    pcm = (samples.clip(-1, 1) * 32767).round().astype("<i2")
    name = _CODECS.get(wire["type"])
    if name is None:
        return pcm.tobytes()
    codec: Any = av.CodecContext.create(name, "w")
    codec.sample_rate, codec.layout, codec.format = _G711_RATE, "mono", "s16"
    frame = av.AudioFrame.from_ndarray(pcm[None], format="s16", layout="mono")
    frame.sample_rate = _G711_RATE
    return b"".join(bytes(packet) for part in (frame, None) for packet in codec.encode(part))


def as_sent(clip: Clip, wire: Mapping[str, Any]) -> Clip:
    """A clip as a format carries it: mono, at the format's rate, through its codec.

    Whisper hears telephone audio worse, whichever route brings it.
    """
    rate = wire.get("rate", _G711_RATE)
    data, name = wire_bytes(clip.mono(rate), wire), _CODECS.get(wire["type"])
    if name is None:
        pcm = np.frombuffer(data, "<i2")
    else:
        codec: Any = av.CodecContext.create(name, "r")
        codec.sample_rate, codec.layout = rate, "mono"
        pcm = np.concatenate([f.to_ndarray()[0] for f in codec.decode(av.Packet(data))])
    return replace(clip, samples=pcm.astype(np.float32)[None] / 32768, rate=rate)


def client(base_url: str, api_key: str) -> openai.AsyncOpenAI:
    """OpenAI's client for a server at http://HOST:PORT."""
    sockets = base_url.replace("http", "ws", 1) + "/v1"
    return openai.AsyncOpenAI(
        base_url=base_url + "/v1", websocket_base_url=sockets, api_key=api_key
    )


async def stream(
    base_url: str,
    api_key: str,
    clip: Clip,
    wire: Mapping[str, Any],
    extension: Mapping[str, Any],
    silence_s: float = SILENCE_S,
) -> LiveRun:
    """Play a clip and a silence behind it; the transcript once all of it has come.

    Args:
        wire: one of FORMATS.
        extension: settings of ours, `session.sglang_ext`.
    """
    rate = wire.get("rate", _G711_RATE)
    samples = np.concatenate([clip.mono(rate), np.zeros(round(silence_s * rate), np.float32)])
    data, run = wire_bytes(samples, wire), LiveRun()
    size = round(PIECE_S * rate) * len(data) // len(samples)
    session: Any = {
        "type": "transcription",
        "audio": {
            "input": {
                "format": dict(wire),
                "transcription": {"language": "en"},
                "turn_detection": {"type": "server_vad"},
            }
        },
        "sglang_ext": dict(extension),
    }
    async with client(base_url, api_key).realtime.connect(
        extra_query={"intent": "transcription"}
    ) as connection:
        await connection.session.update(session=session)
        began = time.monotonic()
        following = asyncio.create_task(_follow(connection, run, began))
        for place, first in enumerate(range(0, len(data), size)):
            await asyncio.sleep(began + (place + 1) * PIECE_S - time.monotonic())
            piece = base64.b64encode(data[first : first + size]).decode()
            await connection.input_audio_buffer.append(audio=piece)
        await connection.input_audio_buffer.commit()  # the silence, or what the VAD left open
        async with asyncio.timeout(ANSWER_S):
            await following
    return run


async def _follow(connection: Any, run: LiveRun, began: float) -> None:
    """Take events up to the transcript of the item that the client committed."""
    deltas: dict[str, str] = {}
    open_items: set[str] = set()
    turns: set[str] = set()
    async for event in connection:
        now = time.monotonic() - began
        if event.type == "error":
            run.errors.append(event.error.message)
        elif event.type == TAIL:
            run.lags.append(event.lag_s)
        elif event.type == TEXT + "delta":
            deltas[event.item_id] = deltas.get(event.item_id, "") + event.delta
            run.shown += [(word, now) for word in event.delta.split()]
        elif event.type == "input_audio_buffer.speech_stopped":
            turns.add(event.item_id)
        elif event.type == "input_audio_buffer.committed":
            open_items.add(event.item_id)
        elif event.type in (TEXT + "completed", TEXT + "failed"):
            open_items.discard(event.item_id)
            if event.type == TEXT + "failed":
                run.errors.append(event.error.message)
            else:
                run.mismatches += event.transcript != deltas.get(event.item_id, "")
                run.text = f"{run.text} {event.transcript}".strip()
            if event.item_id not in turns:
                return
    raise ConnectionError("the server closed the session")


def display_delays(run: LiveRun, words: Sequence[tuple[str, float]]) -> list[float]:
    """Seconds from the end of each word in the audio to its display, of words that both heard.

    Args:
        words: of the file route, and where each ends, in seconds.
    """
    known, ends = _keys(words)
    shown, times = _keys(run.shown)
    blocks = difflib.SequenceMatcher(None, known, shown, autojunk=False).get_matching_blocks()
    return [times[block.b + i] - ends[block.a + i] for block in blocks for i in range(block.size)]


def lost_words(run: LiveRun, text: str) -> int:
    """Words of the file route's transcript that stand in runs of four and more that the stream has
    nothing for."""
    known, heard = _normalized(text).split(), _normalized(run.text).split()
    changes = difflib.SequenceMatcher(None, known, heard, autojunk=False).get_opcodes()
    gaps = (b - a for kind, a, b, _, _ in changes if kind == "delete")
    return sum(gap for gap in gaps if gap >= _LOST_RUN)


def _keys(words: Sequence[tuple[str, float]]) -> tuple[list[str], list[float]]:
    pairs = [(_normalized(word).replace(" ", ""), at) for word, at in words]
    kept = [(key, at) for key, at in pairs if key]
    return [key for key, _ in kept], [at for _, at in kept]
