"""The Triton kernel of staging.full_mask, in a file of its own: Triton is imported for it alone."""

import triton
import triton.language as tl


@triton.jit
def write_tree_columns(tree, lens, starts, out, width, BLOCK: tl.constexpr):
    """Write one request's tree mask into the last columns of its rows.

    Args:
        tree: bool[bs, width, width].
        lens, starts: int64[bs], prefix length and first entry of each request's rows.
        out: bool[...], rows of lens + width entries.
        BLOCK: a power of two, width * width or more.
    """
    request = tl.program_id(0)
    entry = tl.arange(0, BLOCK)
    inside = entry < width * width
    row = entry // width
    length = tl.load(lens + request)
    start = tl.load(starts + request)
    seen = tl.load(tree + request * width * width + entry, mask=inside)
    tl.store(out + start + row * (length + width) + length + entry % width, seen, mask=inside)
