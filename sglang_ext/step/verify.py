"""Acceptance rules: which nodes of a verified tree are kept.

The exact rule asks the target for its own token at a node (argmax, or a sample from its
distribution as SGLang's sampler draws it) and follows the tree as long as that token is a
child. Every committed token is then the target's own choice given what precedes it, so greedy
output is that of plain decoding and sampling keeps the target's distribution, whatever was
drafted; with a sampling seed even the tokens are those of plain decoding, because SGLang's
seeded sampler depends on seed and position only.

The biased rule (bias.py) differs in what the target's own token is at the positions that a drafter
biases, the relaxed one (relaxed.py) in what a node goes on with where that token was not drafted;
the walk is the same.
"""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_ext.cpu.likeliest import likeliest_tokens
from sglang_ext.step.bias import BiasedRows, coins_of, is_greedy, prefer
from sglang_ext.step.relaxed import RelaxedNodes, marks_of, relax, relax_on_device
from sglang_ext.tree import PackedTrees, child_with, walk

if TYPE_CHECKING:
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

_ROW_FIELDS = ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed")


@dataclass(frozen=True)
class Accepted:
    """What a verify step commits.

    Attributes:
        predict: int32[bs * width], the token that each node goes on with, the target's own unless
            a rule says otherwise (0 where not asked; on a device 0 behind all that is not
            accepted).
        accept_index: int32[bs, width], flat indices of the accepted nodes, root first, then -1.
        accept_lens: int32[bs], tokens committed, the bonus included.
        learned: int32[bs, 2 * width], the target's token after every node and accept_index: what
            drafters learn from; None: on the host, where they are read from the other fields.
        relaxed: bool[bs, width], which of the tokens that are committed were accepted by
            relaxation; None: no request asks for it.
    """

    predict: torch.Tensor
    accept_index: torch.Tensor
    accept_lens: torch.Tensor
    learned: torch.Tensor | None = None
    relaxed: torch.Tensor | None = None


def accept_on_host(
    logits: torch.Tensor,
    trees: PackedTrees,
    sampling_info: "SamplingBatchInfo",
    positions: torch.Tensor,
    sampler: Any,
    nodes: npt.NDArray[np.int64] | None = None,
    biased: BiasedRows | None = None,
    relaxed: RelaxedNodes | None = None,
) -> Accepted:
    """The rules for logits on the host: only nodes on the accepted path are sampled.

    Args:
        logits: float[bs * width, vocab], penalties, bias and grammar already applied.
        positions: int64[bs * width], each node's position in its sequence.
        sampler: SGLang's layers/sampler.py Sampler.
        nodes: int64[T], the flat indices of the nodes that `logits` has rows for, if not of
            all; greedy requests only.
        biased: the nodes with a biased token; None: there are none.
        relaxed: the nodes that a relaxed rule may accept, of greedy requests; None: there are none.
    """
    if sampling_info.is_all_greedy:
        chosen = likeliest_tokens(logits)
        if biased is not None:
            prefer_greedily(chosen, logits, biased, nodes)
        walked = _greedy_walk(chosen, logits, trees, nodes, relaxed)
    else:
        walked = _sample_walk(logits, trees, sampling_info, positions, sampler, biased, relaxed)
    index = torch.from_numpy(walked.index)
    return Accepted(
        torch.from_numpy(walked.predicted.reshape(-1).astype(np.int32)),
        index,
        torch.from_numpy(walked.lens),
        relaxed=None if walked.taken is None else marks_of(walked.taken, index),
    )


def accept_on_device(
    logits: torch.Tensor,
    verify_input: Any,
    sampling_info: "SamplingBatchInfo",
    positions: torch.Tensor,
    sampler: Any,
    tp_group: Any,
    biased: BiasedRows | None = None,
    relaxed: RelaxedNodes | None = None,
) -> Accepted:
    """The rules without a host round trip: every node is sampled, a kernel walks the trees.

    Args:
        logits: float[bs * width, vocab], as in accept_on_host.
        verify_input: SGLang's NgramVerifyInput of this step.
        tp_group: tensor-parallel group; rank 0's samples bind all ranks.
        biased, relaxed: as in accept_on_host.
    """
    predicted = _tokens_at_nodes(logits, verify_input, sampling_info, positions, sampler, biased)
    taken = relax_on_device(predicted, logits, relaxed) if relaxed is not None else None
    if tp_group.world_size > 1:
        tp_group.broadcast(predicted, src=0)
    accepted = walk_on_device(predicted, verify_input)
    if taken is None:
        return accepted
    return dataclasses.replace(accepted, relaxed=marks_of(taken, accepted.accept_index))


def _tokens_at_nodes(
    logits: torch.Tensor,
    verify_input: Any,
    sampling_info: "SamplingBatchInfo",
    positions: torch.Tensor,
    sampler: Any,
    biased: BiasedRows | None,
) -> torch.Tensor:
    """int64[bs * width], the target's token after every node."""
    if sampling_info.is_all_greedy:
        predicted = torch.argmax(logits, dim=-1)
        if biased is not None:
            prefer_greedily(predicted, logits, biased)
    else:
        width = verify_input.draft_token_num
        bs = logits.shape[0] // width
        rows = torch.arange(bs, device=logits.device).repeat_interleave(width)
        probs = logits.clone()
        predicted = _sample_rows(probs, sampling_info, rows, positions, sampler)
        if biased is not None:
            at = biased.places
            predicted[at] = _prefer_sampled(
                predicted[at], probs[at], biased, sampling_info, positions[at]
            )
    return predicted.to(torch.int64)


def walk_on_device(predicted: torch.Tensor, verify_input: Any) -> Accepted:
    """Follow the trees as long as the target's tokens are children, by SGLang's kernel.

    Args:
        predicted: int64[bs * width], the target's token after each node.
        verify_input: SGLang's NgramVerifyInput, or what has its tree (draft_token, retrieve_*).
    """
    from sglang.kernels.ops.speculative.spec_tree import verify_tree_greedy_func

    width = verify_input.draft_token_num
    bs = len(predicted) // width
    device = predicted.device
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
    said = predicted.reshape(bs, width).to(torch.int32)
    return Accepted(predict, accept_index, correct + 1, torch.cat([said, accept_index], dim=1))


def prefer_greedily(
    chosen: torch.Tensor,
    logits: torch.Tensor,
    biased: BiasedRows,
    nodes: npt.NDArray[np.int64] | None = None,
) -> None:
    """Put the biased rule's tokens into `chosen`, for greedy requests.

    Args:
        chosen: int64[T], the likeliest token of each row of `logits` [T, vocab].
        nodes: int64[T], the place of each row; None: a row's place is its number.
    """
    at = biased.places
    if nodes is not None:
        at = torch.from_numpy(np.searchsorted(nodes, at.numpy()))
    if logits.device.type == "cpu":
        # Where the target agrees there is nothing to decide; a GPU would have to wait to leave it
        # out, and decides the same.
        differs = torch.nonzero(chosen[at] != biased.expected)[:, 0]
        at, biased = at[differs], biased.at(differs)
    probs = torch.softmax(logits[at].float(), dim=-1)
    greedy = torch.ones(len(at), dtype=torch.bool, device=logits.device)
    chosen[at] = prefer(chosen[at], probs, biased, greedy, biased.betas)


def _prefer_sampled(tokens, probs, biased, sampling_info, positions) -> torch.Tensor:
    """The biased rule's tokens for nodes at `positions` whose sampler has left `probs`."""
    rows = biased.rows
    seeds = sampling_info.sampling_seed
    coins = coins_of(seeds[rows] if seeds is not None else None, positions + 1)
    return prefer(tokens, probs.float(), biased, is_greedy(sampling_info)[rows], coins)


@dataclass(frozen=True)
class _Walked:
    """Trees followed on the host.

    Attributes:
        predicted: int64[bs, width], the token that each node goes on with (0 where not asked).
        index, lens: `accept_index` and `accept_lens` of Accepted.
        taken: bool[bs * width], the nodes that go on by relaxation; None: none may.
    """

    predicted: npt.NDArray[np.int64]
    index: npt.NDArray[np.int32]
    lens: npt.NDArray[np.int32]
    taken: torch.Tensor | None


def _greedy_walk(
    chosen: torch.Tensor,
    logits: torch.Tensor,
    trees: PackedTrees,
    nodes: npt.NDArray[np.int64] | None,
    relaxed: RelaxedNodes | None,
) -> _Walked:
    """Follow the trees along `chosen`, int64[T], and what relaxation makes of it."""
    bs, width = trees.tokens.shape
    predicted, taken = chosen.numpy(), None
    if relaxed is not None:
        taken = relax(chosen, logits, relaxed if nodes is None else relaxed.with_rows(nodes))
    if nodes is not None:
        predicted = np.zeros(bs * width, dtype=np.int64)
        predicted[nodes] = chosen.numpy()
        if taken is not None:
            marks = torch.zeros(bs * width, dtype=torch.bool)
            marks[torch.from_numpy(nodes)] = taken
            taken = marks
    said = predicted.reshape(bs, width)
    index, lens = walk(trees.tokens, trees.next_token, trees.next_sibling, said)
    return _Walked(said, index, lens, taken)


def _sample_walk(logits, trees, sampling_info, positions, sampler, biased, relaxed) -> _Walked:
    bs, width = trees.tokens.shape
    predicted = np.zeros((bs, width), dtype=np.int64)
    index = np.full((bs, width), -1, dtype=np.int32)
    lens = np.zeros(bs, dtype=np.int32)
    decided, taken = np.zeros(bs, dtype=np.bool_), None
    if relaxed is not None:
        decided[relaxed.parents.numpy() // width] = True
        taken = _decide_greedily(predicted, decided, logits, biased, relaxed)
    rows = np.arange(bs)
    nodes = np.zeros(bs, dtype=np.int64)
    # Which of the biased rows each place is.
    number = np.full(bs * width, -1, dtype=np.int64)
    if biased is not None:
        number[biased.places.numpy()] = np.arange(len(biased.places))
    while len(rows):
        flat = rows * width + nodes
        drawn = ~decided[rows]
        if drawn.any():
            asked = flat[drawn]
            predicted.reshape(-1)[asked] = _sampled_at(
                asked, logits, width, sampling_info, positions, sampler, biased, number
            )
        tokens = predicted[rows, nodes]
        index[rows, lens[rows]] = flat
        lens[rows] += 1
        nodes = np.array(
            [
                child_with(trees.tokens[b], trees.next_token[b], trees.next_sibling[b], node, token)
                for b, node, token in zip(rows, nodes, tokens, strict=True)
            ]
        )
        rows, nodes = rows[nodes >= 0], nodes[nodes >= 0]
    return _Walked(predicted, index, lens, taken)


def _decide_greedily(
    predicted: npt.NDArray[np.int64],
    decided: npt.NDArray[np.bool_],
    logits: torch.Tensor,
    biased: BiasedRows | None,
    relaxed: RelaxedNodes,
) -> torch.Tensor:
    """Fill in what the nodes of `decided` requests go on with, bool[bs]: greedy ones, all relaxed.

    Args:
        predicted: int64[bs, width].

    Returns:
        bool[bs * width], the nodes that go on by relaxation.
    """
    width = predicted.shape[1]
    at = torch.from_numpy(np.flatnonzero(np.repeat(decided, width)))
    chosen = torch.zeros(predicted.size, dtype=torch.int64)
    chosen[at] = likeliest_tokens(logits[at])
    if biased is not None:
        prefer_greedily(
            chosen, logits, biased.at(torch.nonzero(torch.isin(biased.places, at))[:, 0])
        )
    taken = relax(chosen, logits, relaxed)
    predicted[decided] = chosen.numpy().reshape(-1, width)[decided]
    return taken


def _sampled_at(
    flat: npt.NDArray[np.int64],
    logits: torch.Tensor,
    width: int,
    sampling_info: "SamplingBatchInfo",
    positions: torch.Tensor,
    sampler: Any,
    biased: BiasedRows | None,
    number: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    """int64[n], the target's tokens after the nodes at `flat`.

    Args:
        number: int64[bs * width], which of the biased rows each node is; -1: none.
    """
    at = torch.from_numpy(flat)
    probs = logits[at]
    sampled = _sample_rows(
        probs, sampling_info, torch.from_numpy(flat // width), positions[at], sampler
    )
    of_bias = torch.from_numpy(number[flat])
    if biased is not None and (of_bias >= 0).any():
        here = torch.nonzero(of_bias >= 0)[:, 0]
        sampled[here] = _prefer_sampled(
            sampled[here], probs[here], biased.at(of_bias[here]), sampling_info, positions[at][here]
        )
    return sampled.numpy()


def _sample_rows(logits, sampling_info, rows, positions, sampler) -> torch.Tensor:
    """SGLang's own sampler on `logits` (overwritten), each with its request's parameters."""
    per_row = {
        name: value[rows]
        for name in _ROW_FIELDS
        if (value := getattr(sampling_info, name)) is not None
    }
    info = dataclasses.replace(sampling_info, **per_row)
    info.rows = rows  # read by LogitsGuard
    output = LogitsProcessorOutput(next_token_logits=logits)
    return sampler(output, info, False, [], [], positions)
