"""SSSD's throughput against plain SGLang at batch 1/4/8/16/32 where drafts are mostly poor.

Spec-Bench prompts of all categories, others at each launch, cold: nothing that was served joins the
datastore, so drafts come from the prompt and the answer so far. What the budget chose is read
from the server's metrics.

Neighbours on the machine make it a quarter slower for seconds at a time, and two processes of the
same server differ by 3% for as long as they live. So both servers work on the same requests at
once, but by turns: one is stopped (SIGSTOP) while the other runs for a second, which makes what the
machine does fall on both alike. `batch` requests are in flight, the next one begins where one ends,
and answers are as long as the model makes them: were all of one length, they would end together,
and in how many passes the next ones' prompts are then read is chance.
Both servers are launched anew several times. A ratio is the mean of all runs' ratios without the
highest and the lowest fifth (a trimmed mean); its standard error is that of the launches' ones.

    python -m scripts.bench_budget [--launches N] [--repeats N] [--tokens N] [--null]
        [--quick] [--json FILE]

With --null both servers are plain: what it prints is what the benchmark itself is off by.
"""

import argparse
import itertools
import math
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field

from scipy.stats import trim_mean  # type: ignore[import-untyped]

from scripts.lib.client import generate_all
from scripts.lib.figures import parser, report
from scripts.lib.served_metrics import read_metrics
from scripts.lib.server import Server
from scripts.lib.spec_bench import spec_bench

BATCHES = (1, 4, 8, 16, 32)
MAX_PROMPT_TOKENS = 160
TRIMMED = 0.2  # of the turns, at each end
SLICE_S = 1.0
REQUESTS_PER_BATCH = 2
WARM_UP_TOKENS = 16
# What the metrics count up: their differences over a run are that run's.
COUNTED = (
    "verify_width_sum",
    "verify_width_count",
    "accept_length_sum",
    "accept_length_count",
)


@dataclass
class Turn:
    """One round of requests, the same to each server: output tokens, seconds that it ran."""

    plain_tokens: int
    plain_s: float
    sssd_tokens: int
    sssd_s: float

    @property
    def ratio(self) -> float:
        """SSSD's tokens per second by plain SGLang's."""
        return (self.sssd_tokens / self.sssd_s) / (self.plain_tokens / self.plain_s)


@dataclass
class Rows:
    """What one batch size gave; one list of turns a launch."""

    launches: list[list[Turn]] = field(default_factory=list)
    counted: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0.0))
    knee: float = 0.0

    @property
    def turns(self) -> list[Turn]:
        """Those of all launches."""
        return [turn for launch in self.launches for turn in launch]

    @property
    def ratio(self) -> float:
        """SSSD's tokens per second by plain SGLang's."""
        return trimmed_ratio(self.turns)

    @property
    def error(self) -> float:
        """The ratio's standard error, from how the launches differ; nan with one launch."""
        ratios = [trimmed_ratio(turns) for turns in self.launches if turns]
        return statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else float("nan")

    @property
    def plain_speed(self) -> float:
        """Output tokens a second over all turns."""
        return sum(t.plain_tokens for t in self.turns) / sum(t.plain_s for t in self.turns)

    @property
    def sssd_speed(self) -> float:
        """Output tokens a second over all turns."""
        return sum(t.sssd_tokens for t in self.turns) / sum(t.sssd_s for t in self.turns)

    def add(self, turn: Turn, before: dict[str, float], after: dict[str, float]) -> None:
        """Another one of the latest launch, and the metrics around it."""
        self.launches[-1].append(turn)
        for name in COUNTED:
            self.counted[name] += after.get(name, 0.0) - before.get(name, 0.0)
        self.knee = after.get("budget_knee_tokens", 0.0)

    def mean(self, name: str) -> float:
        """The mean of a histogram of the metrics; 0 where it saw nothing."""
        count = self.counted[name + "_count"]
        return self.counted[name + "_sum"] / count if count else 0.0


def trimmed_ratio(turns: Sequence[Turn]) -> float:
    """The turns' ratio without their highest and lowest fifth."""
    logs = [math.log(turn.ratio) for turn in turns]
    return math.exp(float(trim_mean(logs, TRIMMED)))


def main() -> int:
    args = parser(__doc__)
    args.add_argument("--launches", type=int, default=3, help="times that both servers start [3]")
    args.add_argument("--repeats", type=int, default=2, help="turns per launch [2]")
    args.add_argument("--tokens", type=int, default=160, help="most tokens of an answer [160]")
    args.add_argument("--null", action="store_true", help="plain SGLang against itself")
    options = args.parse_args()
    if options.quick:
        options.launches, options.repeats, options.tokens = 1, 1, 48
    prompts = [p.input_ids for p in spec_bench(options.model, max_prompt_tokens=MAX_PROMPT_TOKENS)]
    rows = {batch: Rows() for batch in BATCHES}
    fresh = itertools.cycle(prompts)
    for number in range(options.launches):
        chosen = itertools.islice(fresh, REQUESTS_PER_BATCH * max(BATCHES))
        launch(number, list(chosen), rows, options)
    print()
    table(rows)
    figures = {f"ratio_b{b}": r.ratio for b, r in rows.items()}
    figures |= {f"ratio_of_sums_b{b}": r.sssd_speed / r.plain_speed for b, r in rows.items()}
    if options.launches > 1:
        figures |= {f"standard_error_b{b}": r.error for b, r in rows.items()}
    figures |= {f"mean_sq_b{b}": r.mean("verify_width") for b, r in rows.items()}
    least = min(r.ratio for r in rows.values())
    report({"min_ratio_vs_plain": least, **figures}, options.json)
    return 0


def launch(
    number: int,
    prompts: list[Sequence[int]],
    rows: Mapping[int, Rows],
    options: argparse.Namespace,
) -> None:
    """Start both servers and add their turns, at every batch size, to the rows."""
    with ExitStack() as stack:
        plain = Server(options.model, ["--enable-metrics"], name="plain")
        flags = [] if options.null else ["--speculative-algorithm", "SSSD"]
        sssd = Server(options.model, [*flags, "--enable-metrics"], name="sssd")
        # One after the other, and the other way round next time: the first one has its pick
        # of the memory.
        for server in (plain, sssd) if number % 2 else (sssd, plain):
            stack.callback(server.stop)
            server.start().wait()
        for row in rows.values():
            row.launches.append([])
        for server in (plain, sssd):  # into the radix cache: what is measured is decoding
            answer_all(server.base_url, prompts, max(BATCHES), WARM_UP_TOKENS)
        for repeat, batch in itertools.product(range(options.repeats), BATCHES):
            random.Random(f"{number} {repeat} {batch}").shuffle(prompts)
            before = read_metrics(sssd.base_url)
            turn = by_turns(
                (plain, sssd), (number + repeat) % 2,
                prompts[: REQUESTS_PER_BATCH * batch], batch, options.tokens,
            )  # fmt: skip
            rows[batch].add(turn, before, read_metrics(sssd.base_url))
            show(f"launch {number + 1}, turn {repeat + 1}", batch, rows[batch])


def by_turns(
    servers: tuple[Server, Server],
    first: int,
    prompts: Sequence[Sequence[int]],
    in_flight: int,
    tokens: int,
) -> Turn:
    """Both servers, plain SGLang and ours, answer all prompts; the `first` one begins."""
    seconds = [0.0, 0.0]
    with ThreadPoolExecutor(len(servers)) as pool, ExitStack() as stack:
        for server in servers:
            server.pause()
            stack.callback(server.resume)
        work = [
            pool.submit(answer_all, server.base_url, prompts, in_flight, tokens)
            for server in servers
        ]
        for place in itertools.cycle((first, 1 - first)):
            if all(future.done() for future in work):
                break
            if work[place].done():
                continue
            servers[place].resume()
            start = time.perf_counter()
            wait([work[place]], SLICE_S)
            servers[place].pause()
            seconds[place] += time.perf_counter() - start
    return Turn(work[0].result(), seconds[0], work[1].result(), seconds[1])


def answer_all(url: str, prompts: Sequence[Sequence[int]], in_flight: int, tokens: int) -> int:
    """All prompts, so many at a time; the number of output tokens."""
    answers = generate_all(
        url, prompts, in_flight=in_flight, params={"ingest": False}, max_new_tokens=tokens
    )
    return sum(len(answer.token_ids) for answer in answers)


def show(when: str, batch: int, rows: Rows) -> None:
    """The state of one batch size, on one line."""
    if rows.turns:
        last = rows.turns[-1]
        print(
            f"{when}, batch {batch}: ratio {last.ratio:.3f}, so far "
            f"{rows.ratio:.3f} (plain {rows.plain_speed:.1f}, SSSD {rows.sssd_speed:.1f} tok/s)",
            flush=True,
        )


def table(rows: dict[int, Rows]) -> None:
    """Print what was measured and what the budget chose."""
    print(
        f"{'batch':>5} {'plain':>7} {'SSSD':>7} {'sums':>6} {'ratio':>6} {'+-':>5} "
        f"{'I_knee/batch':>12} "
        f"{'mean s_q':>9} {'accepted':>9}"
    )
    for batch, r in rows.items():
        print(
            f"{batch:>5} {r.plain_speed:>7.1f} {r.sssd_speed:>7.1f} "
            f"{r.sssd_speed / r.plain_speed:>6.3f} {r.ratio:>6.3f} {r.error:>5.3f} "
            f"{r.knee / batch:>12.1f} "
            f"{r.mean('verify_width'):>9.2f} {r.mean('accept_length'):>9.2f}"
        )
    print(
        "(tok/s and sums: over all turns; ratio: the turns' trimmed mean, +- its standard error;\n"
        "s_q: nodes verified per request and step; accepted: tokens per verify)"
    )


if __name__ == "__main__":
    sys.exit(main())
