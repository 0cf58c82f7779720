"""Two drafters' token trees as one."""

import numpy as np
import pytest

from sglang_ext.mixture import MixtureWeight, TreeMixture
from sglang_ext.tree import TokenTree

SURE, UNSURE = 3, 0
"""Bands of the second drafter's likeliest token: above 0.9, and below 0.3."""


def tree_of(*nodes: tuple[int, int, float], logprobs: bool = False, source: int = 0) -> TokenTree:
    """Of tokens, the nodes before them and their probabilities behind these."""
    tokens, parents, behind = zip(*nodes, strict=True)
    probs: list[float] = []
    for parent, prob in zip(parents, behind, strict=True):
        probs.append(prob * (probs[parent] if parent >= 0 else 1.0))
    return TokenTree(
        np.array(tokens),
        np.array(parents, np.int32),
        np.array(probs, np.float32),
        np.full(len(nodes), source, np.int8) if source else None,
        np.log(np.array(behind, np.float32)) if logprobs else None,
    )


def by_path(tree: TokenTree) -> dict[tuple[int, ...], float]:
    """The probability of each node, by the tokens that lead to it."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return dict(zip(paths, tree.probs.tolist(), strict=True))


FIRST = tree_of((1, -1, 0.8), (2, 0, 0.5), logprobs=True)
SECOND = tree_of((1, -1, 0.2), (3, -1, 0.2), (4, 0, 0.95), (5, 1, 0.5), source=4)


def test_a_node_is_believed_as_both_believe_it():
    mixture = TreeMixture()
    for weight, share in zip(mixture.weights, (0.25, 0.5, 0.5, 0.75), strict=True):
        weight.weight = share
    mixed = mixture.mixed(FIRST, SECOND, 10)
    mixed.check(10)
    likely = 0.75 * 0.8 + 0.25 * 0.2  # the second is unsure of what comes first
    assert by_path(mixed) == pytest.approx(
        {
            (1,): likely,
            (1, 4): likely * 0.75 * 0.95,  # and sure of what follows
            (1, 2): likely * 0.25 * 0.5,
            (3,): 0.25 * 0.2,
            (3, 5): 0.25 * 0.2 * 0.5,  # of which the first says nothing
        }
    )
    assert (np.diff(mixed.probs) <= 0).all()


def test_where_nodes_come_from_is_kept():
    mixed = TreeMixture().mixed(FIRST, SECOND, 10)
    of = dict(zip(by_path(mixed), zip(mixed.sources, mixed.logprobs, strict=True), strict=True))
    assert of[1,] == (4, pytest.approx(np.log(0.8)))
    assert of[1, 2] == (0, pytest.approx(np.log(0.5)))
    assert of[1, 4][0] == 4 and np.isnan(of[1, 4][1])
    assert TreeMixture().mixed(SECOND, SECOND, 10).logprobs is None


@pytest.mark.parametrize("most", range(1, 6))
def test_the_best_nodes_are_a_tree(most):
    mixture = TreeMixture()
    whole, cut = mixture.mixed(FIRST, SECOND, 10), mixture.mixed(FIRST, SECOND, most)
    cut.check(10)
    assert list(by_path(cut).items()) == list(by_path(whole).items())[:most]


def test_equally_likely_nodes_stand_behind_their_parents():
    chain, other = TokenTree.chain([1, 2, 3], 1.0), TokenTree.chain([1, 2, 3, 4, 5], 1.0)
    mixed = TreeMixture().mixed(chain, other, 8)
    assert mixed.tokens.tolist() == [1, 2, 3, 4, 5]
    assert mixed.parents.tolist() == [-1, 0, 1, 2, 3]
    assert mixed.probs.max() <= 1.0


def test_one_alone_is_taken_as_it_is():
    mixture = TreeMixture()
    assert by_path(mixture.mixed(FIRST, TokenTree.empty(), 8)) == by_path(FIRST)
    assert by_path(mixture.mixed(TokenTree.empty(), SECOND, 8)) == by_path(SECOND)
    assert len(mixture.mixed(FIRST, TokenTree.empty(), 1)) == 1
    assert len(mixture.mixed(TokenTree.empty(), TokenTree.empty(), 8)) == 0


def test_whoever_is_right_is_believed_more():
    mixture = TreeMixture()
    before = [weight.weight for weight in mixture.weights]
    for _ in range(100):
        mixture.note(FIRST, SECOND, [1, 4, 7])
    # The first said 0.8 of what came first, the second 0.2; of 4 the second alone has spoken.
    assert mixture.weights[UNSURE].weight < before[UNSURE]
    assert mixture.weights[SURE].weight > 0.8
    assert [mixture.weights[band].weight for band in (1, 2)] == before[1:3]


@pytest.mark.parametrize("tokens", [[], [9], [3, 5, 1]])
def test_what_only_one_has_spoken_of_teaches_nothing_behind_it(tokens):
    mixture = TreeMixture()
    mixture.note(FIRST, SECOND, tokens)
    others = [weight.weight for weight in mixture.weights[1:]]
    assert others == [TreeMixture().weights[0].weight] * 3


def test_no_weight_goes_to_an_end():
    weight = MixtureWeight()
    for _ in range(2000):
        weight.note(1.0, 0.0)
    assert 0.0 < weight.weight < 0.05
    for _ in range(2000):
        weight.note(0.0, 1.0)
    assert 0.95 < weight.weight < 1.0
    weight.note(0.0, 0.0)
    assert 0.95 < weight.weight < 1.0
