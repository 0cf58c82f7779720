"""The draft decoder's KV cache of one request: a chain of tokens, and branches beside it.

Slots 0 .. n-1 hold K and V of n tokens. A token sees its ancestors: the slots of its `visible`
row. While no branch was added every token sees all slots before it. Branches are dropped by
`truncate`; what is kept of them is fed again, in a forward pass that is due anyway, so that slots
never move.
"""

from collections.abc import Sequence

import numpy as np
import torch

_FIRST_CAPACITY = 128


class DraftCache:
    """K and V of one request.

    Attributes:
        keys, values: float [layers, heads, capacity, head_dim], of the decoder's tokens.
        cross_keys, cross_values: float [layers, heads, frames, head_dim], of the audio; the others
            have their device.
        tokens: the token of each slot in use.
        depths: the position of each slot's token in its sequence.

    Args:
        dtype: of keys and values; None: that of the audio's.
    """

    def __init__(
        self,
        cross_keys: torch.Tensor,
        cross_values: torch.Tensor,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.cross_keys = cross_keys
        self.cross_values = cross_values
        layers, heads, _, head_dim = cross_keys.shape
        shape = layers, heads, _FIRST_CAPACITY, head_dim
        self.keys = cross_keys.new_zeros(shape, dtype=dtype)
        self.values = cross_keys.new_zeros(shape, dtype=dtype)
        self.visible = np.zeros((_FIRST_CAPACITY, _FIRST_CAPACITY), dtype=bool)
        self.tokens: list[int] = []
        self.depths: list[int] = []
        self._is_chain = True

    def __len__(self) -> int:
        return len(self.tokens)

    def truncate(self, length: int) -> None:
        """Forget all slots from `length` on; what is left must be a chain."""
        del self.tokens[length:], self.depths[length:]
        self._is_chain = True

    def append(self, tokens: Sequence[int], parents: Sequence[int]) -> None:
        """Take slots for `tokens`; parents[i] is the slot of token i's parent, -1 for none."""
        first = len(self.tokens)
        self._reserve(first + len(tokens))
        for slot, (token, parent) in enumerate(zip(tokens, parents, strict=True), first):
            row = self.visible[slot]
            if parent < 0:
                row[:] = False
            else:
                row[:] = self.visible[parent]
            row[slot] = True
            self.tokens.append(token)
            self.depths.append(0 if parent < 0 else self.depths[parent] + 1)
            self._is_chain &= parent == slot - 1

    def mask(self, first: int) -> torch.Tensor | None:
        """bool [n - first, n] on the host: what the slots from `first` on see; None: everything."""
        length = len(self.tokens)
        if self._is_chain and first == length - 1:
            return None
        return torch.from_numpy(self.visible[first:length, :length])

    def _reserve(self, length: int) -> None:
        capacity = self.keys.shape[2]
        if length <= capacity:
            return
        grown = max(length, 2 * capacity)
        pad = (0, 0, 0, grown - capacity)
        self.keys = torch.nn.functional.pad(self.keys, pad)
        self.values = torch.nn.functional.pad(self.values, pad)
        visible = np.zeros((grown, grown), dtype=bool)
        visible[:capacity, :capacity] = self.visible
        self.visible = visible
