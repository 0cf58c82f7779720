"""What FlashInfer's kernels compute, in plain torch: attention, its merge, mask bits, KV indices.

The references are FlashInfer 0.7.2 (include/flashinfer/attention/prefill.cuh, variants.cuh,
cascade.cuh, quantization/packbits.py) and SGLang 0.5.23 (kernels/ops/attention/kv_indices.py).
What is not emulated: the rounding of 16-bit tensor cores, split-KV scheduling and speed.
"""

import math

import numpy as np
import torch

_QUERY_ROWS = 256  # at once, so that a long prefill needs no [n, m] matrix per head


def segment_packbits(x: torch.Tensor, indptr: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack segments of booleans into bits, each from a byte of its own on, first bit lowest.

    As flashinfer.quantization.segment_packbits with bitorder="little".

    Args:
        x: bool or uint8[at least indptr[-1]].
        indptr: integer[segments + 1], where the segments start in `x`.

    Returns:
        uint8[bytes] and int32[segments + 1], where the segments start in it.

    Raises:
        ValueError: `x` is shorter than its segments; the real kernel reads past its end.
    """
    indptr = indptr.long()
    length = int(indptr[-1])
    if x.numel() < length:
        raise ValueError(f"custom_mask has {x.numel()} elements, its segments have {length}")
    sizes = indptr.diff()
    packed_indptr = torch.zeros_like(indptr)
    packed_indptr[1:] = torch.cumsum((sizes + 7) // 8, 0)
    bits = torch.zeros(int(packed_indptr[-1]) * 8, dtype=torch.uint8)
    shifts = torch.repeat_interleave(8 * packed_indptr[:-1] - indptr[:-1], sizes)
    bits[torch.arange(length) + shifts] = x[:length].to(torch.uint8)
    packed = torch.from_numpy(np.packbits(bits.numpy(), bitorder="little"))
    return packed, packed_indptr.int()


def pack_verify_mask_into(
    mask: torch.Tensor, kv_indptr: torch.Tensor, packed_indptr: torch.Tensor, output: torch.Tensor,
    *, batch_size: int, query_width: int, max_kv_len: int,
) -> None:  # fmt: skip
    """SGLang's kernels/ops/speculative/pack_verify_mask.py: each request's mask, packed in place.

    Args:
        mask: bool[query_width * kv_indptr[-1]].
        kv_indptr: int32[requests + 1], where keys start.
        packed_indptr: int32[requests + 1], where packed bytes start.
        output: uint8[bytes], written up to packed_indptr[-1].

    Raises:
        ValueError: a request has more keys than `max_kv_len`, or its bytes start elsewhere.
    """
    if int(kv_indptr.diff().max()) > max_kv_len or len(kv_indptr) != batch_size + 1:
        raise ValueError(f"max_kv_len {max_kv_len}, requests {batch_size}: not of {kv_indptr}")
    packed, starts = segment_packbits(mask, kv_indptr * query_width)
    if not torch.equal(starts, packed_indptr):
        raise ValueError(f"packed masks start at {packed_indptr}, not at {starts}")
    output[: len(packed)].copy_(packed)


def unpack_bits(packed: torch.Tensor, count: int) -> torch.Tensor:
    """bool[count], the first bits of uint8[bytes]; raises ValueError where there are fewer."""
    if packed.numel() * 8 < count:
        raise ValueError(f"the mask buffer has {packed.numel() * 8} bits left, {count} are read")
    return torch.from_numpy(np.unpackbits(packed.numpy(), count=count, bitorder="little")).bool()


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor | None,
    scale: float,
    soft_cap: float = 0.0,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one request; consecutive query heads share a KV head.

    Args:
        q: [n, heads, dim].
        k, v: [m, kv_heads, dim]; m may be 0.
        seen: bool, which keys a query sees, broadcast to [heads / kv_heads, n, m]; None for all.
        soft_cap: logits become soft_cap * tanh(logits / soft_cap); 0 for none.

    Returns:
        [n, heads, dim] in q's dtype, zero where a query sees nothing, and float32[n, heads], the
        log2 of the sum of exponentials, -inf there.
    """
    n, heads, dim = q.shape
    kv_heads = k.shape[1]
    keys = k.to(compute_dtype).permute(1, 2, 0)
    values = v.to(compute_dtype).permute(1, 0, 2)
    out = torch.zeros(n, heads, v.shape[-1], dtype=q.dtype)
    lse = torch.full((n, heads), -math.inf)
    if not len(k):
        return out, lse
    for start in range(0, n, _QUERY_ROWS):
        rows = slice(start, min(start + _QUERY_ROWS, n))
        count = rows.stop - start
        block = q[rows].to(compute_dtype).view(count, kv_heads, -1, dim).permute(1, 2, 0, 3)
        scores = (block.reshape(kv_heads, -1, dim) @ keys) * scale
        if soft_cap > 0:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        scores = scores.view(kv_heads, -1, count, len(k))
        if seen is not None:
            scores.masked_fill_(~seen[..., rows, :], -math.inf)
        sums = torch.logsumexp(scores, -1)  # [kv_heads, group, count]
        weights = torch.exp(scores - _finite(sums).unsqueeze(-1))
        mixed = weights.view(kv_heads, -1, len(k)) @ values
        mixed = mixed.view(kv_heads, -1, count, v.shape[-1]).permute(2, 0, 1, 3)
        out[rows] = mixed.reshape(count, heads, -1).to(q.dtype)
        lse[rows] = (sums * math.log2(math.e)).permute(2, 0, 1).reshape(count, heads).float()
    return out, lse


def causal(n: int, m: int) -> torch.Tensor:
    """bool[n, m]: query i is the key m - n + i, and sees none behind it."""
    return torch.arange(m) <= torch.arange(m - n, m).unsqueeze(1)


def in_window(n: int, m: int, window_left: int) -> torch.Tensor:
    """bool[n, m]: a query sees itself and the `window_left` keys before it (variants.cuh)."""
    return torch.arange(m) + window_left >= torch.arange(m - n, m).unsqueeze(1)


def in_window_of_tile(n: int, m: int, window_left: int, group: int, tile: int) -> torch.Tensor:
    """bool[group, n, m]: the keys that are not skipped before any query is looked at.

    A kernel compiled without a window (plan() got none) but run with one leaves out the keys that
    are out of reach for the first row of a tile of `tile` packed rows (row * group + head), and
    masks none by itself (prefill.cuh: kv_start_idx).
    """
    packed = torch.arange(n) * group + torch.arange(group).unsqueeze(1)
    first = m - n + packed // tile * tile // group - window_left
    return torch.arange(m) >= first.unsqueeze(-1)


def tile_rows(packed_rows: int, dim: int) -> int:
    """FA2DetermineCtaTileQ (utils.cuh) for heads below 512 on Ampere and newer."""
    if packed_rows > 64 and dim < 256:
        return 128
    return 64 if packed_rows > 16 else 16


def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two sets of keys from the attention over each (flashinfer.merge_state).

    Args:
        v_a, v_b: [n, heads, dim], outputs.
        s_a, s_b: float32[n, heads], log2 of their sums of exponentials; -inf for no key at all.

    Returns:
        Output and log2 sum over both; zero and -inf where neither has a key.
    """
    s_a, s_b = s_a.float(), s_b.float()
    largest = _finite(torch.maximum(s_a, s_b))
    a, b = torch.exp2(s_a - largest), torch.exp2(s_b - largest)
    total = a + b
    share_a = torch.where(total > 0, a / total, 0.0).unsqueeze(-1)
    share_b = torch.where(total > 0, b / total, 0.0).unsqueeze(-1)
    merged = share_a * v_a.float() + share_b * v_b.float()
    return merged.to(v_a.dtype), torch.log2(total) + largest


def _finite(logs: torch.Tensor) -> torch.Tensor:
    """`logs` with 0 for -inf, which stands for no key at all."""
    return logs.masked_fill(logs == -math.inf, 0.0)


class KvIndicesLauncher:
    """`create_flashinfer_kv_indices_triton[grid](...)` without Triton, for token-granular tables.

    It writes the ids table[row[i], start[i] : start[i] + len[i]] to out from indptr[i] on.
    """

    def __getitem__(self, grid: tuple[int, ...]) -> "KvIndicesLauncher":
        return self

    def __call__(
        self,
        table: torch.Tensor,
        rows: torch.Tensor,
        lens: torch.Tensor,
        indptr: torch.Tensor,
        starts: torch.Tensor | None,
        out: torch.Tensor,
        row_stride: int,
        ENTRY_PAGE_SIZE: int = 1,
        TOKEN_BLOCK_PARALLEL: bool = False,
        token_mapping: torch.Tensor | None = None,
    ) -> None:
        if ENTRY_PAGE_SIZE != 1 or token_mapping is not None or row_stride != table.stride(0):
            raise NotImplementedError("only token-granular tables of the plain pool are emulated")
        first = torch.zeros_like(lens) if starts is None else starts
        for row, start, length, at in zip(
            rows.tolist(), first.tolist(), lens.tolist(), indptr.tolist(), strict=False
        ):
            if start + length > table.shape[1] or at + length > out.numel():
                raise ValueError(f"KV indices: {length} tokens from {start} on, out of bounds")
            out[at : at + length] = table[row, start : start + length]
