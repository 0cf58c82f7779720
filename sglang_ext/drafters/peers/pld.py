"""PLD, a peer of SSSD's: what followed the last few tokens where they stood first.

Source: Saxena, Prompt Lookup Decoding (github.com/apoorvumang/prompt-lookup-decoding, 2023), with
its own settings: n-grams of 3 tokens, then 2, then 1, the earliest match, 10 tokens of it.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from numba import njit

from sglang_ext.drafters import Drafter, DraftRequest
from sglang_ext.tree import TokenTree

MAX_NGRAM = 3
DRAFT_TOKENS = 10
# PLD has no probabilities; the worker's budget, where it is asked for, learns what they are worth.
_PROB = 0.8


class PromptLookupDrafter(Drafter):
    """Drafts from the request's own prompt and output."""

    def start(self, request: DraftRequest) -> None:
        """Keep the tokens in one growing array."""
        request.state = _Tokens(request.prompt)

    def propose(self, requests: Sequence[DraftRequest], max_nodes: int) -> list[TokenTree]:
        """A chain of at most 10 tokens each."""
        return [self._chain(request, min(max_nodes, DRAFT_TOKENS)) for request in requests]

    @staticmethod
    def _chain(request: DraftRequest, length: int) -> TokenTree:
        seen: _Tokens = request.state
        seen.extend(request.output[len(seen) - len(request.prompt) :])
        start = continuation(seen.tokens, MAX_NGRAM)
        if start < 0:
            return TokenTree.empty()
        return TokenTree.chain(seen.tokens[start : start + length].tolist(), _PROB)


class _Tokens:
    """int64 tokens that grow at the end, in amortised constant time each."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._buffer = np.empty(max(256, 2 * len(tokens)), dtype=np.int64)
        self._size = 0
        self.extend(tokens)

    def __len__(self) -> int:
        return self._size

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        return self._buffer[: self._size]

    def extend(self, tokens: Sequence[int]) -> None:
        end = self._size + len(tokens)
        if end > len(self._buffer):
            self._buffer = np.resize(self._buffer, 2 * end)
        self._buffer[self._size : end] = tokens
        self._size = end


@njit(nogil=True)
def continuation(tokens, max_ngram):
    """Where the tokens go on that follow the earliest match of the last ones; -1: no match.

    tokens: int64[n]. The longest n-gram of at most `max_ngram` tokens that stands anywhere before
    the end counts.
    """
    n = len(tokens)
    for size in range(min(max_ngram, n - 1), 0, -1):
        for start in range(n - size):
            k = 0
            while k < size and tokens[start + k] == tokens[n - size + k]:
                k += 1
            if k == size:
                return start + size
    return -1
