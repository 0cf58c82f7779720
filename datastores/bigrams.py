"""What the target itself says after a single token: drafts of what was never seen.

Source: N-Grammys (arXiv 2411.03786), the model-derived bigram. The table is made elsewhere, by
asking the target (sglang_ext/drafters/target_bigrams.py); here it is only read.
"""

from dataclasses import dataclass

import numpy as np

from .config import DatastoreError

# Next tokens that a table may hold of each token.
MOST_FOLLOWERS = 8


@dataclass(frozen=True, eq=False)
class Bigrams:
    """The likeliest next tokens of every token.

    Raises DatastoreError if the arrays do not fit each other.
    """

    tokens: np.ndarray
    """int32[vocabulary, k], the tokens likeliest to follow each; -1: not known."""
    probs: np.ndarray
    """float32[vocabulary, k], their probabilities."""

    def __post_init__(self) -> None:
        for name, dtype in (("tokens", np.int32), ("probs", np.float32)):
            array = getattr(self, name)
            if array.dtype != dtype or array.ndim != 2 or not array.flags.c_contiguous:
                raise DatastoreError(
                    f"bigrams: {name} must be a contiguous {np.dtype(dtype)} matrix, got "
                    f"{array.dtype} of shape {array.shape}"
                )
        vocabulary, k = self.tokens.shape
        if self.probs.shape != (vocabulary, k) or not 1 <= k <= MOST_FOLLOWERS:
            raise DatastoreError(
                f"bigrams: tokens and probs must have one shape of 1 to {MOST_FOLLOWERS} columns, "
                f"got {self.tokens.shape} and {self.probs.shape}"
            )
        if vocabulary and not -1 <= self.tokens.min() <= self.tokens.max() < vocabulary:
            raise DatastoreError(f"bigrams: tokens must be -1 or below {vocabulary}")
        if not ((self.probs >= 0) & (self.probs <= 1)).all():
            raise DatastoreError("bigrams: probs must be from 0 to 1")

    @property
    def known(self) -> int:
        """Tokens whose next tokens are known."""
        return int((self.tokens[:, 0] >= 0).sum()) if self.tokens.size else 0
