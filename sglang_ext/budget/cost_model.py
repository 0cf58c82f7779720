"""What a step costs, learned from the steps that are run: ridge regression towards what is known.

A step's time is close to linear in few things: its linear layers (their cost by token count was
swept at start, cost_sweep.py), what a step costs whatever it runs, what each token costs besides,
what verification costs (tree masks, acceptance, moving KV), and the KV that attention reads, which
a verify's kernels may read slower. A weighted least-squares fit, in which steps fade as they grow
old, finds the factors; it is drawn towards what is assumed before (Hoerl and Kennard 1970), so that
what is not run for long, and what was never run, costs what the rest makes likely.
"""

from collections.abc import Mapping

import numba
import numpy as np
import numpy.typing as npt

# A node reads its request's KV beside the others of its tree, from the cache: how much of a plain
# read that takes (0.4 measured, tree_cpu).
NODE_READS = 0.4
# On a GPU a request's nodes share a tile of queries, which reads its KV once for all of them.
NODE_READS_CUDA = 0.0
# A verify step's cost above a plain step of as many tokens, until one was run: parts of it.
_VERIFY = 0.04
# Steps that show what a pass costs besides its linear layers; SGLang's warm-up has so many.
_FIRST_STEPS = 8
# A step that takes so many times what is expected was held up by something else: by the clock of
# the host, and by the device's own events.
DELAYED, DELAYED_CUDA = 1.5, 1.15
# Steps after which one counts for a third.
_MEMORY = 300.0
# Steps that the assumed factors count for.
_STRENGTH = 1.0
# What each token costs besides is counted in this part of a one-token pass.
_TOKEN_PART = 1 / 8


class CostModel:
    """Seconds of a step of `tokens` tokens whose attention reads `read` KV entries.

    cost = scale * (linear, one, tokens, verify, read, read by a verify) . factors, where the scale
    is what this machine makes of it now: every step moves it (but a delayed one between two that
    are not), so that a machine that slows down makes no kind of step look cheap beside one that was
    measured before.

    Args:
        prior: cost by token count, of the linear layers, in seconds; another unit is scaled to
            what is observed.
        read_s: cost of reading a KV entry (a token's K and V of all layers), in `prior`'s unit:
            the weights tell how fast memory is; 0: reading is not told apart from the rest.
        node_reads: a verified node's part of a plain read of its request's KV, beside its root's.
        delayed: a step that takes so many times what is expected, alone of its kind, is left out.

    Attributes:
        parts: what `levels` takes: the prior's token counts and costs, the factors, and the prior
            cost of one token and the cost of reading a KV entry by that.
    """

    def __init__(
        self,
        prior: Mapping[int, float],
        read_s: float = 0.0,
        node_reads: float = NODE_READS,
        delayed: float = DELAYED,
    ):
        self.node_reads = node_reads
        self._most = delayed
        prior_tokens = np.array(sorted(prior), dtype=np.float64)
        costs = np.array([prior[t] for t in sorted(prior)], dtype=np.float64)
        # More tokens never cost less: a count that looks dearer than a larger one was disturbed.
        prior_cost = np.minimum.accumulate(costs[::-1])[::-1].copy()
        self._unit = float(_prior(prior_tokens, prior_cost, 1.0))
        self._steps = 0
        self._fixed = 0.0  # of a step, besides its linear layers
        self._scale = 1.0
        self._delayed = {False: False, True: False}  # whether the last step of this kind was
        self._products, self._sums = np.zeros((6, 6)), np.zeros(6)
        factors = np.zeros(6)
        self.parts = prior_tokens, prior_cost, factors, np.array([self._unit, read_s / self._unit])
        _fit(self._products, self._sums, self._assumed(), factors)

    def observe(
        self,
        tokens: int,
        seconds: float,
        verify: bool = False,
        read: float = 0.0,
        held_up: bool = False,
    ) -> None:
        """Take in that a plain step, or one that verified drafts, took `seconds`.

        Args:
            held_up: by something else, as its CPU time tells (held_up.py): it says nothing of what
                such a step costs, however many of them there are.
        """
        if held_up:
            return
        prior_tokens, prior_cost, factors, _ = self.parts
        if self._steps < _FIRST_STEPS:
            besides = seconds - float(_prior(prior_tokens, prior_cost, float(tokens)))
            besides = max(0.0, besides) / self._unit
            self._fixed = min(self._fixed, besides) if self._steps else besides
            _fit(self._products, self._sums, self._assumed(), factors)
        level = self._level(tokens, verify, read)
        if not self._steps:
            self._scale = seconds / (level * self._unit)
        self._steps += 1
        ratio = min(max(seconds / (level * self.in_seconds), 0.5), self._most)
        # What only delayed one step says nothing; what makes a kind of step dear comes again.
        delayed, again = ratio == self._most, self._delayed[verify]
        self._delayed[verify] = delayed
        if delayed and not again:
            return
        _learn(self._products, self._sums, *self.parts, tokens, verify, read, level, ratio)
        _fit(self._products, self._sums, self._assumed(), factors)
        self._scale *= 1.0 + max(0.1, 1.0 / self._steps) * (ratio - 1.0)

    @property
    def was_observed(self) -> bool:
        """Whether costs are seconds, whatever the prior's unit is."""
        return self._steps > 0

    def cost(self, tokens: int, verify: bool = False, read: float = 0.0) -> float:
        """Seconds expected of a step (in the prior's unit before any observation)."""
        return self._level(tokens, verify, read) * self.in_seconds

    def verify_costs(
        self, tokens: npt.NDArray[np.int64], read: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        """float64[n]: `cost` of n verify steps, one for each token count."""
        return levels(*self.parts, tokens, True, read) * self.in_seconds

    @property
    def in_seconds(self) -> float:
        """What a cost in parts of a one-token pass, as `levels` has it, is multiplied by."""
        return self._unit * self._scale

    def _level(self, tokens: int, verify: bool, read: float) -> float:
        return float(_level(*self.parts, float(tokens), verify, float(read)))

    def _assumed(self) -> npt.NDArray[np.float64]:
        return np.array([1.0, self._fixed, 0.0, _VERIFY * (1.0 + self._fixed), 1.0, 0.0])


# Compiled: a step asks several times, and the steps of a small model are counted in milliseconds.


@numba.njit(nogil=True, cache=True)
def levels(prior_tokens, prior_cost, factors, numbers, tokens, verify, read):
    """float64[n], the costs of n steps in parts of a one-token pass's linear layers.

    Args:
        prior_tokens, prior_cost, factors, numbers: `CostModel.parts`.
        tokens: int64[n]; verify: whether they verify drafts; read: float64[n], KV entries.
    """
    costs = np.empty(len(tokens), np.float64)
    for i in range(len(tokens)):
        count = np.float64(tokens[i])
        costs[i] = _level(prior_tokens, prior_cost, factors, numbers, count, verify, read[i])
    return costs


@numba.njit(nogil=True, cache=True)
def _level(prior_tokens, prior_cost, factors, numbers, tokens, verify, read):
    features = _features(prior_tokens, prior_cost, numbers, tokens, verify, read)
    level = 0.0
    for i in range(len(factors)):
        level += features[i] * factors[i]
    return level


@numba.njit(nogil=True, cache=True)
def _features(prior_tokens, prior_cost, numbers, tokens, verify, read):
    linear = _prior(prior_tokens, prior_cost, tokens) / numbers[0]
    reads, verifies = numbers[1] * read, 1.0 if verify else 0.0
    return (linear, 1.0, _TOKEN_PART * tokens, verifies, reads, reads * verifies)


@numba.njit(nogil=True, cache=True)
def _prior(prior_tokens, prior_cost, tokens):
    within = np.interp(tokens, prior_tokens, prior_cost)
    return within * max(1.0, tokens / prior_tokens[-1])


@numba.njit(nogil=True, cache=True)
def _learn(
    products, sums, prior_tokens, prior_cost, factors, numbers, tokens, verify, read, level, ratio
):  # fmt: skip
    """Add a step to what is fitted: the older steps fade."""
    features = _features(prior_tokens, prior_cost, numbers, np.float64(tokens), verify, read)
    fade = 1.0 - 1.0 / _MEMORY
    for i in range(len(sums)):
        sums[i] = fade * sums[i] + features[i] / level * ratio
        for j in range(len(sums)):
            products[i, j] = fade * products[i, j] + features[i] / level * (features[j] / level)


@numba.njit(nogil=True, cache=True)
def _fit(products, sums, assumed, factors):
    """Write the factors that fit: nothing makes a step quicker."""
    drawn = products + _STRENGTH * np.eye(len(sums))
    factors[:] = np.maximum(np.linalg.solve(drawn, sums + _STRENGTH * assumed), 0.0)
