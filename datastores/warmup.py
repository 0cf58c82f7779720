"""Compiles (or loads from numba's cache) all that retrieval runs, before the first request."""

import numpy as np

from .input_trie import InputTrie, extend_all
from .retrieval import retrieve
from .segment import Document, Snapshot, build_segment, merge, without_documents

_VOCAB_SIZES = (100, 100_000)  # one per token dtype
_BATCH = 64  # enough for retrieval to start its threads


def warm_up(vocab_size: int | None = None) -> None:
    """Takes seconds the first time on a machine, a fraction of one later.

    vocab_size: prepare for this vocabulary only; None: for every kind.
    """
    text = np.array([1, 2, 3, 4, 5] * 4, np.int32)
    trie = InputTrie()
    trie.extend(text)
    extend_all([trie], [[1]])
    for size in _VOCAB_SIZES if vocab_size is None else (max(vocab_size, 8),):
        segment = build_segment([Document(text)], size)
        without_documents(merge(segment, segment, size), np.array([True, False]), size)
        retrieve([trie] * _BATCH, Snapshot((segment,), (), size), 4)
