"""Part `asr` of scripts.bench_cpu_peers: Whisper here and in faster-whisper, the same weights."""

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scripts.bench_specasr import referenced
from scripts.lib.cpu_peers_common import Taken, ratio_figures, weights_flags
from scripts.lib.peer_process import PeerProcess
from scripts.lib.peer_weights import peer_weights
from scripts.lib.server import Server
from scripts.lib.speech_client import Speech, transcribe_all
from scripts.lib.word_errors import WordErrors
from scripts.speech_data import Clip, encode, read_clips
from sglang_ext.cpu.install import usable_cores
from speech.audio import SAMPLE_RATE

TARGET, DRAFT = "whisper-base", "whisper-tiny.en"
PEER, PLAIN, SPECASR = "faster-whisper int8", "plain", "specasr"
PARAMS = {PLAIN: {"drafter": "none"}, SPECASR: {"drafter": "specasr"}}
TOGETHER = 8
_AT_ONCE = "_eight_at_once"
FULL_CLIPS, QUICK_CLIPS = 30, 8
_FLAGS = [
    "--speculative-algorithm", "SSSD", "--draft-model", DRAFT, "--max-total-tokens", "16384",
]  # fmt: skip

# What transcribes clips, one behind the other or at once: their texts.
Transcribe = Callable[[Sequence[int]], list[str]]


@dataclass
class Column:
    """What one engine took and wrote.

    Attributes:
        alone: of each clip; together: of each group of TOGETHER.
        texts: of each clip, as written alone.
    """

    alone: list[Taken] = field(default_factory=list)
    together: list[Taken] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)


def asr_figures(options: argparse.Namespace) -> dict[str, float]:
    """The figures; see scripts.bench_cpu_peers.

    Raises:
        UsageError, PeerError, ValueError: it cannot be measured; the message says why.
    """
    flags = weights_flags(options.asr_weights, "--asr-weights")
    count = QUICK_CLIPS if options.quick else FULL_CLIPS
    clips = referenced(read_clips(options.audio))
    clips = clips[:: max(1, len(clips) // count)][:count]
    columns = measure(clips, flags, options.peers)
    errors = WordErrors([clip.reference or "" for clip in clips])
    seconds = [clip.seconds for clip in clips]
    figures = figures_of(columns, sum(seconds)) | per_audio_second(columns, seconds)
    for name, column in columns.items():
        figures[f"asr_wer_{label(name)}"] = errors.rate(column.texts)
    if flags:
        exact = texts_in_float32(clips)
        figures["asr_wer_points_above_fp32"] = 100.0 * (
            figures[f"asr_wer_{SPECASR}"] - errors.rate(exact)
        )
    return figures


def label(name: str) -> str:
    """An engine's name within a figure's."""
    return "faster_whisper" if name == PEER else name


def measure(clips: Sequence[Clip], flags: Sequence[str], python: Path) -> dict[str, Column]:
    """Every clip in every engine, and groups of clips at once, the engines taking turns."""
    columns = {name: Column() for name in (PEER, PLAIN, SPECASR)}
    speech = [Speech.of(clip) for clip in clips]
    model = str(peer_weights(TARGET))
    with tempfile.TemporaryDirectory() as folder:
        files = [write_wav(Path(folder), clip) for clip in clips]
        threads = ["--threads", str(usable_cores()), "--compute", "int8"]
        with (
            PeerProcess("peer_whisper.py", [model, *threads], python) as peer,
            Server(TARGET, [*_FLAGS, *flags], name="asr") as server,
        ):

            def run(name: str, places: Sequence[int]) -> tuple[Taken, list[str]]:
                return (
                    by_peer(peer, [files[i] for i in places])
                    if name == PEER
                    else by_server(server, name, [speech[i] for i in places])
                )

            for name in columns:  # what is loaded or made on first use
                for places in ([0], range(min(TOGETHER, len(clips)))):
                    run(name, places)
            for i in range(len(clips)):
                for name in turned(list(columns), i):
                    taken, texts = run(name, [i])
                    columns[name].alone.append(taken)
                    columns[name].texts += texts
                print(line(f"clip {i + 1} of {len(clips)}", columns, "alone"), flush=True)
            for turn, first in enumerate(range(0, len(clips) - TOGETHER + 1, TOGETHER)):
                for name in turned(list(columns), turn):
                    taken, _ = run(name, range(first, first + TOGETHER))
                    columns[name].together.append(taken)
                print(line(f"clips {first + 1} on at once", columns, "together"), flush=True)
    return columns


def by_peer(peer: PeerProcess, files: Sequence[str]) -> tuple[Taken, list[str]]:
    """Clips as one batch, or one alone."""
    answer = peer.ask(files=list(files), together=len(files) > 1)
    return Taken(answer["seconds"], answer["cpu_s"]), answer["texts"]


def by_server(server: Server, name: str, speech: Sequence[Speech]) -> tuple[Taken, list[str]]:
    """Clips that are all sent at once."""
    wall, cpu = time.perf_counter(), server.cpu_seconds()
    done = transcribe_all(server.base_url, speech, PARAMS[name], in_flight=len(speech))
    taken = Taken(time.perf_counter() - wall, server.cpu_seconds() - cpu)
    return taken, [transcript.text for transcript in done]


def turned(names: list[str], turn: int) -> list[str]:
    """The names, another one first each turn."""
    first = turn % len(names)
    return names[first:] + names[:first]


def line(what: str, columns: dict[str, Column], kind: str) -> str:
    """What the last piece of work took in each engine."""
    last = {name: getattr(column, kind)[-1] for name, column in columns.items()}
    shown = (f"{name} {t.seconds:.2f} s, {t.cpu_s:.2f} CPU s" for name, t in last.items())
    return f"{what}: " + "; ".join(shown)


def figures_of(columns: dict[str, Column], audio_s: float) -> dict[str, float]:
    """Ratios of ours to faster-whisper's, ours with SpecASR where nothing else is said."""
    figures: dict[str, float] = {"asr_clips": len(columns[PEER].alone), "asr_audio_s": audio_s}
    for name in (SPECASR, PLAIN):
        end = "" if name == SPECASR else f"_{name}"
        for kind, more in (("alone", ""), ("together", _AT_ONCE)):
            ours, theirs = getattr(columns[name], kind), getattr(columns[PEER], kind)
            if not ours:
                continue
            for what, field_name in (("cpu", "cpu_s"), ("wall", "seconds")):
                figures |= ratio_figures(
                    f"asr_{what}_ratio{more}{end}",
                    [getattr(t, field_name) for t in ours],
                    [getattr(t, field_name) for t in theirs],
                )
    return figures


def per_audio_second(columns: dict[str, Column], seconds: Sequence[float]) -> dict[str, float]:
    """What a second of audio took in each engine.

    Args:
        seconds: of each clip.
    """
    figures = {}
    together = sum(seconds[: len(seconds) // TOGETHER * TOGETHER])
    for name, column in columns.items():
        for kind, more, audio_s in (("alone", "", sum(seconds)), ("together", _AT_ONCE, together)):
            taken = getattr(column, kind)
            if taken:
                cpu, wall = sum(t.cpu_s for t in taken), sum(t.seconds for t in taken)
                figures[f"asr_cpu_s_per_audio_s{more}_{label(name)}"] = cpu / audio_s
                figures[f"asr_wall_s_per_audio_s{more}_{label(name)}"] = wall / audio_s
    return figures


def write_wav(folder: Path, clip: Clip) -> str:
    """The clip as the server gets it: 16 kHz, mono, 16 bits."""
    path = folder / f"{clip.name}.wav"
    mono = Clip(clip.name, clip.mono(SAMPLE_RATE)[None], SAMPLE_RATE)
    path.write_bytes(encode(mono))
    return str(path)


def texts_in_float32(clips: Sequence[Clip]) -> list[str]:
    """What the exact weights transcribe."""
    with Server(TARGET, _FLAGS, name="asr-fp32") as server:
        done = transcribe_all(server.base_url, [Speech.of(c) for c in clips], PARAMS[SPECASR])
    return [transcript.text for transcript in done]
