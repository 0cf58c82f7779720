"""How many nodes a step may verify: the drafts' expected gain against the step's measured cost.

SSSD bounds s_q by I_knee / batch (section 3.3); here both sides are measured while serving. A
step of `bs` requests and `width` nodes each costs cost(bs * width) seconds and commits about
bs + (the sum of the nodes' probabilities) tokens; the width with the most tokens a second
wins, and width 1 is a plain decode step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

# A speculative step must promise this much more than a plain one: pays for drafting and for
# being wrong about either side.
MIN_GAIN = 1.04
_BINS = 12


def candidate_widths(max_width: int) -> list[int]:
    """The widths that a step may take, 1 first: few enough to learn each one's cost."""
    steps = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    return [w for w in steps if w < max_width] + [max_width]


class CostModel:
    """Seconds of a forward pass over `tokens` tokens, learned from the passes that are run.

    Starts from `prior`, measured costs of a few token counts; each observation corrects its own
    count. An observation that is MAX_AGE passes old gives way to the prior, so that one bad
    spell of the machine does not rule a width out for good.

    Args:
        prior: cost by token count, in any unit: it is scaled to what is observed.
    """

    MAX_AGE = 2000

    def __init__(self, prior: Mapping[int, float]):
        self._prior_tokens = np.array(sorted(prior), dtype=np.float64)
        costs = np.array([prior[t] for t in sorted(prior)], dtype=np.float64)
        # More tokens never cost less: a count that looks dearer than a larger one was disturbed.
        self._prior_cost = np.minimum.accumulate(costs[::-1])[::-1]
        self._seen: dict[int, tuple[float, int]] = {}
        self._passes = 0
        self._scale = 1.0

    def observe(self, tokens: int, seconds: float) -> None:
        """Take in that a forward pass over `tokens` tokens took `seconds`."""
        self._passes += 1
        old = self._recent(tokens)
        # A pass that something else delayed says little: it counts as half as long again.
        mean = seconds if old is None else 0.9 * old + 0.1 * min(seconds, 1.5 * old)
        self._seen[tokens] = (mean, self._passes)
        ratio = mean / self._prior(tokens)
        self._scale = ratio if self._passes == 1 else 0.95 * self._scale + 0.05 * ratio

    def cost(self, tokens: int) -> float:
        """Seconds expected for `tokens` tokens (the prior's unit before any observation)."""
        recent = self._recent(tokens)
        return self._prior(tokens) * self._scale if recent is None else recent

    def _recent(self, tokens: int) -> float | None:
        mean, at = self._seen.get(tokens, (0.0, -self.MAX_AGE))
        return mean if self._passes - at < self.MAX_AGE else None

    def _prior(self, tokens: int) -> float:
        last_tokens, last_cost = self._prior_tokens[-1], self._prior_cost[-1]
        if tokens > last_tokens:
            return float(last_cost * tokens / last_tokens)
        return float(np.interp(tokens, self._prior_tokens, self._prior_cost))


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
        """A fresh one that starts from this one's answers and turns quickly."""
        return Calibration(parent=self, weight=6.0, memory=60.0)

    def __call__(self, probs: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
        """float64[n], the corrected probabilities."""
        prior = probs.astype(np.float64) if self.parent is None else self.parent(probs)
        bins = _bin(probs)
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
    return np.clip(octaves, 0, _BINS - 1).astype(np.int64)


def choose_width(
    probs: Sequence[npt.NDArray[np.float64]],
    widths: Sequence[int],
    cost: CostModel,
    min_gain: float = MIN_GAIN,
) -> int:
    """The verify width, root included, with the most expected tokens a second.

    Args:
        probs: for each request, its nodes' probabilities in the tree's order.
        widths: the widths allowed, 1 first.
        cost: the cost of forward passes.
        min_gain: how much better than a plain step a wider one must be.
    """
    bs = len(probs)
    longest = max((len(p) for p in probs), default=0)
    if longest == 0:
        return 1
    gains = np.zeros(longest + 1)
    for p in probs:
        cumulative = np.cumsum(p)
        gains[1 : len(p) + 1] += cumulative
        gains[len(p) + 1 :] += cumulative[-1] if len(p) else 0.0
    best_width, best_rate = 1, min_gain * bs / cost.cost(bs)
    for width in widths[1:]:
        rate = (bs + gains[min(width - 1, longest)]) / cost.cost(bs * width)
        if rate > best_rate:
            best_width, best_rate = width, rate
        if width > longest:
            break
    return best_width
