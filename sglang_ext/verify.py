"""Acceptance rules: which nodes of a verified tree are kept.

The exact rule asks the target for its own token at a node (argmax, or a sample from its
distribution as SGLang's sampler draws it) and follows the tree as long as that token is a
child. Every committed token is then the target's own choice given what precedes it, so greedy
output is that of plain decoding and sampling keeps the target's distribution, whatever was
drafted; with a sampling seed even the tokens are those of plain decoding, because SGLang's
seeded sampler depends on seed and position only.
"""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_ext.tree import PackedTrees, child_with, walk

if TYPE_CHECKING:
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

_ROW_FIELDS = ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed")


@dataclass(frozen=True)
class Accepted:
    """What a verify step commits.

    Attributes:
        predict: int32[bs * width], the target's token after each node (0 where not asked).
        accept_index: int32[bs, width], flat indices of the accepted nodes, root first, then -1.
        accept_lens: int32[bs], tokens committed, the bonus included.
    """

    predict: torch.Tensor
    accept_index: torch.Tensor
    accept_lens: torch.Tensor


def accept_on_host(
    logits: torch.Tensor,
    trees: PackedTrees,
    sampling_info: "SamplingBatchInfo",
    positions: torch.Tensor,
    sampler: Any,
    nodes: npt.NDArray[np.int64] | None = None,
) -> Accepted:
    """The exact rule for logits on the host: only nodes on the accepted path are sampled.

    Args:
        logits: float[bs * width, vocab], penalties, bias and grammar already applied.
        positions: int64[bs * width], each node's position in its sequence.
        sampler: SGLang's layers/sampler.py Sampler.
        nodes: int64[T], the flat indices of the nodes that `logits` has rows for, if not of
            all; greedy requests only.
    """
    bs, width = trees.tokens.shape
    if sampling_info.is_all_greedy:
        predicted = torch.argmax(logits, dim=-1).numpy()
        if nodes is not None:
            rows, predicted = predicted, np.zeros(bs * width, dtype=np.int64)
            predicted[nodes] = rows
        predicted = predicted.reshape(bs, width)
        index, lens = walk(trees.tokens, trees.next_token, trees.next_sibling, predicted)
    else:
        predicted, index, lens = _sample_walk(logits, trees, sampling_info, positions, sampler)
    return Accepted(
        torch.from_numpy(predicted.reshape(-1).astype(np.int32)),
        torch.from_numpy(index),
        torch.from_numpy(lens),
    )


def accept_on_device(
    logits: torch.Tensor,
    verify_input: Any,
    sampling_info: "SamplingBatchInfo",
    positions: torch.Tensor,
    sampler: Any,
    tp_group: Any,
) -> Accepted:
    """The exact rule without a host round trip: every node is sampled, a kernel walks the trees.

    Args:
        logits: float[bs * width, vocab], as in accept_on_host.
        verify_input: SGLang's NgramVerifyInput of this step.
        tp_group: tensor-parallel group; rank 0's samples bind all ranks.
    """
    from sglang.kernels.ops.speculative.spec_tree import verify_tree_greedy_func

    width = verify_input.draft_token_num
    bs = logits.shape[0] // width
    device = logits.device
    if sampling_info.is_all_greedy:
        predicted = torch.argmax(logits, dim=-1)
    else:
        rows = torch.arange(bs, device=device).repeat_interleave(width)
        predicted = _sample_rows(logits.clone(), sampling_info, rows, positions, sampler)
    predicted = predicted.to(torch.int64)
    if tp_group.world_size > 1:
        tp_group.broadcast(predicted, src=0)
    predict, accept_index, correct = verify_tree_greedy_func(
        predicts=torch.zeros(bs * width, dtype=torch.int32, device=device),
        accept_index=torch.full((bs, width), -1, dtype=torch.int32, device=device),
        accept_token_num=torch.empty(bs, dtype=torch.int32, device=device),
        candidates=verify_input.draft_token.reshape(bs, width),
        retrieve_index=verify_input.retrieve_index,
        retrieve_next_token=verify_input.retrieve_next_token,
        retrieve_next_sibling=verify_input.retrieve_next_sibling,
        target_predict=predicted.reshape(bs, width),
        topk=verify_input.tree_topk,
    )
    return Accepted(predict, accept_index, correct + 1)


def _sample_walk(logits, trees, sampling_info, positions, sampler):
    bs, width = trees.tokens.shape
    predicted = np.zeros((bs, width), dtype=np.int64)
    index = np.full((bs, width), -1, dtype=np.int32)
    lens = np.zeros(bs, dtype=np.int32)
    rows = np.arange(bs)
    nodes = np.zeros(bs, dtype=np.int64)
    while len(rows):
        flat = rows * width + nodes
        at = torch.from_numpy(flat)
        tokens = _sample_rows(
            logits[at], sampling_info, torch.from_numpy(rows), positions[at], sampler
        ).numpy()
        predicted[rows, nodes] = tokens
        index[rows, lens[rows]] = flat
        lens[rows] += 1
        nodes = np.array(
            [
                child_with(trees.tokens[b], trees.next_token[b], trees.next_sibling[b], node, token)
                for b, node, token in zip(rows, nodes, tokens, strict=True)
            ]
        )
        rows, nodes = rows[nodes >= 0], nodes[nodes >= 0]
    return predicted, index, lens


def _sample_rows(logits, sampling_info, rows, positions, sampler) -> torch.Tensor:
    """SGLang's own sampler on `logits` (overwritten), each with its request's parameters."""
    per_row = {
        name: value[rows]
        for name in _ROW_FIELDS
        if (value := getattr(sampling_info, name)) is not None
    }
    info = dataclasses.replace(sampling_info, **per_row)
    output = LogitsProcessorOutput(next_token_logits=logits)
    return sampler(output, info, False, [], [], positions)
