"""SpecASR against plain decoding and plain speculation, in the shape of SpecASR's Table II and
Figs. 11 to 13: what is drafted and accepted per round, and where a decoder's time goes.

One server decodes every clip in every mode, the modes taking turns clip by clip at batch 1: AR
(no drafts), the baselines (length, beams) = (8,1), (16,1), (8,2), ASP, ASP with draft recycling,
and TSP (on top of both; as in the paper, then as it is served by default). Times are the server's
own, of drafting and of the target's decode steps; encoders are shown apart. Of the repeats of a
clip in a mode the median time counts. TSP has drafts read along with the prompt: what the decoder
takes longer there than in AR's prefills counts too (the median difference of all runs, per clip).

The default target is whisper-base enlarged to the decoder of medium.en (`sglang-ext models
enlarge`): its words are base's, its cost is medium.en's. --target PATH takes a real one.

    python -m scripts.bench_specasr [--target T] [--draft D] [--audio DIR] [--repeats N] [--quick]
"""

import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scripts.lib.figures import parser, report
from scripts.lib.served_metrics import read_metrics
from scripts.lib.server import Server
from scripts.lib.speech_client import (
    AUTOREGRESSIVE,
    BASELINES,
    MODES,
    PUBLISHED_TWO_PASS,
    TWO_PASS,
    Speech,
    Transcript,
    transcribe,
)
from scripts.lib.word_errors import WordErrors, draft_texts
from scripts.speech_data import FOLDER, Clip, read_clips
from sglang_ext.models import default_cache_dir, resolve
from speech.enlarge import CONFIG_KEY, Enlargement, enlarge

MEDIUM_DECODER = Enlargement(width=2, decoder_layers=24)  # of whisper-base: medium.en's decoder
LONGEST_S = 30.0
QUICK_CLIPS = 5
# Metrics that count up; their differences around a request are the request's.
SECONDS = (
    "draft_seconds_total", "verify_seconds_total", "plain_seconds_total", "known_seconds_total",
)  # fmt: skip
ENCODER_SECONDS = "draft_prefill_seconds_total"
PREFILL_SECONDS = "prefill_decoder_seconds_total"
STEPS = ("verify_steps_total", "plain_steps_total")
DRAFTER = ("draft_steps", "decoded_tokens", "predicted_tokens", "accepted_tokens")
COUNTED = (
    *SECONDS, ENCODER_SECONDS, PREFILL_SECONDS, *STEPS, "accept_length_sum", "accept_length_count",
    *(f"drafter.{name}" for name in DRAFTER),
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One clip decoded once in one mode: its transcript, and what the metrics counted."""

    transcript: Transcript
    counted: Mapping[str, float]

    @property
    def decoder_seconds(self) -> float:
        return sum(self.counted[name] for name in SECONDS)


@dataclass
class Row:
    """A mode's results.

    Attributes:
        runs: for each clip, its repeats.
        prefill_excess: seconds that the target's decoder took longer in prefills than in AR's:
            TSP has drafts read there.
    """

    runs: list[list[Run]] = field(default_factory=list)
    prefill_excess: float = 0.0

    def prefills(self) -> list[float]:
        return [run.counted[PREFILL_SECONDS] for repeats in self.runs for run in repeats]

    def total(self, name: str) -> float:
        """A counted metric over all clips; of a clip's repeats, the one of median time counts."""
        return sum(run.counted[name] for run in self.typical())

    def typical(self) -> list[Run]:
        """Each clip's repeat with the median decoder time (the lower one of two)."""
        middles = []
        for repeats in self.runs:
            ranked = sorted(repeats, key=lambda run: run.decoder_seconds)
            middles.append(ranked[(len(ranked) - 1) // 2])
        return middles

    @property
    def rounds(self) -> float:
        """Steps of the target after the prefill, with drafts or without."""
        return sum(self.total(name) for name in STEPS)

    @property
    def accepted(self) -> float:
        """Drafted tokens that the target accepted (the bonus tokens are its own)."""
        return self.total("accept_length_sum") - self.total("accept_length_count")

    @property
    def draft_seconds(self) -> float:
        return self.total("draft_seconds_total")

    @property
    def target_seconds(self) -> float:
        steps = sum(self.total(name) for name in SECONDS) - self.draft_seconds
        return steps + self.prefill_excess

    @property
    def decoder_seconds(self) -> float:
        return self.draft_seconds + self.target_seconds

    @property
    def request_seconds(self) -> float:
        """From sending a request to its end, encoders and HTTP included."""
        return sum(run.transcript.seconds for run in self.typical())

    @property
    def decoding_acceptance(self) -> float:
        """Accepted tokens by tokens that the draft model decoded; 0 where it decoded none.

        Both are the draft model's tokens: the target may write the same text in more or fewer.
        """
        decoded = self.total("drafter.decoded_tokens")
        return self.total("drafter.accepted_tokens") / decoded if decoded else 0.0

    def per_round(self, tokens: float) -> float:
        return tokens / self.rounds if self.rounds else 0.0


def main() -> int:
    args = parser(__doc__, model=False)
    args.add_argument("--target", metavar="T", help="path or name [base enlarged, see above]")
    args.add_argument("--draft", default="whisper-tiny.en", metavar="D", help="[%(default)s]")
    args.add_argument("--audio", type=Path, default=FOLDER, metavar="DIR", help="[%(default)s]")
    args.add_argument("--repeats", type=int, default=3, help="of each clip in each mode [3]")
    args.add_argument(
        "--budget", choices=("mixed", "fixed", "auto"), default="mixed",
        help="fixed verifies all that is drafted, auto what pays; mixed: TSP as it is served "
        "(auto), the others as they were published (fixed) [%(default)s]",
    )  # fmt: skip
    options = args.parse_args()
    clips = referenced(read_clips(options.audio))
    if options.quick:
        clips, options.repeats = clips[:: max(1, len(clips) // QUICK_CLIPS)][:QUICK_CLIPS], 1
    target = resolve(options.target) if options.target else str(medium_cost_target())
    print(f"target {describe(Path(target))}; draft {options.draft}; {len(clips)} clips", flush=True)

    errors = WordErrors([clip.reference or "" for clip in clips])
    flags = [
        "--speculative-algorithm", "SSSD", "--draft-model", options.draft, "--enable-metrics",
        "--speculative-num-draft-tokens", "64", "--max-total-tokens", "4096",
    ]  # fmt: skip
    wer_draft = errors.rate(draft_texts(resolve(options.draft), clips))
    with Server(target, flags, name="specasr") as server:
        rows = measure(server.base_url, clips, options.repeats, options.budget)
    wers = {
        name: errors.rate(run.transcript.text for run in row.typical())
        for name, row in rows.items()
    }
    seconds = sum(clip.seconds for clip in clips)
    table(rows, wers, wer_draft, seconds, describe(Path(target)))
    enlarged = CONFIG_KEY in read_config(Path(target))
    figures = summarize(rows, seconds) | {
        "wer_target": wers[AUTOREGRESSIVE],
        "wer_specasr": wers[TWO_PASS],
        "wer_draft": wer_draft,
        "audio_seconds": seconds,
        "target_enlarged": int(enlarged),
    }
    report(figures, options.json)
    return int(figures["mismatches"] > 0)


def referenced(clips: Iterable[Clip]) -> list[Clip]:
    """The clips with a reference that fit into Whisper's window.

    Raises:
        ValueError: there is none.
    """
    kept = [clip for clip in clips if clip.reference and clip.seconds <= LONGEST_S]
    if not kept:
        raise ValueError("no clip of at most 30 s has a reference in references.tsv")
    return kept


def medium_cost_target() -> Path:
    """whisper-base with medium.en's decoder cost, made on first use."""
    folder = default_cache_dir() / "bench" / "whisper-base-w2-d24"
    if not folder.exists():
        source = Path(resolve("whisper-base"))
        enlarge(source, folder, MEDIUM_DECODER, name="whisper-base", progress=True)
    return folder


def read_config(folder: Path) -> dict:
    path = folder / "config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def describe(folder: Path) -> str:
    """What a target is, its cost, and honestly so where it was enlarged."""
    config = read_config(folder)
    if not config:
        return str(folder)
    name, made = folder.name, config.get(CONFIG_KEY)
    if made:
        name = f"{made['name']} enlarged to this cost (its words are {made['name']}'s)"
    return (
        f"{name}: decoder of {config['decoder_layers']} layers, d_model {config['d_model']}, "
        f"{config['decoder_attention_heads']} heads"
    )


def measure(url: str, clips: Sequence[Clip], repeats: int, budget: str) -> dict[str, Row]:
    """Every clip in every mode, `repeats` times, the modes taking turns at being first."""
    modes = {name: {"budget": budget_of(name, budget), **params} for name, params in MODES.items()}
    rows = {name: Row([[] for _ in clips]) for name in modes}
    speech = [Speech.of(clip) for clip in clips]
    for params in modes.values():  # what is compiled or allocated on first use
        run(url, speech[0], params)
    names = list(modes)
    for repeat in range(repeats):
        for index, clip in enumerate(speech):
            first = (repeat + index) % len(names)
            for name in names[first:] + names[:first]:
                rows[name].runs[index].append(run(url, clip, modes[name]))
            print(
                f"repeat {repeat + 1}, clip {index + 1} of {len(speech)}: "
                + ", ".join(
                    f"{name} {rows[name].runs[index][-1].decoder_seconds:.2f}" for name in names
                )
                + " s",
                flush=True,
            )
    rows[TWO_PASS].prefill_excess = prefill_excess(rows[TWO_PASS], rows[AUTOREGRESSIVE])
    return rows


def prefill_excess(row: Row, plain: Row) -> float:
    """Seconds that all clips' prefills take longer in one mode than in another."""
    pairs = zip(row.prefills(), plain.prefills(), strict=True)
    return len(row.runs) * statistics.median(own - other for own, other in pairs)


def budget_of(mode: str, budget: str) -> str:
    """custom_params.budget of a mode."""
    if budget != "mixed":
        return budget
    return "auto" if mode in (PUBLISHED_TWO_PASS, TWO_PASS) else "fixed"


def run(url: str, speech: Speech, params: Mapping[str, object]) -> Run:
    """One request and the difference of the metrics around it."""
    before = read_metrics(url)
    transcript = transcribe(url, speech, params)
    after = read_metrics(url)
    return Run(transcript, {name: after.get(name, 0) - before.get(name, 0) for name in COUNTED})


def mismatches(rows: Mapping[str, Row]) -> int:
    """Runs, of any mode, whose tokens are not those of AR's first run of the clip."""
    truth = [repeats[0].transcript.token_ids for repeats in rows[AUTOREGRESSIVE].runs]
    return sum(
        run.transcript.token_ids != expected
        for row in rows.values()
        for expected, repeats in zip(truth, row.runs, strict=True)
        for run in repeats
    )


def summarize(rows: Mapping[str, Row], seconds: float) -> dict[str, float]:
    """The figures; times are per 10 s of audio, of TSP where no mode is named."""
    plain = rows[AUTOREGRESSIVE].decoder_seconds
    tsp = rows[TWO_PASS]
    return {
        "speedup_asp_vs_ar": plain / rows["ASP"].decoder_seconds,
        "speedup_recycling_vs_ar": plain / rows["ASP+recycling"].decoder_seconds,
        "speedup_tsp_vs_ar": plain / tsp.decoder_seconds,
        "speedup_tsp_vs_best_baseline": best_baseline(rows) / tsp.decoder_seconds,
        "request_speedup_tsp_vs_ar": rows[AUTOREGRESSIVE].request_seconds / tsp.request_seconds,
        "decoding_acceptance_asp": rows["ASP+recycling"].decoding_acceptance,
        "accepted_per_round_tsp": tsp.per_round(tsp.accepted),
        "prefill_excess_ms_per_10s": per_10s(tsp.prefill_excess, seconds),
        "draft_ms_per_10s": per_10s(tsp.draft_seconds, seconds),
        "target_ms_per_10s": per_10s(tsp.target_seconds, seconds),
        "ar_ms_per_10s": per_10s(plain, seconds),
        "mismatches": mismatches(rows),
    }


def counted_late(rows: Mapping[str, Row]) -> bool:
    """Whether a request's last round is counted in the next request: AR accepts no drafts."""
    plain = (run for repeats in rows[AUTOREGRESSIVE].runs for run in repeats)
    return any(run.counted["drafter.accepted_tokens"] for run in plain)


def best_baseline(rows: Mapping[str, Row]) -> float:
    """Decoder seconds of the fastest plain speculation."""
    return min(rows[name].decoder_seconds for name in BASELINES)


def per_10s(decoder_seconds: float, audio_seconds: float) -> float:
    """Milliseconds per 10 s of audio."""
    return 1000 * decoder_seconds * 10 / audio_seconds


def table(
    rows: Mapping[str, Row],
    wers: Mapping[str, float],
    wer_draft: float,
    seconds: float,
    target: str,
) -> None:
    """Print the ablation: SpecASR's Table II, then its Figs. 11 to 13 as columns."""
    plain, baseline = rows[AUTOREGRESSIVE].decoder_seconds, best_baseline(rows)
    print(f"\n{target}; {seconds:.0f} s of audio, batch 1; WER of the draft alone {wer_draft:.1%}")
    print(
        f"{'mode':14} {'WER':>6} {'rounds':>7} {'draft':>6} {'pred/':>6} {'accept/':>7} "
        f"{'decoding':>8} | {'draft':>6} {'target':>7} {'total':>7} {'vs':>5} {'vs best':>7} "
        f"{'prefill':>7} {'draft':>7} {'request':>7}\n"
        f"{'':14} {'':>6} {'':>7} {'steps':>6} {'round':>6} {'round':>7} "
        f"{'accept.':>8} | {'ms/10s':>6} {'ms/10s':>7} {'ms/10s':>7} {'AR':>5} {'basel.':>7} "
        f"{'+ms/10s':>7} {'encoder':>7} {'ms/10s':>7}"
    )
    for name, row in rows.items():
        drafted = name != AUTOREGRESSIVE
        acceptance = f"{row.decoding_acceptance:.1%}" if drafted else "-"
        print(
            f"{name:14} {wers[name]:>6.1%} {row.rounds:>7.0f} "
            f"{row.total('drafter.draft_steps'):>6.0f} "
            f"{row.per_round(row.total('drafter.predicted_tokens')):>6.2f} "
            f"{row.per_round(row.accepted):>7.2f} {acceptance:>8} | "
            f"{per_10s(row.draft_seconds, seconds):>6.0f} "
            f"{per_10s(row.target_seconds, seconds):>7.0f} "
            f"{per_10s(row.decoder_seconds, seconds):>7.0f} "
            f"{plain / row.decoder_seconds:>5.2f} {baseline / row.decoder_seconds:>7.2f} "
            f"{per_10s(row.prefill_excess, seconds):>7.0f} "
            f"{per_10s(row.total(ENCODER_SECONDS), seconds):>7.0f} "
            f"{per_10s(row.request_seconds, seconds):>7.0f}"
        )
    if counted_late(rows):
        print("decoding acceptance is not exact: the server counts a request's last round late")
    print(
        "(rounds: steps of the target after its prefill; pred, accept: drafted tokens on the main\n"
        "chain, and drafted tokens accepted, the bonus not counted; decoding acceptance: accepted\n"
        "by decoded tokens, in the draft model's own; prefill +: what the target's decoder takes\n"
        "longer in prefills than AR's, in the totals; draft encoder: once a clip, in the target's\n"
        "prefill, not in the totals, as the target's is not; request: all, encoders and HTTP too)"
    )


if __name__ == "__main__":
    sys.exit(main())
