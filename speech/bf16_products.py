"""Products of many rows in bfloat16, by oneDNN: for layers that see an encoder's 1,500 frames.

With AMX a product of 1,500 rows by 2048 x 512 takes 1.6 ms on two cores, and 8-bit ones the same:
bringing rows to 8 bits and sums back takes longer than either.
"""

import functools

import torch
import torch.nn.functional as F


@functools.cache
def has_fast_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 faster than float32."""
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


class Bf16Product:
    """x @ weight.T + bias of bfloat16 rows, its sums in float32.

    Attributes:
        nbytes: what the packed weight takes.

    Args:
        weight: [N, K] of any float type; bias: [N], or None for none.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        rounded = weight.detach().to(torch.bfloat16).contiguous()
        self.nbytes = rounded.nbytes
        self._packed = torch.ops.mkldnn._reorder_linear_weight(rounded, _ROWS)
        self._bias = None if bias is None else bias.detach().to(torch.bfloat16)

    def __call__(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, *, gelu: bool = False
    ) -> torch.Tensor:
        """bfloat16 [..., K] -> bfloat16 [..., N].

        Args:
            bias: [N], instead of the one that it was made with.
            gelu: apply GELU to the sums, before they are rounded.
        """
        added = self._bias if bias is None else bias.detach().to(torch.bfloat16)
        then, how = ("gelu", "none") if gelu else ("none", "")
        rows = x.flatten(0, -2)
        count = len(rows)
        rows = F.pad(rows, (0, 0, 0, _rounded_up(count) - count))
        out = torch.ops.mkldnn._linear_pointwise(rows, self._packed, added, then, [], how)
        return out[:count].unflatten(0, x.shape[:-1])


# A whole window's frames: oneDNN lays weights out for so many rows.
_ROWS = 1500


def _rounded_up(rows: int) -> int:
    """The number of rows that a product runs with: oneDNN takes 5 to 18 ms to make a new one's."""
    if rows == _ROWS:
        return rows
    step = 1 << max(0, rows.bit_length() - 5)
    return -(-rows // step) * step
