"""The arrays that compiled retrieval reads have the columns that columns.py names."""

import numpy as np

from datastores import InputTrie, RetrievalConfig, Snapshot
from datastores import columns as col
from datastores.segment import Document, build_segment
from datastores.workers import Workspace


def test_a_sub_index_is_described_by_its_columns():
    static = build_segment([Document(np.arange(9, dtype=np.int32))], 100)
    live = build_segment([Document(np.arange(5, dtype=np.int32))], 100)
    table = Snapshot((live,), (static,), 100).table
    assert table.shape == (2, col.SEGMENT_COLUMNS)
    assert table[0].nbytes == col.SEGMENT_BYTES
    for row, segment in zip(table, (static, live), strict=True):
        assert row[col.TOKENS_AT] == segment.tokens.ctypes.data
        assert row[col.NUM_TOKENS] == segment.tokens.size
        assert row[col.SUFFIXES_AT] == segment.suffixes.ctypes.data
        assert row[col.NUM_SUFFIXES] == segment.suffixes.size
        assert row[col.LANDMARKS_AT] == segment.landmarks.ctypes.data
        assert row[col.NUM_LANDMARKS] == segment.landmarks.size
    assert table[:, col.IS_LIVE].tolist() == [0, 1]


def test_a_request_is_described_by_its_columns():
    trie = InputTrie()
    trie.extend([1, 2, 3])
    trie.extend([4])
    assert trie._row.size == col.TRIE_COLUMNS and trie._row.nbytes == col.TRIE_BYTES
    assert trie._row[col.SEEN_AT] == trie._tokens.ctypes.data
    assert trie._row[col.SEEN_SIZE] == 4 and trie._row[col.PROMPT_SIZE] == 3


def test_options_and_working_memory_have_their_columns():
    config = RetrievalConfig(prefix_length=5, max_samples=7, max_input_scan=11, min_matches=13)
    limits = config.limits
    assert limits.size == col.LIMITS
    named = [limits[i] for i in (col.PREFIX_LENGTH, col.MAX_SAMPLES, col.MAX_INPUT_SCAN)]
    assert [*named, limits[col.MIN_MATCHES]] == [5, 7, 11, 13]
    assert config.weights.size == col.SOURCE_WEIGHTS
    assert config.length_weights.shape[0] == config.novelty.shape[0] == col.ORIGINS
    workspace = Workspace()
    table = workspace.fit(config, 1)
    assert table.size == col.WORKSPACE_COLUMNS
    children = workspace._arrays[col.CHILDREN_AT]
    assert table[col.CHILDREN_AT] == children.ctypes.data
    assert table[col.SLOTS] == children.size
