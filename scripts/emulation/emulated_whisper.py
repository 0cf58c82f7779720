"""SpecASR on the emulated server: Whisper's decoder under the CUDA path, beside its encoder.

Plain SGLang's Whisper on the CPU transcribes clips; the emulated server does so in SpecASR's modes,
clips and modes mixed in one batch.

    python -m scripts.emulation.emulated_whisper [--quick] [--json FILE]
"""

import sys
from collections.abc import Sequence
from typing import Any

from scripts.emulation.cuda_environment import one_thread
from scripts.emulation.emulated_server import EmulatedServer, check_settings, left_running
from scripts.emulation.traffic import Job, ask, difference, run
from scripts.lib.figures import parser, report
from scripts.lib.served_metrics import read_metrics
from scripts.lib.server import Server
from scripts.lib.speech_client import MAX_NEW_TOKENS, MODES, Speech
from scripts.speech_data import FOLDER, read_clips

TARGET, DRAFT = "whisper-base", "whisper-tiny.en"
_LONGEST_S = 15
_SSSD = ["--speculative-algorithm", "SSSD", "--draft-model", DRAFT, "--enable-metrics"]
_PARAMS: dict[str, dict[str, Any]] = {
    "random": {"drafter": "random", "budget": "fixed"},
    "auto": {},
    **{name: {**MODES[name], "budget": "fixed"} for name in ("AR", "(8,2)", "ASP", "TSP")},
}


def speech_jobs(clips: int, every_mode: bool = True) -> list[Job]:
    """The modes taking turns.

    Args:
        every_mode: each clip in every mode; else every clip in half of them, the next one in the
            other half.
    """
    speech = [Speech.of(c) for c in read_clips(FOLDER) if c.seconds < _LONGEST_S][:clips]
    modes = list(_PARAMS.values())
    return [
        Job("specasr", _body(clip), modes[(i + turn) % len(modes)])
        for turn in range(0, len(modes), 1 if every_mode else 2)
        for i, clip in enumerate(speech)
    ]


def plain_whisper() -> Server:
    """Plain SGLang's Whisper on the CPU; not started."""
    return Server(TARGET, name="whisper")


def emulated_whisper() -> EmulatedServer:
    """Whisper on the emulated server, with SpecASR's draft model; not started."""
    return EmulatedServer(TARGET, [*_SSSD, "--drafters", "random"], name="emulated-whisper")


def ask_plain(server: Server, jobs: Sequence[Job]) -> list[Any]:
    """Plain SGLang's answer to every job; it is asked once for each clip."""
    known: dict[str, Any] = {}
    for job in jobs:
        url = job.body["audio_data"]
        if url not in known:
            known[url] = ask(server.base_url, job, drafted=False)
    return [known[job.body["audio_data"]] for job in jobs]


def whisper_figures(quick: bool) -> dict[str, float]:
    """Transcribe.

    Returns:
        emulated_transcripts, emulated_mismatches_specasr, emulated_accept_specasr (mean length),
        emulated_known_steps_specasr (steps whose tokens a prefill had shown), and requests that
        are still running (emulated_stuck_specasr).
    """
    jobs = speech_jobs(2 if quick else 8, not quick)
    with one_thread():
        # One after the other: each takes 4 GB.
        with plain_whisper() as plain:
            expected = ask_plain(plain, jobs)
        with emulated_whisper() as emulated:
            check_settings(emulated)
            got = run(emulated.base_url, jobs, drafted=True, in_flight=8)
            stuck = left_running(emulated)
            known = read_metrics(emulated.base_url)["known_steps_total"]
    wrong = [difference(*each) for each in zip(jobs, got, expected, strict=True)]
    for number, (job, found) in enumerate(zip(jobs, wrong, strict=True)):
        if found:
            print(f"    #{number} {job.params} {found}")
    lengths = [answer["meta_info"].get("spec_accept_length") or 1.0 for answer in got]
    return {
        "emulated_transcripts": len(jobs),
        "emulated_mismatches_specasr": sum(found is not None for found in wrong),
        "emulated_known_steps_specasr": known,
        "emulated_accept_specasr": sum(lengths) / len(lengths),
        "emulated_stuck_specasr": stuck,
    }


def _body(clip: Speech) -> dict[str, Any]:
    return {
        "text": "",  # the decoder's prompt comes from SGLang's Whisper processor
        "audio_data": clip.url,
        "modalities": ["audio"],
        "sampling_params": {"temperature": 0.0, "max_new_tokens": MAX_NEW_TOKENS},
    }


def main() -> int:
    options = parser(__doc__).parse_args()
    figures = whisper_figures(options.quick)
    report(figures, options.json)
    return int(figures["emulated_mismatches_specasr"] > 0)


if __name__ == "__main__":
    sys.exit(main())
