"""What a step costs, learned from the steps that are run: ridge regression towards what is known.

A step's time is close to linear in few things: its linear layers (their cost by token count was
swept at start, cost_sweep.py), what a step costs whatever it runs, what each token costs besides,
what verification costs (tree masks, acceptance, moving KV), and the KV that attention reads, which
a verify's kernels may read slower. A weighted least-squares fit, in which steps fade as they grow
old, finds the factors; it is drawn towards what is assumed before (Hoerl and Kennard 1970), so that
what is not run for long, and what was never run, costs what the rest makes likely.
"""

from collections.abc import Mapping

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
        self._prior_tokens = np.array(sorted(prior), dtype=np.float64)
        costs = np.array([prior[t] for t in sorted(prior)], dtype=np.float64)
        # More tokens never cost less: a count that looks dearer than a larger one was disturbed.
        self._prior_cost = np.minimum.accumulate(costs[::-1])[::-1]
        self._unit = float(self._prior(1))
        self._read = read_s / self._unit
        self._steps = 0
        self._fixed = 0.0  # of a step, besides its linear layers
        self._scale = 1.0
        self._delayed = {False: False, True: False}  # whether the last step of this kind was
        self._moments = np.zeros((6, 6)), np.zeros(6)
        self._factors = self._assumed()

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
        if self._steps < _FIRST_STEPS:
            besides = max(0.0, seconds - float(self._prior(tokens))) / self._unit
            self._fixed = min(self._fixed, besides) if self._steps else besides
            self._factors = self._fitted()
        features = self._features(tokens, verify, read)
        level = float(features @ self._factors)
        if not self._steps:
            self._scale = seconds / (level * self._unit)
        self._steps += 1
        ratio = min(max(seconds / (level * self._in_seconds), 0.5), self._most)
        # What only delayed one step says nothing; what makes a kind of step dear comes again.
        delayed, again = ratio == self._most, self._delayed[verify]
        self._delayed[verify] = delayed
        if delayed and not again:
            return
        products, sums = self._moments
        fade, relative = 1.0 - 1.0 / _MEMORY, features / level
        self._moments = (
            fade * products + np.outer(relative, relative),
            fade * sums + relative * ratio,
        )
        self._factors = self._fitted()
        self._scale *= 1.0 + max(0.1, 1.0 / self._steps) * (ratio - 1.0)

    @property
    def was_observed(self) -> bool:
        """Whether costs are seconds, whatever the prior's unit is."""
        return self._steps > 0

    def cost(self, tokens: int, verify: bool = False, read: float = 0.0) -> float:
        """Seconds expected of a step (in the prior's unit before any observation)."""
        return float(self._features(tokens, verify, read) @ self._factors) * self._in_seconds

    def verify_costs(
        self, tokens: npt.NDArray[np.int64], read: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        """float64[n]: `cost` of n verify steps, one for each token count."""
        ones = np.ones(len(tokens))
        linear = self._prior(tokens) / self._unit
        reads = self._read * read
        features = np.stack([linear, ones, _TOKEN_PART * tokens, ones, reads, reads])
        return self._factors @ features * self._in_seconds

    @property
    def _in_seconds(self) -> float:
        return self._unit * self._scale

    def _features(self, tokens: int, verify: bool, read: float) -> npt.NDArray[np.float64]:
        linear = float(self._prior(tokens)) / self._unit
        reads = self._read * read
        return np.array(
            [linear, 1.0, _TOKEN_PART * tokens, float(verify), reads, reads * float(verify)]
        )

    def _assumed(self) -> npt.NDArray[np.float64]:
        return np.array([1.0, self._fixed, 0.0, _VERIFY * (1.0 + self._fixed), 1.0, 0.0])

    def _fitted(self) -> npt.NDArray[np.float64]:
        products, sums = self._moments
        drawn = products + _STRENGTH * np.eye(len(sums))
        found = np.linalg.solve(drawn, sums + _STRENGTH * self._assumed())
        # Nothing makes a step quicker.
        return np.maximum(found, 0.0)

    def _prior(self, tokens: int | npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        counts = np.asarray(tokens, dtype=np.float64)
        within = np.interp(counts, self._prior_tokens, self._prior_cost)
        return np.asarray(within * np.maximum(1.0, counts / self._prior_tokens[-1]))
