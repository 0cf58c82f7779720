"""Memory for packed weights, on huge pages where the system gives them on request.

A pass reads all weights once. With pages of 4 KiB a processor looks an address up for every 4 KiB
of them, in a virtual machine through two tables; with 2 MiB, far more seldom.
"""

import contextlib
import math
import mmap
import os
from collections.abc import Sequence

import numpy as np

VARIABLE = "SGLANG_EXT_CPU_HUGE_PAGES"
_PAGE = 2 << 20
_LINE = 64
# Mapped at once: several weights share a huge page. What is behind the last one takes no memory.
_CHUNK = 32 * _PAGE


class HugePages:
    """Arrays one behind the other in anonymous mappings; one is unmapped with its last array."""

    def __init__(self) -> None:
        self._free: np.ndarray = np.empty(0, np.uint8)

    def empty(self, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        """An array of this shape, contiguous, whose numbers are not set."""
        size = math.prod(shape) * dtype.itemsize
        if not is_wanted():
            return np.empty(tuple(shape), dtype)
        if size > self._free.size:
            self._free = _mapped(max(size, _CHUNK))
        own = self._free[:size]
        self._free = self._free[-(-size // _LINE) * _LINE :]
        return own.view(dtype).reshape(tuple(shape))


def is_wanted() -> bool:
    """Whether this system has huge pages on request, and nobody has turned them off."""
    return hasattr(mmap, "MADV_HUGEPAGE") and os.environ.get(VARIABLE, "1") != "0"


def _mapped(size: int) -> np.ndarray:
    """uint8[size or more] that begins on a huge page."""
    mapping = mmap.mmap(-1, size + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A kernel without them; pages are small then.
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    room = np.frombuffer(mapping, np.uint8)
    return room[-room.ctypes.data % _PAGE :]


_PAGES = HugePages()


def on_huge_pages(parts: Sequence[np.ndarray]) -> np.ndarray:
    """A copy of arrays of one dtype, one behind the other along the first axis.

    Of one thread at a time: weights are packed one after the other.
    """
    first = parts[0]
    out = _PAGES.empty((sum(map(len, parts)), *first.shape[1:]), first.dtype)
    np.concatenate(parts, out=out)
    return out
