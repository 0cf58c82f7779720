"""Mirrored retrieval: what drafting still costs between two passes of a batch of 32.

Answers that SmolLM2-135M-Instruct gave before are given again, without a server: a step's drafts
are verified against the answer, as a greedy target does. What the early exit says on an answer's
path was recorded from the model (an exit where SSSD wants it, asked about the tokens that servers
ask about and about all, and one at half the depth; lenses fitted on other answers); on nodes beside
the path it is what it says elsewhere. The passes are emulated: behind the exit nothing happens on
this machine (another device), or all cores compute (busy), for the part of so many milliseconds
that is left there. Two drafters take turns of ten steps, with and without retrieval ahead, over
equal datastores.

    python -m scripts.bench_mirrored_retrieval [--quick] [--json FILE] [--tokens N]

Figures, of steps in which both drafted: unmirrored_retrieval_critical_ms and
mirrored_retrieval_critical_ms, the mean time that the target waits for drafting (the latter with
the hand-over at the exit), with passes of 20 ms, and critical_ratio of the two; hit_rate and
prepared_per_request; the same by length of the pass (critical_ratio_5ms, ...), of an exit that is
asked about all tokens (_all_tokens) and of one at half the depth (_half); busy_slowdown, how much
longer the rest of a pass takes that needs all cores itself; different_trees, which must be 0;
hit_rate_possible, hits if all outcomes were retrieved in time, and hit_rate_possible_half. Exits
with 1 where trees differ or nothing was hit.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from scripts.lib.figures import parser, report
from scripts.lib.machine_text import Documents, machine_text
from scripts.lib.recorded_exits import KAPPA, RecordedAnswer, answered, record
from scripts.lib.spec_bench import MODEL, tokenizer
from sglang_ext.drafters import DrafterContext, DraftRequest
from sglang_ext.drafters.sssd import RetrievalDrafter
from sglang_ext.mirror.exit_view import ExitView
from sglang_ext.options import Options
from sglang_ext.tree import TokenTree, pack

BATCH, WIDTH = 32, 8
PASSES_MS = (5.0, 20.0, 60.0)
STANDARD_MS = 20.0
TURN = 10  # steps
HALF = 0.5  # the paper's exit, and the one for a draft model
# Tokens of the datastore, steps, answers to fit the lens on, and answers given.
FULL, QUICK = (10_000_000, 400, 64, 4 * BATCH), (1_000_000, 60, 32, BATCH)
MAX_PROMPT = 120


@dataclass(eq=False)
class Running:
    """A request that gives a recorded answer, as one drafter sees it."""

    recorded: RecordedAnswer
    request: DraftRequest

    @property
    def rest(self) -> list[int]:
        return self.recorded.answer[len(self.request.output) :]


@dataclass
class Lane:
    """One drafter and its requests.

    Attributes:
        waited: seconds that the target has waited for drafting, of each step.
        rests: seconds that passes took behind their exits.
    """

    drafter: RetrievalDrafter
    rng: np.random.Generator
    running: list[Running] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    rests: list[float] = field(default_factory=list)
    started: int = 0

    def refill(self, answers: Sequence[RecordedAnswer]) -> None:
        """Requests whose answers are given leave, and others join."""
        for gone in [r for r in self.running if len(r.rest) < 2]:
            self.drafter.finish(gone.request, False)
            self.running.remove(gone)
        while len(self.running) < BATCH:
            recorded = answers[self.started % len(answers)]
            request = DraftRequest(f"r{self.started}", recorded.prompt, recorded.answer[:1])
            self.drafter.start(request)
            self.running.append(Running(recorded, request))
            self.started += 1

    def step(self, rest: Callable[[], None]) -> list[TokenTree]:
        """Draft, verify in an emulated pass, commit; the trees."""
        requests = [r.request for r in self.running]
        began = time.perf_counter()
        trees = self.drafter.propose(requests, WIDTH - 1)
        waited = time.perf_counter() - began
        if self.drafter.uses_early_exit:
            view = self._view(trees)
            began = time.perf_counter()
            self.drafter.early_exit(requests, view)
            waited += time.perf_counter() - began
        began = time.perf_counter()
        rest()
        self.rests.append(time.perf_counter() - began)
        self.waited.append(waited)
        for running, tree in zip(self.running, trees, strict=True):
            right = int(tree.path(running.rest).sum())
            running.request.output.extend(running.rest[: right + 1])
        return trees

    def _view(self, trees: Sequence[TokenTree]) -> ExitView:
        packed = pack([r.request.output[-1] for r in self.running], trees, WIDTH)
        shape = (*packed.tokens.shape, KAPPA)
        candidates, logprobs = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        for b, (running, tree) in enumerate(zip(self.running, trees, strict=True)):
            said, at = running.recorded, len(running.request.output) - 1
            elsewhere = self.rng.integers(0, len(said.candidates), len(tree) + 1)
            elsewhere[0] = at
            on_path = 1 + np.flatnonzero(tree.path(running.rest))
            elsewhere[on_path] = np.minimum(at + 1 + np.arange(len(on_path)), len(said.answer) - 1)
            candidates[b, : len(tree) + 1] = said.candidates[elsewhere]
            logprobs[b, : len(tree) + 1] = said.logprobs[elsewhere]
        return ExitView(
            tuple(r.request.rid for r in self.running),
            packed.tokens.astype(np.int32),
            packed.parents,
            packed.sizes.astype(np.int32),
            candidates,
            logprobs,
            time.perf_counter(),
        )


@dataclass(frozen=True)
class Measured:
    """Of a run: milliseconds waited for drafting, and of passes' rests, without and with."""

    plain_ms: float
    mirrored_ms: float
    plain_rest_ms: float
    mirrored_rest_ms: float
    hit_rate: float
    prepared_per_request: float
    different_trees: int


def main() -> int:
    args = parser(__doc__, model=False)
    args.add_argument("--tokens", type=int, help="of the datastore's text")
    options = args.parse_args()
    tokens, steps, fitted, given = QUICK if options.quick else FULL
    pairs = answered(MAX_PROMPT)
    fit, asked = pairs[:fitted], pairs[fitted : fitted + given]
    print(f"recording what the exit says of {len(asked)} answers", flush=True)
    texts = machine_text(MODEL, options.tokens or tokens)
    drafters = [drafter(mirrored, texts, fit) for mirrored in (False, True)]
    depth = drafters[1].exit_depth
    answers, half = record(fit, asked, (depth, HALF))
    [wider] = record(fit, asked, (depth,), head_tokens=0)
    figures: dict[str, float] = {}
    for ms in PASSES_MS:
        made = run(drafters, answers, steps, partial(time.sleep, (1 - depth) * ms / 1e3))
        figures[f"critical_ratio_{ms:g}ms"] = made.mirrored_ms / made.plain_ms
        figures[f"hit_rate_{ms:g}ms"] = made.hit_rate
        if ms == STANDARD_MS:
            figures = standard(made) | figures
        figures["different_trees"] = figures.get("different_trees", 0) + made.different_trees
    for name, said, at in (("all_tokens", wider, depth), ("half", half, HALF)):
        made = run(drafters, said, steps, partial(time.sleep, (1 - at) * STANDARD_MS / 1e3))
        figures[f"critical_ratio_{name}"] = made.mirrored_ms / made.plain_ms
        figures[f"hit_rate_{name}"] = made.hit_rate
    made = run(drafters, answers, steps, busy_for((1 - depth) * STANDARD_MS))
    figures["busy_critical_ratio"] = made.mirrored_ms / made.plain_ms
    figures["busy_slowdown"] = made.mirrored_rest_ms / made.plain_rest_ms
    whole = ended(drafters[1])
    figures["hit_rate_possible"] = run(drafters, answers, steps, whole).hit_rate
    figures["hit_rate_possible_half"] = run(drafters, half, steps, whole).hit_rate
    report(figures, options.json)
    if figures["different_trees"] or not figures["hit_rate"]:
        print("trees differ from those of plain retrieval, or none was ready")
        return 1
    return 0


def standard(made: Measured) -> dict[str, float]:
    """The figures of passes of the standard length."""
    return {
        "unmirrored_retrieval_critical_ms": made.plain_ms,
        "mirrored_retrieval_critical_ms": made.mirrored_ms,
        "critical_ratio": made.mirrored_ms / made.plain_ms,
        "hit_rate": made.hit_rate,
        "prepared_per_request": made.prepared_per_request,
    }


def drafter(mirrored: bool, texts: Documents, served: Sequence) -> RetrievalDrafter:
    """SSSD over these texts and what was served."""
    options = Options(mirror_retrieval=mirrored, live_ingest=False)
    made = RetrievalDrafter(DrafterContext(len(tokenizer(MODEL)), options))
    made.add_corpus("text", [texts[i].tolist() for i in range(len(texts))])
    made.add_corpus("served", [prompt[-16:] + answer for prompt, answer in served])
    return made


def run(
    drafters: Sequence[RetrievalDrafter],
    answers: Sequence[RecordedAnswer],
    steps: int,
    rest: Callable[[], None],
) -> Measured:
    """Both drafters through the same steps, in turns; `rest` is what a pass does at its exit."""
    lanes = [Lane(each, np.random.default_rng(0)) for each in drafters]
    before = dict(drafters[1].counters)
    different, finish = 0, ended(drafters[1])
    for number in range(steps // TURN):
        trees: list[list[TokenTree]] = [[], []]
        for which in (0, 1) if number % 2 else (1, 0):
            for _ in range(TURN):
                lanes[which].refill(answers)
                trees[which] += lanes[which].step(rest)
            finish()  # the other one's turn is its alone
        different += sum(not same(a, b) for a, b in zip(*trees, strict=True))
    gained = {name: value - before[name] for name, value in drafters[1].counters.items()}
    asked = gained["mirror_hits"] + gained["mirror_misses"]
    settled = max(2, steps // 10)
    waited, rests = (
        [1e3 * float(np.mean(times[settled:])) for times in each]
        for each in ([lane.waited for lane in lanes], [lane.rests for lane in lanes])
    )
    return Measured(
        plain_ms=waited[0],
        mirrored_ms=waited[1],
        plain_rest_ms=rests[0],
        mirrored_rest_ms=rests[1],
        hit_rate=gained["mirror_hits"] / asked,
        prepared_per_request=gained["mirror_prepared"] / asked,
        different_trees=different,
    )


def same(a: TokenTree, b: TokenTree) -> bool:
    return (
        np.array_equal(a.tokens, b.tokens)
        and np.array_equal(a.parents, b.parents)
        and np.array_equal(a.probs, b.probs)
    )


def busy_for(ms: float) -> Callable[[], None]:
    """As many matrix products as take so long here when nothing else runs, on all cores."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    a = torch.randn(256, 256)
    for _ in range(20):
        a @ a
    began = time.perf_counter()
    for _ in range(200):
        a @ a
    count = max(1, round(200 * ms / 1e3 / (time.perf_counter() - began)))

    def compute() -> None:
        for _ in range(count):
            a @ a

    return compute


def ended(mirrored: RetrievalDrafter) -> Callable[[], None]:
    """Waits until all outcomes are retrieved for."""

    def wait() -> None:
        job = mirrored._mirror._job if mirrored._mirror is not None else None
        while job is not None and not job.done:
            time.sleep(1e-4)

    return wait


if __name__ == "__main__":
    sys.exit(main())
