"""Names of the numbered columns that compiled retrieval reads and that Python fills.

Plain ints at the top of a module are constants to numba: a name costs nothing. Each group is the
columns of one array, in its order, and ends with how many there are; all are of eight bytes. The
columns of a search and of a call, which no other module knows, are in search.py and kernel.py.
"""

WORD_BYTES = 8

# A sub-index, a row of Snapshot.table: addresses and sizes of its arrays; 1 if it is live.
(TOKENS_AT, NUM_TOKENS, SUFFIXES_AT, NUM_SUFFIXES, LANDMARKS_AT, NUM_LANDMARKS, IS_LIVE,
 SEGMENT_COLUMNS) = range(8)  # fmt: skip
SEGMENT_BYTES = WORD_BYTES * SEGMENT_COLUMNS

# What a request has seen, InputTrie's row: addresses of its tokens and of the two links of each
# position, how many tokens there are, and how many of them are the prompt's; addresses of the hash
# tables of last positions, how many slots each has, and how many tokens there may be before it
# grows or forgets.
(SEEN_AT, SAME_ONE_AT, SAME_TWO_AT, SEEN_SIZE, PROMPT_SIZE, LAST_ONE_AT, LAST_TWO_AT, LAST_SLOTS,
 FULL_AT, TRIE_COLUMNS) = range(10)  # fmt: skip
TRIE_BYTES = WORD_BYTES * TRIE_COLUMNS

# What a request may read of all sub-indices of a call: the first one's row, and how many.
FIRST_SEGMENT, SEGMENTS, SHARE_COLUMNS = range(3)
SHARE_BYTES = WORD_BYTES * SHARE_COLUMNS

# RetrievalConfig.limits, and RetrievalConfig.weights (float64).
(PREFIX_LENGTH, MAX_MATCH_LENGTH, BRANCH_LENGTH, MAX_SAMPLES, MAX_INPUT_SAMPLES, MAX_INPUT_SCAN,
 MIN_MATCHES, LIMITS) = range(8)  # fmt: skip
DATASTORE_WEIGHT, DATASTORE_CAP, SOURCE_WEIGHTS = range(3)

# Rows of RetrievalConfig.length_weights and .novelty, columns of a node's weights.
OF_INPUT, OF_DATASTORE, ORIGINS = range(3)

# A thread's working memory (Workspace): addresses of the tree, its hash table of children, the
# heap, the draft, and what searches write; then how many slots the hash table has.
(NODES_AT, WEIGHTS_AT, KEYS_AT, CHILDREN_AT, HEAP_PROBS_AT, HEAP_KEYS_AT, DRAFT_TOKENS_AT,
 DRAFT_PARENTS_AT, DRAFT_PROBS_AT, DRAFT_SOURCES_AT, OCCURRENCES_AT, INTERVALS_AT, SEARCHES_AT,
 SAMPLES_AT, SLOTS, WORKSPACE_COLUMNS) = range(16)  # fmt: skip

# Suffixes that begin with what is searched for: the first, and the one behind the last.
FIRST, BEHIND, INTERVAL_COLUMNS = range(3)
INTERVAL_BYTES = WORD_BYTES * INTERVAL_COLUMNS
