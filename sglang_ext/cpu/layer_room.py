"""Where `fused_kernel` writes what is between a layer's parts, kept from step to step.

Made anew in each step it came from the system and went back: 20 page faults a step of 12 rows of
SmolLM2, each of which may wait for a virtual machine's host.
"""

from collections.abc import Sequence

import numpy as np
import torch

from sglang_ext.cpu.float_weights import FloatWeight
from sglang_ext.cpu.group_dots import GROUP
from sglang_ext.cpu.group_weights import GroupWeight
from sglang_ext.cpu.lane_vectors import LANES
from sglang_ext.cpu.layer_rows import FLOAT_BITS

# Passes of more rows are prompts: these take long, and theirs is not kept.
_MOST_KEPT = 128

Weight = GroupWeight | FloatWeight
Rows = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
Room = tuple[np.ndarray, np.ndarray, Rows, np.ndarray, Rows, Rows, Rows, np.ndarray, np.ndarray]


class LayerRoom:
    """Room for passes of layers that are alike, one pass at a time.

    Args:
        heads, size: of the queries.
        products: of a layer: to q, k and v, behind the attention, to gate and up, and down.
    """

    def __init__(self, heads: int, size: int, products: Sequence[Weight]) -> None:
        self._heads, self._size = heads, size
        self._bits = products[0].bits
        sizes = [columns_of(weight)[2:] for weight in products]
        self._inputs = [groups * GROUP for _, groups in sizes]
        self._outputs = [blocks * LANES for blocks, _ in sizes]
        self._kept: Room | None = None
        self._rows = 0

    def of(self, rows: int) -> Room:
        """As `fused_kernel.run_layers` takes it: queries and the attention's output float32[rows,
        heads, size]; rows (layer_rows.py) and made of the projection to q, k and v; rows of the
        other products; gate and up; and what products add.
        """
        if rows > _MOST_KEPT:
            return self._made(rows)
        if self._kept is None or rows > self._rows:
            self._rows = min(_MOST_KEPT, 2 * rows)
            self._kept = self._made(self._rows)
        queries, attended, qkv, made, out, up, down, both, added = self._kept
        return (
            queries[:rows], attended[:rows], _first(qkv, rows), made[:rows], _first(out, rows),
            _first(up, rows), _first(down, rows), both[:rows], added[:rows],
        )  # fmt: skip

    def _made(self, rows: int) -> Room:
        queries, attended = _empty(2, rows, self._heads, self._size)
        qkv, out, up, down = (_rows_of(rows, width, self._bits) for width in self._inputs)
        # The last product's outputs are as many as the second's: both are added to the layer's.
        made, added, both, _ = (_empty(rows, width) for width in self._outputs)
        return queries, attended, qkv, made, out, up, down, both, added


def columns_of(weight: Weight) -> tuple[int, int, int, int]:
    """A weight's columns of `fused_kernel.run_layers`: two addresses, blocks, groups of inputs."""
    if isinstance(weight, GroupWeight):
        blocks, groups = weight.levels.shape[:2]
        return weight.levels.ctypes.data, weight.scales.ctypes.data, blocks, groups
    blocks, words = weight.words.shape[:2]
    return weight.words.ctypes.data, 0, blocks, words * 32 // weight.bits // GROUP


def _rows_of(rows: int, width: int, bits: int) -> Rows:
    """Levels, scales, corrections and floats, as layer_rows.py has them."""
    groups = 0 if bits >= FLOAT_BITS else width // GROUP
    return (
        _empty(rows, groups * GROUP, kind=torch.int8),
        _empty(rows, groups),
        _empty(rows, groups, kind=torch.int32),
        _empty(rows, width if bits >= FLOAT_BITS else 0),
    )


def _first(rows: Rows, count: int) -> Rows:
    levels, scales, corrections, floats = rows
    return levels[:count], scales[:count], corrections[:count], floats[:count]


def _empty(*shape: int, kind: torch.dtype = torch.float32) -> np.ndarray:
    """Of torch, whose arrays begin with a cache line."""
    made: np.ndarray = torch.empty(*shape, dtype=kind).numpy()
    return made
