"""check_pd: what SGLang makes of Whisper where prefill and decode are apart."""

import argparse
from pathlib import Path

import requests

from scripts.pd_servers import Disaggregated
from scripts.server import Server, ServerError
from scripts.speech_client import Speech, transcribe
from scripts.speech_data import read_audio

_MODEL = "whisper-base"
_AUDIO = Path(__file__).parent / "data" / "LJ001-0001.flac"


def check(options: argparse.Namespace) -> dict[str, float]:
    """The figure whisper_equal: 1 if the transcript is a single server's, 0 if there is none."""
    speech = Speech.of(read_audio(_AUDIO))
    with Server(_MODEL, name="single-whisper") as server:
        expected = transcribe(server.base_url, speech)
    try:
        with Disaggregated(_MODEL, name="pd-whisper") as pd:
            found = transcribe(pd.base_url, speech)
    except (ServerError, requests.RequestException, RuntimeError, KeyError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        print(f"no transcript: {lines[-1][:300]}", flush=True)
        return {"whisper_equal": 0}
    print(f"single: {expected.text!r}\npd:     {found.text!r}", flush=True)
    return {"whisper_equal": int(found.token_ids == expected.token_ids)}
