"""Weight matrices in float32 or bfloat16, and their products with float32 rows.

bfloat16 takes half the bytes of float32, and none of its bits where the checkpoint had 16 of this
kind: rows stay float32, so that a product differs from float32's in the order of its sums alone.
(oneDNN's bfloat16 products round rows and results too, and where a processor has AMX a row's bits
depend on how many rows there are: from 13 rows on for weights of 576 x 576.)
"""

import numba
import torch
import torch.nn.functional as F

from sglang_ext.cpu.float_dots import BLOCKS
from sglang_ext.cpu.float_kernel import block_multiplier, product
from sglang_ext.cpu.huge_pages import on_huge_pages
from sglang_ext.cpu.lane_vectors import LANES

_NO_BIAS = torch.empty(0)


class FloatWeight:
    """A float matrix [N, K] in float32 or bfloat16, with the product x @ weight.T + bias.

    Attributes:
        bits: 32 or 16.
        words: uint32[N / 16, K / inputs of a word, 16] as float_kernel.py takes them, N rounded up.
        nbytes: what a product reads of it.
    """

    def __init__(self, weight: torch.Tensor, bits: int) -> None:
        self.bits = bits
        self._rows, self._columns = weight.shape
        self._inputs = 32 // bits  # of a word
        outputs = LANES * max(BLOCKS, -(-self._rows // LANES))
        missing = (0, -self._columns % self._inputs, 0, outputs - self._rows)
        padded = F.pad(weight.detach(), missing)
        dtype = torch.float32 if bits == 32 else torch.bfloat16
        self.words = on_huge_pages([_pack(padded.to(dtype), self._inputs).numpy()])
        self.nbytes = self.words.nbytes
        self._function = block_multiplier().address
        self._threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] -> [..., N], of x's dtype."""
        rows = x.reshape(-1, self._columns).to(torch.float32)
        if self._columns % self._inputs:
            rows = F.pad(rows, (0, 1))
        rows = rows.contiguous()
        outputs = self.words.shape[0] * LANES
        more = _NO_BIAS if bias is None else _padded(bias, outputs)
        out = torch.empty(len(rows), outputs)
        product(
            self._function, self.bits, rows.numpy(), self.words, more.numpy(), out.numpy(),
            self._threads,
        )  # fmt: skip
        if outputs != self._rows:
            out = out[:, : self._rows].contiguous()
        return out.to(x.dtype).view(*x.shape[:-1], self._rows)


def _padded(bias: torch.Tensor, outputs: int) -> torch.Tensor:
    """float32[outputs]."""
    bias = bias.detach().to(torch.float32).contiguous()
    return bias if len(bias) == outputs else F.pad(bias, (0, outputs - len(bias)))


def _pack(weight: torch.Tensor, inputs: int) -> torch.Tensor:
    """[N, K] -> uint32[N / 16, K / inputs, 16], so many inputs of an output in a word."""
    rows, columns = weight.shape
    blocks = weight.view(rows // LANES, LANES, columns // inputs, inputs).transpose(1, 2)
    return blocks.contiguous().view(torch.uint32).squeeze(-1)
