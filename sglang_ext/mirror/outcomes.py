"""The likely outcomes of a step, best first, from what the early exit says of its nodes.

An outcome is the node that acceptance ends at and the token behind it that the target says: what
the step commits is the path to the node, and that token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numba
import numpy as np
import numpy.typing as npt

from datastores import Continuations
from sglang_ext.mirror.exit_view import ExitView

UNKNOWN = -1.0


@dataclass(frozen=True)
class Outcomes:
    """The likely outcomes of each request of a view, best first.

    Attributes:
        nodes: int32[bs, most], the last accepted node.
        tokens: int32[bs, most], the target's token behind it, which none of its children holds.
        probs: float32[bs, most], the outcome's estimated probability.
        counts: int32[bs], how many of a row are outcomes.
    """

    nodes: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.int32]
    probs: npt.NDArray[np.float32]
    counts: npt.NDArray[np.int32]


def likely_outcomes(
    view: ExitView, most: int, least: float = 0.0, drafted: npt.NDArray[np.float32] | None = None
) -> Outcomes:
    """The outcomes that a view makes likely.

    A node is accepted behind its parent with the proxy's probability of its token, or with the
    mean of that and the drafter's where it is known: a retrieved token is right more often than a
    proxy in the middle of the target can tell. What the children leave of a node's probability is
    shared among the candidates that no child holds.

    Args:
        most: outcomes of each request.
        least: outcomes less probable than this are left out.
        drafted: float32[bs, width], the drafter's estimate that a node follows its parent; UNKNOWN
            where it has none.
    """
    bs, width = view.tokens.shape
    if drafted is None:
        drafted = np.full((bs, width), UNKNOWN, np.float32)
    made = Outcomes(
        np.zeros((bs, most), np.int32),
        np.zeros((bs, most), np.int32),
        np.zeros((bs, most), np.float32),
        np.zeros(bs, np.int32),
    )
    _rank(
        view.tokens, view.parents, view.counts, view.candidates, view.logprobs, drafted,
        least, made.nodes, made.tokens, made.probs, made.counts,
    )  # fmt: skip
    return made


@dataclass(frozen=True)
class Foreseen:
    """What likely outcomes commit, of some rows of a view, the most probable one first.

    Attributes:
        continuations: of these rows, numbered as they were given.
        places: int64[rows, most], where each of a row's outcomes stands among these; -1: it has no
            more.
    """

    continuations: Continuations
    places: npt.NDArray[np.int64]


def foreseen_of(view: ExitView, outcomes: Outcomes, rows: Sequence[int]) -> Foreseen:
    """What the outcomes of these rows of a view commit."""
    made = _foresee(
        view.tokens, view.parents, np.array(rows, np.int64), outcomes.nodes, outcomes.tokens,
        outcomes.probs, outcomes.counts,
    )  # fmt: skip
    return Foreseen(Continuations(*made[:3]), made[3])


@numba.njit(cache=True, nogil=True)
def _foresee(tokens, parents, rows, nodes, corrections, probs, counts):
    """`whose`, `tokens` and `lengths` of Continuations, and `places` of Foreseen."""
    n = counts[rows].sum()
    all_whose, ranks = np.empty(n, np.int64), np.empty(n, np.int64)
    improbable = np.empty(n, np.float32)
    i = 0
    for number, row in enumerate(rows):
        for rank in range(counts[row]):
            all_whose[i], ranks[i], improbable[i] = number, rank, -probs[row, rank]
            i += 1
    places = np.full((len(rows), nodes.shape[1]), -1, np.int64)
    whose, lengths = np.empty(n, np.int64), np.empty(n, np.int64)
    paths = np.zeros((n, tokens.shape[1]), np.int32)
    for place, i in enumerate(np.argsort(improbable, kind="mergesort")):
        row, rank = rows[all_whose[i]], ranks[i]
        whose[place], places[all_whose[i], rank] = all_whose[i], place
        lengths[place] = _write_path(tokens[row], parents[row], nodes[row, rank], paths[place])
        paths[place, lengths[place] - 1] = corrections[row, rank]
    return whose, paths, lengths, places


@numba.njit(cache=True, nogil=True)
def _write_path(tokens, parents, node, path):
    """Writes down the path to a node; its length, with one token behind it."""
    depth, at = 0, node
    while at > 0:
        depth, at = depth + 1, parents[at]
    length = depth + 1
    while node > 0:
        depth -= 1
        path[depth] = tokens[node]
        node = parents[node]
    return length


@numba.njit(cache=True, nogil=True)
def _rank(
    tokens, parents, counts, candidates, logprobs, drafted, least,
    nodes_out, tokens_out, probs_out, counts_out,
):  # fmt: skip
    bs, width, kappa = candidates.shape
    probs = np.empty((width, kappa), np.float64)
    follows = np.empty(width, np.float64)
    reach = np.empty(width, np.float64)
    of_children = np.empty(width, np.float64)
    of_their_candidates = np.empty(width, np.float64)
    for b in range(bs):
        n = counts[b]
        for i in range(n):
            of_children[i] = 0.0
            of_their_candidates[i] = 0.0
            for c in range(kappa):
                probs[i, c] = np.exp(logprobs[b, i, c])
        for i in range(1, n):
            p = parents[b, i]
            proxy = 0.5 * probs[p, kappa - 1]  # less than the least that was named
            for c in range(kappa):
                if candidates[b, p, c] == tokens[b, i]:
                    proxy = probs[p, c]
                    of_their_candidates[p] += proxy
                    probs[p, c] = 0.0  # no outcome: the walk goes on there
            estimate = proxy if drafted[b, i] < 0 else 0.5 * (proxy + drafted[b, i])
            follows[i] = estimate
            of_children[p] += estimate
        reach[0] = 1.0
        for i in range(1, n):
            p = parents[b, i]
            reach[i] = reach[p] * follows[i] / max(1.0, of_children[p] / 0.98)
        for i in range(n):
            left = max(0.02, 1.0 - of_children[i])
            unnamed = max(0.02, 1.0 - of_their_candidates[i])
            for c in range(kappa):
                probs[i, c] *= reach[i] * left / unnamed
        counts_out[b] = _take_best(
            probs[:n], candidates[b], least, nodes_out[b], tokens_out[b], probs_out[b]
        )


@numba.njit(cache=True, nogil=True)
def _take_best(probs, candidates, least, nodes_out, tokens_out, probs_out):
    """Writes the best outcomes down, best first, and returns their number; probs is used up."""
    n, kappa = probs.shape
    for taken in range(nodes_out.size):
        best, node, which = least, -1, -1
        for i in range(n):
            for c in range(kappa):
                if probs[i, c] > best:
                    best, node, which = probs[i, c], i, c
        if node < 0:
            return taken
        nodes_out[taken] = node
        tokens_out[taken] = candidates[node, which]
        probs_out[taken] = best
        probs[node, which] = 0.0
    return nodes_out.size
