"""How many nodes a step may verify: the drafts' expected gain against the step's measured cost.

SSSD bounds s_q by I_knee / batch (section 3.3): up to I_knee tokens a forward pass takes about as
long as reading the weights, past it every token is paid for. Both sides are measured here. A step
of `bs` requests and k drafted nodes costs cost(bs + k) seconds and commits about 1 + (the sum of
its nodes' probabilities) / bs tokens of each request; the k with the most tokens a second wins, and
k = 0 is a plain decode step. The nodes are taken best first over the whole batch, so a request
whose drafts are poor gets few of them or none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numba
import numpy as np
import numpy.typing as npt

from sglang_ext.budget.cost_model import CostModel, levels

# A speculative step must promise this much more than a plain one: pays for being wrong about
# either side.
MIN_GAIN = 1.03
# Of many estimates the highest are chosen, and those are too high more often than too low: a
# node's probability counts as this power of it.
CAUTION = 1.1
_BINS = 12


def knee(costs: Mapping[int, float]) -> int:
    """I_knee of a device: the token count where computing takes as long as reading the weights.

    A pass of n tokens costs m (reading the weights) and n * c (computing), max(m, n * c) or the
    sum, as far as the device overlaps the two. Either way n = m / c is where the roofline bends,
    cost(1) is about m, and c is the slope where the counts are large; so this is cost(1) / slope,
    with no factor to choose, and it serves GPUs (overlap) and CPUs (little of it) alike. Where
    the sweep stays flat, I_knee is its largest count.

    Args:
        costs: seconds of a forward pass by its number of tokens, at least two counts.
    """
    counts = np.array(sorted(costs), dtype=np.float64)
    seconds = np.array([costs[int(n)] for n in counts])
    upper = counts >= counts[-1] / 4  # the largest counts: the compute-bound part, if any is
    if upper.sum() < 2:
        upper[-2:] = True
    slope = float(np.polyfit(counts[upper], seconds[upper], 1)[0])
    if slope * counts[-1] <= seconds[0]:
        return int(counts[-1])
    return max(1, round(float(seconds[0]) / slope))


def token_grid(low: int, high: int) -> list[int]:
    """The token counts above `low` and up to `high` that a step may have.

    Every count to 32, then four an octave: few enough to have their kernels made at start.
    """
    counts = list(range(1, 32))
    octave = 32
    while octave <= high:
        counts += [octave, octave * 5 // 4, octave * 3 // 2, octave * 7 // 4]
        octave *= 2
    return [n for n in counts if low < n <= high]


@dataclass
class Calibration:
    """Corrects a drafter's probabilities by what became of the nodes that were verified.

    Nodes fall into bins by predicted probability; a bin's answer is its observed share of
    accepted nodes, started from the prediction and slowly forgetting. A request has one of its
    own above its drafter's, because requests differ more than any one prediction: text that was
    served before is accepted whole, new text hardly.

    Attributes:
        parent: where predictions come from until this one has seen enough, one without a parent;
            None: the drafter.
        weight: observations that the prediction counts for.
        memory: observations after which old ones fade.
    """

    parent: "Calibration | None" = None
    weight: float = 20.0
    memory: float = 2000.0
    seen: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(_BINS))
    accepted: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(_BINS))

    def for_request(self) -> "Calibration":
        """A calibration for one request: it starts from this one's answers and turns sooner."""
        return Calibration(parent=self, weight=30.0, memory=180.0)

    def __call__(self, probs: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
        """float64[n], the corrected probabilities."""
        above = self.parent
        if above is None:
            return _corrected(probs, _bin(probs), probs, self.seen, self.accepted, self.weight)
        return _corrected_twice(
            probs, above.seen, above.accepted, above.weight, self.seen, self.accepted, self.weight
        )

    def observe(self, probs: npt.NDArray[np.float32], accepted: npt.NDArray[np.bool_]) -> None:
        """Take in which of the verified nodes with these predictions were accepted."""
        if self.parent is not None:
            self.parent.observe(probs, accepted)
        _count(probs, accepted, self.seen, self.accepted, self.memory)


@numba.njit(cache=True, nogil=True)
def _bin(probs):
    # Half-octave bins: 1, 0.71, 0.5, ...; what is rarer shares the last one.
    bins = np.empty(len(probs), dtype=np.int64)
    for i, prob in enumerate(probs):
        bins[i] = min(max(-2.0 * np.log2(max(prob, 1e-6)), 0.0), _BINS - 1)
    return bins


@numba.njit(cache=True, nogil=True)
def _count(probs, accepted, seen, taken, memory):
    bins = _bin(probs)
    for i, b in enumerate(bins):
        seen[b] += 1.0
        taken[b] += accepted[i]
    for b in range(_BINS):
        if seen[b] > memory:
            taken[b] *= memory / seen[b]
            seen[b] = memory


@numba.njit(cache=True, nogil=True)
def _corrected(probs, bins, prior, seen, accepted, weight):
    corrected = np.empty(len(probs), dtype=np.float64)
    for i, b in enumerate(bins):
        corrected[i] = (accepted[b] + weight * prior[i]) / (seen[b] + weight)
    return corrected


@numba.njit(cache=True, nogil=True)
def _corrected_twice(probs, seen_above, accepted_above, weight_above, seen, accepted, weight):
    # One call for both: of a large batch's step the calls are what takes the time.
    bins = _bin(probs)
    prior = _corrected(probs, bins, probs, seen_above, accepted_above, weight_above)
    return _corrected(probs, bins, prior, seen, accepted, weight)


@dataclass(frozen=True)
class Choice:
    """What a step verifies.

    Attributes:
        nodes: int64[bs], of each request; 0 for one that decodes plainly.
        saved_s: what it should save over plain steps that yield as many tokens, in the cost's unit.
        width: nodes that the pass runs of every request, its root included, where all run as many;
            1 is a plain decode step.
    """

    nodes: npt.NDArray[np.int64]
    saved_s: float = 0.0
    width: int = 1


def choose_nodes(
    probs: Sequence[npt.NDArray[np.float64]],
    cost: CostModel,
    contexts: Sequence[int] = (),
    drafting_s: float = 0.0,
    min_gain: float = MIN_GAIN,
    padded: bool = False,
    most_tokens: int = 0,
) -> Choice:
    """How many of its nodes each request verifies, for the most tokens a second.

    Args:
        probs: for each request, its nodes' probabilities in the tree's order.
        cost: the cost of steps.
        contexts: KV entries of each request; none: not considered.
        drafting_s: seconds that drafting takes, in `cost`'s unit; a plain step saves them.
        min_gain: how much better than a plain step a wider one must be.
        padded: the pass runs as many nodes for every request as for the one with most.
        most_tokens: of a pass that verifies; 0: as many as pay.
    """
    bs = len(probs)
    sizes = np.array([len(p) for p in probs], dtype=np.int64)
    drafted = int(sizes.sum())
    grid = _grid(bs, min(bs + drafted, most_tokens or bs + drafted))
    if not len(grid):
        return Choice(np.zeros(bs, dtype=np.int64))
    held = np.array(contexts or [0] * bs, dtype=np.float64)
    nodes, saved = _best_nodes(
        np.concatenate(probs), sizes, grid, held, *cost.parts, cost.node_reads,
        drafting_s / cost.in_seconds, min_gain, padded,
    )  # fmt: skip
    return Choice(nodes, saved * cost.in_seconds, 1 + int(nodes.max()))


def warm_up() -> None:
    """Compile what chooses and learns, or load it from numba's cache, so that no step waits."""
    probs = np.array([0.5, 0.25], np.float32)
    calibration = Calibration().for_request()
    calibration.observe(probs, np.array([True, False]))
    cost = CostModel({1: 1.0, 4: 2.0})
    cost.observe(1, 1.0)
    choose_nodes([calibration(probs)], cost, [1])


@lru_cache(maxsize=4096)
def _grid(low: int, high: int) -> npt.NDArray[np.int64]:
    """`token_grid` as int64[n]."""
    return np.array(token_grid(low, high), dtype=np.int64)


@numba.njit(cache=True, nogil=True)
def _best_nodes(
    probs, sizes, grid, held, prior_tokens, prior_cost, factors, numbers, node_reads, drafting,
    min_gain, padded,
):  # fmt: skip
    """int64[bs], nodes of each request for the most tokens a second, and what they should save.

    Args:
        probs: of all requests' nodes, end to end; sizes: int64[bs], nodes of each.
        grid: int64[n], token counts that a step may have.
        held: float64[bs], KV entries of each.
        prior_tokens, prior_cost, factors, numbers: CostModel.parts, in whose unit drafting and what
            is saved are.
    """
    bs, first = len(sizes), 0
    owners = np.empty(len(probs), np.int64)
    certain, rank = np.empty(len(probs), np.float64), np.empty(len(probs), np.float64)
    for b in range(bs):
        least = np.inf
        for i in range(first, first + sizes[b]):
            owners[i], certain[i] = b, probs[i] ** CAUTION
            # A node is verified only with those before it in its tree, so it ranks no higher.
            least = min(least, certain[i])
            rank[i] = -least
        first += sizes[b]
    order = np.argsort(rank, kind="mergesort")  # stable: parents stay before their children
    total = held.sum()
    gains, read = np.empty(len(grid), np.float64), np.empty(len(grid), np.float64)
    taken, sure, more = 0, 0.0, 0.0
    for k in range(len(grid)):
        while taken < grid[k] - bs:
            sure += certain[order[taken]]
            more += held[owners[order[taken]]]
            taken += 1
        gains[k], read[k] = 1.0 + sure / bs, total + node_reads * more
    costs = levels(prior_tokens, prior_cost, factors, numbers, grid, True, read)
    plain = levels(
        prior_tokens, prior_cost, factors, numbers, np.full(1, bs), False, np.full(1, total)
    )[0]
    best = np.argmax(gains / (costs + drafting))
    nodes, cost = np.bincount(owners[order[: grid[best] - bs]], minlength=bs), costs[best]
    if padded:
        most = nodes.max()
        whole = np.full(1, total * (1.0 + node_reads * most))
        cost = levels(
            prior_tokens, prior_cost, factors, numbers, np.full(1, bs * (1 + most)), True, whole
        )[0]
    if gains[best] / (cost + drafting) <= min_gain / plain:
        return np.zeros(bs, np.int64), 0.0
    return nodes, max(0.0, gains[best] * plain - cost)


def choose_width(
    probs: Sequence[npt.NDArray[np.float64]],
    cost: CostModel,
    widths: Sequence[int],
    contexts: Sequence[int] = (),
    drafting_s: float = 0.0,
    min_gain: float = MIN_GAIN,
    padded_batch: int | None = None,
    most_tokens: int = 0,
) -> Choice:
    """Which captured width every request is verified at, for the most tokens a second.

    For devices whose steps replay captured graphs: the graph of width w runs w nodes of each of
    `padded_batch` requests, whatever was drafted for them, so a request verifies its best w - 1.

    Widths are compared by the geometric mean of the requests' tokens, over the step's seconds. A
    request that repeats itself gets through its easy part in a few steps at any width; most steps
    are run for the others. Minimizing T(w) * (sum of length / tokens per step), the time of all
    requests, makes a width better that gains more in mean log(tokens) than in log(T).

    Args:
        probs: for each request, its nodes' probabilities in the tree's order, best first.
        cost: the cost of steps.
        widths: the captured ones; width 1, a plain decode step, is always possible.
        contexts: KV entries of each request; none: not considered.
        drafting_s: seconds that the device waits for drafts in such a step, in `cost`'s unit. They
            have passed by now, also for a plain step: whether they pay is DraftingRation's matter.
        min_gain: how much better than a plain step a wider one must be.
        padded_batch: requests that the graph runs, padding included; None: as many as there are.
        most_tokens: of a pass that verifies; 0: as many as pay.
    """
    rows, none = padded_batch or len(probs), Choice(np.zeros(len(probs), dtype=np.int64))
    most = most_tokens or float("inf")
    wide = np.array([w for w in sorted(widths) if w > 1 and rows * w <= most], dtype=np.int64)
    sizes = np.array([len(p) for p in probs], dtype=np.int64)
    if not len(wide) or not sizes.any():
        return none
    flat = np.concatenate(probs)
    gains = np.exp(np.log(_tokens_by_width(flat**CAUTION, sizes, wide)).mean(axis=1))
    held = float(sum(contexts))
    read = np.asarray(held * (1.0 + cost.node_reads * (wide - 1)), dtype=np.float64)
    seconds = cost.verify_costs(rows * wide, read)
    plain_s = cost.cost(rows, read=held)
    best = int(np.argmax(gains / (seconds + drafting_s)))
    gain, verify_s = float(gains[best]), float(seconds[best])
    if gain / (verify_s + drafting_s) <= min_gain / (plain_s + drafting_s):
        return none
    tokens = float(_tokens_by_width(flat, sizes, wide)[best].mean())
    saved_s = tokens * plain_s - verify_s  # of one choice, not the best of many: no caution
    return Choice(np.minimum(sizes, wide[best] - 1), max(0.0, saved_s), int(wide[best]))


def _tokens_by_width(
    probs: npt.NDArray[np.float64], sizes: npt.NDArray[np.int64], wide: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """float64[widths, bs]: tokens that each request is expected to get in a step of each width.

    Args:
        probs: of all requests' nodes, end to end.
        sizes: nodes of each request.
        wide: the widths.
    """
    starts = np.cumsum(sizes) - sizes
    ends = starts + np.minimum(sizes, wide[:, None] - 1)
    sums = np.concatenate([[0.0], np.cumsum(probs)])
    return 1.0 + sums[ends] - sums[starts]
