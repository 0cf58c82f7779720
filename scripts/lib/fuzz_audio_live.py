"""Audio files of a fuzzer sent to a running Whisper server."""

import base64
from collections.abc import Iterable
from typing import Any

import httpx

from scripts.lib.audio_seeds import written
from scripts.lib.client import TIMEOUT_S
from scripts.lib.http_client import HTTP

_EVERY = 4  # of so many files one goes to SGLang's /generate
_SERVER_ERROR = 500


class LiveRun:
    """Files sent to a server, and what came of them.

    Attributes:
        files: how many were sent.
        errors: answers from 500.
        crashes: times that the server did not answer.
        wrong: times that a valid file did not give what it gave at first.
        peak_mib: MiB that the server held at the most, above idle; 0: not measured.

    Args:
        url: of the server.
    """

    def __init__(self, url: str):
        self._url = url
        self._model = HTTP.get(url + "/v1/models", timeout=TIMEOUT_S).json()["data"][0]["id"]
        self._valid = written("wav", "pcm_s16le", 16_000, "mono", seconds=2.0)
        self.files = self.errors = self.crashes = self.wrong = 0
        self.peak_mib = 0.0
        self._expected = self._known()

    def send_class(self, kind: str, files: Iterable[bytes]) -> None:
        """Send files of a kind, then see that a valid one gives what it gave before."""
        for data in files:
            self.files += 1
            generate = self.files % _EVERY == 0
            try:
                answer = self._generate(data) if generate else self._transcribe(data)
            except (httpx.NetworkError, httpx.ProtocolError) as error:
                self.crashes += 1
                print(f"{kind}: no answer: {error}")
                return
            if answer.status_code >= _SERVER_ERROR:
                self.errors += 1
                print(f"{kind}, file {self.files}: {answer.status_code}: {answer.text[:200]}")
        if self._known() != self._expected:
            self.wrong += 1
            print(f"{kind}: a valid file does not give what it gave before")

    def figures(self) -> dict[str, float]:
        """What a report adds."""
        return {"live_files": self.files, "live_peak_mib": self.peak_mib}

    def _known(self) -> tuple[Any, ...]:
        transcribed = self._transcribe(self._valid)
        generated = self._generate(self._valid, max_new_tokens=16)
        body = transcribed.json() if transcribed.is_success else transcribed.text
        ids = generated.json().get("output_ids") if generated.is_success else generated.text
        return transcribed.status_code, body, generated.status_code, ids

    def _transcribe(self, data: bytes) -> httpx.Response:
        return HTTP.post(
            self._url + "/v1/audio/transcriptions",
            files={"file": ("audio", data)},
            data={"model": self._model, "language": "en", "return_token_ids": "true"},
            timeout=TIMEOUT_S,
        )

    def _generate(self, data: bytes, max_new_tokens: int = 1) -> httpx.Response:
        body = {
            "text": "",
            "audio_data": "data:audio/x;base64," + base64.b64encode(data).decode(),
            "modalities": ["audio"],
            "sampling_params": {"temperature": 0.0, "max_new_tokens": max_new_tokens},
        }
        return HTTP.post(self._url + "/generate", json=body, timeout=TIMEOUT_S)
