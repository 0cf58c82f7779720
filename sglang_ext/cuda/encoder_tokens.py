"""Tree verification beside an encoder's tokens (Whisper) on SGLang's FlashInfer backend.

A request's row of req_to_token begins with its encoder's tokens; the decoder's stand behind them,
and `seq_lens` counts those alone. Each layer of an encoder-decoder model has one of two FlashInfer
wrappers: 0 for self-attention, 1 for cross-attention. SGLang 0.5.23 plans both alike when it
verifies a tree (update_cross_attention in srt/layers/attention/flashinfer_backend.py): it hands the
tree's mask and width to the cross-attention too, and reads the decoder's keys from the front of the
row, where the encoder's are. Extends and plain decode steps are planned right, and left alone.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.speculative.ngram_info import NgramVerifyInput

if TYPE_CHECKING:
    from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator


def install(attn_backend: "FlashInferAttnBackend") -> None:
    """Have a backend verify trees of an encoder-decoder model; idempotent.

    Call it for every instance (one per captured width), before its graphs are captured.

    Raises:
        ValueError: the backend is not FlashInfer's, or was made for another kind of model.
    """
    from sglang.srt.layers.attention import flashinfer_backend

    if not isinstance(attn_backend, flashinfer_backend.FlashInferAttnBackend):
        raise ValueError(
            "speculation over encoder-decoder models (Whisper) on CUDA needs --attention-backend "
            f"flashinfer, not {type(attn_backend).__name__}"
        )
    cross_attention = flashinfer_backend.WrapperDispatch.CROSS_ATTENTION
    if attn_backend.dispatch_reason is not cross_attention:
        raise ValueError("this FlashInfer backend was not made for an encoder-decoder model")
    updater = attn_backend.indices_updater_prefill
    if isinstance(updater.update, _Update):
        return
    updater.update = _Update(attn_backend)
    make = attn_backend._create_prefill_wrappers

    def make_wrappers(bs: int, use_custom_mask: bool = False) -> list[Any]:
        """A graph's wrapper reads a mask wherever it has a buffer for one: only 0 gets one."""
        wrappers = make(bs, use_custom_mask)
        return [wrappers[0], make(bs, False)[1]] if use_custom_mask else wrappers

    attn_backend._create_prefill_wrappers = make_wrappers


def keep_encoder_lens(verify_input: NgramVerifyInput, batch: "ScheduleBatch") -> None:
    """Give a verify step the host's mirror of its encoder lengths.

    Captured graphs pass a backend the verify input, but not the batch. Without this call, planning
    still works, and waits for the device to add the lengths up.
    """
    if batch.encoder_lens_cpu is not None:
        verify_input.encoder_lens_cpu = list(batch.encoder_lens_cpu)


class _Update:
    """FlashInferIndicesUpdaterPrefill.update of an encoder-decoder model, right for verify steps.

    Args:
        backend: whose updater this is; its present `update` goes on serving extends.
    """

    def __init__(self, backend: "FlashInferAttnBackend") -> None:
        self._backend = backend
        self._updater = backend.indices_updater_prefill
        self._extend = self._updater.update

    def __call__(
        self,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor | None,
        seq_lens_sum: int | None,
        prefix_lens: torch.Tensor | None = None,
        *,
        prefill_wrappers: Sequence[Any],
        encoder_lens: torch.Tensor,
        spec_info: Any,
        plan: Any,
        **options: Any,
    ) -> None:
        """As SGLang's; see flashinfer_backend.py for the arguments."""
        if not isinstance(spec_info, NgramVerifyInput):
            self._extend(
                req_pool_indices,
                seq_lens,
                seq_lens_cpu,
                seq_lens_sum,
                prefix_lens,
                prefill_wrappers=prefill_wrappers,
                encoder_lens=encoder_lens,
                spec_info=spec_info,
                plan=plan,
                **options,
            )
            return
        encoder_lens, encoder_sum = _lens_and_sum(encoder_lens, spec_info)
        if seq_lens_cpu is not None:
            seq_lens_sum = int(seq_lens_cpu.sum())
        kv_indices, kv_indptr, qo_indptr, mask = spec_info.generate_attn_arg_prefill(
            req_pool_indices=req_pool_indices,
            paged_kernel_lens=seq_lens,
            paged_kernel_lens_sum=seq_lens_sum,
            translator=_BehindEncoder(self._backend.kv_index_translator, encoder_lens),
            plan=plan,
        )
        self._begin(prefill_wrappers[0], qo_indptr, kv_indptr, kv_indices, mask)
        kv_indptr = torch.zeros_like(qo_indptr)
        kv_indices = self._encoder_entries(
            plan, req_pool_indices, encoder_lens, encoder_sum, kv_indptr
        )
        self._begin(prefill_wrappers[1], qo_indptr, kv_indptr, kv_indices, None)

    def _encoder_entries(
        self,
        plan: Any,
        req_pool_indices: torch.Tensor,
        encoder_lens: torch.Tensor,
        encoder_sum: int,
        indptr: torch.Tensor,
    ) -> torch.Tensor:
        """int32[encoder_sum], where each request's encoder tokens lie in the KV pool.

        Args:
            indptr: int32[bs + 1] of zeros; gets where each request's begin among them.
        """
        indptr[1:] = torch.cumsum(encoder_lens, dim=0)
        entries = torch.empty(encoder_sum, dtype=torch.int32, device=indptr.device)
        self._backend.kv_index_translator.pack_read_stream(
            plan,
            req_pool_indices=req_pool_indices,
            seq_lens=encoder_lens,
            indptr=indptr,
            out=entries,
        )
        return entries

    def _begin(
        self,
        wrapper: Any,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> None:
        """Plan a wrapper as FlashInferIndicesUpdaterPrefill.call_begin_forward does."""
        updater = self._updater
        wrapper.begin_forward(
            qo_indptr,
            kv_indptr,
            kv_indices,
            updater.kv_last_page_len[: len(qo_indptr) - 1],
            updater.num_qo_heads,
            updater.num_kv_heads,
            updater.head_dim,
            1,  # token a page
            q_data_type=updater.q_data_type,
            kv_data_type=updater.data_type,
            custom_mask=mask,
            non_blocking=True,
        )


class _BehindEncoder:
    """A KVIndexTranslator that reads each request's row from behind its encoder's tokens."""

    def __init__(self, translator: "KVIndexTranslator", encoder_lens: torch.Tensor) -> None:
        self._translator = translator
        self._encoder_lens = encoder_lens

    def pack_read_stream(self, plan: Any, **arguments: Any) -> bool:
        return self._translator.pack_read_stream(plan, kv_start_idx=self._encoder_lens, **arguments)


def _lens_and_sum(
    encoder_lens: torch.Tensor, verify_input: NgramVerifyInput
) -> tuple[torch.Tensor, int]:
    """integer[bs], the encoder tokens that each lane reads, and their sum, known to the host.

    A graph's lanes behind the last request hold lengths of earlier batches; they read one token.
    """
    on_host = getattr(verify_input, "encoder_lens_cpu", None)
    if on_host is None:  # while a graph is captured
        return encoder_lens, int(encoder_lens.sum())
    padding = len(encoder_lens) - len(on_host)
    if padding:
        encoder_lens = encoder_lens.clone()
        encoder_lens[len(on_host) :] = 1
    return encoder_lens, sum(on_host) + padding
