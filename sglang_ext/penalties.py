"""Penalties, exact under speculation.

SGLang's speculative workers apply one step's penalties to a whole tree and count only the last
token of an accepted run (`eagle_sample` in speculative/eagle_utils.py calls it "relaxed").
Here they are made from the committed output itself, and each node adds what the tokens on its
own path change, so that the tokens equal those of plain decoding.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from sglang_ext.tree import PackedTrees

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def is_penalized(req: "Req") -> bool:
    """Whether the request's logits depend on what it has written so far."""
    params = req.sampling_params
    return (
        params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
        or params.repetition_penalty != 1.0
        or params.min_new_tokens > 0
    )


def max_depth(req: "Req", output_len: int) -> int | None:
    """How deep a tree may go before min_new_tokens changes what is allowed; None: any depth."""
    remaining = req.sampling_params.min_new_tokens - output_len
    return remaining - 1 if remaining > 0 else None


def base_penalties(
    reqs: Sequence["Req"], outputs: Sequence[Sequence[int]], vocab_size: int, device: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Penalties on each request's next token, from its whole output.

    Returns:
        additive: float32[bs, vocab], to be added to the logits.
        scaling: float32[bs, vocab], 1 where nothing is scaled
            (sampling/penaltylib/repetition_penalty.py divides positive logits by it).
    """
    additive = torch.zeros(len(reqs), vocab_size)
    scaling = torch.ones(len(reqs), vocab_size)
    for row, (req, output) in enumerate(zip(reqs, outputs, strict=True)):
        params = req.sampling_params
        ids = torch.tensor(list(output), dtype=torch.int64)
        counts = torch.bincount(ids, minlength=vocab_size)[:vocab_size]
        seen = counts > 0
        additive[row] -= params.frequency_penalty * counts
        additive[row, seen] -= params.presence_penalty
        scaling[row, seen] = params.repetition_penalty
        if len(output) < params.min_new_tokens:
            additive[row, _stop_tokens(req)] = float("-inf")
    return additive.to(device), scaling.to(device)


def apply_tree_penalties(
    logits: torch.Tensor,
    reqs: Sequence["Req"],
    outputs: Sequence[Sequence[int]],
    trees: PackedTrees,
) -> None:
    """Apply every node's penalties, its request's and its path's, in place.

    Args:
        logits: float[bs * width, vocab].
        outputs: each request's committed output, the root last.
    """
    width = trees.width
    additive, scaling = base_penalties(reqs, outputs, logits.shape[-1], logits.device)
    path_rows, path_tokens, path_delta, new_rows, new_tokens, new_scale = [], [], [], [], [], []
    for b, (req, output) in enumerate(zip(reqs, outputs, strict=True)):
        params = req.sampling_params
        if not is_penalized(req):
            continue
        seen = set(output)
        for node in range(1, int(trees.sizes[b])):
            row = b * width + node
            fresh = set()
            for token in _path(trees, b, node):
                delta = -params.frequency_penalty
                if token not in seen and token not in fresh:
                    delta -= params.presence_penalty
                    fresh.add(token)
                    new_rows.append(row)
                    new_tokens.append(token)
                    new_scale.append(params.repetition_penalty)
                path_rows.append(row)
                path_tokens.append(token)
                path_delta.append(delta)
    device = logits.device
    logits += additive.repeat_interleave(width, dim=0)
    if path_rows:
        index = (torch.tensor(path_rows, device=device), torch.tensor(path_tokens, device=device))
        logits.index_put_(
            index, torch.tensor(path_delta, dtype=logits.dtype, device=device), accumulate=True
        )
    scale = scaling.repeat_interleave(width, dim=0)
    if new_rows:
        scale[new_rows, new_tokens] = torch.tensor(new_scale, device=device)
    logits.copy_(torch.where(logits < 0, logits * scale, logits / scale))


def _path(trees: PackedTrees, b: int, node: int) -> list[int]:
    tokens = []
    while node > 0:
        tokens.append(int(trees.tokens[b, node]))
        node = int(trees.parents[b, node])
    return tokens


def _stop_tokens(req: "Req") -> list[int]:
    # The set of sampling/penaltylib/min_new_tokens.py.
    tokenizer = req.tokenizer
    tokens = set(req.sampling_params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    tokens |= set(getattr(tokenizer, "additional_stop_token_ids", None) or ())
    tokens.add(tokenizer.eos_token_id)
    return [token for token in tokens if token is not None]
