"""SpecDec and SpecDec++ (arXiv 2203.16487) against plain decoding (AT), SSSD and suffix decoding.

Sentences of multi30k are translated from English into French and German, one by one, by methods
that take turns on each sentence, and at being first. AT runs on plain SGLang; everything else on a
server of ours that is up beside it. Every answer starts with the instruction in the radix cache,
and nothing else. What the target wrote of sentences of the training half ("distilled") is in the
datastore, so that SSSD and suffix decoding retrieve from what a trained drafter learned from.
Methods with a length verify all that is drafted (`budget: fixed`); "budget auto" is a server's own
choice. Relaxed rows accept by SpecDec++'s rule (docs/relaxed.md), with SSSD, with SpecDec, and with
SSBD on sentences that grow. Then sentences are in flight together, batch 8 and more.

SpecDec's rows need --draft-model, a directory of `sglang-ext drafter train`; suffix decoding's need
arctic-inference (docs/peers.md). What is not there is said to be absent.

Figures: mismatches (outputs of exact methods that are not AT's, at any batch size),
accepted_per_step_* (tokens that a decode step commits), speedup_* (tokens/s by AT's, batch 1),
speedup_specdec_vs_sssd, bleu_*, and of each relaxed rule relaxed_DRAFTER_accepted_*, _bleu_*,
_speedup_*.

    python -m scripts.bench_specdec [--quick] [--sentences N] [--distil N] [--length K]
        [--draft-model DIR] [--languages L,...] [--batches N,...] [--plots DIR] [--docs DIR]
        [--json FILE]
"""

import argparse
import importlib.util
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from scripts.lib.client import generate, generate_all
from scripts.lib.data_folder import data_folder
from scripts.lib.drafter_alone import load_drafter_of, write_alone
from scripts.lib.figures import parser, report
from scripts.lib.result_page import add_docs_flag
from scripts.lib.server import Server
from scripts.lib.specdec_methods import (
    ALONE,
    AT,
    BLOCKS,
    GRID,
    QUICK_BLOCKS,
    QUICK_GRID,
    Method,
    growing_methods,
    sentence_methods,
)
from scripts.lib.specdec_page import print_results, write_page, write_plots
from scripts.lib.specdec_results import GROWING, SENTENCES, Answer, Rate, Results
from scripts.lib.ssbd_streams import Stream, read_lines, read_streams
from scripts.lib.translation_runs import (
    Progress,
    Prompts,
    add_corpus,
    fresh_cache,
    remove_corpus,
    server_template,
)

MODEL = "qwen2.5-coder-0.5b-instruct"
DATA = data_folder("parallel")
TEST, TRAIN = "multi30k.test_2016_flickr", "multi30k.train"
ENDINGS = {"French": "fr", "German": "de"}
CORPUS = "distilled"
WHOLE = 1 << 20  # words: a sentence that does not grow
AT_ONCE = 16


@dataclass(frozen=True)
class Pair:
    """A pair of languages to translate, as prompts are made from it (PromptSettings)."""

    model: str
    template: str
    source_language: str
    target_language: str


@dataclass(frozen=True)
class Bench:
    """Two servers that are up together, and what is asked of both.

    Attributes:
        plain, ours: their URLs.
        max_tokens: of an answer, the end token included.
    """

    plain: str
    ours: str
    prompts: Prompts
    language: str
    max_tokens: int

    def url(self, method: Method) -> str:
        """The server that a method runs on."""
        return self.plain if method is AT else self.ours

    def answer(
        self, suite: str, method: Method, number: int, sources: Sequence[str], batch: int = 1
    ) -> Answer:
        """Translate a sentence, or each beginning of one that grows, one after the other."""
        last: tuple[int, ...] = ()
        text, tokens, steps, relaxed, seconds = "", 0, 0, 0, 0.0
        for source in sources:
            made = generate(
                self.url(method),
                self.prompts.ids(source),
                params=method.params(last),
                max_new_tokens=self.max_tokens,
            )
            last, text = self.prompts.without_end(made.token_ids), made.text
            tokens += len(made.token_ids)
            steps += made.steps
            relaxed += made.relaxed
            seconds += made.seconds
        return Answer(
            suite, self.language, method.name, batch, number, last, text, len(sources), tokens,
            steps, relaxed, seconds,
        )  # fmt: skip

    def one_by_one(
        self, suite: str, methods: Sequence[Method], streams: Sequence[Stream]
    ) -> Iterator[Answer]:
        """Batch 1: each sentence by all methods, which take turns at being first."""
        progress = Progress(f"{self.language}, {suite}", len(streams) * len(methods))
        for number, stream in enumerate(streams):
            first = number % len(methods)
            for method in [*methods[first:], *methods[:first]]:
                fresh_cache(self.url(method), self.prompts)
                yield self.answer(suite, method, number, stream.sources)
            progress.show(len(methods), f"sentence {number + 1} of {len(streams)}")

    def in_flight(
        self, methods: Sequence[Method], streams: Sequence[Stream], batch: int
    ) -> Iterator[tuple[Rate, list[Answer]]]:
        """All sentences, `batch` of them under way at once, by each method."""
        for method in methods:
            fresh_cache(self.url(method), self.prompts)
            start = time.perf_counter()
            with ThreadPoolExecutor(batch) as pool:
                jobs = [
                    pool.submit(self.answer, SENTENCES, method, n, stream.sources, batch)
                    for n, stream in enumerate(streams)
                ]
                answers = [job.result() for job in jobs]
            seconds = time.perf_counter() - start
            tokens = sum(a.tokens for a in answers)
            print(f"{self.language}, batch {batch}: {method.name} {tokens / seconds:.1f} tok/s")
            yield Rate(self.language, method.name, batch, tokens, seconds), answers

    def distil(self, sources: Sequence[str]) -> list[str]:
        """What the target writes of other sentences."""
        made = generate_all(
            self.ours,
            [self.prompts.ids(source) for source in sources],
            in_flight=AT_ONCE,
            label="distilling",
            params={"drafter": "sssd", "ingest": False},
            max_new_tokens=self.max_tokens,
        )
        return [answer.text for answer in made if answer.text.strip()]


def main() -> int:
    options = read_options()
    results = run(options)
    print_results(results)
    if options.plots is not None:
        write_plots(options.plots, results)
    if options.docs is not None:
        write_page(options.docs, results, options.model, options.length)
    figures = results.figures(options.length)
    report(figures, options.json)
    return int(figures["mismatches"] > 0 or figures["outputs_compared"] == 0)


def read_options() -> argparse.Namespace:
    """The command line, checked."""
    args = parser(__doc__)
    args.set_defaults(model=MODEL)
    add = args.add_argument
    add("--sentences", type=int, default=300, metavar="N", help="translated [%(default)s]")
    add("--growing", type=int, default=30, metavar="N", help="that grow, for SSBD [%(default)s]")
    add("--lag", type=int, default=3, metavar="K", help="words a step of these [%(default)s]")
    add("--distil", type=int, default=2000, metavar="N",
        help="training sentences whose translations are retrieved from [%(default)s]")  # fmt: skip
    add("--length", type=int, default=10, metavar="K", help="nodes drafted a step [%(default)s]")
    add("--max-tokens", type=int, default=96, metavar="N", help="of an answer [%(default)s]")
    add("--languages", default="French,German", metavar="L,...", help="[%(default)s]")
    add("--batches", default="8,32", metavar="N,...", help="beside batch 1 [%(default)s]")
    add("--draft-model", default="", metavar="DIR", help="of `sglang-ext drafter train`")
    add("--plots", type=Path, metavar="DIR", help="draw the tables, PNG and SVG")
    add_docs_flag(args)
    options = args.parse_args()
    if options.quick:
        quick = {"sentences": 6, "growing": 2, "distil": 48, "batches": "8", "max_tokens": 40}
        for name, value in quick.items():
            if getattr(options, name) == args.get_default(name):
                setattr(options, name, value)
    options.languages = [name.strip() for name in options.languages.split(",")]
    unknown = [name for name in options.languages if name not in ENDINGS]
    if unknown:
        args.error(f"--languages: {', '.join(unknown)}; known: {', '.join(ENDINGS)}")
    try:
        options.batches = [int(batch) for batch in options.batches.split(",") if batch]
    except ValueError:
        args.error(f"--batches {options.batches}: whole numbers, comma-separated")
    for name in ("sentences", "growing", "lag", "length", "max_tokens"):
        if getattr(options, name) < 1:
            args.error(f"--{name.replace('_', '-')} must be at least 1")
    if min(options.batches, default=2) < 2:
        args.error("--batches: 2 and more; batch 1 is always measured")
    if not (DATA / f"{TEST}.en.gz").is_file():
        args.error(f"{DATA}/{TEST}.en.gz is not there (scripts/lib/data_folder.py)")
    return options


def run(options: argparse.Namespace) -> Results:
    """Translate on servers of our own."""
    drafters, absent = drafters_of(options)
    grid, blocks = (QUICK_GRID, QUICK_BLOCKS) if options.quick else (GRID, BLOCKS)
    methods = {
        SENTENCES: sentence_methods(
            drafters, options.length, grid, blocks, "specdec" in drafters and _judged(options)
        ),
        GROWING: growing_methods(options.length, grid),
    }
    width = max(method.length or 0 for method in methods[SENTENCES]) + 1
    flags = ["--max-running-requests", str(max(AT_ONCE, *options.batches, 1))]
    ours = [
        "--speculative-algorithm", "SSSD", "--drafter", "sssd",
        "--drafters", ",".join(name for name in drafters if name != "sssd"),
        "--speculative-num-draft-tokens", str(max(16, width)),
    ]  # fmt: skip
    if options.draft_model:
        ours += ["--draft-model", options.draft_model]
    with ExitStack() as stack:
        servers = [
            Server(options.model, flags, name="plain").start(),
            Server(options.model, [*flags, *ours], name="ours").start(),
        ]
        for server in servers:
            stack.callback(server.stop)
        for server in servers:
            server.wait()
        empty = Results(methods, [], [], {}, (0, 0), absent)
        results = measured(options, empty, *(server.base_url for server in servers))
        plain, other = (server.memory_bytes() for server in servers)
        results = replace(results, memory=(plain, other))
    return replace(results, answers=[*results.answers, *alone(options, drafters)])


def measured(options: argparse.Namespace, empty: Results, plain: str, ours: str) -> Results:
    """What two servers answer, language by language."""
    answers: list[Answer] = []
    rates: list[Rate] = []
    references: dict[str, Sequence[str]] = {}
    for language in options.languages:
        prompts = Prompts(_pair(options, language))
        bench = Bench(plain, ours, prompts, language, options.max_tokens)
        streams = _streams(language, options.sentences, WHOLE)
        references[language] = [stream.reference for stream in streams]
        if options.distil:
            # The training half's sentences are none of the test's.
            lines = [line for line in read_lines(DATA / f"{TRAIN}.en.gz") if line]
            texts = bench.distil(lines[: options.distil])
            add_corpus(ours, CORPUS, texts)
            print(f"{language}: {len(texts):,} distilled outputs are in the datastore", flush=True)
        growing = _streams(language, min(options.growing, options.sentences), options.lag)
        for suite, items in ((SENTENCES, streams), (GROWING, growing)):
            for method in empty.methods[suite]:  # what is compiled or measured on first use
                bench.answer(suite, method, 0, items[0].sources)
            answers += bench.one_by_one(suite, empty.methods[suite], items)
        batched = [method for method in empty.methods[SENTENCES] if method.batched]
        for batch in options.batches:
            for rate, own in bench.in_flight(batched, streams, batch):
                rates.append(rate)
                answers += own
        if options.distil:
            remove_corpus(ours, CORPUS)
    return replace(empty, answers=answers, rates=rates, references=references)


def alone(options: argparse.Namespace, drafters: Sequence[str]) -> Iterator[Answer]:
    """The block drafter's own translations, which nobody verifies."""
    if "specdec" not in drafters:
        return
    drafter, ends = load_drafter_of(options.model, "specdec", draft_model=options.draft_model)
    for language in options.languages:
        prompts = Prompts(_pair(options, language))
        for number, stream in enumerate(_streams(language, options.sentences, WHOLE)):
            output, blocks, seconds = write_alone(
                drafter, prompts.ids(stream.sources[-1]), options.length, options.max_tokens, ends
            )
            # An end that is not drafted counts as a token, as in all other rows.
            yield Answer(
                SENTENCES, language, ALONE, 1, number, tuple(output), prompts.decode(output), 1,
                len(output) + 1, blocks, 0, seconds,
            )  # fmt: skip


def drafters_of(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """The drafters that can be had here, and the rows that are absent for want of others."""
    drafters, absent = ["sssd", "ssbd"], []
    if importlib.util.find_spec("arctic_inference"):
        drafters.append("suffix")
    else:
        absent.append("suffix decoding: arctic-inference is not installed (docs/peers.md)")
    if options.draft_model:
        drafters.append("specdec")
    else:
        absent.append(
            "SpecDec, SpecDec++, SpecDec with SSSD, NAT alone: no --draft-model was given"
        )
    return drafters, absent


def _judged(options: argparse.Namespace) -> bool:
    from sglang_ext.drafters import load_class

    return load_class("specdec").gives_logprobs


def _pair(options: argparse.Namespace, language: str) -> Pair:
    return Pair(options.model, server_template(), "English", language)


def _streams(language: str, count: int, lag: int) -> list[Stream]:
    source, reference = (DATA / f"{TEST}.{e}.gz" for e in ("en", ENDINGS[language]))
    return read_streams(source, reference, lag=lag, count=count)


if __name__ == "__main__":
    sys.exit(main())
