"""The tokens that a block drafter knows: the frequent ones of the target's vocabulary."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]

# Rows of the drafter's embedding before the kept tokens'. What can be predicted begins at UNKNOWN:
# class 0 is "a token that was not kept", at which a drafted chain ends.
PADDING, MASK, UNKNOWN, FIRST = 0, 1, 2, 3


class KeptTokens:
    """The target's token ids as rows of the drafter's embedding, and back.

    Attributes:
        tokens: int64[n], token ids without repeats; those that can be drafted come first.
        outputs: how many of them can be drafted; the rest are only read, in sources.
    """

    def __init__(self, tokens: Ids, outputs: int, vocab_size: int) -> None:
        """Raises ValueError: these are no different ids of 0 .. vocab_size - 1."""
        tokens = np.asarray(tokens, dtype=np.int64)
        if tokens.ndim != 1 or not 1 <= outputs <= len(tokens):
            raise ValueError(f"{outputs} of {tokens.shape} tokens cannot be drafted")
        if tokens.min() < 0 or tokens.max() >= vocab_size or len(np.unique(tokens)) < len(tokens):
            raise ValueError(f"kept tokens must be different ids of 0..{vocab_size - 1}")
        self.tokens = tokens
        self.outputs = outputs
        self._rows = np.full(vocab_size, UNKNOWN, dtype=np.int64)
        self._rows[tokens] = FIRST + np.arange(len(tokens))

    @property
    def num_rows(self) -> int:
        """Rows of the embedding."""
        return FIRST + len(self.tokens)

    @property
    def num_classes(self) -> int:
        """What the drafter chooses from at each place: the kept outputs, and UNKNOWN."""
        return 1 + self.outputs

    def rows(self, ids: npt.ArrayLike) -> Ids:
        """int64[n], the row of each token id; UNKNOWN where it was not kept."""
        return self._rows[np.asarray(ids, dtype=np.int64)]

    def output_rows(self, ids: npt.ArrayLike) -> Ids:
        """As `rows`, UNKNOWN too where a token cannot be drafted."""
        rows = self.rows(ids)
        return np.where(rows < FIRST + self.outputs, rows, UNKNOWN)

    def ids(self, rows: npt.ArrayLike) -> Ids:
        """int64[n], the token ids of rows of kept tokens; -1 for the others."""
        rows = np.asarray(rows, dtype=np.int64)
        return np.where(rows >= FIRST, self.tokens[np.maximum(rows - FIRST, 0)], -1)

    @classmethod
    def most_frequent(
        cls,
        sources: npt.NDArray[np.int64],
        outputs: npt.NDArray[np.int64],
        most_outputs: int,
        most_sources: int,
        always: Iterable[int],
    ) -> "KeptTokens":
        """The most frequent tokens of outputs, and of sources those that are not among them.

        Args:
            sources, outputs: int64[vocab_size], how often each token is there.
            always: tokens that can be drafted however rare they are (those that end an output).
        """
        counts = outputs.copy()
        counts[list(always)] = outputs.max(initial=0) + 1
        drafted = _top(counts, most_outputs)
        rest = sources.copy()
        rest[drafted] = 0
        return cls(np.concatenate([drafted, _top(rest, most_sources)]), len(drafted), len(counts))


def _top(counts: npt.NDArray[np.int64], most: int) -> Ids:
    """The `most` tokens with the highest counts, those that never occur left out."""
    order = np.argsort(-counts, kind="stable")[:most]
    return order[counts[order] > 0]
