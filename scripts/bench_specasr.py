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
        [--docs DIR]
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from scripts.lib.figures import parser, report
from scripts.lib.result_page import add_docs_flag, aligned
from scripts.lib.served_metrics import read_metrics
from scripts.lib.server import Server
from scripts.lib.specasr_page import table, write_page
from scripts.lib.specasr_runs import COUNTED, Row, Run, prefill_excess, summarize
from scripts.lib.speech_client import (
    AUTOREGRESSIVE,
    MODES,
    PUBLISHED_TWO_PASS,
    TWO_PASS,
    Speech,
    transcribe,
)
from scripts.lib.word_errors import WordErrors, draft_texts
from scripts.speech_data import FOLDER, Clip, read_clips
from sglang_ext.models import default_cache_dir, resolve
from speech.enlarge import CONFIG_KEY, Enlargement, enlarge

MEDIUM_DECODER = Enlargement(width=2, decoder_layers=24)  # of whisper-base: medium.en's decoder
LONGEST_S = 30.0
QUICK_CLIPS = 5


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
    add_docs_flag(args)
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
    shown = table(rows, wers, seconds, describe(Path(target)))
    print(f"\n{aligned(shown)}")
    enlarged = CONFIG_KEY in read_config(Path(target))
    figures = summarize(rows, seconds) | {
        "wer_target": wers[AUTOREGRESSIVE],
        "wer_specasr": wers[TWO_PASS],
        "wer_draft": wer_draft,
        "audio_seconds": seconds,
        "target_enlarged": int(enlarged),
    }
    report(figures, options.json)
    if options.docs:
        write_page(options.docs, rows, shown, figures)
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


if __name__ == "__main__":
    sys.exit(main())
