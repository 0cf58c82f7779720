"""Re-translation of growing sources: SSBD (arXiv 2509.21740) against plain decoding (AR).

Each sentence grows by k words (lag-k) and is translated anew after each step, stream by stream at
batch 1; a stream's last output is the draft of its next one. The modes take turns on each stream,
and at being first, so that the machine's drift hits all alike. AR, and SSBD with realignment and
retrieval ("SSBD+", the server's default) at beta 0 and 0.2, translate all streams; the sweep of
SSBD as published, realignment alone, and mask-k that trims the draft, the first --timed-streams.
Display-only mask-k needs no run of its own. AR and SSBD+ at beta 0 then translate all streams
again, 8 at once.

Every mode of a stream starts with the instruction in the radix cache and nothing else: the cache
is flushed, then filled with the tokens before the source, which are not timed. (A salt in the
instruction would keep modes apart as well, but change what the model writes.) From then on a mode
profits from its own earlier requests alone, as a session does. SSBD+ retrieves from prompt and
output, from a translation memory (--memory: sentences of the target language, by default the
training half of the data, which has none of the streams), and from its own final outputs of the
streams before, which join the datastore as a session's do.

tok/s: output tokens by seconds of requests, over all updates. A batch-8 output of SSBD+ at beta 0
is a mismatch if it is AR's neither at batch 8 nor at batch 1; sources on which AR contradicts
itself between the two are counted.

    python -m scripts.bench_ssbd [--streams N] [--timed-streams N] [--lag K] [--quick]
        [--source FILE --reference FILE --source-language L --target-language L] [--memory FILE]
        [--results FILE.jsonl | --from FILE.jsonl] [--plots DIR] [--docs DIR] [--json FILE]
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from scripts.lib.client import generate
from scripts.lib.data_folder import data_folder
from scripts.lib.figures import parser, report
from scripts.lib.result_page import add_docs_flag
from scripts.lib.server import Server
from scripts.lib.ssbd_page import write_page
from scripts.lib.ssbd_plots import AR, DEFAULT, EXACT, MODES, Mode, Tables
from scripts.lib.ssbd_streams import (
    Settings,
    Stream,
    Update,
    is_unspaced,
    read_lines,
    read_results,
    read_streams,
    write_line,
)
from scripts.lib.translation_runs import (
    Progress,
    Prompts,
    add_corpus,
    fresh_cache,
    server_template,
)

MODEL = "qwen2.5-coder-0.5b-instruct"
DATA = data_folder("parallel")
PAIR = "multi30k.test_2016_flickr"
MEMORY = DATA / "multi30k.train.fr.gz"
BATCH = 8
QUICK_STREAMS, QUICK_TIMED_STREAMS = 8, 2


@dataclass(frozen=True)
class Translator:
    """Translates streams on a running server.

    Attributes:
        max_tokens: most output tokens of an update, the end token included.
    """

    url: str
    prompts: Prompts
    max_tokens: int

    def fresh_cache(self) -> None:
        """The radix cache holds the instruction, and nothing else."""
        fresh_cache(self.url, self.prompts)

    def translate(self, number: int, stream: Stream, mode: Mode, batch: int = 1) -> list[Update]:
        """All of a stream's updates in one mode."""
        updates: list[Update] = []
        draft: tuple[int, ...] = ()
        for step, source in enumerate(stream.sources):
            final = step + 1 == len(stream.sources)
            answer = generate(
                self.url,
                self.prompts.ids(source),
                params=mode.params(draft, final),
                max_new_tokens=self.max_tokens,
            )
            draft = self.prompts.without_end(answer.token_ids)
            update = Update(
                stream=number, mode=mode.name, batch=batch, step=step,
                final=final, source=source, token_ids=draft, text=answer.text,
                tokens=len(answer.token_ids), seconds=answer.seconds,
            )  # fmt: skip
            updates.append(update)
        return updates


def main() -> int:
    options = read_options()
    if options.from_file is not None:
        settings, updates = read_results(options.from_file)
        prompts = Prompts(settings)
    else:
        streams = read_streams(
            options.source, options.reference, lag=options.lag, count=options.streams,
            by_character=is_unspaced(options.source_language),
        )  # fmt: skip
        settings = Settings(
            model=options.model, source=options.source.name, lag=options.lag,
            source_language=options.source_language, target_language=options.target_language,
            template=server_template(), references=tuple(s.reference for s in streams),
        )  # fmt: skip
        prompts = Prompts(settings)
        # Before the server, so that a tokenizer that is not there is said at once.
        Tables.language(settings, prompts.decode)
        updates = run(options, settings, streams, prompts)
    tables = Tables(settings, updates, prompts.decode)
    tables.print()
    if options.plots is not None:
        tables.plot(options.plots)
    if options.docs is not None:
        write_page(options.docs, tables)
    figures = tables.figures()
    report(figures, options.json)
    return int(figures["mismatches_beta0"] > 0)


def read_options() -> argparse.Namespace:
    """The command line, checked."""
    args = parser(__doc__)
    args.set_defaults(model=MODEL)
    args.add_argument("--streams", type=int, default=300, metavar="N", help="[%(default)s]")
    args.add_argument(
        "--timed-streams", type=int, default=30, metavar="N",
        help="streams that all modes translate [%(default)s]",
    )  # fmt: skip
    args.add_argument("--lag", type=int, default=3, metavar="K", help="words a step [%(default)s]")
    args.add_argument("--max-tokens", type=int, default=128, metavar="N", help="[%(default)s]")
    for option, ending in (("source", "en"), ("reference", "fr")):
        args.add_argument(
            f"--{option}", type=Path, default=DATA / f"{PAIR}.{ending}.gz", metavar="FILE",
            help="aligned sentences, plain or .gz [%(default)s]",
        )  # fmt: skip
    args.add_argument("--source-language", default="English", metavar="L", help="[%(default)s]")
    args.add_argument("--target-language", default="French", metavar="L", help="[%(default)s]")
    args.add_argument(
        "--memory", metavar="FILE",
        help="sentences of the target language to retrieve from, plain or .gz; none: no memory "
        f"[{MEMORY} with the default files, else none]",
    )  # fmt: skip
    args.add_argument("--results", type=Path, metavar="FILE", help="keep every output, JSON Lines")
    args.add_argument(
        "--from", dest="from_file", type=Path, metavar="FILE",
        help="print the tables of a --results file, without a server",
    )  # fmt: skip
    add_docs_flag(args)
    args.add_argument("--plots", type=Path, metavar="DIR", help="draw the tables, PNG and SVG")
    options = args.parse_args()
    if options.quick:
        options.streams, options.timed_streams = QUICK_STREAMS, QUICK_TIMED_STREAMS
    if options.memory is None:
        own = (options.source, options.reference) == tuple(
            args.get_default(name) for name in ("source", "reference")
        )
        options.memory = str(MEMORY) if own else "none"
    options.timed_streams = min(options.timed_streams, options.streams)
    for name in ("streams", "timed_streams", "lag", "max_tokens"):
        if getattr(options, name) < 1:
            args.error(f"--{name.replace('_', '-')} must be at least 1")
    if options.from_file is None:
        for path in (options.source, options.reference):
            if not path.is_file():
                args.error(f"{path} is not there; give aligned files: --source and --reference")
        if options.memory != "none" and not Path(options.memory).is_file():
            args.error(f"--memory {options.memory} is not there")
    return options


def run(
    options: argparse.Namespace, settings: Settings, streams: Sequence[Stream], prompts: Prompts
) -> list[Update]:
    """Translate on a server of our own; every update, in the file of --results as well."""
    flags = [
        "--speculative-algorithm", "SSSD", "--drafters", "ssbd", "--enable-metrics",
        "--max-running-requests", str(BATCH),
    ]  # fmt: skip
    updates: list[Update] = []
    with ExitStack() as stack:
        kept = None
        if options.results is not None:
            kept = stack.enter_context(options.results.open("w", encoding="utf-8"))
            write_line(kept, settings)
        server = stack.enter_context(Server(options.model, flags, name="ssbd"))
        translator = Translator(server.base_url, prompts, options.max_tokens)
        if options.memory != "none":
            remember(server.base_url, Path(options.memory))
        print(f"warming up: {streams[0].sources[-1]}", flush=True)
        for mode in MODES:  # what is compiled, allocated or measured on first use
            translator.translate(0, streams[0], mode)
        for phase in (
            one_by_one(translator, streams, options.timed_streams),
            all_at_once(translator, streams),
        ):
            for update in phase:
                updates.append(update)
                if kept is not None:
                    write_line(kept, update)
    return updates


def remember(url: str, memory: Path) -> None:
    """Give the server a translation memory to retrieve from."""
    lines = [line for line in read_lines(memory) if line]
    add_corpus(url, "memory", lines)
    print(f"translation memory: {len(lines):,} sentences of {memory.name}", flush=True)


def one_by_one(
    translator: Translator, streams: Sequence[Stream], timed_streams: int
) -> Iterator[Update]:
    """Batch 1: each stream in all modes that it is measured in."""
    modes = [
        [mode for mode in MODES if mode.on_all_streams or number < timed_streams]
        for number in range(len(streams))
    ]
    work = sum(len(s.sources) * len(m) for s, m in zip(streams, modes, strict=True))
    progress = Progress("batch 1", work)
    totals: dict[str, tuple[int, float]] = {}
    for number, (stream, own) in enumerate(zip(streams, modes, strict=True)):
        first = number % len(own)
        for mode in own[first:] + own[:first]:
            translator.fresh_cache()
            updates = translator.translate(number, stream, mode)
            tokens, seconds = totals.get(mode.name, (0, 0.0))
            tokens += sum(update.tokens for update in updates)
            totals[mode.name] = tokens, seconds + sum(update.seconds for update in updates)
            yield from updates
        plain, ours = (
            tokens / seconds for tokens, seconds in (totals[AR.name], totals[DEFAULT.name])
        )
        progress.show(
            len(stream.sources) * len(own),
            f"stream {number + 1} of {len(streams)}, AR {plain:.1f} tok/s, {DEFAULT.name} "
            f"{ours:.1f}, {ours / plain:.2f}x",
        )


def all_at_once(translator: Translator, streams: Sequence[Stream]) -> Iterator[Update]:
    """Batch 8: AR and SSBD+ at beta 0 on all streams, for their tokens alone."""
    progress = Progress(f"batch {BATCH}", 2 * sum(len(stream.sources) for stream in streams))
    for mode in (AR, EXACT):
        translator.fresh_cache()
        with ThreadPoolExecutor(BATCH) as pool:
            found = pool.map(
                lambda number, mode=mode: translator.translate(
                    number, streams[number], mode, BATCH
                ),
                range(len(streams)),
            )
            for number, updates in enumerate(found):
                yield from updates
                progress.show(len(updates), f"{mode.name}, stream {number + 1} of {len(streams)}")


if __name__ == "__main__":
    sys.exit(main())
