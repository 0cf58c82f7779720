"""A lens: the final state of a target, predicted linearly from the one at its early exit.

The LM head reads states of the last layer; on those of a middle layer it says little, of small
models above all. A ridge regression from the one to the other, in closed form, makes them readable
(as the tuned lens, arXiv 2303.08112, which is trained by gradients instead).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sglang_ext.models.cached_tables import CachedTable
from sglang_ext.models.store import default_cache_dir

# Of the mean of X^T X's diagonal: enough to be solved, too little to bend what is well known.
RIDGE = 1e-3


@dataclass(frozen=True)
class Lens:
    """Final normalised state = state @ weight + bias.

    Attributes:
        weight: float32[d, d].
        bias: float32[d].
        tokens: how many it was fitted on.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    tokens: int

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """float[T, d] from the normalised states at the exit, float[T, d]."""
        dtype = states.dtype
        return torch.addmm(self.bias.to(dtype), states, self.weight.to(dtype))

    def to(self, dtype: torch.dtype) -> "Lens":
        """The same for states of this dtype, converted once."""
        return Lens(self.weight.to(dtype), self.bias.to(dtype), self.tokens)


class RidgeSums:
    """X^T X and X^T Y over all tokens seen, in float64; X has a column of ones.

    Args:
        size: d, of states.
    """

    def __init__(self, size: int) -> None:
        self.tokens = 0
        self._xx = torch.zeros(size + 1, size + 1, dtype=torch.float64)
        self._xy = torch.zeros(size + 1, size, dtype=torch.float64)

    def add(self, states: torch.Tensor, finals: torch.Tensor) -> None:
        """Take some tokens' states at the exit and their final ones, float[n, d] both."""
        x = torch.nn.functional.pad(states.detach().float().cpu(), (0, 1), value=1.0)
        y = finals.detach().float().cpu()
        # A chunk's product in float32 is exact enough; the sums over chunks are not.
        self._xx += x.T @ x
        self._xy += x.T @ y
        self.tokens += len(x)

    def solve(self, ridge: float = RIDGE) -> Lens:
        """The regression; the column of ones is not shrunk.

        Raises:
            ValueError: no token was seen.
        """
        if not self.tokens:
            raise ValueError("a lens needs tokens to be fitted on")
        size = self._xy.shape[1]
        penalty = torch.full((size + 1,), ridge * float(self._xx.diagonal()[:size].mean()))
        penalty[size] = 0.0
        solved = torch.linalg.solve(self._xx + torch.diag(penalty.double()), self._xy).float()
        return Lens(solved[:size].contiguous(), solved[size].contiguous(), self.tokens)


def kept_lens(identity: Mapping[str, Any]) -> CachedTable:
    """Where the lens of a model and layer is kept: ~/.cache/sglang-ext/lens."""
    return CachedTable(default_cache_dir() / "lens", identity, ".npz", "the lens is")


def write_lens(kept: CachedTable, lens: Lens) -> None:
    """Keep a lens for the next start."""
    arrays = {"weight": lens.weight.numpy(), "bias": lens.bias.numpy(), "tokens": lens.tokens}
    kept.keep(lambda file: np.savez(file, **arrays))


def read_lens(path: Path, size: int) -> Lens | None:
    """The lens in a file; None: it is one of states of another size.

    Raises:
        OSError, ValueError, KeyError: there is none, or it is damaged.
    """
    with np.load(path) as stored:
        weight, bias = stored["weight"], stored["bias"]
        tokens = int(stored["tokens"])
    if weight.shape != (size, size) or bias.shape != (size,):
        return None
    if not (np.isfinite(weight).all() and np.isfinite(bias).all()):
        raise ValueError(f"{path}: numbers that are none")
    return Lens(torch.from_numpy(weight).float(), torch.from_numpy(bias).float(), tokens)
