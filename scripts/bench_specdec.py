"""SpecDec and SpecDec++ (arXiv 2203.16487) against plain decoding (AT), SSSD and suffix decoding.

Sentences of multi30k are translated from English into French and German, one by one, by methods
that take turns on each sentence, and at being first. AT runs on plain SGLang; everything else on a
server of ours that is up beside it. Every answer starts with the instruction in the radix cache,
and nothing else. What the target wrote of sentences of the training half ("distilled") is in the
datastore, so that SSSD and suffix decoding retrieve from what a trained drafter learned from.
Methods with a length verify all that is drafted (`budget: fixed`), of SpecDec's blocks of k places
the likeliest k nodes, or the chain as published; "budget auto" is a server's own choice. Relaxed
rows accept by SpecDec++'s rule (docs/relaxed.md), with SSSD, with SpecDec, and with SSBD on
sentences that grow. Lengths and settings of the rules are swept on fewer sentences. Then sentences
are in flight together, batch 8 and more. Both servers' weights are in 8 bits, as a CPU is best
served with (--cpu-weights).

SpecDec's rows need --draft-model, a directory of `sglang-ext drafter train`, or --train-minutes: so
long a drafter is trained on the distilled outputs, and with --shared-encoder another one that reads
the target's states instead (--shared-draft-model, where it is trained). --quick trains both. Where
there are both, the rows are of the one that drafts more of held-out outputs; the other is compared
with it. What `sglang-ext drafter distill` has written (docs/specdec.md) is read with --data. Suffix
decoding's rows need arctic-inference (docs/peers.md). What is not there is said to be absent.

Figures: mismatches (outputs of exact methods that are not AT's, at any batch size),
accepted_per_step_* (tokens that a decode step commits), speedup_* (tokens/s by AT's, batch 1):
specdec, specdecpp (SpecDec++ (3, 1)), sssd, together (SpecDec with SSSD), auto (`--drafter auto`);
speedup_specdec_vs_sssd, speedup_both_vs_better (together by the better one of the two), bleu_*,
bleu_loss_specdecpp; of each relaxed rule relaxed_DRAFTER_accepted_*, _bleu_*, _speedup_*.
shared_encoder_accepted_ratio (tokens a step by those of the drafter with an encoder of its own),
_cost_ratio (drafting seconds of a request likewise, capturing states included), _encode_ratio (of
encoding alone). bad_inputs (mistakes that were made), bad_inputs_unclear (that were not told in
one clear line). trained_minutes, trained_memory_gb (of the drafter whose rows these are; reading
the target's states is part of both). served_shared_encoder: 1 if that one has the target's.

    python -m scripts.bench_specdec [--quick] [--sentences N] [--swept N] [--growing N]
        [--cpu-weights FORMAT] [--distil N | --data FILE,...]
        [--draft-model DIR [--shared-draft-model DIR]
         | --train-minutes M [--train-shape NAME] [--shared-encoder]] [--length K]
        [--languages L,...] [--batches N,...] [--plots DIR] [--docs DIR] [--json FILE]
"""

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from scripts.lib.drafter_alone import load_drafter_of, write_alone
from scripts.lib.figures import parser, report
from scripts.lib.result_page import add_docs_flag
from scripts.lib.server import Server
from scripts.lib.specdec_asking import (
    AT_ONCE,
    DATA,
    ENDINGS,
    TEST,
    Bench,
    pair_of,
    streams_of,
)
from scripts.lib.specdec_bad_input import Case, cases
from scripts.lib.specdec_methods import (
    ALONE,
    BLOCKS,
    GRID,
    PUBLISHED,
    QUICK_BLOCKS,
    growing_methods,
    sentence_methods,
    setting_methods,
    specdec,
)
from scripts.lib.specdec_page import print_results, write_page, write_plots
from scripts.lib.specdec_results import GROWING, SENTENCES, SETTINGS, Answer, Results
from scripts.lib.specdec_shared import Drafting, drafting_of, shared_figures
from scripts.lib.specdec_training import (
    Drafters,
    Written,
    drafters_for,
    training_figures,
    written_by_language,
)
from scripts.lib.translation_runs import (
    Prompts,
    add_corpus,
    remove_corpus,
)
from sglang_ext.block_drafter.drafter_manifest import read_manifest

MODEL = "qwen2.5-coder-0.5b-instruct"
CORPUS = "distilled"
WHOLE = 1 << 20  # words: a sentence that does not grow


def main() -> int:
    options = read_options()
    with tempfile.TemporaryDirectory() as folder:
        results, more = run(options, Path(folder))
    print_results(results)
    if options.plots is not None:
        write_plots(options.plots, results)
    if options.docs is not None:
        served = f"{options.model}, {options.cpu_weights} weights"
        if "served_shared_encoder" in more:
            encoder = "the target's" if more["served_shared_encoder"] else "an own"
            served += f", SpecDec with {encoder} encoder"
        write_page(options.docs, results, served, options.length)
    figures = results.figures(options.length) | more
    report(figures, options.json)
    wrong = figures["mismatches"] > 0 or figures["outputs_compared"] == 0
    return int(wrong or figures.get("bad_inputs_unclear", 0) > 0)


def read_options() -> argparse.Namespace:
    """The command line, checked."""
    args = parser(__doc__)
    args.set_defaults(model=MODEL)
    add = args.add_argument
    add("--sentences", type=int, default=150, metavar="N",
        help="translated into each language [%(default)s]")  # fmt: skip
    add("--swept", type=int, default=30, metavar="N",
        help="of these, for methods that differ in a setting [%(default)s]")  # fmt: skip
    add("--growing", type=int, default=15, metavar="N", help="that grow, for SSBD [%(default)s]")
    add("--lag", type=int, default=3, metavar="K", help="words a step of these [%(default)s]")
    add("--distil", type=int, default=2000, metavar="N",
        help="training sentences whose translations are retrieved from [%(default)s]")  # fmt: skip
    add("--length", type=int, default=10, metavar="K", help="nodes drafted a step [%(default)s]")
    add("--max-tokens", type=int, default=96, metavar="N", help="of an answer [%(default)s]")
    add("--cpu-weights", default="int8", metavar="FORMAT",
        help="of both servers [%(default)s]")  # fmt: skip
    add("--languages", default="French,German", metavar="L,...", help="[%(default)s]")
    add("--batches", default="8,32", metavar="N,...", help="beside batch 1 [%(default)s]")
    add("--data", default="", metavar="FILE,...",
        help="of `drafter distill`, one for each language: nothing is distilled here")  # fmt: skip
    add("--draft-model", default="", metavar="DIR", help="of `sglang-ext drafter train`")
    add("--shared-draft-model", default="", metavar="DIR",
        help="another one, of `--encoder target`")  # fmt: skip
    add("--train-minutes", type=float, default=0.0, metavar="M",
        help="train a drafter here, on the distilled outputs [no]")  # fmt: skip
    add("--train-shape", default="small", metavar="NAME", help="of `drafter train` [%(default)s]")
    add("--shared-encoder", action="store_true",
        help="train another one, with the target's encoder")  # fmt: skip
    add("--plots", type=Path, metavar="DIR", help="draw the tables, PNG and SVG")
    add_docs_flag(args)
    options = args.parse_args()
    if options.quick:
        _make_quick(args, options)
    _check(args, options)
    return options


def _make_quick(args: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Less of what was not asked for by name."""
    quick: dict[str, object] = {
        "sentences": 6, "swept": 3, "growing": 2, "distil": 160, "batches": "8", "max_tokens": 40,
    }  # fmt: skip
    if not options.draft_model:
        quick |= {"train_minutes": 1.5, "train_shape": "tiny", "shared_encoder": True}
    for name, value in quick.items():
        if getattr(options, name) == args.get_default(name):
            setattr(options, name, value)


def _check(args: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Take the lists apart, and end with a line where something cannot be."""
    options.languages = [name.strip() for name in options.languages.split(",")]
    unknown = [name for name in options.languages if name not in ENDINGS]
    if unknown:
        args.error(f"--languages: {', '.join(unknown)}; known: {', '.join(ENDINGS)}")
    try:
        options.batches = [int(batch) for batch in options.batches.split(",") if batch]
    except ValueError:
        args.error(f"--batches {options.batches}: whole numbers, comma-separated")
    for name in ("sentences", "swept", "growing", "lag", "length", "max_tokens"):
        if getattr(options, name) < 1:
            args.error(f"--{name.replace('_', '-')} must be at least 1")
    options.data = [Path(file) for file in options.data.split(",") if file]
    if options.data and len(options.data) != len(options.languages):
        args.error(f"--data: {len(options.languages)} files are needed, one for each language")
    if options.draft_model and options.train_minutes:
        args.error("--draft-model is a trained drafter: leave --train-minutes out")
    if options.shared_draft_model and not options.draft_model:
        args.error("--shared-draft-model is compared with --draft-model: give both")
    if options.shared_encoder and not options.train_minutes:
        args.error("--shared-encoder needs --train-minutes")
    if options.train_minutes < 0 or (options.train_minutes and options.distil < 20):
        args.error("--train-minutes must be above 0, and needs --distil 20 or more")
    if min(options.batches, default=2) < 2:
        args.error("--batches: 2 and more; batch 1 is always measured")
    if not (DATA / f"{TEST}.en.gz").is_file():
        args.error(f"{DATA}/{TEST}.en.gz is not there (scripts/lib/data_folder.py)")


def run(options: argparse.Namespace, folder: Path) -> tuple[Results, dict[str, float]]:
    """Translate on servers of our own; the tables, and the figures that are not of them.

    Args:
        folder: to write to.
    """
    flags = [
        "--cpu-weights", options.cpu_weights,
        "--max-running-requests", str(max(AT_ONCE, *options.batches, 1)),
    ]  # fmt: skip
    with Server(options.model, flags, name="plain") as plain:
        written = written_by_language(plain, options)
        made = drafters_for(options, folder, written)
        served = made.better
        with Server(options.model, [*flags, *our_flags(options, served)], name="ours") as ours:
            results = measured(options, made, written, plain, ours)
            compared, bad = {}, []
            if made.own is not None and made.shared is not None:
                compared[served] = drafting(options, plain, ours, served)
            if served is not None and made.data is not None:
                bad = list(bad_inputs(options, folder, served, made.data, ours))
        more = training_figures(served)
        if served is not None:
            more["served_shared_encoder"] = float(served == made.shared)
        if bad:
            unclear = sum(bool(case.fault) for case in bad)
            more |= {"bad_inputs": len(bad), "bad_inputs_unclear": unclear}
        if compared:
            other = made.own if served == made.shared else made.shared
            with Server(options.model, [*flags, *our_flags(options, other)], name="other") as last:
                compared[other] = drafting(options, plain, last, other)
            more |= shared_figures(compared[made.own], compared[made.shared])
    return results, more


def our_flags(options: argparse.Namespace, drafter: Path | None) -> list[str]:
    """Flags of a server with all drafters; requests name theirs, or have one chosen."""
    drafters, _ = drafters_of(drafter)
    width = max([options.length, *([] if options.quick else blocks_of(drafter, BLOCKS)[0])])
    flags = [
        "--speculative-algorithm", "SSSD", "--drafter", "auto", "--enable-metrics",
        "--drafters", ",".join(name for name in drafters if name not in ("sssd", "specdec")),
        "--speculative-num-draft-tokens", str(max(16, width + 1)),
    ]  # fmt: skip
    return flags if drafter is None else [*flags, "--draft-model", str(drafter)]


def drafting(
    options: argparse.Namespace, plain: Server, ours: Server, drafter: Path | None
) -> Drafting:
    """What a server's block drafter does and takes, on the test's sentences."""
    assert drafter is not None
    method = specdec(options.length)

    def ask() -> Iterator[Answer]:
        for language in options.languages:
            prompts = Prompts(pair_of(options.model, language))
            bench = Bench(plain.base_url, ours.base_url, prompts, language, options.max_tokens)
            streams = streams_of(language, options.sentences, WHOLE)
            yield from bench.one_by_one(SENTENCES, [method], streams)

    return drafting_of(ours.base_url, drafter, ask)


def bad_inputs(
    options: argparse.Namespace, folder: Path, drafter: Path, data: Path, ours: Server
) -> Iterator[Case]:
    """The mistakes of specdec_bad_input, each printed with what was said of it."""
    prompt = Prompts(pair_of(options.model, options.languages[0])).ids("A man.")
    for case in cases(ours.base_url, prompt, folder, drafter, data, options.model):
        print(f"{case.name}: {'NOT CLEAR, ' + case.fault if case.fault else 'ok'}: {case.said}")
        yield case


def measured(
    options: argparse.Namespace,
    made: Drafters,
    written: Mapping[str, Sequence[Written]],
    plain: Server,
    ours: Server,
) -> Results:
    """What two servers answer, language by language."""
    drafters, absent = drafters_of(made.better)
    grid, asked = (PUBLISHED, QUICK_BLOCKS) if options.quick else (GRID, BLOCKS)
    blocks, beyond = blocks_of(made.better, asked)
    absent += beyond
    judged = "specdec" in drafters and _judged()
    methods = {
        SENTENCES: sentence_methods(drafters, options.length),
        SETTINGS: setting_methods(drafters, options.length, grid, blocks, judged),
        GROWING: growing_methods(options.length, grid),
    }
    results = Results(methods, [], [], {}, (0, 0), absent)
    for language in options.languages:
        bench = Bench(
            plain.base_url, ours.base_url, Prompts(pair_of(options.model, language)), language,
            options.max_tokens,
        )  # fmt: skip
        if written[language]:
            add_corpus(ours.base_url, CORPUS, [each.text for each in written[language]])
            print(f"{language}: {len(written[language]):,} distilled outputs are in the datastore")
        results = in_language(options, bench, results)
        if written[language]:
            remove_corpus(ours.base_url, CORPUS)
    memory = (plain.memory_bytes(), ours.memory_bytes())
    answers = [*results.answers, *alone(options, made.own)]
    return replace(results, memory=memory, answers=answers)


def in_language(options: argparse.Namespace, bench: Bench, so_far: Results) -> Results:
    """With one more language measured."""
    answers, rates = list(so_far.answers), list(so_far.rates)
    streams = streams_of(bench.language, options.sentences, WHOLE)
    growing = streams_of(bench.language, min(options.growing, options.sentences), options.lag)
    suites = {SENTENCES: streams, SETTINGS: streams[: options.swept], GROWING: growing}
    for suite, items in suites.items():
        for method in so_far.methods[suite]:  # what is compiled or measured on first use
            bench.answer(suite, method, 0, items[0].sources)
        answers += bench.one_by_one(suite, so_far.methods[suite], items)
    batched = [method for method in so_far.methods[SENTENCES] if method.batched]
    for batch in options.batches:
        for rate, own in bench.in_flight(batched, streams, batch):
            rates.append(rate)
            answers += own
    references = {**so_far.references, bench.language: [s.reference for s in streams]}
    return replace(so_far, answers=answers, rates=rates, references=references)


def alone(options: argparse.Namespace, folder: Path | None) -> Iterator[Answer]:
    """The block drafter's own translations, which nobody verifies."""
    if folder is None or read_manifest(folder).states is not None:
        return  # the target's states are the server's
    drafter, ends = load_drafter_of(options.model, "specdec", draft_model=str(folder))
    for language in options.languages:
        prompts = Prompts(pair_of(options.model, language))
        for number, stream in enumerate(streams_of(language, options.sentences, WHOLE)):
            output, blocks, seconds = write_alone(
                drafter, prompts.ids(stream.sources[-1]), options.length, options.max_tokens, ends
            )
            # An end that is not drafted counts as a token, as in all other rows.
            yield Answer(
                SENTENCES, language, ALONE, 1, number, tuple(output), prompts.decode(output), 1,
                len(output) + 1, blocks, 0, seconds,
            )  # fmt: skip


def drafters_of(drafter: Path | None) -> tuple[list[str], list[str]]:
    """The drafters that can be had here, and the rows that are absent for want of others.

    Args:
        drafter: a block drafter's directory; None: there is none.
    """
    drafters, absent = ["sssd", "ssbd"], []
    if importlib.util.find_spec("arctic_inference"):
        drafters.append("suffix")
    else:
        absent.append("suffix decoding: arctic-inference is not installed (docs/peers.md)")
    if drafter is None:
        absent.append(
            "SpecDec, SpecDec++, SpecDec with SSSD, NAT alone: give --draft-model or "
            "--train-minutes"
        )
    else:
        drafters.append("specdec")
    return drafters, absent


def blocks_of(drafter: Path | None, blocks: Sequence[int]) -> tuple[list[int], list[str]]:
    """The k that a drafter predicts, and the rows that are absent as it predicts fewer places."""
    if drafter is None:
        return [], []
    most = read_manifest(drafter).shape.block
    beyond = [k for k in blocks if k > most]
    line = f"SpecDec k={', '.join(map(str, beyond))}: the drafter's blocks have {most} places"
    return [k for k in blocks if k <= most], [line] if beyond else []


def _judged() -> bool:
    from sglang_ext.drafters import load_class

    return load_class("specdec").gives_logprobs


if __name__ == "__main__":
    sys.exit(main())
