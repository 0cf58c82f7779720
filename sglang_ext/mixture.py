"""Two drafters' token trees as one: of what both speak, their probabilities are mixed.

The weight is learned from what is committed. A maximum of both in its place would believe whoever
is surer of itself, and so draft less than the better one of them alone (docs/specdec.md).
"""

from collections.abc import Sequence

import numba
import numpy as np
import numpy.typing as npt

from sglang_ext.tree import NO_PARENT, TokenTree

# Of a committed token, how far it moves a weight; and no drafter is left out for good.
_FADE, _LEAST = 0.02, 0.01
# Where a second drafter's bands of sureness end, and what it is trusted with before it was seen.
_BANDS, _AT_FIRST = np.array([0.3, 0.6, 0.9]), 0.1
_LEFT = -2  # a place of a tree that the output did not come to


class MixtureWeight:
    """How far a second distribution over next tokens is believed beside a first one: learned.

    The belief in a token is a mixture of both. After each committed token of which both have
    spoken, the weight moves towards who gave it more (a step of online EM).

    Attributes:
        weight: of the second, 0 to 1.
    """

    def __init__(self, weight: float = 0.5) -> None:
        self.weight = weight

    def mixed(self, first: float, second: float) -> float:
        """The belief in a token to which they give these probabilities."""
        return (1.0 - self.weight) * first + self.weight * second

    def note(self, first: float, second: float) -> None:
        """A token was committed to which they gave these probabilities."""
        mixed = self.mixed(first, second)
        if mixed > 0.0:
            self.weight += _FADE * (self.weight * second / mixed - self.weight)
            self.weight = min(max(self.weight, _LEAST), 1.0 - _LEAST)


class TreeMixture:
    """Two drafters' trees as one, each believed as far as it has been right.

    How sure the second is of what follows a node differs: its weight is learned apart for each
    band of the probability that it gives to its likeliest token there.
    """

    def __init__(self) -> None:
        self.weights = [MixtureWeight(_AT_FIRST) for _ in range(len(_BANDS) + 1)]

    def mixed(self, first: TokenTree, second: TokenTree, max_nodes: int) -> TokenTree:
        """One tree of the best `max_nodes` nodes of both, best first.

        A node's probability behind its parent is the mixture of theirs where both say what follows
        the parent, and that of the one who does elsewhere. Its sources are those of both, its
        log-probability is the first tree's.
        """
        if not len(first) or not len(second):
            return (first if len(first) else second).first(max_nodes)
        weights = np.array([each.weight for each in self.weights])
        tokens, parents, probs, places = _union(*_arrays(first), *_arrays(second), weights)
        sources = np.zeros(len(tokens), np.int8)
        if first.sources is not None:
            sources[: len(first)] = first.sources
        if second.sources is not None:
            sources[places] |= second.sources
        logprobs = None
        if first.logprobs is not None:
            logprobs = np.full(len(tokens), np.nan, np.float32)
            logprobs[: len(first)] = first.logprobs
        return TokenTree(tokens, parents, probs, sources, logprobs).best(max_nodes)

    def note(self, first: TokenTree, second: TokenTree, tokens: Sequence[int]) -> None:
        """These tokens were committed where these trees were mixed."""
        if len(first) and len(second) and len(tokens):
            committed = np.asarray(tokens, np.int64)
            bands, said = _said(*_arrays(first), *_arrays(second), committed)
            for band, (of_first, of_second) in zip(bands.tolist(), said.tolist(), strict=True):
                self.weights[band].note(of_first, of_second)


def warm_up() -> None:
    """Compile what a step calls, or read it from numba's cache."""
    chain, mixture = TokenTree.chain([1, 2]), TreeMixture()
    mixture.mixed(chain, chain, 2)
    mixture.note(chain, chain, [1])


_Arrays = tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.float32]]


def _arrays(tree: TokenTree) -> _Arrays:
    return tree.tokens, tree.parents, tree.probs


@numba.njit(cache=True, nogil=True)
def _union(tokens, parents, probs, others, their_parents, their_probs, weights):
    """The nodes of both, the first tree's in front.

    Args:
        weights: of the second, by the band of its sureness.

    Returns:
        their tokens, parents and mixed probabilities, and the place of each of the second's.
    """
    n, m = len(tokens), len(others)
    size = n
    of_all = np.empty(n + m, np.int64)
    of_parents = np.empty(n + m, np.int32)
    # Each's probability behind the parent, and its highest behind a node; the root's is the last.
    firsts, seconds = np.zeros(n + m), np.zeros(n + m)
    first_best, second_best = np.zeros(n + m + 1), np.zeros(n + m + 1)
    places = np.empty(m, np.int64)
    for i in range(n):
        of_all[i], of_parents[i] = tokens[i], parents[i]
        firsts[i] = _behind_parent(parents, probs, i)
        first_best[parents[i]] = max(first_best[parents[i]], firsts[i])
    for i in range(m):
        parent = places[their_parents[i]] if their_parents[i] >= 0 else NO_PARENT
        place = 0
        while place < size and (of_parents[place] != parent or of_all[place] != others[i]):
            place += 1
        if place == size:
            of_all[place], of_parents[place] = others[i], parent
            size += 1
        places[i] = place
        seconds[place] = _behind_parent(their_parents, their_probs, i)
        second_best[parent] = max(second_best[parent], seconds[place])
    mixed = np.empty(size, np.float32)
    for i in range(size):
        parent = of_parents[i]
        share = 0.0
        if second_best[parent] > 0:
            sure = np.searchsorted(_BANDS, second_best[parent])
            share = weights[sure] if first_best[parent] > 0 else 1.0
        behind = (1.0 - share) * firsts[i] + share * seconds[i]
        mixed[i] = behind if parent < 0 else mixed[parent] * min(behind, 1.0)
    return of_all[:size], of_parents[:size], mixed, places


@numba.njit(cache=True, nogil=True)
def _behind_parent(parents, probs, node):
    before = probs[parents[node]] if parents[node] >= 0 else np.float32(1.0)
    return probs[node] / before if before > 0 else 0.0


@numba.njit(cache=True, nogil=True)
def _said(tokens, parents, probs, others, their_parents, their_probs, committed):
    """Of each committed token of which both trees have spoken: the second's band, and theirs."""
    said = np.empty((len(committed), 2))
    bands = np.empty(len(committed), np.int64)
    first, second, k = NO_PARENT, NO_PARENT, 0
    for token in committed:
        of_first, first_best, first = _step(tokens, parents, probs, first, token)
        of_second, second_best, second = _step(others, their_parents, their_probs, second, token)
        if first_best == 0 and second_best == 0:
            break
        if first_best > 0 and second_best > 0:
            bands[k] = np.searchsorted(_BANDS, second_best)
            said[k] = of_first, of_second
            k += 1
    return bands[:k], said[:k]


@numba.njit(cache=True, nogil=True)
def _step(tokens, parents, probs, node, token):
    """A tree's probability of the token behind a node, its highest there, and where that leads."""
    of_token, best, led = 0.0, 0.0, _LEFT
    for i in range(len(tokens)):
        if parents[i] == node:
            prob = _behind_parent(parents, probs, i)
            best = max(best, prob)
            if tokens[i] == token:
                of_token, led = prob, i
    return of_token, best, led
