"""What a block drafter keeps of a request while it runs."""

import numpy as np
import numpy.typing as npt
import torch


class RequestMemory:
    """Keys and values of a source, and of the last tokens written behind it.

    Entries know their places, so their order does not matter: what is written goes round in the
    room behind the source.

    Attributes:
        last: float32[width], the newest entry: of the token before the last one that was written,
            of the source's last token before that.

    Args:
        room: float32[decoder layers, 2, source + window, heads, width / heads]; of the source's
            entries there are keys and values, or whoever makes it writes them.
        source: entries of it.
    """

    def __init__(self, room: torch.Tensor, source: int, last: torch.Tensor) -> None:
        self._room, self._source, self._written = room, source, 0
        self._window = room.shape[2] - source
        self.last = last

    @classmethod
    def of_source(
        cls, keys_values: torch.Tensor, last: torch.Tensor, window: int
    ) -> "RequestMemory":
        """With nothing written yet.

        Args:
            keys_values: float32[decoder layers, 2, s, heads, width / heads], of the source.
            last: float32[width], the entry of its last token.
            window: most entries of what was written; at least 1.
        """
        layers, two, source, heads, size = keys_values.shape
        room = keys_values.new_empty((layers, two, source + window, heads, size))
        room[:, :, :source] = keys_values
        return cls(room, source, last.clone())

    def add(self, keys_values: torch.Tensor, last: torch.Tensor) -> None:
        """Take entries of tokens that were written, in their order.

        Args:
            keys_values: float32[decoder layers, 2, m, heads, width / heads], m at most the window.
            last: float32[width], the last one's entry.
        """
        at = torch.from_numpy(self.slots_for(keys_values.shape[2]))
        self._room[:, :, at.to(self._room.device)] = keys_values
        self.last = last.clone()

    def slots_for(self, count: int) -> npt.NDArray[np.int64]:
        """int64[count], where further entries of tokens that were written belong in the room.

        Whoever asks writes their keys and values there.
        """
        at = self._source + (self._written + np.arange(count)) % self._window
        self._written += count
        return at

    @property
    def capacity(self) -> int:
        """Entries that there is room for."""
        return self._source + self._window

    @property
    def address(self) -> int:
        """Where float32[decoder layers, 2, capacity, width] begins, on a CPU."""
        return self._room.data_ptr()

    @property
    def count(self) -> int:
        """Entries that there are."""
        return self._source + min(self._written, self._window)

    def addresses(self, layer: int) -> tuple[int, int]:
        """Where a decoder layer's keys and values begin, on a CPU."""
        return self._room[layer, 0].data_ptr(), self._room[layer, 1].data_ptr()

    @property
    def entries(self) -> torch.Tensor:
        """float32[decoder layers, 2, m, heads, width / heads], a view of what there is."""
        return self._room[:, :, : self.count]

    @property
    def nbytes(self) -> int:
        """What it takes, however much was written."""
        return self._room.nbytes + self.last.nbytes
