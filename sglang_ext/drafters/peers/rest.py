"""REST, a peer of SSSD's: continuations from one static suffix array, by their frequency.

Source: He et al., REST: Retrieval-Based Speculative Decoding (arXiv 2311.08252), with the
settings of its code (github.com/FasterDecoding/REST): the longest suffix of 16 to 2 tokens that
stands in the datastore, its first 5,000 places in suffix order, 10 tokens behind each, and the 64
most frequent prefixes of these as a tree. Nothing is drafted from the prompt, and nothing is
learned from what is served; the datastore is what /add_external_corpus brings.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numba import njit

from sglang_ext.drafters import Drafter, DrafterContext, DraftRequest
from sglang_ext.tree import TokenTree

LONGEST_SUFFIX, SHORTEST_SUFFIX = 16, 2
MOST_PLACES = 5000
CONTINUATION = 10
MOST_NODES = 64
_END = 0


@dataclass(frozen=True)
class SuffixArray:
    """Documents and their sorted suffixes.

    `datastores` sorts by fewer tokens than REST compares, so it has a suffix array of its own.

    Attributes:
        tokens: int64[n], token ids + 1; each document is followed by _END, the last one by enough
            of them for every read.
        suffixes: int64[m], where the suffixes begin, sorted by LONGEST_SUFFIX + CONTINUATION
            tokens at least.
    """

    tokens: npt.NDArray[np.int64]
    suffixes: npt.NDArray[np.int64]

    @classmethod
    def of(cls, documents: Sequence[Sequence[int]]) -> "SuffixArray":
        """Sort documents: by prefix doubling (Manber and Myers 1990), some 5 sorts in all."""
        depth = LONGEST_SUFFIX + CONTINUATION
        parts = [np.append(np.asarray(d, dtype=np.int64) + 1, _END) for d in documents]
        tokens = np.concatenate([*parts, np.full(2 * depth, _END, dtype=np.int64)])
        rank, sorted_by = tokens, 1
        while sorted_by < depth:
            behind = np.append(rank[sorted_by:], np.zeros(sorted_by, dtype=np.int64))
            rank = np.unique(rank * (rank.max() + 1) + behind, return_inverse=True)[1]
            sorted_by *= 2
        suffixes = np.argsort(rank, kind="stable")
        return cls(tokens, suffixes[tokens[suffixes] != _END])


class RestDrafter(Drafter):
    """Drafts from named corpora alone."""

    def __init__(self, context: DrafterContext) -> None:
        self._corpora: dict[str, list[Sequence[int]]] = {}
        self._store: SuffixArray | None = None

    def propose(self, requests: Sequence[DraftRequest], max_nodes: int) -> list[TokenTree]:
        """The most frequent continuations of each request's last tokens."""
        return [self._tree(request, min(max_nodes, MOST_NODES)) for request in requests]

    def add_corpus(self, name: str, documents: Sequence[Sequence[int]]) -> int:
        """Build the suffix array anew with a named corpus; returns its number of tokens."""
        if name in self._corpora:
            raise ValueError(f"corpus {name!r} is there already; remove it first")
        # Anew and not in place: corpora come in another thread than the scheduler's.
        self._corpora = self._corpora | {name: list(documents)}
        self._build()
        return self.list_corpora()[name]

    def remove_corpus(self, name: str) -> None:
        """Build it anew without the corpus."""
        if name in self._corpora:
            self._corpora = {n: d for n, d in self._corpora.items() if n != name}
            self._build()

    def list_corpora(self) -> dict[str, int]:
        """Tokens by named corpus."""
        return {name: sum(map(len, documents)) for name, documents in self._corpora.items()}

    def _build(self) -> None:
        documents = [document for docs in self._corpora.values() for document in docs]
        self._store = SuffixArray.of(documents) if documents else None

    def _tree(self, request: DraftRequest, max_nodes: int) -> TokenTree:
        store = self._store
        if store is None:
            return TokenTree.empty()
        query = np.array(self._last_tokens(request), dtype=np.int64) + 1
        low, high, length = longest_match(store.tokens, store.suffixes, query, SHORTEST_SUFFIX)
        high = min(high, low + MOST_PLACES)
        if low == high:
            return TokenTree.empty()
        tokens, parents, counts = continuations(
            store.tokens, store.suffixes[low:high], length, CONTINUATION
        )
        # Most frequent first; of equals the one nearer to the root, so parents come first.
        order = np.argsort(-counts, kind="stable")[:max_nodes]
        place = np.full(len(tokens) + 1, -1, dtype=np.int32)  # the last one: the root's
        place[order] = np.arange(len(order), dtype=np.int32)
        share = (counts[order] / (high - low)).astype(np.float32)
        return TokenTree(tokens[order] - 1, place[parents[order]], share)

    @staticmethod
    def _last_tokens(request: DraftRequest) -> list[int]:
        missing = LONGEST_SUFFIX - len(request.output)
        if missing <= 0:
            return list(request.output[-LONGEST_SUFFIX:])
        return [*request.prompt[-missing:], *request.output]


@njit(nogil=True)
def longest_match(tokens, suffixes, query, shortest):
    """(low, high, length): suffixes[low:high] begin with the last `length` tokens of the query.

    The longest such end of the query, of `shortest` tokens at least; low == high: there is none.
    tokens, suffixes: a SuffixArray's. query: int64[n], ids + 1.
    """
    for start in range(max(0, len(query) - shortest + 1)):
        low, high = 0, len(suffixes)
        for upper in (False, True):
            left, right = low, high
            while left < right:
                middle = (left + right) // 2
                order = _order(tokens, suffixes[middle], query, start)
                if order < 0 or (upper and order == 0):
                    left = middle + 1
                else:
                    right = middle
            if upper:
                high = left
            else:
                low = left
        if low < high:
            return low, high, len(query) - start
    return 0, 0, 0


@njit(nogil=True)
def _order(tokens, position, query, start):
    """-1, 0 or 1 as the suffix at `position` sorts before, begins with, or after query[start:]."""
    for k in range(len(query) - start):
        token = tokens[position + k]
        if token != query[start + k]:
            return -1 if token < query[start + k] else 1
    return 0


@njit(nogil=True)
def continuations(tokens, suffixes, skip, depth):
    """All prefixes of what follows the first `skip` tokens of sorted suffixes, as a tree.

    Of `depth` tokens at most, none beyond a document's end. Returns tokens int64[n] (ids + 1),
    parents int64[n] (-1: the root; a parent comes before its children), counts int64[n].
    """
    most = len(suffixes) * depth
    out = np.empty(most, dtype=np.int64)
    parents = np.empty(most, dtype=np.int64)
    counts = np.zeros(most, dtype=np.int64)
    path = np.full(depth, -1, dtype=np.int64)  # the nodes of the suffix before: equals are next
    n = 0
    for i in range(len(suffixes)):
        parent, same = np.int64(-1), True
        for d in range(depth):
            token = tokens[suffixes[i] + skip + d]
            if token == _END:
                path[d:] = -1
                break
            if not (same and path[d] >= 0 and out[path[d]] == token):
                same = False
                path[d] = n
                out[n] = token
                parents[n] = parent
                n += 1
            parent = path[d]
            counts[parent] += 1
    return out[:n], parents[:n], counts[:n]
