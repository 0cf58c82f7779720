"""A verify step's arrays on the device: one copy from the host, and the mask that backends read."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

# Every array starts at a multiple of this, so that a view of it as int64 is aligned.
_ALIGN = 8


def to_device(arrays: Sequence[npt.NDArray[Any]], device: str | torch.device) -> list[torch.Tensor]:
    """The arrays as tensors on `device`, brought there by one copy that nothing waits for.

    They share one pinned buffer; PyTorch's host allocator keeps it until the copy has run.

    Args:
        arrays: of any dtypes and shapes that torch knows.

    Returns:
        tensors of the same dtypes and shapes, views of one buffer.
    """
    starts, size = [], 0
    for array in arrays:
        starts.append(size)
        size += -(-array.nbytes // _ALIGN) * _ALIGN
    pinned = torch.device(device).type == "cuda"
    host = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    bytes_of = host.numpy()
    for array, start in zip(arrays, starts, strict=True):
        place = bytes_of[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        np.copyto(place, array)
    there = host.to(device, non_blocking=True)
    return [
        there[start : start + array.nbytes].view(_torch_dtype(array.dtype)).view(array.shape)
        for array, start in zip(arrays, starts, strict=True)
    ]


def mask_starts(lens: npt.NDArray[np.int64], width: int) -> npt.NDArray[np.int64]:
    """int64[bs], where each request's part of `full_mask` begins.

    Args:
        lens: int64[bs], KV entries of each request before this step.
    """
    ends = np.cumsum(width * (lens + width))
    return np.concatenate([[0], ends[:-1]])


def full_mask(
    tree: torch.Tensor, lens: torch.Tensor, starts: torch.Tensor, total: int
) -> torch.Tensor:
    """The mask that FlashInfer and Triton read: each node sees its prefix and its tree's part.

    Of each request `width` rows of (prefix, all true) + (its row of the tree mask), one after the
    other, the layout of SGLang's speculative/ngram_worker.py. One kernel on CUDA.

    Args:
        tree: bool[bs, width, width], PackedTrees.mask.
        lens: int64[bs], KV entries of each request before this step.
        starts: int64[bs], mask_starts.
        total: entries of the mask, width * (sum(lens) + bs * width).

    Returns:
        bool[total].
    """
    out = torch.ones(total, dtype=torch.bool, device=tree.device)
    if tree.device.type == "cuda":
        _launch_tree_columns(tree, lens, starts, out)
    else:
        _write_tree_columns(tree, lens, starts, out)
    return out


def _write_tree_columns(
    tree: torch.Tensor, lens: torch.Tensor, starts: torch.Tensor, out: torch.Tensor
) -> None:
    nodes = torch.arange(tree.shape[1], device=tree.device)
    row = starts[:, None] + nodes * (lens[:, None] + len(nodes)) + lens[:, None]
    out[(row[:, :, None] + nodes).flatten()] = tree.flatten()


def _launch_tree_columns(
    tree: torch.Tensor, lens: torch.Tensor, starts: torch.Tensor, out: torch.Tensor
) -> None:
    from sglang_ext.cuda.mask_kernel import write_tree_columns

    width = tree.shape[1]
    write_tree_columns[(tree.shape[0],)](
        tree, lens, starts, out, width, BLOCK=_power_of_two(width * width)
    )


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _torch_dtype(dtype: np.dtype) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype=dtype)).dtype
