"""How many nodes a step may verify: the drafts' expected gain against the step's measured cost.

SSSD bounds s_q by I_knee / batch (section 3.3): up to I_knee tokens a forward pass takes about as
long as reading the weights, past it every token is paid for. Both sides are measured here. A step
of `bs` requests and k drafted nodes costs cost(bs + k) seconds and commits about 1 + (the sum of
its nodes' probabilities) tokens of each; the k with the highest geometric mean of the requests'
tokens a second wins, and k = 0 is a plain decode step. The geometric mean and not the sum
(proportional fairness: Kelly, Maulloo, Tan 1998): a node makes the step longer for all, and a
batch ends with its slowest request, so what one gains at the others' cost must be worth it. The
nodes are taken best first over the whole batch, so a request whose drafts are poor gets few of
them or none. Past I_knee, where a wrong guess costs its full price, the promise must be better by
SURE_GAIN; it is for text that was served before.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

# A speculative step must promise this much more than a plain one: pays for being wrong about
# either side.
MIN_GAIN = 1.03
# What a step past I_knee must promise over the best one below it.
SURE_GAIN = 1.2
# A verify step's cost above a plain step of as many tokens, until one was run.
VERIFY_SURCHARGE = 1.04
# Steps that show what a pass costs besides its linear layers; SGLang's warm-up has so many.
_FIRST_STEPS = 8
# A step that takes so many times what is expected was held up by something else.
_DELAYED = 1.5
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

    Every count to 16, then four an octave: few enough to learn each one's cost.
    """
    counts = list(range(1, 16))
    octave = 16
    while octave <= high:
        counts += [octave, octave * 5 // 4, octave * 3 // 2, octave * 7 // 4]
        octave *= 2
    return [n for n in counts if low < n <= high]


class CostModel:
    """Seconds of a step over `tokens` tokens, learned from the steps that are run.

    cost = (prior(tokens) + fixed + per_token * tokens) * scale * surcharge * local: `prior` are
    measured costs of a few token counts, `fixed` is what a step costs besides, whatever its tokens
    (the quickest of the first steps tells), `per_token` what each token costs besides (attention
    above all, so it follows the contexts' lengths; wide and narrow steps tell, by least mean
    squares), the scale is what this machine makes of them now, the surcharge is that of verify
    steps (tree masks, acceptance, moving KV), and the local factor corrects one token count of one
    kind of step. Every step moves the scale (but a delayed one between two that are not), so that a
    machine that slows down makes no kind of step look cheap beside one that was measured before;
    and a local factor fades while its kind of step is not run, so that one bad spell does not rule
    it out for good.

    Args:
        prior: cost by token count, of the linear layers, in seconds; another unit is scaled to
            what is observed.
    """

    # Steps after which a local factor that was not seen again has lost most of its say.
    FADE = 150.0

    def __init__(self, prior: Mapping[int, float]):
        self._prior_tokens = np.array(sorted(prior), dtype=np.float64)
        costs = np.array([prior[t] for t in sorted(prior)], dtype=np.float64)
        # More tokens never cost less: a count that looks dearer than a larger one was disturbed.
        self._prior_cost = np.minimum.accumulate(costs[::-1])[::-1]
        self._local: dict[tuple[int, bool], _Local] = {}
        self._steps = 0
        self._fixed = self._per_token = 0.0
        self._usual = 1.0  # tokens of a step, in the mean
        self._scale = 1.0
        self._surcharge = VERIFY_SURCHARGE
        self._delayed = {False: False, True: False}  # whether the last step of this kind was

    def observe(self, tokens: int, seconds: float, verify: bool = False) -> None:
        """Take in that a plain step, or one that verified drafts, took `seconds`."""
        if self._steps < _FIRST_STEPS:
            besides = max(0.0, seconds - self._prior(tokens))
            self._fixed = min(self._fixed, besides) if self._steps else besides
        base = self._base(tokens, verify)
        if not self._steps:
            self._scale, self._usual = seconds / base, float(tokens)
        self._steps += 1
        factor = self._factor(tokens, verify)
        ratio = _within(seconds / (base * self._scale * factor), 0.5, _DELAYED)
        # What only delayed one step says nothing; what makes a kind of step dear comes again.
        delayed, again = ratio == _DELAYED, self._delayed[verify]
        self._delayed[verify] = delayed
        if delayed and not again:
            return
        known = self._local.setdefault((tokens, verify), _Local())
        known.factor = _within(factor * (1.0 + 0.08 * (ratio - 1.0)), 0.7, 1.5)
        known.at = self._steps
        # What all steps are off by is the scale's; what wide ones are and narrow ones are not:
        off = tokens - self._usual
        slope = (ratio - 1.0) * base * off / (off * off + self._usual**2 / 4)
        if not delayed:  # else its width has nothing to do with it
            self._per_token = max(0.0, self._per_token + 0.2 * slope)
        self._usual += 0.05 * off
        if verify:
            above = _within(seconds / (self._base(tokens, False) * self._scale), 1.0, 1.6)
            self._surcharge += 0.02 * (above - self._surcharge)
        self._scale *= 1.0 + max(0.1, 1.0 / self._steps) * (ratio - 1.0)

    def cost(self, tokens: int, verify: bool = False) -> float:
        """Seconds expected of a step (in the prior's unit before any observation)."""
        return self._base(tokens, verify) * self._scale * self._factor(tokens, verify)

    def _base(self, tokens: int, verify: bool) -> float:
        besides = self._fixed + self._per_token * tokens
        return (self._prior(tokens) + besides) * (self._surcharge if verify else 1.0)

    def _factor(self, tokens: int, verify: bool) -> float:
        known = self._local.get((tokens, verify))
        if known is None:
            return 1.0
        return 1.0 + (known.factor - 1.0) * math.exp((known.at - self._steps) / self.FADE)

    def _prior(self, tokens: int) -> float:
        last_tokens, last_cost = self._prior_tokens[-1], self._prior_cost[-1]
        if tokens > last_tokens:
            return float(last_cost * tokens / last_tokens)
        return float(np.interp(tokens, self._prior_tokens, self._prior_cost))


@dataclass
class _Local:
    """The correction of one token count of one kind of step."""

    factor: float = 1.0
    at: int = 0


def _within(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


@dataclass
class Calibration:
    """Corrects a drafter's probabilities by what became of the nodes that were verified.

    Nodes fall into bins by predicted probability; a bin's answer is its observed share of
    accepted nodes, started from the prediction and slowly forgetting. A request has one of its
    own above its drafter's, because requests differ more than any one prediction: text that was
    served before is accepted whole, new text hardly.

    Attributes:
        parent: where predictions come from until this one has seen enough; None: the drafter.
        weight: observations that the prediction counts for.
        memory: observations after which old ones fade.
    """

    parent: "Calibration | None" = None
    weight: float = 20.0
    memory: float = 2000.0
    seen: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(_BINS))
    accepted: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(_BINS))

    def for_request(self) -> "Calibration":
        """A fresh one that starts from this one's answers and turns sooner."""
        return Calibration(parent=self, weight=30.0, memory=180.0)

    def __call__(self, probs: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
        """float64[n], the corrected probabilities."""
        return self._correct(probs, _bin(probs))

    def _correct(
        self, probs: npt.NDArray[np.float32], bins: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float64]:
        prior = probs if self.parent is None else self.parent._correct(probs, bins)
        return (self.accepted[bins] + self.weight * prior) / (self.seen[bins] + self.weight)

    def observe(self, probs: npt.NDArray[np.float32], accepted: npt.NDArray[np.bool_]) -> None:
        """Take in which of the verified nodes with these predictions were accepted."""
        if self.parent is not None:
            self.parent.observe(probs, accepted)
        bins = _bin(probs)
        np.add.at(self.seen, bins, 1.0)
        np.add.at(self.accepted, bins, accepted.astype(np.float64))
        full = self.seen > self.memory
        self.accepted[full] *= self.memory / self.seen[full]
        self.seen[full] = self.memory


def _bin(probs: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    # Half-octave bins: 1, 0.71, 0.5, ...; what is rarer shares the last one.
    octaves = -2.0 * np.log2(np.maximum(probs, 1e-6))
    return np.minimum(np.maximum(octaves, 0.0), _BINS - 1).astype(np.int64)


def choose_nodes(
    probs: Sequence[npt.NDArray[np.float64]],
    cost: CostModel,
    knee_tokens: int,
    drafting_s: float = 0.0,
    min_gain: float = MIN_GAIN,
    padded: bool = False,
) -> npt.NDArray[np.int64]:
    """How many of its nodes each request verifies, for the best geometric mean of their speeds.

    Args:
        probs: for each request, its nodes' probabilities in the tree's order.
        cost: the cost of forward passes.
        knee_tokens: I_knee of the device.
        drafting_s: seconds that drafting takes, in `cost`'s unit; a plain step saves them.
        min_gain: how much better than a plain step a wider one must be.
        padded: the pass runs as many nodes for every request as for the one with most.

    Returns:
        int64[bs], 0 for a request that decodes plainly.
    """
    bs = len(probs)
    none = np.zeros(bs, dtype=np.int64)
    if sum(map(len, probs)) == 0:
        return none
    # What a node adds to the logarithm of its request's tokens.
    added = [np.diff(np.log1p(np.cumsum(p)), prepend=0.0) for p in probs]
    # A node is verified only with those before it in its tree, so it ranks no higher.
    rank = np.concatenate([np.minimum.accumulate(a) for a in added])
    order = np.argsort(-rank, kind="stable")
    gains = np.exp(np.cumsum(np.concatenate(added)[order]) / bs)
    # Fewer tokens, and no tree: what looks dearer than a verify step was disturbed.
    plain_rate = min_gain / min(cost.cost(bs), cost.cost(bs + 1, verify=True))
    best, best_rate = 0, plain_rate
    past_knee = False
    for tokens in token_grid(bs, bs + len(order)):
        rate = gains[tokens - bs - 1] / (cost.cost(tokens, verify=True) + drafting_s)
        if tokens > knee_tokens and not past_knee:
            past_knee, best_rate = True, SURE_GAIN * best_rate
        if rate > best_rate:
            best, best_rate = tokens - bs, rate
    if not best:
        return none
    owners = np.repeat(np.arange(bs), [len(p) for p in probs])
    nodes = np.bincount(owners[order[:best]], minlength=bs)
    if padded:
        tokens = bs * (1 + int(nodes.max()))
        if gains[best - 1] / (cost.cost(tokens, verify=True) + drafting_s) <= plain_rate:
            return none
    return nodes


def saved_seconds(
    probs: Sequence[npt.NDArray[np.float64]], nodes: npt.NDArray[np.int64], cost: CostModel
) -> float:
    """What verifying these nodes should save over plain steps that yield as many tokens.

    Args:
        probs: as `choose_nodes` takes them.
        nodes: int64[bs], what it chose.

    Returns:
        seconds, 0 if it chose none.
    """
    if not nodes.any():
        return 0.0
    added = [np.log1p(p[:n].sum()) for p, n in zip(probs, nodes, strict=True)]
    plain = math.exp(sum(added) / len(nodes)) * cost.cost(len(nodes))
    return max(0.0, plain - cost.cost(len(nodes) + int(nodes.sum()), verify=True))
