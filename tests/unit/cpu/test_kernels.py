"""The stand-in's functions against plain Python written from SGLang's Triton kernels."""

import itertools
import random

import pytest
import torch

from sglang_ext.cpu import kernels


def random_tree(rng, n):
    """Parents of n nodes, parents first; -1 for the root."""
    return [-1] + [rng.randrange(i) for i in range(1, n)]


def ancestors(parents, node):
    found = []
    while node >= 0:
        found.append(node)
        node = parents[node]
    return found


def links(parents):
    """First child and next sibling of every node, -1 where there is none."""
    n = len(parents)
    children = [[i for i in range(n) if parents[i] == p] for p in range(n)]
    first = [c[0] if c else -1 for c in children]
    sibling = [-1] * n
    for c in children:
        for a, b in itertools.pairwise(c):
            sibling[a] = b
    return first, sibling


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_and_slots_are_copied_both_ways(dtype):
    pool = torch.arange(60, dtype=torch.int32).view(5, 12)
    rows = torch.tensor([3, 0, 4], dtype=dtype)
    start, end = torch.tensor([2, 0, 7], dtype=dtype), torch.tensor([5, 0, 12], dtype=dtype)
    out = torch.zeros(8, dtype=torch.int64)
    kernels.assign_extend_cache_locs_cpu(rows, pool, start, end, out, 12)
    assert out.tolist() == [38, 39, 40, 55, 56, 57, 58, 59]

    kernels.assign_req_to_token_pool_cpu(rows, pool, start, end, out + 100, 12)
    assert pool[3, 2:5].tolist() == [138, 139, 140]
    assert pool[4, 7:].tolist() == [155, 156, 157, 158, 159]
    assert pool[0].tolist() == list(range(12)), "an empty span writes nothing"
    assert pool[3, :2].tolist() == [36, 37] and pool[3, 5].item() == 41


def test_draft_slots_follow_the_sequence():
    pool = torch.arange(40, dtype=torch.int32).view(2, 20)
    out = torch.zeros(12, dtype=torch.int64)
    kernels.assign_draft_cache_locs_contiguous_cpu(
        torch.tensor([1, 0]), pool, torch.tensor([4, 9]), out, 20, 2, 3
    )
    assert out.tolist() == [24, 25, 26, 27, 28, 29, 9, 10, 11, 12, 13, 14]


def test_accepted_slots_and_bonus_tokens():
    accept_index = torch.tensor([[0, 2, -1], [4, -1, -1]])
    out = torch.zeros(6, dtype=torch.int64)
    kernels.fill_accept_out_cache_loc_cpu(accept_index, torch.arange(10, 18), out)
    assert out.tolist() == [10, 12, 14, 0, 0, 0]

    bonus = torch.zeros(2, dtype=torch.int32)
    tokens = torch.tensor([7, 8, 0, 9, 0, 0], dtype=torch.int64)
    kernels.fill_bonus_tokens_cpu(tokens, torch.tensor([2, 1], dtype=torch.int32), bonus, 3)
    assert bonus.tolist() == [8, 9]


@pytest.mark.parametrize("seed", range(20))
def test_greedy_walk_and_links_from_the_mask(seed):
    rng = random.Random(seed)
    bs, n, steps = rng.randint(1, 4), rng.randint(1, 9), rng.randint(1, 6)
    trees = [random_tree(rng, n) for _ in range(bs)]
    mask = torch.zeros(bs, n, n, dtype=torch.bool)
    for b, parents in enumerate(trees):
        for i in range(n):
            mask[b, i, ancestors(parents, i)] = True
    seq_lens = torch.tensor([rng.randint(1, 50) for _ in range(bs)])
    positions = torch.zeros(bs * n, dtype=torch.int64)
    index, child, sibling = (torch.zeros(bs, n, dtype=torch.int64) for _ in range(3))
    kernels.reconstruct_indices_from_tree_mask(
        mask.flatten(), seq_lens, positions, index, child, sibling, bs, n
    )
    for b, parents in enumerate(trees):
        first, following = links(parents)
        assert child[b].tolist() == first and sibling[b].tolist() == following
        depths = [len(ancestors(parents, i)) - 1 for i in range(n)]
        assert positions.view(bs, n)[b].tolist() == [seq_lens[b].item() + d for d in depths]
    assert index.flatten().tolist() == list(range(bs * n))

    # Few tokens, so that walks go deep. Siblings differ, as in a trie.
    candidates = torch.tensor([[rng.randrange(3) for _ in range(n)] for _ in range(bs)])
    target = torch.tensor([[rng.randrange(3) for _ in range(n)] for _ in range(bs)])
    accept_index = torch.full((bs, steps), -1, dtype=torch.int32)
    accept_num = torch.zeros(bs, dtype=torch.int32)
    predicts = torch.full((bs * n,), -7, dtype=torch.int32)
    kernels.verify_tree_greedy_cpu(
        predicts, accept_index, accept_num, candidates, index, child, sibling, target
    )
    for b, parents in enumerate(trees):
        path = [0]
        while len(path) < steps:
            wanted = target[b, path[-1]].item()
            fitting = [i for i in range(n) if parents[i] == path[-1] and candidates[b, i] == wanted]
            if not fitting:
                break
            path.append(fitting[0])
        assert accept_num[b] == len(path) - 1
        assert accept_index[b, : len(path)].tolist() == [b * n + i for i in path]
        assert (accept_index[b, len(path) :] == -1).all()
        for i in range(n):
            expected = target[b, i].item() if i in path else -7
            assert predicts[b * n + i] == expected


def test_eagle_tree():
    # topk 2, two steps. Step one expands the root to token indices 0 and 1; step two expands each
    # of them: 2, 3 under 0 and 4, 5 under 1. parent_list names, per expansion, the token expanded.
    parent_list = torch.tensor([[-1, 0, 1]])
    selected = torch.tensor([[0, 1, 3, 4]])
    n = 5
    for mode, prefix in ((1, 0), (0, 7)):
        mask = torch.ones(n * (prefix + n), dtype=torch.bool)
        positions = torch.zeros(n, dtype=torch.int64)
        index, child, sibling = (torch.full((1, n), -1) for _ in range(3))
        kernels.build_tree_kernel_efficient_cpu(
            parent_list, selected, torch.tensor([7]), mask, positions, index, child, sibling,
            2, 2, n, mode,
        )  # fmt: skip
        assert positions.tolist() == [7, 8, 8, 9, 9]
        assert child.tolist() == [[1, 3, 4, -1, -1]]
        assert sibling.tolist() == [[-1, 2, -1, -1, -1]]
        rows = mask.view(n, prefix + n)
        assert rows[:, :prefix].all()
        assert [r.nonzero().flatten().tolist() for r in rows[:, prefix:]] == [
            [0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4],
        ]  # fmt: skip
    with pytest.raises(NotImplementedError, match="tree_mask_mode 2"):
        kernels.build_tree_kernel_efficient_cpu(
            parent_list, selected, torch.tensor([7]), mask, positions, index, child, sibling,
            2, 2, n, 2,
        )  # fmt: skip


def test_rotate_input_ids():
    ids = torch.arange(10, 18)
    start, lens = torch.tensor([0, 3, 8]), torch.tensor([3, 5, 0])
    kernels.rotate_input_ids_cpu(ids, start, lens, torch.tensor([[90], [91], [92]]))
    assert ids.tolist() == [11, 12, 90, 14, 15, 16, 17, 91]
    kernels.rotate_input_ids_cpu(ids, start, lens, torch.tensor([1, 2, 3]), torch.tensor([1, 4, 0]))
    assert ids.tolist() == [12, 1, 90, 15, 2, 17, 91, 91]


def test_kv_rows_move_in_place_with_overlap():
    buffers = [torch.randn(10, 3, 4), torch.randn(10, 2, 2, dtype=torch.float64)]
    source, target = torch.tensor([5, 3, 4]), torch.tensor([3, 4, 9])
    expected = [b.clone() for b in buffers]
    for e, b in zip(expected, buffers, strict=True):
        e[target] = b[source]
    kernels.copy_all_layer_kv_cache_cpu(
        torch.tensor([b.data_ptr() for b in buffers], dtype=torch.uint64),
        torch.tensor([b.stride(0) * b.element_size() for b in buffers]),
        target,
        source,
    )
    for e, b in zip(expected, buffers, strict=True):
        assert torch.equal(e, b)
