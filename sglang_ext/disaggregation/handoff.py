"""What a decode server's first step starts from when another server has read the prompts."""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.managers.overlap_utils import FutureMap
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.speculative.ngram_info import NgramVerifyInput


def first_draft_input(
    batch: "ScheduleBatch", last_tokens: torch.Tensor, future_map: "FutureMap"
) -> "NgramVerifyInput":
    """As our worker leaves it behind a prefill of its own: nothing drafted, one token committed.

    SGLang's counterparts are speculative/eagle_disaggregation.py and its neighbours.

    Args:
        batch: requests whose KV has come; their output_ids end with the prefill's token.
        last_tokens: int64[bs], these tokens.
        future_map: where the next step finds it under overlap scheduling.
    """
    from sglang.srt.managers.overlap_utils import RelayPayload
    from sglang.srt.runtime_context import get_spec
    from sglang.srt.speculative.ngram_info import NgramVerifyInput

    stride = get_spec().speculative_num_draft_tokens
    count = len(batch.reqs)
    relay = torch.zeros(count, stride, dtype=torch.int32, device=batch.device)
    relay[:, 0] = last_tokens
    made = NgramVerifyInput(
        draft_token_num=stride,
        new_seq_lens=batch.seq_lens,
        accept_tokens=relay.flatten(),
        # None was accepted here. A step that takes its roots from the relay reads the first one.
        accept_lens=torch.zeros(count, dtype=torch.int32, device=batch.device),
    )
    if batch.enable_overlap:
        made.future_indices = batch.req_pool_indices
        future_map.publish(made.future_indices, batch.seq_lens)
        future_map.stash(made.future_indices, RelayPayload.from_ngram(made))
    return made
