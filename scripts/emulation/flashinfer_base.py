"""What the emulated FlashInfer wrappers share: plans keep a layout, runs go over its requests.

See flashinfer_wrappers.py for the contract.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, ClassVar

import torch

from scripts.emulation import flashinfer_kernels as kernels

# flashinfer/jit/utils.py: the types that kernels are generated for.
_QUERY_DTYPES = (torch.float16, torch.bfloat16)
_KV_DTYPES = (*_QUERY_DTYPES, torch.float8_e4m3fn, torch.float8_e5m2)

KvCache = tuple[torch.Tensor, torch.Tensor]


class Wrapper:
    """What the three wrappers share: options, data types, the run over a batch's requests."""

    allow_float32: ClassVar[bool] = False
    compute_dtype: ClassVar[torch.dtype] = torch.float32

    def __init__(self, workspace: torch.Tensor, kv_layout: str, use_cuda_graph: bool, backend: str):
        if kv_layout != "NHD":
            raise ValueError(f"kv_layout {kv_layout}: only NHD is emulated")
        if workspace.data_ptr() % 16:
            raise ValueError("float_workspace_buffer must be 16-byte aligned")
        self.device = workspace.device
        self._float_workspace_buffer = workspace
        self._backend = "fa2" if backend == "auto" else backend
        self._use_cuda_graph = use_cuda_graph
        self._planned = False
        self._causal = False
        self._window_left = -1
        self._logits_soft_cap: float | None = None
        self._sm_scale: float | None = None
        self._has_window = self._has_cap = False
        self._max_total_num_rows: int | None = None
        self._custom_mask_buf: torch.Tensor | None = None
        self._mask_indptr_buf: torch.Tensor | None = None
        self._int_workspace_buffer = self._pin_memory_int_workspace_buffer = workspace

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._use_cuda_graph

    def keep_heads(self, num_qo_heads: int, num_kv_heads: int, head_dim: int) -> None:
        if num_qo_heads % num_kv_heads:
            raise ValueError(f"{num_qo_heads} query heads are no multiple of {num_kv_heads}")
        self._num_qo_heads, self._num_kv_heads, self._dim = num_qo_heads, num_kv_heads, head_dim

    def keep_dtypes(self, q: Any, kv: Any, o: Any = None) -> None:
        """As the JIT does: KeyError for a type without kernels, float32 among them."""
        q = _dtype(q)
        kv = q if kv is None else _dtype(kv)
        float32 = (torch.float32,) if self.allow_float32 else ()
        for dtype, known in ((q, _QUERY_DTYPES), (kv, _KV_DTYPES)):
            if dtype not in known + float32:
                raise KeyError(dtype)
        self._cached_q_data_type, self._cached_kv_data_type = q, kv
        self._cached_o_data_type = q if o is None else _dtype(o)

    def keep_variant(
        self,
        causal: bool,
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: float | None,
    ) -> None:
        """Window and cap are compiled in (or out) by the plan; a run only sets their values."""
        self._has_window = window_left >= 0
        self._has_cap = (logits_soft_cap or 0.0) > 0
        self.set_call(causal, window_left, logits_soft_cap, sm_scale)
        self._planned = True

    def set_call(
        self,
        causal: bool,
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: float | None,
    ) -> None:
        self._causal, self._window_left = causal, window_left
        self._logits_soft_cap, self._sm_scale = logits_soft_cap, sm_scale

    def check_rows(self, batch_size: int, rows: int, fixed_batch_size: int) -> None:
        if self._max_total_num_rows is None:
            self._max_total_num_rows = rows
        if rows > self._max_total_num_rows:
            raise ValueError(
                f"The total number of rows in qo_indptr {rows} in cuda graph mode cannot exceed "
                f"the number of rows set during initialization {self._max_total_num_rows}."
            )
        if batch_size != fixed_batch_size:
            raise ValueError(
                "The batch size should be fixed during the lifecycle of the wrapper in cuda graph "
                f"mode, the runtime batch size {batch_size} mismatches the batch size "
                f"{fixed_batch_size} set during initialization."
            )

    def check_inputs(self, q: torch.Tensor, k: torch.Tensor) -> None:
        if not self._planned:
            raise AssertionError("plan info is not initialized")
        for name, got, planned in (
            ("q", q.dtype, self._cached_q_data_type),
            ("k", k.dtype, self._cached_kv_data_type),
        ):
            if got != planned:
                raise ValueError(
                    f"The dtype of {name} {got} does not match the data type {planned} specified "
                    "in plan function."
                )
        if q.shape[1] > self._num_qo_heads or q.shape[-1] != self._dim:
            raise ValueError(
                f"q has {q.shape[1]} heads of {q.shape[-1]}, planned were {self._num_qo_heads} "
                f"of {self._dim}"
            )

    def attend_all(
        self,
        q: torch.Tensor,
        qo_indptr: torch.Tensor,
        requests: Iterator[tuple[torch.Tensor, torch.Tensor]],
        k_scale: float | None = None,
        v_scale: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Each request's queries over its (keys, values); returns output and log2 sums."""
        scale = q.shape[-1] ** -0.5 if self._sm_scale is None else self._sm_scale
        cap = self._logits_soft_cap or 0.0 if self._has_cap else 0.0
        out = torch.zeros_like(q, dtype=self._cached_o_data_type)
        lse = torch.full(q.shape[:2], -torch.inf)
        bounds = qo_indptr.tolist()
        tile = self._tile_rows(q, len(bounds) - 1)
        for i, (k, v) in enumerate(requests):
            rows = slice(bounds[i], bounds[i + 1])
            group = q.shape[1] // k.shape[1]
            seen = self._seen(i, rows.stop - rows.start, len(k), group, tile)
            made, lse[rows] = kernels.attend(
                q[rows], k, v, seen, scale * (k_scale or 1.0), cap, self.compute_dtype
            )
            out[rows] = made
        return out if v_scale is None else out * v_scale, lse

    def _seen(self, i: int, n: int, m: int, group: int, tile: int) -> torch.Tensor | None:
        """Which of its m keys request i's n queries see; None for all (variants.cuh)."""
        seen = None
        if self._custom_mask_buf is not None:
            assert self._mask_indptr_buf is not None
            bits = self._custom_mask_buf[int(self._mask_indptr_buf[i]) :]
            seen = kernels.unpack_bits(bits, n * m).view(n, m)
        elif self._causal and n > 1:
            seen = kernels.causal(n, m)
        if self._window_left < 0 or self._window_left >= m:
            return seen
        if self._has_window:
            near = kernels.in_window(n, m, self._window_left)
        else:
            near = kernels.in_window_of_tile(n, m, self._window_left, group, tile)
        return near if seen is None else seen & near

    def _tile_rows(self, q: torch.Tensor, batch_size: int) -> int:
        """scheduler.cuh: from the mean request, or from the longest that a graph has room for."""
        group = self._num_qo_heads // self._num_kv_heads
        if self._use_cuda_graph:
            return kernels.tile_rows((len(q) - batch_size + 1) * group, q.shape[-1])
        return kernels.tile_rows(len(q) * group // max(batch_size, 1), q.shape[-1])


class PagedWrapper(Wrapper):
    """A wrapper whose keys lie in a pool of [slots, heads, dim], one slot a page."""

    _paged_kv_indptr_buf: torch.Tensor
    _paged_kv_indices_buf: torch.Tensor
    _paged_kv_last_page_len_buf: torch.Tensor
    _fixed_batch_size: int = 0

    def keep_graph_buffers(self, **buffers: torch.Tensor | None) -> None:
        for name, buffer in buffers.items():
            if self._use_cuda_graph and not torch.is_tensor(buffer):
                raise ValueError(f"{name} should be a torch.Tensor in CUDA graph mode")
        self.__dict__.update({f"_{name}": buffer for name, buffer in buffers.items()})
        if not self._use_cuda_graph:
            return
        self._fixed_batch_size = len(self._paged_kv_last_page_len_buf)
        if len(self._paged_kv_indptr_buf) != self._fixed_batch_size + 1:
            raise ValueError("The length of paged_kv_indptr_buf should be batch_size + 1.")

    def keep_pages(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        page_size: int,
    ) -> None:
        if page_size != 1 or not bool((last_page_len == 1).all()):
            raise NotImplementedError("pages of one token only are emulated")
        check_int32(indptr=indptr, indices=indices, last_page_len=last_page_len)
        if int(indptr[-1]) > len(indices):
            raise ValueError(f"{len(indices)} page indices, but indptr ends at {int(indptr[-1])}")
        if not self._use_cuda_graph:
            self._paged_kv_indptr_buf = indptr
            self._paged_kv_indices_buf = indices
            self._paged_kv_last_page_len_buf = last_page_len
            return
        if len(indices) > len(self._paged_kv_indices_buf):
            raise ValueError("The length of paged_kv_indices exceeds the allocated buffer size.")
        self._paged_kv_indptr_buf.copy_(indptr)
        self._paged_kv_last_page_len_buf.copy_(last_page_len)
        self._paged_kv_indices_buf[: len(indices)].copy_(indices)

    def pages(self, cache: KvCache) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each request's keys and values, by what the buffers hold now."""
        bounds = self._paged_kv_indptr_buf.tolist()
        for start, end in pairwise(bounds):
            slots = self._paged_kv_indices_buf[start:end].long()
            yield cache[0][slots], cache[1][slots]


def check_int32(**tensors: torch.Tensor) -> None:
    """Kernels are compiled for int32 indices and read any other as such."""
    for name, tensor in tensors.items():
        if tensor.dtype != torch.int32:
            raise ValueError(f"{name} of {tensor.dtype}: expected int32")


def _dtype(dtype: torch.dtype | str) -> torch.dtype:
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype
