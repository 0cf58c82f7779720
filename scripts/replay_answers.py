"""What drafters would gain on answers that are known: a closed loop without a model.

The answers (a sweep's `served_before.jsonl`: a line with `prompt` and `output`, token ids, each)
are dealt into folds. Those of one fold are answered again, so many at a time, by a drafter that has
seen the other folds' answers. A step costs what the cost table says of its tokens; our budget
chooses what is verified, while peers verify all that they draft. There is no server and none of its
noise, so differences of a percent show; what drafting itself costs is left out.

    python -m scripts.replay_answers FILE.jsonl [--drafters sssd,pld,suffix] [--batches 1,4,16]
        [--quick] [--json FILE]
"""

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scripts.lib.figures import parser, report
from sglang_ext.budget.choice import Calibration, choose_nodes
from sglang_ext.budget.cost_model import CostModel
from sglang_ext.drafters import Drafter, DrafterContext, DraftRequest, load
from sglang_ext.options import Options
from sglang_ext.tree import TokenTree

FOLDS = 4
MAX_NODES = 15
# Whose own rule says how much is verified.
BUDGETED = frozenset({"sssd"})
# Milliseconds of a step by its tokens: SmolLM2-135M in float32 on two cores of an AMD EPYC, what is
# not linear layers (half of it at one token) included.
COSTS = {1: 30.0, 2: 31.0, 4: 34.0, 8: 41.0, 16: 56.0, 32: 92.0, 64: 165.0}


@dataclass(frozen=True)
class Answer:
    """A request that was answered: token ids."""

    prompt: list[int]
    output: list[int]


@dataclass
class Total:
    """What a run came to."""

    tokens: int = 0
    passes: int = 0
    """Requests' shares in steps."""
    nodes: int = 0
    cost: float = 0.0

    def add(self, other: "Total") -> None:
        """Count another run in."""
        self.tokens += other.tokens
        self.passes += other.passes
        self.nodes += other.nodes
        self.cost += other.cost


@dataclass
class Running:
    """A request amid its answer."""

    request: DraftRequest
    answer: Answer
    calibration: Calibration

    @property
    def rest(self) -> list[int]:
        """What is still to come."""
        return self.answer.output[len(self.request.output) :]


def main() -> int:
    args = parser(__doc__, model=False)
    args.add_argument("file", type=Path, help="answers, JSON lines")
    args.add_argument("--drafters", default="sssd,pld,suffix", help="installed ones [%(default)s]")
    args.add_argument("--batches", default="1,4,16", help="requests at a time [%(default)s]")
    args.add_argument("--workload", help="of the file's lines those with this `workload` alone")
    args.add_argument("--vocab-size", type=int, default=49152, help="[%(default)d: SmolLM2's]")
    options = args.parse_args()
    answers = list(read_answers(options.file, options.workload))
    if len(answers) < FOLDS:
        args.error(f"{options.file}: expected {FOLDS} answers or more, found {len(answers)}")
    if options.quick:
        answers = answers[: 4 * FOLDS]
    figures: dict[str, float] = {"answers": len(answers)}
    print(f"{'drafter':12} {'batch':>5} {'accepted':>9} {'s_q':>6} {'speedup':>8}")
    for batch in map(int, options.batches.split(",")):
        plain = plain_cost(answers, batch)
        for name in options.drafters.split(","):
            total = folded(name, answers, batch, options)
            accepted, width = total.tokens / total.passes, 1 + total.nodes / total.passes
            print(f"{name:12} {batch:>5} {accepted:>9.3f} {width:>6.2f} {plain / total.cost:>8.3f}")
            figures[f"speedup_{name}_b{batch}"] = plain / total.cost
    report(figures, options.json)
    return 0


def read_answers(path: Path, workload: str | None) -> Iterator[Answer]:
    """The file's answers that are two tokens or longer."""
    for line in path.read_text(encoding="utf-8").splitlines():
        found = json.loads(line)
        if workload in (None, found.get("workload")) and len(found["output"]) > 1:
            yield Answer(list(found["prompt"]), list(found["output"]))


def folded(name: str, answers: Sequence[Answer], batch: int, options: argparse.Namespace) -> Total:
    """Each fold's answers, a drafter that has seen the other ones."""
    total = Total()
    for fold in range(FOLDS):
        context = DrafterContext(
            vocab_size=options.vocab_size, options=Options(drafter=name), tokenizer_fingerprint="t"
        )
        drafter = load(name, context)
        asked = answers[fold::FOLDS]
        for number, answer in enumerate(answers):
            if number % FOLDS != fold:
                see(drafter, f"seen {number}", answer)
        settle(drafter)
        total.add(replay(drafter, asked, batch, budgeted=name in BUDGETED))
    return total


def see(drafter: Drafter, rid: str, answer: Answer) -> None:
    """Have a drafter take in an answer as if it had been served."""
    request = DraftRequest(rid, answer.prompt, answer.output[:1])
    drafter.start(request)
    request.output += answer.output[1:]
    drafter.observe(request, answer.output[1:])
    drafter.finish(request, completed=True)


def replay(drafter: Drafter, answers: Sequence[Answer], batch: int, budgeted: bool) -> Total:
    """Answer them in a closed loop of `batch` requests."""
    total, cost, shared = Total(), CostModel(COSTS), Calibration()
    numbers = itertools.count()
    waiting = list(reversed(answers))
    running: list[Running] = []
    while waiting or running:
        while waiting and len(running) < batch:
            running.append(begin(drafter, waiting.pop(), f"r{next(numbers)}", shared))
        trees = drafter.propose([r.request for r in running], MAX_NODES)
        if budgeted:
            probs = [r.calibration(t.probs) for r, t in zip(running, trees, strict=True)]
            nodes = choose_nodes(probs, cost).nodes
            trees = [tree.first(int(n)) for tree, n in zip(trees, nodes, strict=True)]
        tokens = len(running) + sum(map(len, trees))
        total.cost += float(np.interp(tokens, list(COSTS), list(COSTS.values())))
        for r, tree in zip(running, trees, strict=True):
            total.passes += 1
            total.nodes += len(tree)
            total.tokens += advance(drafter, r, tree)
        for r in [r for r in running if not r.rest]:
            drafter.finish(r.request, completed=True)
            running.remove(r)
            settle(drafter)
    return total


def settle(drafter: Drafter) -> None:
    """Wait for what was served to be searchable: a server's next steps leave the time for it."""
    if drafter.datastore is not None:
        drafter.datastore.flush()


def begin(drafter: Drafter, answer: Answer, rid: str, shared: Calibration) -> Running:
    """A request that has its first token."""
    request = DraftRequest(rid, answer.prompt, answer.output[:1])
    drafter.start(request)
    return Running(request, answer, shared.for_request())


def advance(drafter: Drafter, running: Running, tree: TokenTree) -> int:
    """Accept what is right of a tree; the tokens that the request got."""
    accepted = tree.path(running.rest)
    if len(tree):
        running.calibration.observe(tree.probs, accepted)
    new = running.rest[: 1 + int(accepted.sum())]
    running.request.output += new
    drafter.observe(running.request, new)
    return len(new)


def plain_cost(answers: Sequence[Answer], batch: int) -> float:
    """Milliseconds that the answers take in a closed loop of `batch` requests without drafts."""
    total = 0.0
    running: list[int] = []
    for fold in range(FOLDS):
        waiting = [len(answer.output) - 1 for answer in reversed(answers[fold::FOLDS])]
        while waiting or running:
            while waiting and len(running) < batch:
                running.append(waiting.pop())
            total += float(np.interp(len(running), list(COSTS), list(COSTS.values())))
            running = [left - 1 for left in running if left > 1]
    return total


if __name__ == "__main__":
    sys.exit(main())
