"""Weight matrices in 8 bits with a scale for each output channel, for products of many rows.

Their integer sums are torch's (oneDNN: AMX or VNNI), which read a weight once for many rows: eight
times as fast as group_weights.py for an encoder's 1,500, where one or two rows are what that one is
for. Rows come to 8 bits too, each by its largest magnitude, and int32 sums are exact: a row has the
same bits whatever is computed beside it, on any number of threads.
"""

import functools
import logging

import numba
import torch

from sglang_ext.cpu.channel_kernel import quantize_rows, scale_sums
from sglang_ext.cpu.huge_pages import on_huge_pages
from sglang_ext.cpu.product_rows import rounded_up

logger = logging.getLogger(__name__)

_LEVELS = 127
# Longer sums of products of levels might not fit int32.
_MOST_INPUTS = 2**31 // _LEVELS**2
# Rows from which waking threads pays.
_MANY_ROWS = 32
_ROWS_AT_ONCE = 384


@functools.cache
def has_exact_products() -> bool:
    """Whether this CPU's 8-bit products are exact and fast: oneDNN's others saturate at 16 bits."""
    if not torch.backends.mkldnn.is_available():
        return False
    return torch.cpu._is_vnni_supported() or torch.cpu._is_amx_tile_supported()


class ChannelWeight:
    """A float matrix [N, K] in 8 bits, with the product x @ weight.T + bias.

    A weight is its level, -127 to 127, by its output channel's scale.

    Raises:
        ValueError: a weight is infinite or NaN, or there are too many inputs.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self._rows, self._columns = weight.shape
        if not 0 < self._columns <= _MOST_INPUTS:
            raise ValueError(f"{self._columns} inputs: expected 1 to {_MOST_INPUTS}")
        values = weight.detach().float()
        if not values.isfinite().all():
            raise ValueError("expected finite weights; some are infinite or NaN")
        scales = values.abs().amax(dim=1) / _LEVELS
        steps = torch.where(scales > 0, scales, 1.0)
        levels = (values / steps[:, None]).round_().clamp_(-_LEVELS, _LEVELS).to(torch.int8)
        self._levels = torch.from_numpy(on_huge_pages([levels.T.numpy()]))
        self._scales = scales.numpy()
        self._no_bias = torch.zeros(self._rows)
        self._threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)

    @property
    def nbytes(self) -> int:
        """What the packed weights take."""
        return self._levels.nbytes + self._scales.nbytes

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] -> [..., N], of x's dtype."""
        rows = x.reshape(-1, self._columns).to(torch.float32).contiguous()
        count = len(rows)
        threads = self._threads if count >= _MANY_ROWS else 1
        levels = torch.empty(rounded_up(count), self._columns, dtype=torch.int8)
        scales = torch.empty(count)
        quantize_rows(
            rows.numpy(), rows.view(torch.int32).numpy(), levels.numpy(), scales.numpy(), threads
        )
        out = torch.empty(count, self._rows)
        added = self._no_bias if bias is None else bias.detach().float()
        # Not all at once: sums of a few rows are still in the cache when they are scaled.
        room = torch.empty(min(len(levels), _ROWS_AT_ONCE), self._rows, dtype=torch.int32)
        for start in range(0, count, _ROWS_AT_ONCE):
            some = slice(start, start + _ROWS_AT_ONCE)
            sums = room[: len(levels[some])]
            torch._int_mm(levels[some], self._levels, out=sums)
            scale_sums(
                sums.numpy(), scales[some].numpy(), self._scales, added.numpy(), out[some].numpy(),
                threads,
            )  # fmt: skip
        return out.to(x.dtype).view(*x.shape[:-1], self._rows)


def by_channels(weight: torch.Tensor) -> ChannelWeight | None:
    """The matrix in 8 bits by channels; None where its values or this CPU are not for it."""
    if not has_exact_products():
        return None
    try:
        return ChannelWeight(weight)
    except ValueError as error:
        logger.warning("a %d x %d weight is not packed by channels: %s", *weight.shape, error)
        return None
