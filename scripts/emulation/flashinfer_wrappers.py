"""FlashInfer's batch wrappers in plain torch, for SGLang's FlashInferAttnBackend on the CPU.

They follow the contract of FlashInfer 0.7.2 (flashinfer/prefill.py, decode.py) as SGLang 0.5.23
uses it (srt/layers/attention/flashinfer_backend.py): what plan() checks, copies and keeps, what a
run reads from the buffers, which mask the kernel is compiled for. With `use_cuda_graph` the buffers
are the caller's, a plan only writes into them, and a run reads whatever stands there, as a replayed
graph does.

Stricter than the original, which would read or write out of bounds: index tensors are int32, masks
and index lists are as long as their indptr says, a layer has no more heads than were planned.
Not emulated: several tokens per page, multi-item scoring, NVFP4, positions inside the kernel,
attention sinks, a workspace that is too small.
"""

from typing import Any

import torch

from scripts.emulation import flashinfer_kernels as kernels
from scripts.emulation.flashinfer_base import KvCache, PagedWrapper, Wrapper, check_int32


class _PlanOnHost:
    """The module that a plan compiles: what it schedules is the host's word for the buffers."""

    def __init__(self, wrapper: "BatchPrefillWithPagedKVCacheWrapper"):
        self._wrapper = wrapper

    def plan(
        self, floats: Any, integers: Any, pinned: Any, qo: torch.Tensor, kv: torch.Tensor,
        kv_lens: torch.Tensor, most_rows: int, batch_size: int, *heads: Any,
    ) -> None:  # fmt: skip
        """Where the original would run another schedule than the buffers' layout.

        Raises:
            ValueError: the host's layout is not the one in the graph's buffers.
        """
        in_place = self._wrapper._qo_indptr_buf, self._wrapper._paged_kv_indptr_buf
        for name, host, device in zip(("qo_indptr", "kv_indptr"), (qo, kv), in_place, strict=True):
            if host.dtype != torch.int32 or not torch.equal(host, device):
                raise ValueError(f"{name} on the host is not what the graph's buffer holds")
        if not torch.equal(kv_lens, kv.diff()):
            raise ValueError("kv_lens on the host are not those of kv_indptr")
        self._wrapper.check_rows(batch_size, int(qo[-1]), self._wrapper._fixed_batch_size)


class BatchPrefillWithPagedKVCacheWrapper(PagedWrapper):
    """flashinfer.BatchPrefillWithPagedKVCacheWrapper: extend and verify over a paged pool."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
    ):
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend)
        self._qo_indptr_buf: torch.Tensor
        self.keep_graph_buffers(
            qo_indptr_buf=qo_indptr_buf,
            paged_kv_indptr_buf=paged_kv_indptr_buf,
            paged_kv_indices_buf=paged_kv_indices_buf,
            paged_kv_last_page_len_buf=paged_kv_last_page_len_buf,
        )
        if use_cuda_graph and len(self._qo_indptr_buf) != self._fixed_batch_size + 1:
            raise ValueError("The length of qo_indptr_buf should be batch_size + 1.")
        self._custom_mask_buf, self._mask_indptr_buf = custom_mask_buf, mask_indptr_buf
        self._cached_module: _PlanOnHost | None = None

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        """Keep a batch's layout (or write it into the graph's buffers) and pack its mask.

        Raises:
            KeyError: a data type without kernels.
            ValueError: what does not fit together or not into the buffers.
        """
        if prefix_len_ptr is not None:
            raise NotImplementedError("multi-item scoring is not emulated")
        self.keep_dtypes(q_data_type, kv_data_type, o_data_type)
        self.keep_heads(num_qo_heads, num_kv_heads, head_dim_qk)
        check_int32(qo_indptr=qo_indptr)
        if len(qo_indptr) != len(paged_kv_indptr):
            raise ValueError("The length of qo_indptr and paged_kv_indptr should be the same.")
        packed = _packed(custom_mask, qo_indptr, paged_kv_indptr)
        self._qo_indptr_last = int(qo_indptr[-1])
        if self._use_cuda_graph:
            self.check_rows(len(qo_indptr) - 1, self._qo_indptr_last, self._fixed_batch_size)
        self.keep_pages(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size)
        self._keep_queries(qo_indptr, packed)
        self.keep_variant(causal, window_left, logits_soft_cap, sm_scale)
        self._cached_module = _PlanOnHost(self)

    begin_forward = plan

    def _keep_queries(
        self, qo_indptr: torch.Tensor, packed: tuple[torch.Tensor, torch.Tensor] | None
    ) -> None:
        if not self._use_cuda_graph:
            self._qo_indptr_buf = qo_indptr
            self._custom_mask_buf, self._mask_indptr_buf = packed or (None, None)
            return
        self._qo_indptr_buf.copy_(qo_indptr)
        if packed is None:  # a mask buffer that is there keeps what it holds, and is applied
            return
        if self._custom_mask_buf is None or self._mask_indptr_buf is None:
            raise ValueError(
                "custom_mask_buf and mask_indptr_buf must be initialized with a torch.Tensor in "
                "cuda graph mode if we use custom mask in attention computation."
            )
        bits, indptr = packed
        if len(bits) > len(self._custom_mask_buf):
            raise ValueError(f"{len(bits)} mask bytes in a buffer of {len(self._custom_mask_buf)}")
        self._custom_mask_buf[: len(bits)].copy_(bits)
        self._mask_indptr_buf.copy_(indptr)

    def run_return_lse(
        self,
        q: torch.Tensor,
        paged_kv_cache: KvCache,
        k_scale: float | None = None,
        v_scale: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[rows, heads, dim] and float32[rows, heads], the log2 of each softmax's denominator."""
        self.check_inputs(q, paged_kv_cache[0])
        if len(q) != self._qo_indptr_last:
            raise ValueError(
                f"q.shape[0] ({len(q)}) does not match qo_indptr[-1] ({self._qo_indptr_last})."
            )
        return self.attend_all(q, self._qo_indptr_buf, self.pages(paged_kv_cache), k_scale, v_scale)

    def forward_return_lse(
        self,
        q: torch.Tensor,
        paged_kv_cache: KvCache,
        causal: bool = False,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`run_return_lse` with this call's mask and scale in place of the plan's."""
        self.set_call(causal, window_left, logits_soft_cap, sm_scale)
        return self.run_return_lse(q, paged_kv_cache, k_scale, v_scale)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """`forward_return_lse` without the sums."""
        return self.forward_return_lse(*args, **kwargs)[0]


class BatchDecodeWithPagedKVCacheWrapper(PagedWrapper):
    """flashinfer.BatchDecodeWithPagedKVCacheWrapper: one query per request over a paged pool."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
    ):
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend)
        self.use_tensor_cores = use_tensor_cores
        self.keep_graph_buffers(
            paged_kv_indptr_buf=paged_kv_indptr_buffer,
            paged_kv_indices_buf=paged_kv_indices_buffer,
            paged_kv_last_page_len_buf=paged_kv_last_page_len_buffer,
        )

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        data_type: Any = None,
        sm_scale: float | None = None,
        non_blocking: bool = True,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        """Keep a batch's pages; `data_type` is that of the cache."""
        if fixed_split_size is not None and not self.use_tensor_cores:
            raise ValueError("fixed_split_size is only supported by tensor core decode for now.")
        self.keep_dtypes(q_data_type, kv_data_type if kv_data_type is not None else data_type)
        self.keep_heads(num_qo_heads, num_kv_heads, head_dim)
        if self._use_cuda_graph:
            self.check_rows(len(last_page_len), len(last_page_len), self._fixed_batch_size)
        self.keep_pages(indptr, indices, last_page_len, page_size)
        self.keep_variant(False, window_left, logits_soft_cap, sm_scale)

    begin_forward = plan

    def run_return_lse(
        self,
        q: torch.Tensor,
        paged_kv_cache: KvCache,
        k_scale: float | None = None,
        v_scale: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[bs, heads, dim] and float32[bs, heads], the log2 of each softmax's denominator."""
        self.check_inputs(q, paged_kv_cache[0])
        bs = len(self._paged_kv_last_page_len_buf)
        if len(q) != bs:
            raise ValueError(f"q has {len(q)} rows for {bs} requests")
        return self.attend_all(
            q, torch.arange(bs + 1), self.pages(paged_kv_cache), k_scale, v_scale
        )

    def forward_return_lse(
        self,
        q: torch.Tensor,
        paged_kv_cache: KvCache,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`run_return_lse` with this call's window, cap and scale in place of the plan's."""
        self.set_call(False, window_left, logits_soft_cap, sm_scale)
        return self.run_return_lse(q, paged_kv_cache, k_scale, v_scale)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """`forward_return_lse` without the sums."""
        return self.forward_return_lse(*args, **kwargs)[0]


def fast_decode_plan(
    wrapper: BatchDecodeWithPagedKVCacheWrapper,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    global_override_indptr_cpu: torch.Tensor | None = None,
    **options: Any,
) -> None:
    """flashinfer.fast_decode_plan: a plan that leaves a graph's buffers as the caller filled them.

    Raises:
        ValueError: the lengths on the host are not those in the graph's buffer.
    """
    if not wrapper._planned:
        raise RuntimeError("fast_decode_plan needs a plan() before it")
    host = indptr if global_override_indptr_cpu is None else global_override_indptr_cpu
    if wrapper.is_cuda_graph_enabled:
        in_place = wrapper._paged_kv_indptr_buf
        if not torch.equal(host[: len(in_place)].int(), in_place):
            raise ValueError("fast_decode_plan: the graph's indptr buffer holds other lengths")
        indptr, indices = in_place, wrapper._paged_kv_indices_buf
    wrapper.plan(
        indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, **options
    )


class BatchPrefillWithRaggedKVCacheWrapper(Wrapper):
    """flashinfer.BatchPrefillWithRaggedKVCacheWrapper: a chunk's queries over its own keys."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        backend: str = "auto",
    ):
        if use_cuda_graph:
            raise NotImplementedError("SGLang captures no graph over ragged prefill")
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        causal: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
    ) -> None:
        """Keep where each request's queries and keys start."""
        check_int32(qo_indptr=qo_indptr, kv_indptr=kv_indptr)
        if len(kv_indptr) != len(qo_indptr):
            raise ValueError("The kv_indptr length should be equal to mask_indptr length.")
        self.keep_dtypes(q_data_type, kv_data_type)
        self.keep_heads(num_qo_heads, num_kv_heads, head_dim_qk)
        self._qo_indptr_buf, self._kv_indptr_buf = qo_indptr, kv_indptr
        self._qo_indptr_last = int(qo_indptr[-1])
        self.keep_variant(causal, window_left, logits_soft_cap, sm_scale)

    begin_forward = plan

    def run_return_lse(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[rows, heads, dim] and float32[rows, heads], the log2 of each softmax's denominator."""
        self.check_inputs(q, k)
        if len(q) != self._qo_indptr_last:
            raise ValueError(
                f"q.shape[0] ({len(q)}) does not match qo_indptr[-1] ({self._qo_indptr_last})."
            )
        sizes = self._kv_indptr_buf.diff().tolist()
        parts = zip(k.split(sizes), v.split(sizes), strict=True)
        return self.attend_all(q, self._qo_indptr_buf, parts)

    def forward_return_lse(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`run_return_lse` with this call's mask and scale in place of the plan's."""
        self.set_call(causal, window_left, logits_soft_cap, sm_scale)
        return self.run_return_lse(q, k, v)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """`forward_return_lse` without the sums."""
        return self.forward_return_lse(*args, **kwargs)[0]


def _packed(
    mask: torch.Tensor | None, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """A batch's masks, a bit for each query and key, and where each request's begin.

    Raises:
        ValueError: the mask is neither of bools nor of bytes.
    """
    if mask is None:
        return None
    if mask.dtype not in (torch.bool, torch.uint8):
        raise ValueError(f"custom_mask of {mask.dtype}: expected bool")
    sizes = torch.zeros_like(qo_indptr)
    sizes[1:] = torch.cumsum(qo_indptr.diff() * kv_indptr.diff(), 0)
    return kernels.segment_packbits(mask.contiguous().view(-1), sizes)
