"""Runs SGLang's real FlashInferAttnBackend on the CPU, over emulated FlashInfer wrappers.

SGLang's backend plans batches, masks and graphs; what it would hand to FlashInfer's kernels goes to
flashinfer_wrappers.py instead. `install` is for a server process, `installed` for a test.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from scripts.emulation import flashinfer_kernels as kernels
from scripts.emulation import flashinfer_wrappers as wrappers
from scripts.emulation.flashinfer_base import Wrapper

# What the backend imports from flashinfer, where CUDA is available.
_FROM_FLASHINFER = (
    wrappers.BatchPrefillWithPagedKVCacheWrapper,
    wrappers.BatchDecodeWithPagedKVCacheWrapper,
    wrappers.BatchPrefillWithRaggedKVCacheWrapper,
    wrappers.fast_decode_plan,
    kernels.merge_state,
)
_ON_THE_DEVICE = ("empty", "zeros", "ones", "full", "arange", "tensor")


class _TorchWithoutCuda(ModuleType):
    """torch, whose constructors put on the CPU what is asked for on "cuda"."""

    def __init__(self) -> None:
        super().__init__("torch")
        for name in _ON_THE_DEVICE:
            setattr(self, name, _on_the_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_the_cpu(make: Any) -> Any:
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return make(*args, **kwargs)

    return made


def install(*, allow_float32: bool = False, compute_dtype: torch.dtype = torch.float32) -> None:
    """Have this process's FlashInferAttnBackend run on the CPU, for good.

    Call it before SGLang builds an attention backend, and once more in every process it spawns.

    Args:
        allow_float32: take float32 queries and caches too, which no kernel of FlashInfer does
            (plan() raises KeyError without it, as the original). With float32 a model's greedy
            tokens can be compared with those of another attention.
        compute_dtype: what scores and sums are computed in. With float64, a row's float32 result
            hardly depends on how many rows are computed beside it.
    """
    _replace(ExitStack(), allow_float32, compute_dtype)


@contextmanager
def installed(
    *, allow_float32: bool = False, compute_dtype: torch.dtype = torch.float32
) -> Iterator[None]:
    """`install` for the body of a `with` statement."""
    with ExitStack() as stack:
        _replace(stack, allow_float32, compute_dtype)
        yield


def _replace(stack: ExitStack, allow_float32: bool, compute_dtype: torch.dtype) -> None:
    from sglang.kernels.ops.speculative import pack_verify_mask
    from sglang.srt.layers.attention import flashinfer_backend as backend
    from sglang.srt.mem_cache import kv_index_translator

    replaced: list[tuple[Any, str, Any]] = [
        (
            backend,
            "BatchPrefillWithPagedKVCacheWrapper",
            wrappers.BatchPrefillWithPagedKVCacheWrapper,
        ),
        (
            backend,
            "BatchDecodeWithPagedKVCacheWrapper",
            wrappers.BatchDecodeWithPagedKVCacheWrapper,
        ),
        (
            backend,
            "BatchPrefillWithRaggedKVCacheWrapper",
            wrappers.BatchPrefillWithRaggedKVCacheWrapper,
        ),
        *((backend, made.__name__, made) for made in _FROM_FLASHINFER),
        (backend, "_safe_merge_state", kernels.merge_state),
        # The backend names "cuda" where it makes index buffers.
        (backend, "torch", _TorchWithoutCuda()),
        # The backend's indices come from a Triton kernel; triton_checks.py runs that one itself.
        (kv_index_translator, "create_flashinfer_kv_indices_triton", kernels.KvIndicesLauncher()),
        (pack_verify_mask, "pack_verify_mask_into", kernels.pack_verify_mask_into),
        (Wrapper, "allow_float32", allow_float32),
        (Wrapper, "compute_dtype", compute_dtype),
    ]
    for owner, name, value in replaced:
        stack.enter_context(mock.patch.object(owner, name, value, create=True))
