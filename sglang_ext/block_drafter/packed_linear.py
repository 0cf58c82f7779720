"""Linear layers in groups of 8 bits, as the block drafter's compiled loops take them."""

import numba
import numpy as np
import torch

from sglang_ext.cpu.group_weights import GROUP, grouped

_BITS = 8
# Rows up to which a thread alone is quicker: others sleep between a target's passes.
_FEW_ROWS = 16

# Levels, scales and factor of a weight (group_weights.py), and a bias.
PackedLinear = tuple[np.ndarray, np.ndarray, np.float32, np.ndarray]


def packed(weight: torch.Tensor, bias: torch.Tensor) -> PackedLinear | None:
    """A layer, float[outputs, inputs] and float[outputs].

    None where 8 bits do not fit: inputs that are no whole groups, or weights as the log tells.
    """
    made = None if weight.shape[1] % GROUP else grouped(weight, _BITS)
    if made is None:
        return None
    return made.levels, made.scales, np.float32(made.factor), bias.detach().float().numpy()


def threads_for(rows: int) -> int:
    """How many threads share a compiled loop over so many rows."""
    return 1 if rows <= _FEW_ROWS else min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
