"""TokenTree, its packing, and the walk that accepts nodes, against plain-Python references."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.tree import TokenTree, check_all, pack, walk


def tree_of(tokens: list[int], parents: list[int]) -> TokenTree:
    return TokenTree(
        np.array(tokens, dtype=np.int64),
        np.array(parents, dtype=np.int32),
        np.full(len(tokens), 0.5, dtype=np.float32),
    )


@st.composite
def trees(draw, max_nodes: int = 10, vocab: int = 4) -> TokenTree:
    n = draw(st.integers(0, max_nodes))
    tokens = draw(st.lists(st.integers(0, vocab - 1), min_size=n, max_size=n))
    parents = [draw(st.integers(-1, i - 1)) for i in range(n)]
    return tree_of(tokens, parents)


def ancestors(parents: list[int], node: int) -> set[int]:
    """`node` and what is above it; node indices of the packed tree, 0 is the root."""
    found = {node}
    while node > 0:
        node = parents[node - 1] + 1
        found.add(node)
    return found


@given(st.lists(trees(), min_size=1, max_size=3), st.integers(1, 12))
def test_mask_shows_each_node_its_ancestors_only(batch, width):
    packed = pack([1] * len(batch), batch, width)
    for b, tree in enumerate(batch):
        size = min(len(tree) + 1, width)
        assert packed.sizes[b] == size
        for i in range(width):
            expected = ancestors(list(tree.parents), i) if i < size else {i}
            assert set(np.flatnonzero(packed.mask[b, i])) == expected
            assert packed.depths[b, i] == (len(expected) - 1 if i < size else 0)


@given(st.lists(trees(), min_size=1, max_size=3), st.integers(1, 12), st.data())
def test_walk_follows_the_targets_tokens(batch, width, data):
    packed = pack([0] * len(batch), batch, width)
    predicted = np.array(
        data.draw(
            st.lists(
                st.lists(st.integers(0, 3), min_size=width, max_size=width),
                min_size=len(batch),
                max_size=len(batch),
            )
        )
    )
    index, lens = walk(packed.tokens, packed.next_token, packed.next_sibling, predicted)
    for b, tree in enumerate(batch):
        path, node = [0], 0
        while True:
            children = [
                i + 1
                for i in range(min(len(tree), width - 1))
                if tree.parents[i] == node - 1 and tree.tokens[i] == predicted[b, node]
            ]
            if not children:
                break
            node = children[0]
            path.append(node)
        assert lens[b] == len(path)
        assert list(index[b, : lens[b]]) == [b * width + i for i in path]
        assert (index[b, lens[b] :] == -1).all()


@given(trees(), st.integers(0, 6))
def test_clipped_keeps_the_shallow_nodes_and_their_links(tree, depth):
    clipped = tree.clipped(depth)
    clipped.check(4)
    expected = [i for i, d in enumerate(tree.depths()) if d <= depth]
    assert list(clipped.tokens) == [tree.tokens[i] for i in expected]
    assert list(clipped.depths()) == [tree.depths()[i] for i in expected]


@given(trees(), st.sets(st.integers(0, 5), max_size=3))
def test_before_drops_the_ends_and_what_is_behind_them(tree, ends):
    before = tree.before(np.array(sorted(ends), dtype=np.int64))
    before.check(4)
    expected = [
        i
        for i in range(len(tree))
        if not ends & {tree.tokens[n - 1] for n in ancestors(list(tree.parents), i + 1) - {0}}
    ]
    assert list(before.tokens) == [tree.tokens[i] for i in expected]
    assert list(before.depths()) == [tree.depths()[i] for i in expected]


def test_chain_is_a_branch_with_falling_probabilities():
    chain = TokenTree.chain([5, 6, 7], prob=0.5)
    assert list(chain.parents) == [-1, 0, 1]
    np.testing.assert_allclose(chain.probs, [0.5, 0.25, 0.125])


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (tree_of([9], [-1]), r"tokens must be in 0\.\.8"),
        (tree_of([-1], [-1]), "tokens must be in"),
        (tree_of([1], [0]), "parents"),
        (tree_of([1, 2], [-1, -2]), "parents"),
        (
            TokenTree(np.array([1]), np.array([], dtype=np.int32), np.array([0.5])),
            "one length",
        ),
    ],
)
def test_check_names_what_is_wrong(tree, message):
    with pytest.raises(ValueError, match=message):
        tree.check(vocab_size=9)
    right = [tree_of([8, 8], [-1, 0]), TokenTree.empty()]
    check_all(right, vocab_size=9)
    for batch in ([tree], [*right, tree], [tree, *right]):
        with pytest.raises(ValueError, match=message):
            check_all(batch, vocab_size=9)


def test_sources_stay_with_their_nodes():
    tree = TokenTree(
        np.array([5, 6, 7, 8]),
        np.array([-1, 0, -1, 1], dtype=np.int32),
        np.full(4, 0.5, dtype=np.float32),
        np.array([1, 2, 4, 8], dtype=np.int8),
    )
    assert tree.first(2).sources.tolist() == [1, 2]
    assert tree.clipped(1).sources.tolist() == [1, 4]
    assert TokenTree.chain([1, 2]).first(1).sources is None
    with pytest.raises(ValueError, match="sources must be as many as tokens"):
        TokenTree(tree.tokens, tree.parents, tree.probs, tree.sources[:2]).check(10)


@given(trees(), st.lists(st.integers(0, 3), max_size=6))
def test_path_is_what_a_walk_over_the_packed_tree_accepts(tree, output):
    packed = pack([0], [tree], len(tree) + 1)
    # The target's token after each node: the output's, by depth.
    after = [output[d] if d < len(output) else 99 for d in packed.depths[0]]
    index, lens = walk(packed.tokens, packed.next_token, packed.next_sibling, np.array([after]))
    accepted = np.zeros(len(tree), dtype=bool)
    accepted[index[0, 1 : lens[0]] - 1] = True
    assert tree.path(output).tolist() == accepted.tolist()


def test_nodes_leaves_padding_out():
    packed = pack([1, 2], [TokenTree.chain([3, 4]), TokenTree.empty()], 4)
    assert packed.nodes().tolist() == [0, 1, 2, 4]
