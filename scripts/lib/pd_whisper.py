"""check_pd: what SGLang makes of Whisper where prefill and decode are apart."""

import argparse

import httpx

from scripts.lib.pd_servers import Disaggregated
from scripts.lib.server import Server, ServerError
from scripts.lib.speech_client import Speech, transcribe
from scripts.speech_data import read_audio
from sglang_ext.sweep.data_files import CARRIED

_MODEL = "whisper-base"
_SPECASR = ["--speculative-algorithm", "SSSD", "--draft-model", "whisper-tiny.en"]
_AUDIO = CARRIED / "LJ001-0001.flac"


def check(options: argparse.Namespace) -> dict[str, float]:
    """The figure whisper_equal: how many of two transcripts are a single server's.

    One is decoded plainly, the other with SpecASR.
    """
    speech = Speech.of(read_audio(_AUDIO))
    with Server(_MODEL, name="single-whisper") as server:
        expected = transcribe(server.base_url, speech)
    print(f"single: {expected.text!r}", flush=True)
    equal = 0
    try:
        with Disaggregated(_MODEL, _SPECASR, name="pd-whisper") as pd:
            for drafter in ("none", "specasr"):
                found = transcribe(pd.base_url, speech, {"drafter": drafter, "budget": "fixed"})
                print(f"pd, {drafter}: {found.text!r}, {found.accept_length:.2f} tokens a step")
                equal += found.token_ids == expected.token_ids
    except (ServerError, httpx.HTTPError, RuntimeError, ValueError, KeyError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        print(f"no transcript: {lines[-1][:300]}", flush=True)
    return {"whisper_equal": equal}
