"""Verify steps on a CPU without padding: the forward pass runs the trees' real nodes only.

SGLang's verify batches have equally many nodes for every request. Our attention backend does not
need that, and everything else in the pass works row by row; so the padding is left out before the
pass, and put back after it only where something counts on it.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from sglang_ext.step import penalties
from sglang_ext.tree import PackedTrees

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.speculative.ngram_info import NgramVerifyInput


def can_leave_padding_out(runner: Any) -> bool:
    """Whether our own backend runs the attention, and nothing else in the pass counts nodes.

    Args:
        runner: SGLang's ModelRunner.
    """
    from sglang_ext.cpu.attention import TreeAttentionBackend

    return (
        isinstance(runner.attn_backend, TreeAttentionBackend)
        and not runner.model_config.model_is_mrope
        and runner.lora_manager is None
    )


def leave_padding_out(
    batch: "ScheduleBatch", verify_input: "NgramVerifyInput", nodes: npt.NDArray[np.int64]
) -> None:
    """Have the forward pass run `nodes` (flat indices, PackedTrees.nodes()) only."""
    index = torch.from_numpy(nodes)
    batch.input_ids = batch.input_ids[index]
    batch.out_cache_loc = batch.out_cache_loc[index]
    verify_input.positions = verify_input.positions[index]
    verify_input.nodes = nodes  # read by cpu/attention.py


def put_padding_back(
    logits_output: "LogitsProcessorOutput", packed: PackedTrees, nodes: npt.NDArray[np.int64]
) -> None:
    """Bring the logits of `nodes` to their places; rows of padding hold anything."""
    logits = logits_output.next_token_logits
    padded = logits.new_empty(packed.tokens.size, logits.shape[1])
    padded[torch.from_numpy(nodes)] = logits
    logits_output.next_token_logits = padded


def needs_every_row(batch: "ScheduleBatch") -> bool:
    """Whether logits are read by place; for greedy requests alone, an argmax of each row does."""
    info = batch.sampling_info
    return bool(
        batch.return_logprob
        or batch.has_grammar
        or info.logit_bias is not None
        or not info.is_all_greedy
        or any(penalties.is_penalized(req) for req in batch.reqs)
    )
