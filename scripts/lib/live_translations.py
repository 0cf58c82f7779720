"""Audio streamed in real time to /v1/realtime/translations, and what was shown of its translation.

Flicker is normalized erasure (Arivazhagan et al. 2020, "Re-translation versus Streaming for
Simultaneous Translation", section 4), latency LongYAAL (Polák et al. 2025, "Better Late Than Never:
Evaluation of Latency Metrics for Simultaneous Speech-to-Text Translation", arXiv 2509.17349, as
OmniSTEval computes it), both as simulstream reports them.
"""

import asyncio
import base64
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from websockets.asyncio.client import ClientConnection, connect

from scripts.lib.http_client import HTTP
from scripts.lib.live_client import ANSWER_S, PIECE_S
from scripts.speech_data import Clip
from sglang_ext.captions.session_summary import Erasure
from speech.agreement import split_words

RATE = 24_000
INPUT, OUTPUT = "session.input_transcript.delta", "session.output_transcript.delta"
TAIL = "sglang_ext.output_transcript.tail"
_SESSIONS = "/v1/translation/sessions"


@dataclass(frozen=True)
class TranslatedWord:
    """A word that was shown for good.

    Attributes:
        shown_s: when, in seconds since the audio began.
        source_s: where what it translates ends in the audio, in seconds.
    """

    text: str
    shown_s: float
    source_s: float


@dataclass
class TranslatedRun:
    """What a stream gave.

    Attributes:
        source, text: both transcripts: their deltas joined.
        words: of the translation.
        sentences: their translations, by number.
        sources: of each sentence, what was translated, one after the other.
        erasure: of what was shown, unsettled words included.
        errors: messages of error events.
        code: the socket's close code.
    """

    source: str = ""
    text: str = ""
    words: list[TranslatedWord] = field(default_factory=list)
    sentences: dict[int, str] = field(default_factory=dict)
    sources: dict[int, list[str]] = field(default_factory=dict)
    erasure: Erasure = field(default_factory=Erasure)
    errors: list[str] = field(default_factory=list)
    code: int | None = None

    def take(self, event: Mapping[str, Any], now: float) -> None:
        """Follow an event that came `now`, in seconds since the audio began."""
        kind = event["type"]
        if kind == "error":
            self.errors.append(event["error"]["message"])
        elif kind == INPUT:
            self.source += event["delta"]
        elif kind == OUTPUT:
            number, delta = event["sglang_ext"]["sentence"], event["delta"]
            self.text += delta
            self.sentences[number] = self.sentences.get(number, "") + delta
            source_s = event["elapsed_ms"] / 1000
            self.words += [TranslatedWord(w.strip(), now, source_s) for w in split_words(delta)]
        elif kind == TAIL:
            number = event["sentence"]
            self.sources.setdefault(number, []).append(event["source"])
            shown = self.sentences.get(number, "") + event["text"]
            self.erasure.show(number, split_words(shown), event["final"])


async def translated(
    base_url: str,
    api_key: str,
    clip: Clip,
    session: Mapping[str, Any],
    run: TranslatedRun | None = None,
    waits_at_s: float = math.inf,
) -> TranslatedRun:
    """Play a clip; its translation, once all of it has come.

    Args:
        session: settings, as session.update takes them.
        run: follows what comes, and is returned.
        waits_at_s: so far into the clip the player waits until something of it is translated.
    """
    url = base_url.replace("http", "ws", 1) + "/v1/realtime/translations"
    samples = clip.mono(RATE)
    data = (samples.clip(-1, 1) * 32767).round().astype("<i2").tobytes()
    run, size = run or TranslatedRun(), round(PIECE_S * RATE) * 2
    key = {"Authorization": f"Bearer {api_key}"}
    async with connect(url, additional_headers=key, max_size=None) as socket:
        await socket.send(json.dumps({"type": "session.update", "session": session}))
        began = time.monotonic()
        following = asyncio.create_task(_follow(socket, run, began))
        for place, first in enumerate(range(0, len(data), size)):
            while place * PIECE_S >= waits_at_s and not run.sources and not following.done():
                await asyncio.sleep(PIECE_S)
                began += PIECE_S
            await asyncio.sleep(began + (place + 1) * PIECE_S - time.monotonic())
            piece = base64.b64encode(data[first : first + size]).decode()
            event = {"type": "session.input_audio_buffer.append", "audio": piece}
            await socket.send(json.dumps(event))
        await socket.send('{"type": "session.close"}')
        async with asyncio.timeout(ANSWER_S):
            await following
        run.code = socket.close_code
    return run


async def _follow(socket: ClientConnection, run: TranslatedRun, began: float) -> None:
    closed = False
    async for message in socket:
        event = json.loads(message)
        closed |= event["type"] == "session.closed"
        run.take(event, time.monotonic() - began)
    if not closed:
        raise ConnectionError("the server closed the socket before the session")


def long_yaal(
    words: Sequence[TranslatedWord], segments: Sequence[tuple[float, float]], end_s: float
) -> float:
    """LongYAAL, in seconds: the mean over segments of the mean of d_i - (i - 1) / gamma.

    d_i is when the segment's i-th word was shown, since the segment began; gamma its words by its
    seconds. There are no reference translations: a segment has as many words as were shown of it,
    and which these are is what the server says of their place in the audio (elapsed_ms), not a
    re-segmentation. Words that come when the recording is over do not count.

    Args:
        segments: where each begins and ends in the audio, in seconds.
        end_s: of the recording.
    """
    means = []
    for start, end in segments:
        own = [word for word in words if start < word.source_s <= end]
        lags = [
            word.shown_s - start - i * (end - start) / len(own)
            for i, word in enumerate(own)
            if word.shown_s < end_s
        ]
        if lags:
            means.append(float(np.mean(lags)))
    return float(np.mean(means)) if means else float("nan")


def session_differences(
    text_url: str, api_key: str, run: TranslatedRun, settings: Mapping[str, Any]
) -> list[str]:
    """Sentences whose words are not those of a translation session that gets the same updates.

    Args:
        settings: of the sessions.
    """
    different = []
    for number, sources in sorted(run.sources.items()):
        opened = _post(text_url + _SESSIONS, api_key, settings)
        one, made = f"{text_url}{_SESSIONS}/{opened['id']}", ""
        for i, source in enumerate(sources):
            body = {"source": source, "final": i == len(sources) - 1}
            made = _post(f"{one}/updates", api_key, body)["text"]
        if made.split() != run.sentences.get(number, "").split():
            different.append(f"{run.sentences.get(number, '')!r}, by the session {made!r}")
    return different


def _post(url: str, api_key: str, body: Mapping[str, Any]) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {api_key}"}
    response = HTTP.post(url, json=body, headers=headers, timeout=ANSWER_S)
    response.raise_for_status()
    return response.json()
