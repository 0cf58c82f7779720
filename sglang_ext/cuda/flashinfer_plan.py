"""FlashInfer's plan of a verify step in a graph, from what the host knows: nothing is read back.

FlashInfer plans on the host (flashinfer/prefill.py, BatchPrefillWithPagedKVCacheWrapper.plan): it
reads where queries and keys begin back from the device, and how many bytes the mask takes: five
waits a step (docs/gpu.md). All of it follows from the requests' lengths, which the host has. SGLang
0.5.23 plans EAGLE's chains in that way (flashinfer_backend.py, fast_prefill_plan), and the mask
kernel behind it packs any tree's; here it is asked to do so for ours.
"""

from functools import partial
from typing import Any

import torch


def install(attn_backend: Any) -> None:
    """Have a backend plan replayed verify steps without waiting for the device; idempotent.

    Call it for every instance (one per captured width), before its graphs are captured. What is not
    FlashInfer's, has several wrappers (sliding windows, cross-attention), other kernels than "fa2"
    or a KV cache of packed numbers keeps FlashInfer's own plan.
    """
    from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend
    from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend

    if isinstance(attn_backend, HybridAttnBackend):
        install(attn_backend.prefill_backend)
        install(attn_backend.decode_backend)
    elif isinstance(attn_backend, FlashInferAttnBackend) and _is_plain(attn_backend):
        planned = attn_backend.init_forward_metadata_out_graph
        if not isinstance(planned, _Planned):
            attn_backend.init_forward_metadata_out_graph = _Planned(attn_backend, planned)


def _is_plain(backend: Any) -> bool:
    """What SGLang asks for before it takes its own such plan."""
    return (
        backend.prefill_backend == "fa2"
        and backend.dispatch_reason is None
        and backend.flashinfer_kv_cache_dtype.is_floating_point
    )


class _Planned:
    """FlashInferAttnBackend.init_forward_metadata_out_graph, which tells its plans the lengths."""

    def __init__(self, backend: Any, plan: Any) -> None:
        self._backend, self._plan = backend, plan
        self._width, self._keys = 0, torch.empty(0)  # of the step that is planned next

    def __call__(self, forward_batch: Any, in_capture: bool = False) -> None:
        from sglang.srt.speculative.ngram_info import NgramVerifyInput

        tree, bs = forward_batch.spec_info, forward_batch.batch_size
        verifies = forward_batch.forward_mode.is_target_verify()
        lens = forward_batch.seq_lens_cpu
        known = verifies and isinstance(tree, NgramVerifyInput) and lens is not None
        if known:
            self._width = tree.draft_token_num
            self._keys = lens[:bs].to(torch.int32) + self._width
        self._plan(forward_batch, in_capture=in_capture)
        if known and in_capture:
            # The first plan, FlashInfer's own, has loaded the kernels that later ones need.
            for wrapper in self._backend.prefill_cuda_graph_metadata[bs]:
                wrapper.begin_forward = partial(self._plan_known, wrapper)

    def _plan_known(self, wrapper: Any, *layout: Any, **options: Any) -> None:
        plan_from_lengths(wrapper, self._keys, self._width, *layout, **options)


def plan_from_lengths(
    wrapper: Any, keys: torch.Tensor, width: int, *layout: Any, **options: Any
) -> None:
    """BatchPrefillWithPagedKVCacheWrapper.plan of a tree's step in a graph.

    Args:
        wrapper: made for graphs; it has planned before.
        keys: int32[requests] on the host, the tree's own included.
        width: nodes per request.
        layout, options: plan()'s own, with a custom mask.
    """
    from sglang.srt.layers.attention.flashinfer_backend import fast_prefill_plan

    starts = torch.zeros(len(keys) + 1, dtype=torch.int32)
    starts[1:] = torch.cumsum(keys, dim=0)
    fast_prefill_plan(
        wrapper,
        *layout,
        **options,
        qo_indptr_host=torch.arange(0, (len(keys) + 1) * width, width, dtype=torch.int32),
        kv_indptr_host=starts,
        kv_lens_host=keys,
        max_q_len=width,
        max_kv_len=int(keys.max()),
        uniform_verify_width=width,
    )
