"""Windows of audio -> text, by a Whisper server's /v1/audio/transcriptions."""

import asyncio
import io
import wave
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np

from sglang_ext.api.calls import RequestError, call
from speech.audio import SAMPLE_RATE
from speech.streaming import Span, Window

_RETRY_S = 1.0
_BYTES_PER_SAMPLE = 2


class Recognition:
    """Transcribes windows for speech.streaming.StreamingRecognizer.

    Args:
        client: of the server.
        model: its name there.
        language: ISO code.
        prompt: names and words that may come up.
        on_error: called with one line for each request that failed.
    """

    def __init__(
        self,
        client: httpx.AsyncClient,
        model: str,
        language: str,
        prompt: str,
        on_error: Callable[[str], None],
    ):
        self._client = client
        self._model = model
        self._language = language
        self._prompt = prompt
        self._on_error = on_error

    async def transcribe(self, window: Window) -> list[Span] | None:
        """The window's text; None after an error, a second later."""
        fields = {
            "model": self._model,
            "language": self._language,
            "prompt": f"{self._prompt} {window.prompt}".strip(),
            "response_format": "verbose_json",
            "temperature": "0",
            # What will be heard again is not worth decoding again.
            "temperature_fallback": "true" if window.final else "false",
        }
        file = ("window.wav", wav_bytes(window.samples), "audio/wav")
        try:
            body = await call(
                self._client, "POST", "/v1/audio/transcriptions", data=fields, files={"file": file}
            )
            return _spans(body, len(window.samples) / SAMPLE_RATE)
        except RequestError as error:
            self._on_error(f"recognition: {error}")
            await asyncio.sleep(_RETRY_S)
            return None


async def served_model(client: httpx.AsyncClient) -> str:
    """The name of the model that a server has.

    Raises:
        RequestError: it does not say.
    """
    body = await call(client, "GET", "/v1/models")
    try:
        return str(body["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise RequestError(f"{client.base_url} names no model at /v1/models") from None


def wav_bytes(samples: np.ndarray) -> bytes:
    """float32[n] at 16 kHz as a wav file of 16 bits."""
    data = (samples.clip(-1.0, 1.0) * 32767).round().astype("<i2").tobytes()
    file = io.BytesIO()
    with wave.open(file, "wb") as wav:
        wav.setnchannels(1)
        wav.setsampwidth(_BYTES_PER_SAMPLE)
        wav.setframerate(SAMPLE_RATE)
        wav.writeframes(data)
    return file.getvalue()


def _spans(body: dict[str, Any], duration: float) -> list[Span]:
    """The segments of a verbose_json; a server that makes none has one text for all."""
    try:
        if "segments" in body:
            return [Span(float(s["start"]), float(s["end"]), s["text"]) for s in body["segments"]]
        return [Span(0.0, duration, body["text"])]
    except (KeyError, TypeError, ValueError):
        raise RequestError("the server's answer is no verbose_json transcript") from None
