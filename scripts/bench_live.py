"""Live speech over /v1/realtime: words in real time through OpenAI's client, one to eight at once.

Clips are streamed as they would be spoken, through the unmodified `openai` client, each in every
audio format (--quick: in one), and held against what the file route makes of the clip as that
format carries it (G.711 has 8 kHz). Two policies take turns, clip by clip: AlignAtt as the server
has it by default, and LocalAgreement-2 with a step of one second and whole windows encoded. Two
more hear each clip in one format: LocalAgreement-2 without most of the windows' silence
(`padding_ms`, the server's default), and the same with the shorter step of --step-ms.

display_*_s: seconds from the end of a word in the audio (the file route's word times) to the delta
that shows it, of one stream with AlignAtt (--policy localagreement: with the shorter step, where a
server cannot read attention); one_second_display_*_s, padded_display_*_s and short_step_display_*_s
of the others; policy_speedup_p50 is one_second_display_p50_s by display_p50_s, policy_ratio_p90
display_p90_s by one_second_display_p90_s, policy_speedup_padded_p50 padded_display_p50_s by what
AlignAtt has of the same streams. display_*_s_N: N streams at once, for --minutes, heard by
--streams-model; streamed_clips, how many clips. wer_live (of the first), wer_one_second and
wer_file: word errors against the references, of one stream and of the file route; wer_padded and
wer_short_step, of fewer streams. wer_points: what wer_live is beyond wer_one_second, in points;
wer_file_points: beyond wer_file. delta_mismatches: items whose deltas
are not their transcript, byte for byte. lost_words: of runs of four and more that the file route
has and a stream has nothing for. errors: error events and failed items. silence_words: invented in
a silence. bad_input_failures: wrong clients that got neither an error nor a reason, while a stream
went on. closed_frees_s: from a closed socket to no request running.

Translation (scripts/lib/live_translations.py): the clips as one recording, once with what is not
settled and once with finished sentences only. ne_live, ne_live_finished: normalized erasure of what
was shown; longyaal_s, longyaal_finished_s: LongYAAL, computation included; translated_words.
session_differences: sentences whose words are not those that the session route gives for the same
updates; translation_errors: error events. The translator is the smallest model at hand that
translates: what SmolLM2-135M rewrites is its own (ne_live 0.44 of three clips).

    python -m scripts.bench_live [--model M] [--draft D|none] [--translate-model T|none]
        [--language L] [--audio DIR] [--streams 8] [--streams-model M] [--minutes 5]
        [--step-ms 500] [--policy alignatt|localagreement] [--cpu-weights int8] [--quick]
        [--json FILE]
"""

import argparse
import asyncio
import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from scripts.lib.client import TIMEOUT_S
from scripts.lib.figures import parser, report
from scripts.lib.http_client import HTTP
from scripts.lib.live_client import (
    FORMATS,
    LiveRun,
    as_sent,
    display_delays,
    lost_words,
    stream,
    wire_bytes,
)
from scripts.lib.live_hostile import Hostile
from scripts.lib.live_translations import long_yaal, session_differences, translated
from scripts.lib.server import Server
from scripts.lib.word_errors import WordErrors
from scripts.speech_data import FOLDER, Clip, encode, joined, read_clips

KEY = "live"
SERVED = ("--speculative-algorithm", "SSSD", "--api-key", KEY)
PADDED: Mapping[str, Any] = {"live_policy": "localagreement", "step_ms": 1000}
ONE_SECOND: Mapping[str, Any] = {**PADDED, "padding_ms": 30_000}
QUICK_CLIPS = 3
SILENCE_S, QUICK_SILENCE_S = 600.0, 20.0
MINUTES = 5.0
PAUSE_S = 0.8
MOST_NE = 0.2


@dataclass(frozen=True)
class Heard:
    """What the file route makes of a clip: the text, and each word with its end in seconds."""

    text: str
    words: list[tuple[str, float]]


@dataclass
class Streams:
    """The runs of a policy, each with the number of its case."""

    runs: list[tuple[int, LiveRun]] = field(default_factory=list)

    def first(self, count: int) -> "Streams":
        """Those of the first cases."""
        return Streams([run for run in self.runs if run[0] < count])

    def delays(self, heard: Sequence[Heard]) -> np.ndarray:
        parts = [display_delays(run, heard[i].words) for i, run in self.runs]
        return np.array([delay for part in parts for delay in part])


class Bench:
    """Streams of one server.

    A case is a clip in an audio format. The first ones are all clips, the formats by turns.

    Args:
        clips: with references.
        formats: that each clip comes in, 1 to 5.
    """

    def __init__(self, server: Server, clips: Sequence[Clip], formats: int = 1):
        self._url = server.base_url
        self.clips = clips
        self.cases = [
            (clip, FORMATS[(i + turn) % len(FORMATS)])
            for turn in range(formats)
            for i, clip in enumerate(clips)
        ]
        self.references = [clip.reference or "" for clip, _ in self.cases]
        self.heard = [self._file(as_sent(clip, wire)) for clip, wire in self.cases]

    async def in_turn(
        self, turns: Mapping[str, Mapping[str, Any]], cases: int
    ) -> dict[str, Streams]:
        """The first cases with every policy, one stream after the other.

        Args:
            turns: of each case: policies (`session.sglang_ext`) by name.
        """
        made = {name: Streams() for name in turns}
        for index in range(cases):
            for name, policy in turns.items():
                made[name].runs.append((index, await self._stream(index, policy)))
            print(f"streamed {index + 1} of {cases}: {', '.join(turns)}", flush=True)
        return made

    def word_errors(self, streams: Streams) -> float:
        """Word error rate of streams."""
        wanted = [self.references[i] for i, _ in streams.runs]
        return WordErrors(wanted).rate([run.text for _, run in streams.runs])

    async def at_once(self, streams: int, policy: Mapping[str, Any], seconds: float) -> Streams:
        """So many streams, each of one clip after another, begun until so many seconds are over;
        each clip once at least."""
        made, ends = Streams(), time.monotonic() + seconds
        order = itertools.count()

        async def one() -> None:
            for place in order:  # whoever is free takes the next
                if place >= len(self.clips) and time.monotonic() > ends:
                    return
                index = place % len(self.clips)
                made.runs.append((index, await self._stream(index, policy)))

        await asyncio.gather(*(one() for _ in range(streams)))
        return made

    async def _stream(self, index: int, policy: Mapping[str, Any]) -> LiveRun:
        clip, wire = self.cases[index]
        return await stream(self._url, KEY, clip, wire, policy)

    async def silence(self, seconds: float) -> LiveRun:
        """A silence in real time."""
        clip = Clip("silence", np.zeros((1, round(seconds * 16_000)), np.float32), 16_000)
        return await stream(self._url, KEY, clip, FORMATS[1], ONE_SECOND)

    async def hostile(self) -> tuple[list[str], float, LiveRun]:
        """Wrong clients beside a right one: what failed, how soon a closed socket's request was
        over, and the right one's run."""
        hostile, clip = Hostile(self._url, KEY), self.clips[0]
        beside = asyncio.create_task(stream(self._url, KEY, clip, FORMATS[0], ONE_SECOND))
        failed = await hostile.failures()
        run = await beside
        return failed, await hostile.closed_frees_s(wire_bytes(clip.mono(24_000), FORMATS[0])), run

    def _file(self, clip: Clip) -> Heard:
        response = HTTP.post(
            f"{self._url}/v1/audio/transcriptions",
            files={"file": ("clip.wav", encode(clip))},
            data={
                "model": self._model,
                "language": "en",
                "response_format": "verbose_json",
                "timestamp_granularities[]": "word",
            },
            headers={"Authorization": f"Bearer {KEY}"},
            timeout=TIMEOUT_S,
        )
        response.raise_for_status()
        body = response.json()
        return Heard(body["text"], [(w["word"], w["end"]) for w in body["words"]])

    @property
    def _model(self) -> str:
        headers = {"Authorization": f"Bearer {KEY}"}
        models = HTTP.get(self._url + "/v1/models", headers=headers, timeout=TIMEOUT_S).json()
        return models["data"][0]["id"]


class TranslationBench:
    """Translated streams of a Whisper server.

    Args:
        text: the server that translates.
        language: to translate into.
    """

    def __init__(self, whisper: Server, text: Server, language: str, step_ms: int):
        self._url, self._text_url = whisper.base_url, text.base_url
        self._language = language
        self._step_ms = step_ms

    def measured(self, clips: Sequence[Clip]) -> dict[str, float]:
        """All figures of translations of the clips, one behind the other."""
        clip, segments = joined(clips, 24_000, PAUSE_S)
        figures: dict[str, float] = {"session_differences": 0, "translation_errors": 0}
        for suffix, finished in (("", False), ("_finished", True)):
            session = {
                "audio": {
                    "input": {"transcription": {"language": "en"}},
                    "output": {"language": self._language},
                },
                "sglang_ext": {"finished_only": finished, "step_ms": self._step_ms},
            }
            run = asyncio.run(translated(self._url, KEY, clip, session))
            settings = {
                "source_language": "en",
                "target_language": self._language,
                "append_only": True,
            }
            different = session_differences(self._text_url, KEY, run, settings)
            for message in (*run.errors, *different):
                print("failed:", message)
            figures["session_differences"] += len(different)
            figures["translation_errors"] += len(run.errors)
            figures[f"ne_live{suffix}"] = run.erasure.value
            figures[f"longyaal{suffix}_s"] = long_yaal(run.words, segments, clip.seconds)
            figures[f"translated_words{suffix}"] = len(run.words)
        return figures

    @staticmethod
    def failed(figures: dict[str, float]) -> bool:
        """Whether a figure is beyond its limit."""
        return bool(
            figures["session_differences"]
            or figures["translation_errors"]
            or figures["ne_live"] > MOST_NE
            or figures["ne_live_finished"]
            or not figures["translated_words"]
        )


def options_of() -> argparse.Namespace:
    """The command line."""
    args = parser(__doc__, model=False)
    args.add_argument("--model", metavar="M", help="[whisper-base; --quick: whisper-tiny.en]")
    args.add_argument("--draft", metavar="D", help="[whisper-tiny.en; --quick: none]")
    args.add_argument(
        "--translate-model",
        default="qwen2.5-coder-0.5b-instruct",
        metavar="T",
        help="[%(default)s]",
    )
    args.add_argument("--language", default="fr", metavar="L", help="[%(default)s]")
    args.add_argument("--audio", type=Path, default=FOLDER, metavar="DIR", help="[%(default)s]")
    args.add_argument(
        "--streams", type=int, default=8, metavar="N", help="at once; 1: none are [%(default)s]"
    )
    args.add_argument(
        "--streams-model",
        default="whisper-tiny.en",
        metavar="M",
        help="that hears the streams at once [%(default)s]",
    )
    args.add_argument(
        "--minutes", type=float, metavar="M", help="of streams at once [5; --quick: a clip each]"
    )
    args.add_argument(
        "--cpu-weights",
        default="int8",
        metavar="FORMAT",
        help="of all servers, as `sglang-ext captions` starts them [%(default)s]",
    )
    args.add_argument("--step-ms", type=int, default=500, metavar="MS", help="[%(default)s]")
    args.add_argument(
        "--policy",
        default="alignatt",
        choices=("alignatt", "localagreement"),
        help="that display_*_s are of [%(default)s]",
    )
    return args.parse_args()


def main() -> int:
    options = options_of()
    model = options.model or ("whisper-tiny.en" if options.quick else "whisper-base")
    draft = options.draft or ("none" if options.quick else "whisper-tiny.en")
    minutes = options.minutes or (0.0 if options.quick else MINUTES)
    streams = min(options.streams, QUICK_CLIPS) if options.quick else options.streams
    clips = [clip for clip in read_clips(options.audio) if clip.reference]
    clips = clips[:QUICK_CLIPS] if options.quick else clips
    weights = [*SERVED, "--cpu-weights", options.cpu_weights]
    flags = [*weights, *(["--drafter", "none"] if draft == "none" else ["--draft-model", draft])]
    short = {"live_policy": "localagreement", "step_ms": options.step_ms}
    tried = {"live_policy": "alignatt"} if options.policy == "alignatt" else short
    with Server(model, flags, name="live") as server:
        bench = Bench(server, clips, 1 if options.quick else len(FORMATS))
        silence_s = QUICK_SILENCE_S if options.quick else SILENCE_S
        figures, streamed = asyncio.run(measured(bench, short, tried, silence_s))
    if streams > 1:
        plain = [*weights, "--drafter", "none"]
        more, crowd = crowded(options.streams_model, plain, clips, streams, tried, 60 * minutes)
        figures |= more
        streamed += crowd
    figures |= faults(streamed)
    wrong = ("delta_mismatches", "errors", "lost_words", "silence_words", "bad_input_failures")
    failed = any(figures[name] for name in wrong) or not figures["words_timed"]
    if options.translate_model != "none":
        made = translations(options, model, flags, clips)
        figures |= made
        failed |= TranslationBench.failed(made)
    report(figures, options.json)
    return int(failed)


def translations(
    options: argparse.Namespace, model: str, flags: Sequence[str], clips: Sequence[Clip]
) -> dict[str, float]:
    """The figures of live translation.

    Args:
        flags: of the Whisper server.
    """
    ssbd = [*SERVED, "--cpu-weights", options.cpu_weights, "--drafters", "ssbd"]
    with Server(options.translate_model, ssbd, name="text") as text:
        more = ["--translate-with", text.base_url, "--translate-key", KEY]
        with Server(model, [*flags, *more], name="live") as whisper:
            bench = TranslationBench(whisper, text, options.language, options.step_ms)
            return bench.measured(clips)


async def compared(
    bench: Bench, short: Mapping[str, Any], tried: Mapping[str, Any]
) -> tuple[dict[str, float], list[Streams]]:
    """The figures of one stream by policy, and the streams."""
    heard, clips = bench.heard, len(bench.clips)
    made = await bench.in_turn({"live": tried, "one_second": ONE_SECOND}, len(bench.cases))
    made |= await bench.in_turn({"padded": PADDED, "short_step": short}, clips)
    figures: dict[str, float] = {"clips": clips, "step_ms": short["step_ms"]}
    for name, streams in made.items():
        prefix = "" if name == "live" else f"{name}_"
        found = delays("", streams.delays(heard))
        figures |= {f"{prefix}{key}": value for key, value in found.items()}
        figures[f"wer_{name}"] = bench.word_errors(streams)
    shown, slower = figures["display_p50_s"], figures["one_second_display_p50_s"]
    figures["policy_speedup_p50"] = slower / shown
    figures["policy_ratio_p90"] = figures["display_p90_s"] / figures["one_second_display_p90_s"]
    shown = delays("", made["live"].first(clips).delays(heard))["display_p50_s"]
    figures["policy_speedup_padded_p50"] = figures["padded_display_p50_s"] / shown
    figures["words_timed"] = len(made["live"].delays(heard))
    figures["wer_file"] = WordErrors(bench.references).rate([one.text for one in heard])
    for name, other in (("wer_points", "one_second"), ("wer_file_points", "file")):
        figures[name] = 100 * (figures["wer_live"] - figures[f"wer_{other}"])
    return figures, list(made.values())


Streamed = list[tuple[LiveRun, str]]
"""Runs, each with what the file route makes of its audio."""


async def measured(
    bench: Bench, short: Mapping[str, Any], tried: Mapping[str, Any], silence_s: float
) -> tuple[dict[str, float], Streamed]:
    """The figures of one stream, a silence and wrong clients, and all that was streamed.

    Args:
        short, tried: policies (`session.sglang_ext`) beside LocalAgreement-2 at one second.
    """
    figures, every = await compared(bench, short, tried)
    silent = await bench.silence(silence_s)
    failed, freed_s, beside = await bench.hostile()
    for message in failed:
        print("failed:", message)
    runs = [*(made for streams in every for made in streams.runs), (0, beside)]
    figures |= {
        "silence_words": len(silent.text.split()),
        "bad_input_failures": len(failed),
        "closed_frees_s": freed_s,
    }
    return figures, [*((run, bench.heard[i].text) for i, run in runs), (silent, "")]


def crowded(
    model: str,
    flags: Sequence[str],
    clips: Sequence[Clip],
    streams: int,
    policy: Mapping[str, Any],
    seconds: float,
) -> tuple[dict[str, float], Streamed]:
    """The figures of many streams at once, on a server of their own, and all that was streamed."""
    with Server(model, flags, name="streams") as server:
        bench = Bench(server, clips)
        runs = asyncio.run(bench.at_once(streams, policy, seconds))
    figures = delays(f"_{streams}", runs.delays(bench.heard)) | {"streamed_clips": len(runs.runs)}
    return figures, [(run, bench.heard[i].text) for i, run in runs.runs]


def faults(streamed: Streamed) -> dict[str, float]:
    """What went wrong in streams, and how far behind one was."""
    errors = [message for run, _ in streamed for message in run.errors]
    for message in errors:
        print("failed:", message)
    return {
        "lag_most_s": max(lag for run, _ in streamed for lag in run.lags),
        "delta_mismatches": sum(run.mismatches for run, _ in streamed),
        "lost_words": sum(lost_words(run, text) for run, text in streamed),
        "errors": len(errors),
    }


def delays(suffix: str, seconds: np.ndarray) -> dict[str, float]:
    """Percentiles of display delays."""
    if not len(seconds):
        raise SystemExit("no word of the streams is one of the file route's")
    return {f"display_p{p}_s{suffix}": float(np.percentile(seconds, p)) for p in (50, 90, 99)}


if __name__ == "__main__":
    sys.exit(main())
