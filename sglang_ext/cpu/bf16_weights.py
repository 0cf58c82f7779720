"""Weight matrices in bfloat16, and their products with float32 rows.

Half the bytes of float32, and none of its bits where the checkpoint had 16 of this kind: rows stay
float32, so that a product differs from float32's in the order of its sums alone. (oneDNN's bfloat16
products round rows and results too, and where a processor has AMX a row's bits depend on how many
rows there are: from 13 rows on for weights of 576 x 576.)
"""

import numba
import torch
import torch.nn.functional as F

from sglang_ext.cpu.bf16_kernel import product
from sglang_ext.cpu.huge_pages import on_huge_pages
from sglang_ext.cpu.lane_vectors import LANES


class Bf16Weight:
    """A float matrix [N, K] in bfloat16, with the product x @ weight.T + bias.

    Attributes:
        nbytes: what a product reads of it.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self._rows, self._columns = weight.shape
        padded = F.pad(weight.detach(), (0, -self._columns % 2, 0, -self._rows % LANES))
        self._pairs = on_huge_pages([_pack(padded.to(torch.bfloat16)).numpy()])
        self.nbytes = self._pairs.nbytes
        self._threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] -> [..., N], of x's dtype."""
        rows = x.reshape(-1, self._columns).to(torch.float32)
        rows = F.pad(rows, (0, self._columns % 2)).contiguous()
        out = torch.empty(len(rows), self._pairs.shape[0] * LANES)
        product(rows.numpy(), self._pairs, out.numpy(), self._threads)
        if out.shape[1] != self._rows:
            out = out[:, : self._rows].contiguous()
        if bias is not None:
            out += bias
        return out.to(x.dtype).view(*x.shape[:-1], self._rows)


def _pack(weight: torch.Tensor) -> torch.Tensor:
    """bfloat16[N, K] -> uint32[N / 16, K / 2, 16], two inputs of an output in a word."""
    rows, columns = weight.shape
    pairs = weight.view(rows // LANES, LANES, columns // 2, 2).transpose(1, 2).contiguous()
    return pairs.view(torch.uint32).squeeze(-1)
