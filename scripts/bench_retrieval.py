"""Retrieval by itself: latency, growth with size, memory, building, and accepted tokens by replay.

Fills datastores of 1M, 10M and 100M+ tokens with real text (this machine's sources, headers and
documentation, or --tokens FILE), holding back 60 documents drawn with seed 0, whose beginnings
are the requests. No model runs: replay takes each held-back document for the answer.

    python -m scripts.bench_retrieval [--tokens FILE.npy --vocab-size N] [--quick] [--docs DIR]
        [--json FILE]
"""

import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from datastores import CorpusBuilder, Datastore, RetrievalConfig, Snapshot, retrieve, warm_up
from datastores.input_trie import InputTrie
from scripts.lib.figures import parser, report
from scripts.lib.machine_text import Documents, machine_text, tokenizer_size
from scripts.lib.result_page import ResultPage, add_docs_flag, aligned
from scripts.lib.retrieval_replay import replay
from sglang_ext.sweep.result_tables import Table

FULL_TOKENS = 112_000_000
QUICK_TOKENS = 12_000_000
SIZES = (1_000_000, 10_000_000)  # and all
HELD_BACK = 60
BATCHES = (1, 8, 32, 64)
WIDTHS = (8, 16, 32)
PROMPT_TOKENS = 200
COMMITTED = 2  # tokens by which a request goes on between two searches
REPLAYED_WIDTHS = (4, 8, 16, 32)
# The load: as many outputs as a batch of 64 brings that commits two tokens each step of 6 ms, and
# logs small enough that one is folded every few seconds.
OUTPUT_TOKENS = 400
OUTPUTS_PER_SECOND = 50
FOLD_TOKENS = 1 << 16
WEIGHTS = 1 << 24  # float32: 64 MB, twice the last-level cache here


READING = """\
No model runs here. **s_q** is what a step verifies, the root included; a search drafts for all
requests of a batch. Replay takes each held-back document for the answer (as SSSD's Fig. 4a):
accepted tokens are those of its beginning that drafts hold, the bonus token included."""

# Figures by name, and the table that shows them.
Measured = tuple[dict[str, float], Table]


@dataclass(frozen=True)
class Built:
    """A datastore of so many tokens."""

    store: Datastore
    tokens: int
    seconds: float
    """That building took, files written and synced included."""

    @property
    def label(self) -> str:
        return f"{self.tokens / 1e6:.3g}M"


def main() -> int:
    args = parser(__doc__)
    args.add_argument(
        "--tokens", type=Path, metavar="FILE", help="object array of documents (.npy)"
    )
    add_docs_flag(args)
    args.add_argument("--vocab-size", type=int, help="ids are below this [largest id + 1]")
    options = args.parse_args()
    if options.tokens:
        try:
            documents = Documents.load(options.tokens)
        except (OSError, ValueError) as error:
            args.error(f"--tokens: {error}")
        vocab_size = options.vocab_size or int(documents.tokens.max()) + 1
    else:
        documents = machine_text(options.model, QUICK_TOKENS if options.quick else FULL_TOKENS)
        vocab_size = options.vocab_size or tokenizer_size(options.model)
    rounds = 100 if options.quick else 400
    order = np.random.default_rng(0).permutation(len(documents))
    held_back = [documents[i] for i in sorted(order[:HELD_BACK])]
    warm_up(vocab_size)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-retrieval-")))
        built = build_all(documents, order[HELD_BACK:], vocab_size, folder, stack)
        figures: dict[str, float] = {"tokens": built[-1].tokens}
        tables = []
        for made, table in (
            describe(built),
            measure_sizes(built, held_back, rounds),
            measure_growth(built, held_back, rounds),
            measure_loaded(built[-1], held_back, documents, 4 * rounds),
            measure_replay(built[-1].store.snapshot(), held_back),
        ):
            figures |= made
            tables.append(table)
    report(figures, options.json)
    if options.docs:
        write_page(options.docs, figures, tables)
    return 0


# -- datastores ----------------------------------------------------------------------------


def build_all(
    documents: Documents, order: np.ndarray, vocab_size: int, folder: Path, stack: ExitStack
) -> list[Built]:
    """Datastores of each size; the documents join in a random order."""
    total = int(sum(documents.starts[i + 1] - documents.starts[i] for i in order))
    small = SIZES if total >= 2 * SIZES[-1] else (total // 100, total // 10)
    if total < 100_000_000:
        print(
            f"{total / 1e6:.1f}M tokens are fewer than 100M: sizes are "
            f"{', '.join(f'{size / 1e6:.1f}M' for size in (*small, total))}"
        )
    built = []
    for size in (*small, total):
        path = folder / str(size)
        began = time.perf_counter()
        with CorpusBuilder(path, "text", vocab_size=vocab_size) as builder:
            taken = 0
            for i in order:
                builder.add(documents[i])
                taken += int(documents.starts[i + 1] - documents.starts[i])
                if builder.buffered_tokens >= builder.chunk_tokens:
                    builder.commit({"tokens": taken})
                    print(f"\rbuilding: {taken / 1e6:.0f}M of {size / 1e6:.0f}M", end="")
                if taken >= size:
                    break
            tokens = builder.finish()
        seconds = time.perf_counter() - began
        print(f"\rbuilt {tokens / 1e6:.1f}M tokens in {seconds:.1f} s")
        store = Datastore.open(path, vocab_size=vocab_size, fold_tokens=FOLD_TOKENS)
        stack.callback(store.close)
        built.append(Built(store, tokens, seconds))
    return built


def describe(built: Sequence[Built]) -> Measured:
    """Memory and building."""
    rows = []
    for b in built:
        info = b.store.info()
        rows.append((
            f"{b.tokens:,}", str(info.sub_indices), f"{info.bytes_per_token:.3f}",
            f"{b.tokens / b.seconds:,.0f}",
        ))  # fmt: skip
    figures = {
        "bytes_per_token": built[-1].store.info().bytes_per_token,
        "build_tokens_per_s": built[-1].tokens / built[-1].seconds,
    }
    header = ("tokens", "sub-indices", "bytes/token", "build tokens/s")
    return figures, shown(Table("Memory and building", header, rows))


def shown(table: Table) -> Table:
    """The table, printed."""
    print(f"\n{aligned(table)}", flush=True)
    return table


# -- latency -------------------------------------------------------------------------------


class Requests:
    """A batch of requests that read held-back documents, some tokens further each step."""

    def __init__(self, documents: Sequence[np.ndarray], batch: int, seed: int = 0) -> None:
        long = [d for d in documents if d.size >= PROMPT_TOKENS + 50]
        self._documents = long or list(documents)
        self._rng = np.random.default_rng(seed)
        self._rest: list[np.ndarray] = [np.empty(0, np.int32)] * batch
        self.tries: list[InputTrie] = [InputTrie() for _ in range(batch)]
        for i in range(batch):
            self._begin(i)

    def _begin(self, i: int) -> None:
        document = self._documents[int(self._rng.integers(len(self._documents)))]
        start = int(self._rng.integers(max(1, document.size - PROMPT_TOKENS - 50)))
        self.tries[i] = InputTrie()
        self.tries[i].extend(document[start : start + PROMPT_TOKENS])
        self._rest[i] = document[start + PROMPT_TOKENS : start + 2 * PROMPT_TOKENS]

    def advance(self) -> None:
        for i, rest in enumerate(self._rest):
            if rest.size < COMMITTED:
                self._begin(i)
            else:
                self.tries[i].extend(rest[:COMMITTED])
                self._rest[i] = rest[COMMITTED:]


def timed(tries: Sequence[InputTrie], snapshot: Snapshot, s_q: int) -> float:
    """Milliseconds of one search."""
    began = time.perf_counter()
    retrieve(tries, snapshot, s_q - 1)
    return (time.perf_counter() - began) * 1e3


def percentiles(times: Sequence[float]) -> tuple[float, float]:
    p50, p99 = np.percentile(times, (50, 99))
    return float(p50), float(p99)


def measure_sizes(built: Sequence[Built], held_back: Sequence[np.ndarray], rounds: int) -> Measured:
    """The table of latencies; nothing else runs."""
    figures: dict[str, float] = {}
    rows = []
    for b in built:
        snapshot = b.store.snapshot()
        for batch in BATCHES:
            times: dict[int, list[float]] = {s_q: [] for s_q in WIDTHS}
            for s_q, requests in steps(held_back, batch, rounds, WIDTHS):
                times[s_q].append(timed(requests.tries, snapshot, s_q))
            cells = [percentiles(times[s_q]) for s_q in WIDTHS]
            texts = (f"{p50:.3f} / {p99:.3f}" for p50, p99 in cells)
            rows.append((b.label, str(batch), *texts))
            if b is built[-1] and batch == 1:
                figures["p50_ms_b1_sq16"] = percentiles(times[16])[0]
    title = f"Latency in ms, p50 / p99 of {rounds} searches, {cores()} cores"
    header = ("tokens", "batch", *(f"s_q {s_q}" for s_q in WIDTHS))
    return figures, shown(Table(title, header, rows))


def steps(
    held_back: Sequence[np.ndarray], batch: int, rounds: int, kinds: Sequence[int]
) -> Iterator[tuple[int, Requests]]:
    """Each kind in turn, each with requests of its own that are like the others'."""
    requests = {kind: Requests(held_back, batch) for kind in kinds}
    for _ in range(rounds):
        for kind in kinds:
            requests[kind].advance()
            yield kind, requests[kind]


def measure_growth(
    built: Sequence[Built], held_back: Sequence[np.ndarray], rounds: int
) -> Measured:
    """p50 at batch 64, s_q 16: the largest size over the one before it, measured in turns."""
    snapshots = [b.store.snapshot() for b in built[-2:]]
    times: list[list[float]] = [[], []]
    requests = Requests(held_back, 64)
    for i in range(2 * rounds):
        requests.advance()
        for which in (0, 1) if i % 2 else (1, 0):
            times[which].append(timed(requests.tries, snapshots[which], 16))
    small, large = (percentiles(t)[0] for t in times)
    header = (built[-2].label, built[-1].label, "ratio")
    row = (f"{small:.3f}", f"{large:.3f}", f"{large / small:.2f}x")
    table = Table("Growth with size: p50 in ms at batch 64, s_q 16, in turns", header, [row])
    return {"growth_10m_to_100m": large / small}, shown(table)


class Load:
    """A thread that adds outputs to a datastore while the block runs."""

    def __init__(self, store: Datastore, documents: Documents) -> None:
        self._store = store
        self._documents = documents
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)
        self.added = self.dropped = 0

    def _run(self) -> None:
        rng = np.random.default_rng(1)
        due = time.perf_counter()
        while not self._stop.is_set():
            document = self._documents[int(rng.integers(len(self._documents)))]
            start = int(rng.integers(max(1, document.size - OUTPUT_TOKENS)))
            if self._store.add(document[start : start + OUTPUT_TOKENS]):
                self.added += 1
            else:
                self.dropped += 1
            due += 1 / OUTPUTS_PER_SECOND
            time.sleep(max(0.0, due - time.perf_counter()))

    def __enter__(self) -> "Load":
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()


def measure_loaded(
    built: Built, held_back: Sequence[np.ndarray], documents: Documents, rounds: int
) -> Measured:
    """p50 and p99 at batch 64, s_q 16, while outputs come in and logs are folded.

    Once one search after another, and once each after as many weights were read as push all else
    out of the caches, as a target's forward pass on the same processor does.
    """
    store, requests = built.store, Requests(held_back, 64)
    weights = np.ones(WEIGHTS, np.float32)
    times: dict[bool, list[float]] = {False: [], True: []}
    began = time.perf_counter()
    with Load(store, documents) as load:
        # Until the processes that fold and merge have started.
        while sum(store.info().namespaces.values()) < 8 * FOLD_TOKENS:
            time.sleep(0.05)
        for i in range(2 * rounds):
            cold = i // 50 % 2 == 1  # in turns, so that folding hits both alike
            requests.advance()
            if cold:
                weights.sum()
            times[cold].append(timed(requests.tries, store.snapshot(), 16))
    seconds = time.perf_counter() - began
    info = store.info()
    served = sum(info.namespaces.values())
    rows = []
    for cold, label in ((False, "one after another"), (True, "with cold caches")):
        cells = (*percentiles(times[cold]), max(times[cold]))
        rows.append((label, *(f"{cell:.3f}" for cell in cells)))
    p50, p99 = percentiles(times[False])
    cold50, cold99 = percentiles(times[True])
    figures = {
        "p50_ms_b64_sq16": p50,
        "p99_ms_b64_sq16": p99,
        "p50_ms_b64_sq16_cold": cold50,
        "p99_ms_b64_sq16_cold": cold99,
    }
    note = (
        f"{load.added / seconds:.0f} outputs of up to {OUTPUT_TOKENS} tokens a second come in "
        f"({load.dropped} dropped) and are folded ({served - info.unfolded_tokens:,} of "
        f"{served:,} tokens); {rounds} searches each. Cold: after as many weights were read as "
        "push all else out of the caches, as a target's pass on the same processor does."
    )
    title = f"Under load: ms at batch 64, s_q 16, {built.label} tokens"
    return figures, shown(Table(title, ("", "p50", "p99", "longest"), rows, note))


# -- accepted tokens -----------------------------------------------------------------------


def measure_replay(snapshot: Snapshot, held_back: Sequence[np.ndarray]) -> Measured:
    """Accepted tokens per step, bonus included, by what is drafted from (the paper's Fig. 4a)."""
    both = RetrievalConfig()
    sources = {
        "prompt only": RetrievalConfig(max_samples=0),
        "datastore only": RetrievalConfig(max_input_samples=0),
        "both": both,
    }
    accepted: dict[str, list[float]] = {}
    for name, config in sources.items():
        lengths = [
            replay(held_back, snapshot, config, s_q, prompt_tokens=100).accept_length
            for s_q in REPLAYED_WIDTHS
        ]
        accepted[name] = lengths
    alone = sum(accepted[name][-1] - 1 for name in ("prompt only", "datastore only"))
    together = accepted["both"][-1] - 1
    figures = {
        f"accepted_sq{s_q}": length
        for s_q, length in zip(REPLAYED_WIDTHS, accepted["both"], strict=True)
    }
    rows = [(name, *(f"{length:.3f}" for length in accepted[name])) for name in accepted]
    title = f"Accepted tokens per step, {len(held_back)} held-back documents replayed"
    note = f"Both at s_q {REPLAYED_WIDTHS[-1]}: {together / alone:.1%} of the sum of both gains."
    header = ("drafted from", *(f"s_q {s_q}" for s_q in REPLAYED_WIDTHS))
    return figures, shown(Table(title, header, rows, note))


def write_page(docs: Path, figures: Mapping[str, float], tables: Sequence[Table]) -> None:
    """docs/measured/retrieval.md."""
    findings = [
        f"{figures['tokens'] / 1e6:.0f}M tokens of real text in {figures['bytes_per_token']:.2f} "
        f"bytes a token, built at {figures['build_tokens_per_s']:,.0f} tokens/s.",
        f"A search at batch 1, s_q 16: {figures['p50_ms_b1_sq16']:.3f} ms; at batch 64 under load "
        f"p50 {figures['p50_ms_b64_sq16']:.3f} and p99 {figures['p99_ms_b64_sq16']:.3f} ms.",
        f"Ten times the tokens take {figures['growth_10m_to_100m']:.2f} times as long.",
        f"Accepted tokens per step at s_q 16, replayed: {figures['accepted_sq16']:.2f}.",
    ]
    title = "Retrieval: latency, size, and accepted tokens"
    ResultPage("retrieval", title, findings, READING, tables).write(docs)


def cores() -> int:
    return len(os.sched_getaffinity(0))


if __name__ == "__main__":
    sys.exit(main())
