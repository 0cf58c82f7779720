"""SSSD's throughput against plain SGLang at batch 1/4/8/16/32 where drafts are mostly poor.

Spec-Bench prompts of all categories, each measured once, cold: nothing served before joins the
datastore, so drafts come from the prompt and the answer so far. What the budget chose is read
from the server's metrics.

Two processes of the same plain server differ by 3% and more here, for as long as they live, and
the machine's own speed drifts by more within seconds. So both servers are up at once, short runs
of the same prompts take turns, whoever went second goes first next time, and both are launched
anew several times. A ratio is tokens per second over all turns of all launches, ours by plain's;
its standard error is that of the launches.

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
)


@dataclass
class Runs:
    """One server's runs of one batch size."""

    tokens: int = 0
    seconds: float = 0.0

    @property
    def speed(self) -> float:
        """Output tokens a second."""
        return self.tokens / self.seconds

    def __add__(self, other: "Runs") -> "Runs":
        return Runs(self.tokens + other.tokens, self.seconds + other.seconds)


@dataclass
class Rows:
    """What one batch size gave; one item a launch."""

    plain: list[Runs] = field(default_factory=list)
    sssd: list[Runs] = field(default_factory=list)
    counted: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0.0))
    knee: float = 0.0

    @property
    def ratio(self) -> float:
        """SSSD's tokens per second by plain SGLang's, over all launches."""
        return total(self.sssd).speed / total(self.plain).speed

    @property
    def error(self) -> float:
        """The ratio's standard error, from how the launches differ; 0 with one launch."""
        ratios = [s.speed / p.speed for s, p in zip(self.sssd, self.plain, strict=True)]
        return statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0

    def mean(self, name: str) -> float:
        """The mean of a histogram of the metrics; 0 where it saw nothing."""
        count = self.counted[name + "_count"]
        return self.counted[name + "_sum"] / count if count else 0.0


def total(runs: Sequence[Runs]) -> Runs:
    """All of them together."""
    return sum(runs, Runs())


def main() -> int:
    args = parser(__doc__)
    args.add_argument("--launches", type=int, default=5, help="times that both servers start [5]")
    args.add_argument("--repeats", type=int, default=6, help="turns per launch [6]")
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
            for r in rows.values():
                r.plain.append(Runs())
                r.sssd.append(Runs())
            for repeat in range(-1, options.repeats):  # the first one warms up
                for batch in BATCHES:
                    chosen = list(itertools.islice(fresh, batch))
                    measure(rows[batch], repeat, plain, sssd, chosen, options.tokens)
                    show(f"launch {launch + 1}, turn {repeat + 1}", batch, rows[batch])
    print()
    table(rows)
    figures = {f"ratio_b{b}": r.ratio for b, r in rows.items()}
    figures |= {f"standard_error_b{b}": r.error for b, r in rows.items()}
    figures |= {f"mean_sq_b{b}": r.mean("verify_width") for b, r in rows.items()}
    least = min(figures[f"ratio_b{batch}"] for batch in BATCHES)
    report({"min_ratio_vs_plain": least, **figures}, options.json)
    return 0


def measure(
    rows: Rows,
    repeat: int,
    plain: Server,
    sssd: Server,
    prompts: Sequence[Sequence[int]],
    tokens: int,
) -> None:
    """One run of each server; who goes first takes turns."""
    for server in (plain, sssd):  # prompts into the radix cache: what is measured is decoding
        run(server.base_url, prompts, 1)
    before = read_metrics(sssd.base_url)
    servers = [(rows.plain, plain), (rows.sssd, sssd)]
    for runs, server in servers[:: 1 if repeat % 2 else -1]:
        measured = run(server.base_url, prompts, tokens)
        if repeat >= 0:
            runs[-1] += measured
    counted = read_metrics(sssd.base_url)
    if repeat >= 0:
        for name in COUNTED:
            rows.counted[name] += counted.get(name, 0.0) - before.get(name, 0.0)
        rows.knee = counted.get("budget_knee_tokens", 0.0)


def run(url: str, prompts: Sequence[Sequence[int]], tokens: int) -> Runs:
    """One batch, all its requests at once."""
    body = {
        "input_ids": [list(ids) for ids in prompts],
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": tokens,
            "ignore_eos": True,
            "custom_params": {"ingest": False},
        },
    }
    start = time.perf_counter()
    response = requests.post(url + "/generate", json=body, timeout=TIMEOUT_S)
    seconds = time.perf_counter() - start
    response.raise_for_status()
    return Runs(sum(a["meta_info"]["completion_tokens"] for a in response.json()), seconds)


def show(when: str, batch: int, rows: Rows) -> None:
    """The state of one batch size, on one line."""
    if rows.plain[0].tokens:
        print(
            f"{when}, batch {batch}: plain {total(rows.plain).speed:.1f}, "
            f"SSSD {total(rows.sssd).speed:.1f} tok/s so far, ratio {rows.ratio:.3f}",
            flush=True,
        )


def table(rows: dict[int, Rows]) -> None:
    """Print what was measured and what the budget chose."""
    print(
        f"{'batch':>5} {'plain':>7} {'SSSD':>7} {'ratio':>6} {'+-':>5} {'I_knee/batch':>12} "
        f"{'mean s_q':>9} {'accepted':>9}"
    )
    for batch, r in rows.items():
        print(
            f"{batch:>5} {total(r.plain).speed:>7.1f} {total(r.sssd).speed:>7.1f} "
            f"{r.ratio:>6.3f} {r.error:>5.3f} {r.knee / batch:>12.1f} "
            f"{r.mean('verify_width'):>9.2f} {r.mean('accept_length'):>9.2f}"
        )
    print(
        "(tok/s; +-: the ratio's standard error; s_q: nodes verified per request and step;\n"
        "accepted: tokens per verify)"
    )


if __name__ == "__main__":
    sys.exit(main())
