"""The CPU functions of `sgl_kernel` that SGLang 0.5.23 calls, in plain torch.

SGLang's CPU engine imports these names from `sgl_kernel`, whose wheel on PyPI holds CUDA code only.
Each function mutates its output tensors in place, as the compiled one does. The contracts are those
of the call sites in `sglang/kernels/ops/speculative/{cache_locs,eagle,spec_tree,multi_layer_eagle,
reconstruct_tree}.py`, `sglang/kernels/ops/kvcache/cache_move.py` and
`sglang/srt/mem_cache/allocation.py`, whose Triton kernels state the same semantics.

Shapes use bs = requests in the batch and n = draft tokens (tree nodes) per request. Index tensors
may be int32 or int64.
"""

from collections.abc import Iterator

import torch

from sglang_ext.cpu.kv_move import move_rows

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "reconstruct_indices_from_tree_mask",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]

_QLEN_ONLY = 1
_FULL_MASK = 0


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Copy `req_to_token[req, start:end]` of every request, one after another, to `out_cache_loc`.

    req_pool_indices, start_offset, end_offset: [bs]; req_to_token: [rows, pool_len];
    out_cache_loc: [at least sum(end - start)].
    """
    table, slots = req_to_token.numpy(), out_cache_loc.numpy()
    for row, start, end, place in _spans(req_pool_indices, start_offset, end_offset):
        slots[place : place + end - start] = table[row, start:end]


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """The reverse of `assign_extend_cache_locs_cpu`: write the slots into the requests' rows."""
    table, slots = req_to_token.numpy(), out_cache_loc.numpy()
    for row, start, end, place in _spans(req_pool_indices, start_offset, end_offset):
        table[row, start:end] = slots[place : place + end - start]


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Copy `topk * num_steps` slots after each request's `seq_lens` to `out_cache_loc`."""
    assign_extend_cache_locs_cpu(
        req_pool_indices,
        req_to_token,
        seq_lens,
        seq_lens + topk * num_steps,
        out_cache_loc,
        pool_len,
    )


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor,
    out_cache_loc: torch.Tensor,
    accept_out_cache_loc: torch.Tensor,
) -> None:
    """Gather the KV slots of accepted nodes; `accept_index` [any shape] is -1 where none is."""
    accepted = accept_index.reshape(-1)
    slots = out_cache_loc[accepted[accepted > -1].long()]
    accept_out_cache_loc[: slots.numel()] = slots


def fill_bonus_tokens_cpu(
    accept_tokens: torch.Tensor,
    accept_lens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    accept_stride: int,
) -> None:
    """Take each request's last accepted token (the bonus token).

    accept_tokens: [bs * accept_stride]; accept_lens: [bs], bonus included; bonus_tokens: [bs].
    """
    bs = accept_lens.numel()
    last = torch.arange(bs) * accept_stride + accept_lens.long() - 1
    bonus_tokens[:bs] = accept_tokens.reshape(-1)[last].to(bonus_tokens.dtype)


def verify_tree_greedy_cpu(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Walk each draft tree along the target's argmax tokens.

    candidates, retrive_*, target_predict: [bs, n]; node 0 is the last committed token. Writes
    accept_index [bs, steps] (flat node indices, left as given behind the accepted path),
    accept_token_num [bs] (accepted draft tokens, without the bonus token) and predicts
    [at least bs * n] (the target's token at every accepted node).
    """
    bs = candidates.shape[0]
    steps = accept_index.shape[1]
    tokens, index = candidates.tolist(), retrive_index.tolist()
    children, siblings = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    targets = target_predict.reshape(-1).tolist()
    for b in range(bs):
        node = 0
        path = [index[b][0]]
        while len(path) < steps:
            node = children[b][node]
            while node != -1 and tokens[b][node] != targets[path[-1]]:
                node = siblings[b][node]
            if node == -1:
                break
            path.append(index[b][node])
        accept_index[b, : len(path)] = torch.tensor(path, dtype=accept_index.dtype)
        accept_token_num[b] = len(path) - 1
        predicts[path] = torch.tensor([targets[i] for i in path], dtype=predicts.dtype)


def build_tree_kernel_efficient_cpu(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    verified_seq_len: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Build EAGLE's verify tree from the drafter's top-k expansion.

    parent_list: [bs, ...] token index of the expanded parents; selected_index: [bs, n - 1] token
    index of the drafts kept; verified_seq_len: [bs]. Writes tree_mask (flat bool; n * n per request
    in mode QLEN_ONLY, n * (seq_len + n) in FULL_MASK, whose prefix part is left as given),
    positions [bs * n] and retrive_* [bs, n] (which arrive filled with -1).

    Raises:
        NotImplementedError: for the bit-packed mask, which SGLang never asks for on CPU.
    """
    if tree_mask_mode not in (_FULL_MASK, _QLEN_ONLY):
        raise NotImplementedError(
            f"build_tree_kernel_efficient_cpu: tree_mask_mode {int(tree_mask_mode)} (bit-packed) "
            "is not available on CPU; expected FULL_MASK (0) or QLEN_ONLY (1)."
        )
    n = draft_token_num
    parents_of, selected = parent_list.tolist(), selected_index.tolist()
    mask_start = 0
    for b, seq_len in enumerate(verified_seq_len.tolist()):
        parents = _selected_parents(parents_of[b], selected[b], topk, n)
        retrive_index[b] = torch.arange(b * n, b * n + n)
        for i in range(n - 1, 0, -1):
            parent = parents[i]
            if parent >= 0:
                retrive_next_sibling[b, i] = retrive_next_token[b, parent]
                retrive_next_token[b, parent] = i
        prefix = seq_len if tree_mask_mode == _FULL_MASK else 0
        rows = tree_mask[mask_start : mask_start + n * (prefix + n)].view(n, prefix + n)
        mask_start += rows.numel()
        rows[:, prefix:] = False
        rows[:, prefix] = True
        for i in range(n):
            node, level = i, 0
            while node > 0 and level < depth:
                rows[i, prefix + node] = True
                node, level = parents[node], level + 1
            positions[b * n + i] = seq_len + level


def rotate_input_ids_cpu(
    input_ids: torch.Tensor,
    extend_start_loc: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    topk_index: torch.Tensor,
    select_index: torch.Tensor | None = None,
) -> None:
    """Shift each request's tokens one to the left and put its new token at the end.

    input_ids: [tokens], mutated; extend_start_loc, extend_seq_lens: [bs]; topk_index: [bs] or
    [bs, 1] new tokens; select_index: [bs] positions for the new tokens instead of the last ones.
    """
    new_tokens = topk_index.reshape(-1).tolist()
    ends = select_index.tolist() if select_index is not None else None
    spans = zip(extend_start_loc.tolist(), extend_seq_lens.tolist(), strict=True)
    for i, (start, length) in enumerate(spans):
        if length <= 0:
            continue
        input_ids[start : start + length - 1] = input_ids[start + 1 : start + length].clone()
        input_ids[ends[i] if ends is not None else start + length - 1] = new_tokens[i]


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor,
    strides: torch.Tensor,
    tgt_loc: torch.Tensor,
    src_loc: torch.Tensor,
) -> None:
    """Copy KV rows `src_loc` to `tgt_loc` in every buffer; the two may overlap.

    data_ptrs: [buffers] uint64 addresses; strides: [buffers] bytes per row; *_loc: [rows].
    """
    move_rows(data_ptrs.numpy(), strides.numpy(), tgt_loc.numpy(), src_loc.numpy())


def reconstruct_indices_from_tree_mask(
    tree_mask: torch.Tensor,
    verified_seq_len: torch.Tensor,
    positions: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Derive positions and tree links from an ancestor mask (`sgl_kernel.speculative`).

    tree_mask: [bs * n * n] bool, row i marks the ancestors of node i (and i itself); writes
    positions [bs * n] = seq_len + depth and retrive_* [bs, n]: flat index, first child (-1: none)
    and next sibling (-1: none). A parent is a node's nearest ancestor before it.
    """
    n = draft_token_num
    order = torch.arange(n)
    ancestors = tree_mask.view(batch_size, n, n).bool() & (order < order[:, None])
    depth = ancestors.sum(-1)
    positions.view(batch_size, n).copy_(depth + verified_seq_len[:batch_size, None])
    retrive_index.view(batch_size, n).copy_(torch.arange(batch_size * n).view(batch_size, n))

    # Min over the later rows k: "first child" and "next sibling" with n meaning none.
    later = order[:, None].expand(n, n)
    first_child = torch.where(ancestors, later, n).amin(1)
    retrive_next_token.view(batch_size, n).copy_(first_child.where(first_child < n, -1))

    parent = torch.where(ancestors, order, -1).amax(-1)
    same_parent = (parent[:, :, None] == parent[:, None, :]) & (later > order)
    sibling = torch.where(same_parent, later, n).amin(1)
    has_sibling = (parent >= 0) & (sibling < n)
    retrive_next_sibling.view(batch_size, n).copy_(sibling.where(has_sibling, -1))


def _spans(
    rows: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor
) -> Iterator[tuple[int, int, int, int]]:
    """Of each request its row, where its span starts and ends, and where it goes in a list of all.

    One by one: for a few requests, calls on arrays of them all take longer.
    """
    place = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        yield row, start, end, place
        place += max(0, end - start)


def _selected_parents(parents: list[int], selected: list[int], topk: int, n: int) -> list[int]:
    """The parent node of every node of one EAGLE tree; -1 for the root and for orphans."""
    node_of: dict[int, int] = {}
    for i, token_index in enumerate(selected[: n - 1]):
        node_of.setdefault(token_index, i + 1)
    result = [-1]
    for token_index in selected[: n - 1]:
        expanded = token_index // topk
        result.append(0 if expanded == 0 else node_of.get(parents[expanded], -1))
    return result
