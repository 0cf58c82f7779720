"""The draft model's KV cache of one request: its text, and the nodes of a token tree behind it.

Slots 0 .. text-1 hold the text, one token each. The slots behind them hold nodes, in the order in
which they were read; a node sees the text and its own ancestors. When text is committed, the nodes
that became text move to the front and those behind them are kept (`keep`): nothing is read twice.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

_FIRST_CAPACITY = 128
_FIRST_NODES = 64
ROOT = -1


class TreeCache:
    """K and V of one request.

    Attributes:
        keys, values: [layers, kv_heads, capacity, head_dim].
        text: tokens of the text that are cached.
        nodes: nodes that are cached behind it.

    Args:
        layers, kv_heads, head_dim: the model's.
        dtype, device: of keys and values.
    """

    def __init__(
        self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str
    ) -> None:
        shape = (layers, kv_heads, _FIRST_CAPACITY, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.text = 0
        self.nodes = 0
        self._depths: list[int] = []
        self._sees = np.zeros((_FIRST_NODES, _FIRST_NODES), dtype=bool)

    @property
    def used(self) -> int:
        """Slots in use."""
        return self.text + self.nodes

    @property
    def nbytes(self) -> int:
        """Bytes that keys and values take."""
        return 2 * self.keys.numel() * self.keys.element_size()

    def take(self, text: int, parents: Sequence[int]) -> tuple[list[int], torch.Tensor | None]:
        """Take slots for `text` tokens of the text, then for a node for each of `parents`.

        Args:
            parents: the number of the node's parent, which has a slot or gets one in this call;
                ROOT: the text's last token. Nodes are numbered in the order of their slots.

        Returns:
            the positions in the sequence, and what the new slots see, bool[new, used] on the host;
            None: everything.
        """
        assert not (text and self.nodes), "text is read before nodes are"
        first, old_nodes = self.used, self.nodes
        self.text += text
        self.nodes += len(parents)
        self._reserve()
        positions = list(range(first, first + text))
        for node, parent in enumerate(parents, old_nodes):
            row = self._sees[node]
            row[:] = False if parent == ROOT else self._sees[parent]
            row[node] = True
            self._depths.append(1 if parent == ROOT else self._depths[parent] + 1)
            positions.append(self.text - 1 + self._depths[node])
        new = text + len(parents)
        if new == 1 and old_nodes == 0:
            return positions, None
        mask = np.ones((new, self.used), dtype=bool)
        mask[:text] = np.tri(text, self.used, first, dtype=bool)
        mask[text:, self.text :] = self._sees[old_nodes : self.nodes, : self.nodes]
        return positions, torch.from_numpy(mask)

    def look_ahead(
        self,
        positions: Sequence[int],
        mask: torch.Tensor | None,
        rows: Sequence[int],
        streams: int,
    ) -> tuple[list[int], torch.Tensor]:
        """Room behind the slots in use for streams of some rows; the next pass takes it.

        Args:
            positions, mask: what `take` said of the pass's rows.
            rows: those behind which streams look ahead.

        Returns:
            the streams' positions, and the mask of all rows, those of streams behind the others. A
            stream sees what its row sees, and its row's streams up to itself.
        """
        more = streams * len(rows)
        self._reserve(more)
        before = len(positions)
        whole = np.zeros((before + more, self.used + more), dtype=bool)
        whole[:before, : self.used] = True if mask is None else mask.numpy()
        own = np.tri(streams, dtype=bool)
        for number, row in enumerate(rows):
            first = number * streams
            part = slice(before + first, before + first + streams)
            whole[part, : self.used] = whole[row, : self.used]
            whole[part, self.used + first : self.used + first + streams] = own
        ahead = [positions[row] + 1 + j for row in rows for j in range(streams)]
        return ahead, torch.from_numpy(whole)

    @torch.inference_mode()  # a cache that has grown in a pass can be written to nowhere else
    def keep(self, path: Sequence[int], others: Sequence[int]) -> None:
        """The nodes of `path` have become text; of the rest only `others` stay.

        Args:
            path: numbers of nodes from a child of the root downwards.
            others: numbers of nodes in rising order, descendants of the last one of `path`, all
                their ancestors among them; they are numbered anew, from 0.
        """
        kept = [*path, *others]
        if kept != list(range(len(kept))):
            source = torch.tensor(kept, device=self.keys.device) + self.text
            target = slice(self.text, self.text + len(kept))
            self.keys[:, :, target] = self.keys.index_select(2, source)
            self.values[:, :, target] = self.values.index_select(2, source)
        rows = np.array(others, dtype=np.int64)
        sees = self._sees[np.ix_(rows, rows)]
        self._sees[: len(others), : len(others)] = sees
        self._depths = [self._depths[node] - len(path) for node in others]
        self.text += len(path)
        self.nodes = len(others)

    def truncate(self, text: int) -> None:
        """Forget all nodes, and the text behind its first `text` tokens."""
        self.text, self.nodes = min(self.text, text), 0
        self._depths = []

    def sees(self, node: int) -> npt.NDArray[np.bool_]:
        """bool[nodes], the ancestors of a node, itself included."""
        return self._sees[node, : self.nodes]

    def _reserve(self, ahead: int = 0) -> None:
        capacity, wanted = self.keys.shape[2], self.used + ahead
        if wanted > capacity:
            pad = (0, 0, 0, max(wanted, 2 * capacity) - capacity)
            self.keys = torch.nn.functional.pad(self.keys, pad)
            self.values = torch.nn.functional.pad(self.values, pad)
        if self.nodes > len(self._sees):
            grown = max(self.nodes, 2 * len(self._sees))
            more = np.zeros((grown, grown), dtype=bool)
            more[: len(self._sees), : len(self._sees)] = self._sees
            self._sees = more
