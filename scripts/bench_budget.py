"""SSSD's throughput against plain SGLang at batch 1/4/8/16/32 where drafts are mostly poor.

Spec-Bench prompts of all categories, each measured once, cold: nothing served before joins the
datastore, so drafts come from the prompt and the answer so far. What the budget chose is read
from the server's metrics. Both servers are up at once; short runs of the same prompts take turns
and the median of their ratios counts, so that a disturbance of the machine hits both or neither.
Two processes of the same plain server differ by 3% here, for as long as they live, so the servers
are started several times.

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
    sssd: list[float] = field(default_factory=list)
    cpu_ratios: list[float] = field(default_factory=list)
    counted: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0.0))
    knee: float = 0.0

    @property
    def ratios(self) -> list[float]:
        return [s / p for s, p in zip(self.sssd, self.plain, strict=True)]

    def mean(self, name: str) -> float:
        """The mean of a histogram of the metrics; 0 where it saw nothing."""
        count = self.counted[name + "_count"]
        return self.counted[name + "_sum"] / count if count else 0.0


def main() -> int:
    args = parser(__doc__)
    args.add_argument("--launches", type=int, default=3, help="times that both servers start [3]")
    args.add_argument("--repeats", type=int, default=4, help="pairs of runs per launch [4]")
    args.add_argument("--tokens", type=int, default=64, help="tokens per answer [64]")
    options = args.parse_args()
    if options.quick:
        options.launches, options.repeats, options.tokens = 1, 3, 48
    prompts = [p.input_ids for p in spec_bench(options.model, max_prompt_tokens=MAX_PROMPT_TOKENS)]
    rows = {batch: Rows() for batch in BATCHES}
    fresh = itertools.cycle(prompts)
    for _ in range(options.launches):
        with ExitStack() as stack:
            plain = Server(options.model, ["--enable-metrics"], name="plain").start()
            stack.callback(plain.stop)
            flags = ["--speculative-algorithm", "SSSD", "--enable-metrics"]
            sssd = Server(options.model, flags, name="sssd").start()
            stack.callback(sssd.stop)
            plain.wait()
            sssd.wait()
            for repeat in range(-1, options.repeats):  # the first one warms up
                for batch in BATCHES:
                    chosen = list(itertools.islice(fresh, batch))
                    measure(rows[batch], repeat, plain, sssd, chosen, options.tokens)
                    show(batch, rows[batch])
    print()
    table(rows)
    figures = {f"ratio_b{batch}": statistics.median(r.ratios) for batch, r in rows.items()}
    budgets = {f"mean_sq_b{batch}": r.mean("verify_width") for batch, r in rows.items()}
    report({"min_ratio_vs_plain": min(figures.values()), **figures, **budgets}, options.json)
    return 0


def measure(
    rows: Rows,
    repeat: int,
    plain: Server,
    sssd: Server,
    prompts: Sequence[Sequence[int]],
    tokens: int,
) -> None:
    """One run on each server; who goes first takes turns."""
    for server in (plain, sssd):  # prompts into the radix cache: what is measured is decoding
        run(server.base_url, prompts, 1)
    speeds, cpu = {}, {}
    before = read_metrics(sssd.base_url)
    for server in (plain, sssd) if repeat % 2 else (sssd, plain):
        start = server.cpu_seconds()
        speeds[server] = run(server.base_url, prompts, tokens)
        cpu[server] = server.cpu_seconds() - start
    after = read_metrics(sssd.base_url)
    if repeat < 0:
        return
    rows.plain.append(speeds[plain])
    rows.sssd.append(speeds[sssd])
    rows.cpu_ratios.append(cpu[plain] / cpu[sssd])
    for name in COUNTED:
        rows.counted[name] += after.get(name, 0.0) - before.get(name, 0.0)
    rows.knee = after.get("budget_knee_tokens", 0.0)


def run(url: str, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    """Output tokens a second of one batch."""
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
    return sum(a["meta_info"]["completion_tokens"] for a in response.json()) / seconds


def read_metrics(url: str) -> dict[str, float]:
    """The server's `sglang_ext:` series that have no label beside the model's, by name."""
    found = {}
    for line in requests.get(url + "/metrics", timeout=30).text.splitlines():
        if line.startswith("sglang_ext:") and line.count("=") == 1:
            name, value = line.removeprefix("sglang_ext:").rsplit(" ", 1)
            found[name.partition("{")[0]] = float(value)
    return found


def show(batch: int, rows: Rows) -> None:
    """The state of one batch size, on one line."""
    if rows.ratios:
        print(
            f"run {len(rows.ratios)}, batch {batch}: plain {rows.plain[-1]:.1f}, SSSD "
            f"{rows.sssd[-1]:.1f} tok/s; median ratio {statistics.median(rows.ratios):.3f}",
            flush=True,
        )


def table(rows: dict[int, Rows]) -> None:
    """Print what was measured and what the budget chose."""
    print(
        f"{'batch':>5} {'plain':>8} {'SSSD':>8} {'ratio':>6} {'quartiles':>13} {'by CPU':>7} "
        f"{'I_knee/batch':>12} {'mean s_q':>9} {'accepted':>9}"
    )
    for batch, r in rows.items():
        low, _, high = statistics.quantiles(r.ratios, n=4)
        print(
            f"{batch:>5} {statistics.median(r.plain):>8.1f} {statistics.median(r.sssd):>8.1f} "
            f"{statistics.median(r.ratios):>6.3f} {low:>6.3f}-{high:<6.3f} "
            f"{statistics.median(r.cpu_ratios):>7.3f} {r.knee / batch:>12.1f} "
            f"{r.mean('verify_width'):>9.2f} {r.mean('accept_length'):>9.2f}"
        )
    print(
        "(tok/s; by CPU: the ratio of tokens per CPU second, which other programs on the machine\n"
        "disturb less; s_q: nodes verified per request and step; accepted: tokens per verify)"
    )


if __name__ == "__main__":
    sys.exit(main())
