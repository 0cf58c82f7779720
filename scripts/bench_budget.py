"""SSSD's throughput against plain SGLang at batch 1/4/8/16/32 where drafts are mostly poor.

Spec-Bench prompts of all categories, each measured once, cold: nothing served before joins the
datastore, so drafts come from the prompt and the answer so far. What the budget chose is read
from the server's metrics.

Two processes of the same plain server differ by 3% and more here, for as long as they live, and
the machine's own speed drifts. So both servers are up at once and short runs of the same prompts
take turns, three of them: plain SGLang, our server without drafts, our server as it is. What
drafting is worth is the median of ratios within our server; what our server costs by itself is
its ratio to plain SGLang without drafts, the median over all batch sizes and launches; a batch
size's ratio is the product. The direct ratios are shown beside it.

    python -m scripts.bench_budget [--launches N] [--repeats N] [--tokens N] [--quick] [--json FILE]
"""

import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import requests

from scripts.client import TIMEOUT_S
from scripts.figures import parser, report
from scripts.metrics import read_metrics
from scripts.prompts import spec_bench
from scripts.server import Server

BATCHES = (1, 4, 8, 16, 32)
MAX_PROMPT_TOKENS = 160
# What the metrics count up: their differences over a run are that run's.
COUNTED = (
    "verify_width_sum",
    "verify_width_count",
    "accept_length_sum",
    "accept_length_count",
    "retrieval_seconds_sum",
)


@dataclass
class Rows:
    """What one batch size gave."""

    plain: list[float] = field(default_factory=list)
    undrafted: list[float] = field(default_factory=list)
    sssd: list[float] = field(default_factory=list)
    counted: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0.0))
    knee: float = 0.0

    @property
    def direct(self) -> list[float]:
        """Our server as it is against plain SGLang, pair by pair."""
        return [s / p for s, p in zip(self.sssd, self.plain, strict=True)]

    @property
    def drafting(self) -> list[float]:
        """Our server as it is against itself without drafts."""
        return [s / u for s, u in zip(self.sssd, self.undrafted, strict=True)]

    @property
    def base(self) -> list[float]:
        """Our server without drafts against plain SGLang."""
        return [u / p for u, p in zip(self.undrafted, self.plain, strict=True)]

    def mean(self, name: str) -> float:
        """The mean of a histogram of the metrics; 0 where it saw nothing."""
        count = self.counted[name + "_count"]
        return self.counted[name + "_sum"] / count if count else 0.0


def main() -> int:
    args = parser(__doc__)
    args.add_argument("--launches", type=int, default=4, help="times that both servers start [4]")
    args.add_argument("--repeats", type=int, default=4, help="turns per launch [4]")
    args.add_argument("--tokens", type=int, default=48, help="tokens per answer [48]")
    options = args.parse_args()
    if options.quick:
        options.launches, options.repeats = 1, 3
    prompts = [p.input_ids for p in spec_bench(options.model, max_prompt_tokens=MAX_PROMPT_TOKENS)]
    rows = {batch: Rows() for batch in BATCHES}
    fresh = itertools.cycle(prompts)
    for launch in range(options.launches):
        with ExitStack() as stack:
            plain = Server(options.model, ["--enable-metrics"], name="plain")
            flags = ["--speculative-algorithm", "SSSD", "--enable-metrics"]
            sssd = Server(options.model, flags, name="sssd")
            # One after the other, and the other way round next time: the first one has its pick
            # of the memory's huge pages.
            for server in (plain, sssd) if launch % 2 else (sssd, plain):
                stack.callback(server.stop)
                server.start().wait()
            for repeat in range(-1, options.repeats):  # the first one warms up
                for batch in BATCHES:
                    chosen = list(itertools.islice(fresh, batch))
                    measure(rows[batch], repeat, plain, sssd, chosen, options.tokens)
                    show(batch, rows[batch])
    print()
    base = statistics.median(itertools.chain.from_iterable(r.base for r in rows.values()))
    table(rows, base)
    figures = {f"ratio_b{b}": base * statistics.median(r.drafting) for b, r in rows.items()}
    figures |= {"undrafted_vs_plain": base}
    figures |= {f"direct_ratio_b{b}": statistics.median(r.direct) for b, r in rows.items()}
    budgets = {f"mean_sq_b{batch}": r.mean("verify_width") for batch, r in rows.items()}
    least = min(figures[f"ratio_b{batch}"] for batch in BATCHES)
    report({"min_ratio_vs_plain": least, **figures, **budgets}, options.json)
    return 0


def measure(
    rows: Rows,
    repeat: int,
    plain: Server,
    sssd: Server,
    prompts: Sequence[Sequence[int]],
    tokens: int,
) -> None:
    """One run of each kind; who goes first takes turns."""
    for server in (plain, sssd):  # prompts into the radix cache: what is measured is decoding
        run(server.base_url, prompts, 1)
    counted: dict[str, float] = {}

    def drafted() -> float:
        before = read_metrics(sssd.base_url)
        speed = run(sssd.base_url, prompts, tokens)
        counted.update(read_metrics(sssd.base_url))
        for name in COUNTED:
            counted[name] = counted.get(name, 0.0) - before.get(name, 0.0)
        return speed

    kinds = [
        (rows.plain, lambda: run(plain.base_url, prompts, tokens)),
        (rows.undrafted, lambda: run(sssd.base_url, prompts, tokens, drafter="none")),
        (rows.sssd, drafted),
    ]
    first = repeat % len(kinds)
    for speeds, measured in kinds[first:] + kinds[:first]:
        speed = measured()
        if repeat >= 0:
            speeds.append(speed)
    if repeat >= 0:
        for name in COUNTED:
            rows.counted[name] += counted[name]
        rows.knee = counted.get("budget_knee_tokens", 0.0)


def run(url: str, prompts: Sequence[Sequence[int]], tokens: int, **params: str) -> float:
    """Output tokens a second of one batch; `params` join custom_params."""
    body = {
        "input_ids": [list(ids) for ids in prompts],
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": tokens,
            "ignore_eos": True,
            "custom_params": {"ingest": False, **params},
        },
    }
    start = time.perf_counter()
    response = requests.post(url + "/generate", json=body, timeout=TIMEOUT_S)
    seconds = time.perf_counter() - start
    response.raise_for_status()
    return sum(a["meta_info"]["completion_tokens"] for a in response.json()) / seconds


def show(batch: int, rows: Rows) -> None:
    """The state of one batch size, on one line."""
    if rows.plain:
        print(
            f"run {len(rows.plain)}, batch {batch}: plain {rows.plain[-1]:.1f}, undrafted "
            f"{rows.undrafted[-1]:.1f}, SSSD {rows.sssd[-1]:.1f} tok/s; "
            f"SSSD / undrafted, median {statistics.median(rows.drafting):.3f}",
            flush=True,
        )


def table(rows: dict[int, Rows], base: float) -> None:
    """Print what was measured and what the budget chose."""
    print(
        f"{'batch':>5} {'plain':>7} {'undrafted':>9} {'SSSD':>7} {'ratio':>6} {'quartiles':>13} "
        f"{'direct':>7} {'I_knee/batch':>12} {'mean s_q':>9} {'accepted':>9}"
    )
    for batch, r in rows.items():
        low, middle, high = statistics.quantiles([base * d for d in r.drafting], n=4)
        print(
            f"{batch:>5} {statistics.median(r.plain):>7.1f} {statistics.median(r.undrafted):>9.1f} "
            f"{statistics.median(r.sssd):>7.1f} {middle:>6.3f} {low:>6.3f}-{high:<6.3f} "
            f"{statistics.median(r.direct):>7.3f} {r.knee / batch:>12.1f} "
            f"{r.mean('verify_width'):>9.2f} {r.mean('accept_length'):>9.2f}"
        )
    print(
        f"(tok/s; without drafts our server runs at {base:.3f} of plain SGLang; ratio: this times\n"
        "SSSD / undrafted; s_q: nodes verified per request and step; accepted: tokens per verify)"
    )


if __name__ == "__main__":
    sys.exit(main())
