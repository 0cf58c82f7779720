"""The KV pool's memory, which tokens take as they come instead of the server at its start.

SGLang fills the pool with zeros, and the system backs all of it with memory: 3 GB where a small
model's is for 65,536 tokens. Pages that are given back read as zeros again, madvise(2).
"""

import ctypes
import mmap
from typing import Any

import torch

from sglang_ext import sglang_points
from sglang_ext.sglang_points.hooking import hook

_MADVISE = getattr(ctypes.CDLL(None), "madvise", None)
_DONTNEED = getattr(mmap, "MADV_DONTNEED", None)


def unback(zeros: torch.Tensor) -> None:
    """Give the whole pages of a contiguous tensor of zeros back, where the system takes them."""
    if _MADVISE is None or _DONTNEED is None:
        return
    start = zeros.data_ptr()
    first, last = -(-start // mmap.PAGESIZE), (start + zeros.nbytes) // mmap.PAGESIZE
    if last > first:
        length = (last - first) * mmap.PAGESIZE
        _MADVISE(ctypes.c_void_p(first * mmap.PAGESIZE), ctypes.c_size_t(length), _DONTNEED)


def _unback_pool(_result: None, pool: Any) -> None:
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        if buffer.device.type == "cpu" and buffer.is_contiguous():
            unback(buffer)


def register() -> None:
    """Have the pools that SGLang makes take no memory yet; once in every process."""
    hook(sglang_points.KV_POOL, _unback_pool)
