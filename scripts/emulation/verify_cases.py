"""Random verify steps, the product's mask of them, and dense attention to compare with.

The reference shares nothing with what it checks: who sees whom is read off the trees' parents, and
keys and values come in the order of positions, not from a pool.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sglang_ext.cuda.staging import full_mask, mask_starts
from sglang_ext.tree import PackedTrees, TokenTree, pack


@dataclass(frozen=True)
class Step:
    """A verify step of random trees: full ones, small ones and one of the root alone.

    Attributes:
        lens: KV entries of each request before the step.
        trees: each request's draft, without its root.
    """

    lens: list[int]
    trees: list[TokenTree]
    packed: PackedTrees

    @property
    def width(self) -> int:
        return self.packed.width

    @classmethod
    def random(cls, rng: np.random.Generator, lens: Sequence[int], width: int) -> "Step":
        sizes = [(width - 1, width // 2, 0)[i % 3] for i in range(len(lens))]
        trees = [_random_tree(rng, n) for n in sizes]
        return cls(list(lens), trees, pack(list(range(len(lens))), trees, width))

    def mask(self) -> torch.Tensor:
        """bool[width * (sum(lens) + bs * width)], the mask that the product hands a backend."""
        lens = np.array(self.lens, dtype=np.int64)
        starts = torch.from_numpy(mask_starts(lens, self.width))
        total = self.width * int(lens.sum() + len(lens) * self.width)
        tree = torch.from_numpy(self.packed.mask)
        return full_mask(tree, torch.from_numpy(lens), starts, total)

    def positions(self) -> torch.Tensor:
        """int64[bs * width], each node's position in its sequence."""
        return (
            torch.tensor(self.lens).unsqueeze(1) + torch.from_numpy(self.packed.depths)
        ).flatten()

    def seen(self, request: int, window: int = -1) -> torch.Tensor:
        """bool[nodes, len + nodes]: what each real node sees, itself included, by tree parents.

        Args:
            window: also at most this many positions back; -1 for all.
        """
        length, parents = self.lens[request], self.trees[request].parents
        seen = torch.zeros(len(parents) + 1, length + len(parents) + 1, dtype=torch.bool)
        positions = list(range(length))
        for node in range(len(parents) + 1):
            path, up = [], node
            while up >= 0:
                path.append(length + up)
                up = int(parents[up - 1]) + 1 if up else -1
            seen[node, path] = True
            seen[node, :length] = True
            positions.append(length + len(path) - 1)
        if window >= 0:
            at = torch.tensor(positions)
            seen &= at >= at[length:, None] - window
        return seen


def _random_tree(rng: np.random.Generator, nodes: int) -> TokenTree:
    parents = np.array([rng.integers(-1, i) for i in range(nodes)], dtype=np.int32)
    return TokenTree(rng.integers(0, 100, nodes), parents, np.ones(nodes, dtype=np.float32))


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention in float64.

    Args:
        q: [n, heads, dim].
        k, v: [m, kv_heads, dim].
        seen: bool[n, m].
        sinks: [heads], logits that join each softmax and bring no value.

    Returns:
        float32[n, heads, dim].
    """
    group = q.shape[1] // k.shape[1]
    keys = k.double().repeat_interleave(group, 1)
    values = v.double().repeat_interleave(group, 1)
    scores = torch.einsum("nhd,mhd->hnm", q.double(), keys) * scale
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        column = sinks.double().view(-1, 1, 1).expand(-1, len(q), 1)
        weights = torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]
    else:
        weights = torch.softmax(scores, -1)
    return torch.einsum("hnm,mhd->nhd", weights, values).float()


def worst(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest absolute difference; infinite where a value is not a number."""
    difference = (got.float() - want).abs()
    return float("inf") if bool(difference.isnan().any()) else float(difference.max())
