"""Tree verification within a sliding window on SGLang's Triton backend.

SGLang 0.5.23's extend kernel takes a query's row in the batch for its position when it looks how
far a window reaches (kernels/ops/attention/extend_attention.py, SLIDING_WINDOW_SIZE). In a tree
with branches a node's row is larger than its depth, so that every branch but the first misses the
oldest keys of its window. Here the mask says what a node's window reaches, by its depth, and the
kernel reads the mask there too; layers without a window go on ignoring that part of it.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.speculative.ngram_info import NgramVerifyInput

if TYPE_CHECKING:
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend


def install(attn_backend: Any) -> None:
    """Have a backend of a target with sliding windows verify trees exactly; idempotent.

    Call it for every instance (one per captured width), before its graphs are captured. What is not
    Triton's, or has no window, stays as it is; of two backends in one, each is looked at.

    Raises:
        ValueError: the backend computes deterministically, which is another kernel.
    """
    from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    if isinstance(attn_backend, HybridAttnBackend):
        install(attn_backend.prefill_backend)
        install(attn_backend.decode_backend)
    elif isinstance(attn_backend, TritonAttnBackend):
        _install(attn_backend)


def _install(backend: "TritonAttnBackend") -> None:
    window = backend.sliding_window_size
    if not window or window < 0 or isinstance(backend.extend_attention_fwd, _Extend):
        return
    if backend.enable_deterministic:
        raise ValueError(
            "--enable-deterministic-inference verifies no trees within sliding windows; "
            "leave it out, or start without --speculative-algorithm"
        )
    backend.extend_attention_fwd = _Extend(backend.extend_attention_fwd)
    for name in ("init_forward_metadata", "init_forward_metadata_out_graph"):
        setattr(backend, name, _masked_first(getattr(backend, name), window))


class _Extend:
    """extend_attention_fwd, whose windows come from the mask wherever there is one."""

    def __init__(self, extend: Callable[..., None]) -> None:
        self._extend = extend

    def __call__(self, *args: Any, sliding_window_size: int = -1, **options: Any) -> None:
        custom_mask, max_len_extend = args[9], args[12]
        if custom_mask is not None and sliding_window_size > 0:
            options["skip_prefix_custom_mask"] = False
            # Above every row, so that the kernel leaves out nothing by itself.
            sliding_window_size += max_len_extend
        self._extend(*args, sliding_window_size=sliding_window_size, **options)


def _masked_first(plan: Callable[..., None], window: int) -> Callable[..., None]:
    def planned(forward_batch: Any, *args: Any, **options: Any) -> None:
        verify_input = forward_batch.spec_info
        if isinstance(verify_input, NgramVerifyInput) and verify_input.positions is not None:
            width = verify_input.draft_token_num
            positions = verify_input.positions.view(-1, width)
            lens = forward_batch.seq_lens[: len(positions)].long()
            hide_beyond_window(verify_input.custom_mask, positions, lens, window)
        plan(forward_batch, *args, **options)

    return planned


def hide_beyond_window(
    mask: torch.Tensor, positions: torch.Tensor, lens: torch.Tensor, window: int
) -> None:
    """Clear what lies before each node's window in a full mask; nothing waits for the device.

    Only in the last `window` columns of each prefix, since a window layer reads no others.

    Args:
        mask: bool[width * (sum(lens) + bs * width)], staging.full_mask; changed in place.
        positions: int64[bs, width], each node's position in its sequence.
        lens: int64[bs], KV entries of each request before the step.
        window: positions that a layer looks back.

    Raises:
        ValueError: the window is smaller than the tree, whose own nodes it would hide.
    """
    width = positions.shape[1]
    if window < width:
        raise ValueError(
            f"trees of {width} nodes do not fit into the target's sliding window of {window + 1}; "
            f"start with --speculative-num-draft-tokens {window} or less"
        )
    sizes = width * (lens + width)
    starts = torch.cumsum(sizes, 0) - sizes
    node = torch.arange(width, device=mask.device)
    rows = starts[:, None] + node * (lens[:, None] + width)  # [bs, width]
    # A node of depth d sees d keys of the prefix less than the root, and d is below width.
    column = (lens - window).clamp(min=0)[:, None, None] + node  # [bs, 1, width]
    entry = rows[:, :, None] + column
    # Columns behind the prefix hold the tree; its nodes are all within the window.
    mask[entry] &= column >= positions[:, :, None] - window
