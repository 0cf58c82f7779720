"""Streams of a draft model: an embedding each, and low-rank changes of its matrices for them.

Stream j (1 to s) behind a token stands where the j-th token after it will. It sees what that token
sees, the token itself and the streams before it, and says what follows the place that it stands at.
Rows of text and nodes are computed as without streams, so the main stream says what it said before.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

MATRICES = ("qkv", "out", "gate_up", "down")


@dataclass(frozen=True)
class LowRank:
    """A change of a matrix: x -> up(down(x)).

    Attributes:
        down, up: [rank, K] and [N, rank].
    """

    down: torch.Tensor
    up: torch.Tensor

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, K] -> [rows, N]."""
        wide = x.to(self.down.dtype)
        return (wide @ self.down.T @ self.up.T).to(x.dtype)


@dataclass(frozen=True)
class LookaheadStreams:
    """A draft model's streams.

    Attributes:
        embeddings: [streams, hidden], what stands in a token's place.
        changes: of each layer, by the names of MATRICES.
    """

    embeddings: torch.Tensor
    changes: Sequence[dict[str, LowRank]]

    def __len__(self) -> int:
        return len(self.embeddings)

    @property
    def rank(self) -> int:
        """Of the changes."""
        return len(self.changes[0][MATRICES[0]].down)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors by the names that a file has them under."""
        yield "embeddings", self.embeddings
        for number, layer in enumerate(self.changes):
            for name, change in layer.items():
                yield f"layers.{number}.{name}.down", change.down
                yield f"layers.{number}.{name}.up", change.up

    @classmethod
    def of(cls, tensors: dict[str, torch.Tensor], layers: int) -> "LookaheadStreams":
        """From tensors by name.

        Raises:
            KeyError: one is missing.
        """
        changes = [
            {
                name: LowRank(
                    tensors[f"layers.{number}.{name}.down"], tensors[f"layers.{number}.{name}.up"]
                )
                for name in MATRICES
            }
            for number in range(layers)
        ]
        return cls(tensors["embeddings"], changes)

    def check(self, width: int, sizes: Sequence[Mapping[str, tuple[int, int]]]) -> None:
        """Refuse streams that do not fit a model.

        Args:
            width: hidden, of its states.
            sizes: [N, K] of each layer's matrices, by name.

        Raises:
            ValueError: they are of a model of other sizes; it names the first tensor that is.
        """
        if len(self.changes) != len(sizes):
            raise ValueError(
                f"the streams are of {len(self.changes)} layers, the draft model has {len(sizes)}"
            )
        expected = {"embeddings": (len(self), width)}
        for number, layer in enumerate(sizes):
            for name, (rows, columns) in layer.items():
                expected[f"layers.{number}.{name}.down"] = (self.rank, columns)
                expected[f"layers.{number}.{name}.up"] = (rows, self.rank)
        for name, tensor in self.tensors():
            if tuple(tensor.shape) != expected[name]:
                raise ValueError(
                    f"the streams' {name} is {tuple(tensor.shape)}, for the draft model it must "
                    f"be {expected[name]}"
                )

    @classmethod
    def fresh(
        cls,
        streams: int,
        rank: int,
        embeddings: torch.Tensor,
        sizes: Sequence[Mapping[str, tuple[int, int]]],
    ) -> "LookaheadStreams":
        """Streams that have learned nothing: they change no matrix yet.

        Args:
            embeddings: [n, hidden] of tokens, on the CPU, in whose mean each stream begins.
            sizes: as in `check`.
        """
        spread = 0.02 * embeddings.std() * torch.randn(streams, embeddings.shape[1])
        changes = [
            {
                name: LowRank(torch.randn(rank, columns) / columns**0.5, torch.zeros(rows, rank))
                for name, (rows, columns) in layer.items()
            }
            for layer in sizes
        ]
        return cls(embeddings.mean(dim=0) + spread, changes)

    def to(self, device: str) -> "LookaheadStreams":
        """On another device."""
        moved = {name: tensor.to(device) for name, tensor in self.tensors()}
        return LookaheadStreams.of(moved, len(self.changes))
