"""Compiles (or loads from numba's cache) all that retrieval runs, before the first request."""

import numpy as np

from .config import RetrievalConfig
from .input_trie import InputTrie
from .retrieval import retrieve
from .segment import Document, Snapshot, build_segment, merge, without_documents

_VOCAB_SIZES = (100, 100_000)  # one per token dtype


def warm_up(vocab_size: int | None = None) -> None:
    """Takes seconds the first time on a machine, a fraction of one later.

    vocab_size: prepare for this vocabulary only; None: for every kind.
    """
    config = RetrievalConfig()
    text = [1, 2, 3, 4, 5] * 4
    trie = InputTrie(config)
    trie.extend(text)
    retrieve([trie], None, 4, config)
    for size in _VOCAB_SIZES if vocab_size is None else (max(vocab_size, 8),):
        segment = build_segment([Document(trie.tokens)], size)
        retrieve([trie], Snapshot((segment,), (), size), 4, config)
        without_documents(merge(segment, segment, size), np.array([True, False]), size)
