"""What the budget makes of captured widths, in a model of a GPU: answers replayed in a closed loop.

A model: nothing here ran on a GPU, and every figure says so in its name. The seconds of a step come
from scripts/lib/gpu_roofline.py (Llama-3-8B on an H100). Texts, drafts, acceptance and decisions
are real: SSSD drafts for answers that are known, and the product's ration, calibration, cost model
and choose_width decide which steps look for drafts and how wide they verify. They know no more than
on a server: the times of steps, with noise and one step late, from the first step on.

    python -m scripts.bench_cuda_budget [--quick] [--half even|odd] [--seed N] [--json FILE]

Compared with plain SGLang (overlapped, without looks) and, in hindsight, with the best of plain and
the fixed widths, which look for drafts in every step. The rules were tuned on the even answers;
--half odd, the default, takes those that were held back. Workloads:
    none     no drafter ever finds anything
    new      articles of Spec-Bench's prompts, written on by a drafter that has seen nothing else
    maths    GSM8K's worked answers; other questions' answers were served before
    answers  SmolLM2-135M's greedy answers to Spec-Bench; none was served before
    served   the same; all of them were served before
    mixed    new, answers and served by turns: a batch has some of each
"""

import gzip
import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from scripts.lib.figures import parser, report
from scripts.lib.gpu_roofline import WIDTHS, Gpu, padded
from scripts.lib.spec_bench import DATA, MODEL, spec_bench, tokenizer
from sglang_ext.budget.choice import Calibration, choose_width
from sglang_ext.budget.cost_model import DELAYED_CUDA, NODE_READS_CUDA, CostModel
from sglang_ext.budget.cost_sweep import CUDA_COUNTS, assumed_costs
from sglang_ext.budget.rationing import DraftingRation
from sglang_ext.drafters import DrafterContext, DraftRequest
from sglang_ext.drafters.sssd import PROMPT_TAIL, RetrievalDrafter
from sglang_ext.options import Options
from sglang_ext.tree import TokenTree

MEASURED_AT = (1, 2, 4, 8, 16, 24, 32, 48, 64)
QUICK_AT = (1, 4, 16, 32, 64)
# Of the answers: those that the rules were tuned on, and those that were held back.
HALVES = ("even", "odd")
# Tokens of a run: so many of each place in the batch, and of so many places at least.
TOKENS_A_PLACE, LEAST_PLACES = 400, 8
# Longest answers, and what of an article stands before the first one.
LONGEST, ARTICLE_HEAD = 128, 48
VOCABULARY = 49152  # SmolLM2's
_NOTHING = np.zeros(0, dtype=bool)
# Of a step's measured seconds: their spread, and the share of steps that something holds up.
NOISE, DELAYED = 0.015, 0.004


@dataclass
class Answer:
    """A known answer.

    Attributes:
        trees: what is drafted behind its first n tokens, n = 1, 2, ... (index 0 is not used).
        right: of each tree, which nodes the answer passes through.
    """

    prompt: list[int]
    output: list[int]
    trees: list[TokenTree] = field(default_factory=list)
    right: list[npt.NDArray[np.bool_]] = field(default_factory=list)


@dataclass
class Running:
    """A request amid its answer, of which it has so many tokens."""

    answer: Answer
    calibration: Calibration
    tokens: int = 1

    @property
    def context(self) -> int:
        """KV entries."""
        return len(self.answer.prompt) + self.tokens

    @property
    def tree(self) -> TokenTree:
        """What is drafted behind its tokens."""
        return self.answer.trees[self.tokens]

    def advance(self, nodes: int) -> npt.NDArray[np.bool_]:
        """Verify the tree's first `nodes`: which were right."""
        right = self.answer.right[self.tokens][:nodes]
        self.tokens += 1 + int(right.sum())
        return right


class Fixed:
    """Looks for drafts in every step, to verify them at one width; width 1 is plain SGLang."""

    def __init__(self, width: int):
        self.width = width

    def step(self, running: Sequence[Running]) -> tuple[int, bool]:
        """The width of the next step, and whether it looked."""
        return self.width, self.width > 1

    def learn(self, *_: object) -> None:
        """Nothing."""


class Adaptive:
    """The product's own decisions.

    Args:
        swept: the linear layers were measured at start; else their costs are assumed.
    """

    def __init__(self, gpu: Gpu, rng: np.random.Generator, swept: bool = True):
        self._gpu, self._rng = gpu, rng
        costs = (
            {n: gpu.linear_s(n) * _noise(rng, NOISE) for n in CUDA_COUNTS}
            if swept
            else assumed_costs(int(gpu.weight_bytes))
        )
        self.cost = CostModel(costs, gpu.kv_entry_s(), NODE_READS_CUDA, DELAYED_CUDA)
        self.ration = DraftingRation()
        self.calibration = Calibration()

    def step(self, running: Sequence[Running]) -> tuple[int, bool]:
        """The width of the next step, and whether it looked."""
        if not self.ration.allows():
            return 1, False
        batch = len(running)
        choice = choose_width(
            [r.calibration(r.tree.probs) for r in running],
            self.cost,
            WIDTHS,
            [r.context for r in running],
            self.ration.drafting_s,
            padded_batch=padded(batch),
        )
        found = choice.width > 1
        seconds = self._gpu.look_s(batch) + (self._gpu.stage_s(batch) if found else 0.0)
        self.ration.note_look(seconds * _noise(self._rng, 0.1), found, choice.saved_s)
        return choice.width, True

    def learn(self, rows: int, width: int, read: float, seconds: float) -> None:
        """A step took so long on the device."""
        measured = seconds * _noise(self._rng, NOISE)
        if self._rng.random() < DELAYED:
            measured *= 1.0 + self._rng.random()
        self.cost.observe(rows * width, measured, width > 1, read)
        self.ration.note_step(measured)


def _noise(rng: np.random.Generator, spread: float) -> float:
    return float(rng.lognormal(0.0, spread))


def replay(
    answers: Sequence[Answer], batch: int, gpu: Gpu, rule: Fixed | Adaptive, tokens: int
) -> float:
    """Answer them over and over, `batch` at a time; seconds per token, of the first so many.

    The batch is full to the end, and begins amid its answers: how requests of unequal speed share a
    batch's last steps would say more about their lengths than about the steps.
    """
    shared = rule.calibration if isinstance(rule, Adaptive) else Calibration()
    waiting = itertools.cycle(answers)
    running: list[Running] = []
    late: list[Callable[[], None]] = []  # what the last step taught
    seconds, done = 0.0, 0
    while done < tokens:
        for answer in itertools.islice(waiting, batch - len(running)):
            place = 1 if done else 1 + 37 * len(running) % (len(answer.output) - 1)
            running.append(Running(answer, shared.for_request(), place))
        width, looked = rule.step(running)
        for lesson in late:
            lesson()
        rows, read = padded(batch), float(sum(r.context for r in running))
        device = gpu.step_s(rows, width, read)
        seconds += device + looked * gpu.look_s(batch) + (width > 1) * gpu.stage_s(batch)
        late = [partial(rule.learn, rows, width, read, device)]
        for r in running:
            probs = r.tree.probs[: width - 1]
            right = r.advance(width - 1)
            done += 1 + int(right.sum())
            if len(right) and isinstance(rule, Adaptive):
                late.append(partial(r.calibration.observe, probs, right))
        running = [r for r in running if r.tokens < len(r.answer.output)]
    return seconds / done


def draft(answers: Sequence[Answer], seen: Sequence[Answer]) -> list[Answer]:
    """The answers with what SSSD drafts in each of their places, `seen` served before.

    The datastore stays as it is, so a place's draft is the same in every run.
    """
    options = Options(drafter="sssd", live_ingest=False)
    context = DrafterContext(vocab_size=VOCABULARY, options=options, tokenizer_fingerprint="t")
    drafter = RetrievalDrafter(context)
    if seen:
        drafter.add_corpus("seen", [[*a.prompt[-PROMPT_TAIL:], *a.output] for a in seen])
    made = [Answer(a.prompt, a.output, [TokenTree.empty()], [_NOTHING]) for a in answers]
    requests = [DraftRequest(f"r{i}", a.prompt, a.output[:1]) for i, a in enumerate(made)]
    for request in requests:
        drafter.start(request)
    for place in range(1, max(len(a.output) for a in made)):
        going = [i for i, a in enumerate(made) if place < len(a.output)]
        for i in going:
            requests[i].output = made[i].output[:place]
        trees = drafter.propose([requests[i] for i in going], max(WIDTHS) - 1)
        for i, tree in zip(going, trees, strict=True):
            rest = made[i].output[place:]
            tree = tree.clipped(len(rest) - 1)
            made[i].trees.append(tree)
            made[i].right.append(tree.path(rest))
    return made


def undrafted(answers: Sequence[Answer]) -> list[Answer]:
    """The answers, for which nothing is ever found."""
    return [
        Answer(a.prompt, a.output, [TokenTree.empty()] * n, [_NOTHING] * n)
        for a in answers
        for n in [len(a.output)]
    ]


def articles() -> list[Answer]:
    """Spec-Bench's long prompts, each part an answer to what stands before it."""
    found = []
    for prompt in spec_bench():
        if prompt.category in ("summarization", "rag"):
            ids = tokenizer(MODEL).encode(prompt.text)
            for start in range(ARTICLE_HEAD, len(ids) - LONGEST, LONGEST):
                found.append(Answer(ids[:start], ids[start : start + LONGEST]))
    return found


def solutions() -> list[Answer]:
    """GSM8K's questions and worked answers."""
    encode = tokenizer(MODEL)
    found = []
    for line in _lines("gsm8k.jsonl.gz"):
        prompt = encode.apply_chat_template(
            [{"role": "user", "content": line["question"]}],
            add_generation_prompt=True,
            return_dict=False,
        )
        found.append(Answer(list(prompt), encode.encode(line["answer"])[:LONGEST]))
    return found


def model_answers() -> list[Answer]:
    """SmolLM2's answers to Spec-Bench."""
    prompts = spec_bench(max_prompt_tokens=700)
    pairs = zip(prompts, _lines("answers.jsonl.gz"), strict=False)
    return [Answer(list(p.input_ids), output) for p, output in pairs if len(output) > 8]


def _lines(name: str) -> list[Any]:
    with gzip.open(DATA / name, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def workloads(half: int, most: int) -> dict[str, list[Answer]]:
    """Each workload's answers, at most so many, of every other one of the data."""
    rng = np.random.default_rng(0)  # the halves are the same in every run

    def part(answers: list[Answer]) -> list[Answer]:
        return [answers[i] for i in rng.permutation(len(answers))[half::2]]

    answers, new, maths = part(model_answers()), part(articles()), part(solutions())
    answers, new = answers[:most], new[:most]
    maths, seen = maths[:most], maths[most:]
    made = {
        "none": undrafted(maths),
        "new": draft(new, []),
        "maths": draft(maths, seen),
        "answers": draft(answers, []),
        "served": draft(answers, answers),
    }
    three = zip(made["new"], made["answers"], made["served"], strict=False)
    return made | {"mixed": list(itertools.chain.from_iterable(three))}


@dataclass(frozen=True)
class Row:
    """A workload's speed at one batch, in parts of plain SGLang's."""

    adaptive: float
    fixed: Mapping[int, float]

    @property
    def vs_best(self) -> float:
        """Adaptive tokens/s by those of the best fixed width, plain included."""
        return self.adaptive / max(self.fixed.values())


def compare(
    answers: Sequence[Answer], batch: int, gpu: Gpu, seed: int, tokens: int, swept: bool = True
) -> Row:
    """The product's decisions beside every fixed width."""
    fixed = {w: replay(answers, batch, gpu, Fixed(w), tokens) for w in WIDTHS}
    rule = Adaptive(gpu, np.random.default_rng(seed), swept)
    adaptive = replay(answers, batch, gpu, rule, tokens)
    return Row(fixed[1] / adaptive, {w: fixed[1] / seconds for w, seconds in fixed.items()})


def summary(rows: Mapping[tuple[str, int], Row]) -> dict[str, float]:
    """The figures; all are a model's."""
    figures = {
        "model_min_ratio_vs_plain": min(row.adaptive for row in rows.values()),
        "model_min_ratio_vs_best_fixed": min(row.vs_best for row in rows.values()),
    }
    for (name, batch), row in rows.items():
        figures[f"model_ratio_vs_plain_{name}_b{batch}"] = row.adaptive
        figures[f"model_ratio_vs_best_fixed_{name}_b{batch}"] = row.vs_best
    return figures


def measure(
    quick: bool, half: str = HALVES[1], seed: int = 1, host: float = 1.0, swept: bool = True
) -> dict[tuple[str, int], Row]:
    """Every workload at every batch, printed as they come.

    Args:
        half: the answers to take, one of HALVES.
        seed: of the noise.
        host: a factor on the host's part of a step.
        swept: the linear layers' costs were measured at start.
    """
    print("a model of Llama-3-8B on an H100; speeds in parts of plain SGLang's")
    widths = " ".join(f"{f'w{w}':>6}" for w in WIDTHS[1:])
    print(f"{'workload':9} {'batch':>5} {'adaptive':>8} {'vs best':>8} {widths}")
    gpu, rows = Gpu(host=host), {}
    for name, answers in workloads(HALVES.index(half), 40 if quick else 80).items():
        for batch in QUICK_AT if quick else MEASURED_AT:
            tokens = TOKENS_A_PLACE * max(LEAST_PLACES, batch)
            row = rows[name, batch] = compare(answers, batch, gpu, seed, tokens, swept)
            fixed = " ".join(f"{row.fixed[w]:6.3f}" for w in WIDTHS[1:])
            print(f"{name:9} {batch:>5} {row.adaptive:8.3f} {row.vs_best:8.3f} {fixed}", flush=True)
    return rows


def budget_figures(quick: bool) -> dict[str, float]:
    """The figures of the answers that were held back from tuning."""
    return summary(measure(quick))


def main() -> int:
    args = parser(__doc__, model=False)
    args.add_argument("--half", choices=HALVES, default=HALVES[1], help="[%(default)s]")
    args.add_argument("--seed", type=int, default=1, help="of the noise [%(default)d]")
    args.add_argument("--host", type=float, default=1.0, help="times the host's part [%(default)s]")
    args.add_argument("--unswept", action="store_true", help="as where the sweep failed at start")
    o = args.parse_args()
    report(summary(measure(o.quick, o.half, o.seed, o.host, not o.unswept)), o.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
