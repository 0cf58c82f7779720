"""Which of several ways to draft pays: a bandit over measured gains, apart for each namespace.

Thompson sampling (Thompson 1933; Chapelle and Li 2011): of each arm a gain is drawn from what is
believed of it, and the highest draw wins, so that what may be best is tried as often as it may be.
What was seen fades, as traffic changes; a namespace begins with what all of them have shown.
"""

import math
import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Pulls after which one counts for a third.
MEMORY = 256.0
# The namespaces that are remembered, those that were last used.
MOST_NAMESPACES = 1024
# What is believed of a gain before anything was seen counts as so many pulls with this spread.
_PRIOR_PULLS, _PRIOR_SPREAD = 2.0, 0.5
# An arm that nobody has tried is taken to be this good, or as good as the best, so that it will be.
_NEW_GAIN = 2.0


@dataclass
class GainEstimate:
    """An arm's gain: what its pulls gave by what they took, the older ones faded.

    Attributes:
        pulls: how many there were.
        tokens, time: their sums; the gain is their ratio.
        tokens_2, product, time_2: sums of squares and products, for the ratio's spread.
    """

    pulls: float = 0.0
    tokens: float = 0.0
    time: float = 0.0
    tokens_2: float = 0.0
    product: float = 0.0
    time_2: float = 0.0

    def add(self, tokens: float, time: float) -> None:
        """Take in a pull."""
        self.pulls += 1.0
        self.tokens += tokens
        self.time += time
        self.tokens_2 += tokens * tokens
        self.product += tokens * time
        self.time_2 += time * time

    def fade(self, kept: float) -> None:
        """Have all that was seen count for a part of what it did."""
        self.pulls *= kept
        self.tokens *= kept
        self.time *= kept
        self.tokens_2 *= kept
        self.product *= kept
        self.time_2 *= kept

    def believed(self, prior: float) -> tuple[float, float]:
        """Mean and standard deviation of what is believed of the gain.

        Args:
            prior: the gain that is supposed where nothing was seen.
        """
        weight = self.pulls + _PRIOR_PULLS
        if not self.pulls:
            return prior, _PRIOR_SPREAD / math.sqrt(weight)
        gain, each = self.tokens / self.time, self.time / self.pulls
        # The variance of a ratio of sums (Cochran, Sampling Techniques, 6.4).
        rest = self.tokens_2 - 2.0 * gain * self.product + gain * gain * self.time_2
        seen = max(0.0, rest) / (each * each)
        mean = (self.pulls * gain + _PRIOR_PULLS * prior) / weight
        return mean, math.sqrt((seen + _PRIOR_PULLS * _PRIOR_SPREAD**2) / weight / weight)


class GainBandit:
    """Chooses arms by namespace, and learns what each one gained.

    Args:
        arms: their names.
        seed: of the draws.
    """

    def __init__(self, arms: Sequence[str], seed: int = 0) -> None:
        self._arms = tuple(arms)
        self._random = random.Random(seed)
        self._all = self._unseen()
        self._by_namespace: OrderedDict[str, dict[str, GainEstimate]] = OrderedDict()

    def choose(self, namespace: str, among: Sequence[str]) -> str:
        """An arm for a request of this namespace.

        Args:
            among: the arms that are possible, at least one.
        """
        own = self._by_namespace.get(namespace) or self._unseen()
        supposed = max(_NEW_GAIN, *self.gains().values(), 0.0)
        drawn = {
            # Where this namespace has shown nothing, what all together make likely.
            arm: self._random.gauss(*own[arm].believed(self._all[arm].believed(supposed)[0]))
            for arm in among
        }
        return max(among, key=drawn.__getitem__)

    def report(self, namespace: str, arm: str, tokens: float, time: float) -> None:
        """A pull of `arm` gave `tokens` in `time` (above 0, in any unit that all pulls share)."""
        own = self._by_namespace.setdefault(namespace, self._unseen())
        self._by_namespace.move_to_end(namespace)
        if len(self._by_namespace) > MOST_NAMESPACES:
            self._by_namespace.popitem(last=False)
        for estimates in (own, self._all):
            for estimate in estimates.values():
                estimate.fade(1.0 - 1.0 / MEMORY)
            estimates[arm].add(tokens, time)

    def gains(self, namespace: str | None = None) -> Mapping[str, float]:
        """The gain of each arm that was tried.

        Args:
            namespace: as it alone has shown; None: as all have.
        """
        of = self._all if namespace is None else self._by_namespace.get(namespace, {})
        return {arm: seen.tokens / seen.time for arm, seen in of.items() if seen.pulls}

    def _unseen(self) -> dict[str, GainEstimate]:
        return {arm: GainEstimate() for arm in self._arms}
