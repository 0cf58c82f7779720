"""A block drafter's memory and its decoder's input, in 8 bits on CPUs."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from sglang_ext.block_drafter import entry_kernel
from sglang_ext.block_drafter.kept_tokens import MASK
from sglang_ext.block_drafter.nat_model import OF_OUTPUT, OF_SOURCE, BlockModel, sinusoid_rates
from sglang_ext.block_drafter.packed_linear import PackedLinear, packed, threads_for
from sglang_ext.block_drafter.request_memory import RequestMemory

Rows = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float32]


class ServedEntries:
    """What `BlockModel.remembered`, the layers' keys and values, and `BlockModel.slots_of` compute.

    Args:
        of_states, keys_values, of_before: the model's layers in 8 bits, the second one of all
            decoder layers; of_states: None of a drafter with an encoder of its own.
    """

    def __init__(
        self,
        model: BlockModel,
        of_states: PackedLinear | None,
        keys_values: PackedLinear,
        of_before: PackedLinear,
    ) -> None:
        norm, width = model.memory_norm, model.shape.width
        self._of_states, self._keys_values, self._of_before = of_states, keys_values, of_before
        self._embedding = _floats(model.embedding.weight)
        self._scale = np.float32(math.sqrt(width))
        self._norm = _floats(torch.stack([norm.weight, norm.bias]))
        self._epsilon = np.float32(norm.eps)
        self._kinds, self._shape = _floats(model.kinds), model.shape
        self._rates = _floats(sinusoid_rates(width))
        self._slots = _floats(model.slots).copy()
        self._slots[1:] += self._scale * self._embedding[MASK]
        if model.states is not None:
            self._even = np.ones((2, model.states.width), np.float32)
            self._even[1] = 0

    @classmethod
    def of(cls, model: BlockModel) -> "ServedEntries | None":
        """None where 8 bits do not fit, as `packed` has it."""
        width = model.shape.width
        cross = [layer.multihead_attn for layer in model.decoder.layers]
        keys_values = packed(
            torch.cat([each.in_proj_weight[width:] for each in cross]),
            torch.cat([each.in_proj_bias[width:] for each in cross]),
        )
        before = packed(model.of_before.weight, model.of_before.bias)
        reads = model.states is not None
        states = packed(model.of_states.weight, model.of_states.bias) if reads else None
        if keys_values is None or before is None or (reads and states is None):
            return None
        return cls(model, states, keys_values, before)

    def of_source(self, states: torch.Tensor, places: torch.Tensor) -> RequestMemory:
        """What is kept of a source whose states the target has, float[s, states.width] at int64[s].

        Args:
            states: s is at least 1.
        """
        count, size = len(places), self._shape.width // self._shape.heads
        entries = count + self._shape.window
        room = torch.empty((self._shape.decoder_layers, 2, entries, self._shape.heads, size))
        memory = RequestMemory(room, count, torch.empty(0))
        slots = np.arange(count)
        self._remember(states.numpy(), places.numpy(), OF_SOURCE, [memory], [count], slots)
        return memory

    def write(self, new: Sequence[tuple[RequestMemory, np.ndarray, Rows]]) -> None:
        """Remember written tokens.

        Args:
            new: of each request its memory, what is read of each token (rows, int64[m], or
                float16[m, states.width]) and its place in the output, int64[m]; m at least 1, and
                at most the window.
        """
        memories, counts = [memory for memory, _, _ in new], [len(places) for _, _, places in new]
        self._remember(
            np.concatenate([tokens for _, tokens, _ in new]),
            np.concatenate([places for _, _, places in new]),
            OF_OUTPUT,
            memories,
            counts,
            np.concatenate([m.slots_for(count) for m, count in zip(memories, counts, strict=True)]),
        )

    def _remember(
        self,
        read: np.ndarray,
        places: Rows,
        kind: int,
        memories: Sequence[RequestMemory],
        counts: Sequence[int],
        slots: Rows,
    ) -> None:
        """Write entries' keys and values to their slots, and each memory's last entry."""
        threads = threads_for(len(places))
        if self._of_states is None:
            known = self._embedding[read]
        else:
            states = read.astype(np.float32)
            known = entry_kernel.entries_of_states(states, self._even, self._of_states, threads)
        entries = entry_kernel.remember(
            known,
            self._norm,
            self._epsilon,
            self._kinds[kind],
            places,
            self._rates,
            self._keys_values,
            np.repeat([memory.address for memory in memories], counts),
            np.repeat([memory.capacity for memory in memories], counts),
            slots,
            threads,
        )
        for memory, end in zip(memories, np.cumsum(counts).tolist(), strict=True):
            memory.last = torch.from_numpy(entries[end - 1].copy())

    def slots_of(
        self, last: Rows, committed: Sequence[int], memories: Sequence[RequestMemory]
    ) -> torch.Tensor:
        """float32[n, 1 + block, width], the decoder's input.

        Args:
            last: int64[n], rows of the last committed tokens.
            committed: how many there are.
        """
        before = np.stack([memory.last.numpy() for memory in memories])
        return torch.from_numpy(
            entry_kernel.slots_of(
                last, np.array(committed), before, self._of_before, self._embedding, self._scale,
                self._slots, self._rates,
            )
        )  # fmt: skip


def _floats(values: torch.Tensor) -> _Floats:
    made: _Floats = values.detach().float().contiguous().numpy()
    return made
