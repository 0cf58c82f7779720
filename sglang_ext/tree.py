"""Token trees, and their packing into the tensors that verification reads.

A draft is always a token tree; a chain is a tree without branches. Node 0 of a packed tree is
the root, the last accepted token. No SGLang here: everything is NumPy, on the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numba
import numpy as np
import numpy.typing as npt

from datastores.origins import Origin

NO_PARENT = -1
# Bits of TokenTree.sources that `datastores` does not set itself.
SOURCE_PREVIOUS = int(Origin.PREVIOUS_OUTPUT)
SOURCE_REALIGNED = int(Origin.REALIGNED)


@dataclass(frozen=True)
class TokenTree:
    """A draft without its root, in an order where every parent precedes its children.

    Attributes:
        tokens: int64[n], the proposed token ids.
        parents: int32[n], the index of each node's parent in these arrays; -1 is the root.
        probs: float32[n], the drafter's estimate that the target's output passes through the
            node (the product along its path, so it never grows from parent to child).
        sources: int8[n], a bit mask of where each node comes from (bits of `Origin`);
            None: the drafter does not say.
        logprobs: float32[n], the drafter's own log-probability of each token after those on its
            path (not the product); NaN where it has none; None: it has none of any.
    """

    tokens: npt.NDArray[np.int64]
    parents: npt.NDArray[np.int32]
    probs: npt.NDArray[np.float32]
    sources: npt.NDArray[np.int8] | None = None
    logprobs: npt.NDArray[np.float32] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def empty(cls) -> "TokenTree":
        """A tree of no nodes: a plain decode step."""
        return _EMPTY

    @classmethod
    def chain(
        cls, tokens: Sequence[int], prob: float = 0.9, first: float | None = None
    ) -> "TokenTree":
        """One branch.

        Args:
            prob: the chance that a token is right once those before it are.
            first: the first token's chance, where it is another.
        """
        n = len(tokens)
        probs = np.power(np.float32(prob), np.arange(1, n + 1, dtype=np.float32))
        if first is not None:
            probs *= np.float32(first / prob)
        return cls(np.asarray(tokens, dtype=np.int64), np.arange(-1, n - 1, dtype=np.int32), probs)

    def first(self, n: int) -> "TokenTree":
        """The subtree of the first `n` nodes."""
        if n >= len(self):
            return self
        sources = None if self.sources is None else self.sources[:n]
        logprobs = None if self.logprobs is None else self.logprobs[:n]
        return TokenTree(self.tokens[:n], self.parents[:n], self.probs[:n], sources, logprobs)

    def best(self, n: int) -> "TokenTree":
        """The subtree of the `n` nodes of the highest probability, best first."""
        # Stable, so that a parent stays in front of a child of equal probability.
        order = np.argsort(-self.probs, kind="stable")[:n]
        new_index = np.full(len(self) + 1, NO_PARENT, np.int32)  # the last one: the root's
        new_index[order] = np.arange(len(order), dtype=np.int32)
        return TokenTree(
            self.tokens[order],
            new_index[self.parents[order]],
            self.probs[order],
            None if self.sources is None else self.sources[order],
            None if self.logprobs is None else self.logprobs[order],
        )

    def depths(self) -> npt.NDArray[np.int32]:
        """int32[n], 1 for the root's children."""
        return _depths(self.parents)

    def clipped(self, max_depth: int) -> "TokenTree":
        """The subtree of the nodes no deeper than `max_depth`."""
        if len(self) <= max_depth:
            return self
        return self._kept(self.depths() <= max_depth)

    def before(self, ends: npt.NDArray[np.int64]) -> "TokenTree":
        """The subtree without nodes that hold one of the tokens `ends`, int64[k], or lie behind."""
        if not len(self) or not len(ends):
            return self
        return self._kept(_before(self.tokens, self.parents, ends))

    def _kept(self, keep: npt.NDArray[np.bool_]) -> "TokenTree":
        """The nodes of `keep`, bool[n]; the parent of each must be among them."""
        if keep.all():
            return self
        new_index = (np.cumsum(keep) - 1).astype(np.int32)
        parents = self.parents[keep]
        return TokenTree(
            self.tokens[keep],
            np.where(parents == NO_PARENT, NO_PARENT, new_index[parents]).astype(np.int32),
            self.probs[keep],
            None if self.sources is None else self.sources[keep],
            None if self.logprobs is None else self.logprobs[keep],
        )

    def path(self, tokens: Sequence[int]) -> npt.NDArray[np.bool_]:
        """bool[n], the nodes that an output continuing with `tokens` passes through."""
        return _path(self.tokens, self.parents, np.asarray(tokens, dtype=np.int64))

    def check_lengths(self) -> None:
        """Raise ValueError, naming the field, if its arrays are not equally long.

        Log-probabilities are looked at besides: no token has one above 0.
        """
        n = len(self.tokens)
        if self.sources is not None and len(self.sources) != n:
            raise ValueError(f"sources must be as many as tokens, {n}, got {len(self.sources)}")
        if len(self.parents) != n or len(self.probs) != n:
            raise ValueError(
                f"tokens, parents and probs must have one length, got {n}, "
                f"{len(self.parents)} and {len(self.probs)}"
            )
        if self.logprobs is not None:
            if len(self.logprobs) != n:
                raise ValueError(
                    f"logprobs must be as many as tokens, {n}, got {len(self.logprobs)}"
                )
            if (self.logprobs > 0).any():
                raise ValueError("logprobs must be at most 0, or NaN where there is none")

    def check(self, vocab_size: int) -> None:
        """Raise ValueError, naming the field, if this is not a tree over `vocab_size` tokens."""
        self.check_lengths()
        n = len(self.tokens)
        if n == 0:
            return
        if self.tokens.min() < 0 or self.tokens.max() >= vocab_size:
            raise ValueError(f"tokens must be in 0..{vocab_size - 1}")
        if self.parents.min() < NO_PARENT or (self.parents >= np.arange(n)).any():
            raise ValueError("parents[i] must be -1 (the root) or an earlier node")


_EMPTY = TokenTree(
    np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32), np.empty(0, dtype=np.float32)
)


def check_all(trees: Sequence[TokenTree], vocab_size: int) -> None:
    """`TokenTree.check` of them all, in one call where all are right."""
    sizes = np.array([len(tree.tokens) for tree in trees], dtype=np.int64)
    if not sizes.any() or not _all_right(
        np.concatenate([tree.tokens for tree in trees]),
        np.concatenate([tree.parents for tree in trees]),
        sizes,
        vocab_size,
    ):
        for tree in trees:
            tree.check(vocab_size)
        return
    for tree in trees:
        tree.check_lengths()


def merged(trees: Sequence[TokenTree], max_nodes: int) -> TokenTree:
    """One tree of all their nodes, the best `max_nodes`: a path that several have is there once.

    A node's probability is the highest that any of them gives it, its sources are all of theirs.
    Its log-probability is that of the first tree that gives one.
    """
    index: dict[tuple[int, int], int] = {}
    parents: list[int] = []
    probs: list[float] = []
    sources: list[int] = []
    logprobs: list[float] = []
    for tree in trees:
        places: list[int] = []
        for node in range(len(tree)):
            parent = int(tree.parents[node])
            parent = places[parent] if parent >= 0 else NO_PARENT
            place = index.setdefault((parent, int(tree.tokens[node])), len(index))
            if place == len(parents):
                parents.append(parent)
                probs.append(0.0)
                sources.append(0)
                logprobs.append(np.nan)
            # Never above its parent's, which another tree may rate lower.
            prob = float(tree.probs[node])
            probs[place] = max(probs[place], min(prob, probs[parent] if parent >= 0 else prob))
            sources[place] |= 0 if tree.sources is None else int(tree.sources[node])
            if tree.logprobs is not None and np.isnan(logprobs[place]):
                logprobs[place] = float(tree.logprobs[node])
            places.append(place)
    return TokenTree(
        np.array([token for _, token in index], dtype=np.int64),
        np.array(parents, dtype=np.int32),
        np.array(probs, dtype=np.float32),
        np.array(sources, dtype=np.int8),
        np.array(logprobs, dtype=np.float32)
        if any(tree.logprobs is not None for tree in trees)
        else None,
    ).best(max_nodes)


@dataclass(frozen=True)
class PackedTrees:
    """A batch of trees, each padded to `width` nodes, root included.

    Padding nodes see only themselves (and the prefix) and are linked to nothing, so no walk
    reaches them.

    Attributes:
        tokens: int64[bs, width]; column 0 holds the roots.
        parents: int32[bs, width]; -1 for the root and for padding.
        depths: int64[bs, width]; a node's position is its request's length + depth.
        mask: bool[bs, width, width]; mask[b, i, j] tells that node i sees node j.
        next_token, next_sibling: int64[bs, width]; a node's first child and its next sibling,
            -1 for none (the links of SGLang's speculative/eagle_info.py).
        sizes: int64[bs]; real nodes of each tree, root included.
        logprobs: float32[bs, width], the drafters' own (TokenTree.logprobs); NaN where there is
            none; None: there is none of any.
    """

    tokens: npt.NDArray[np.int64]
    parents: npt.NDArray[np.int32]
    depths: npt.NDArray[np.int64]
    mask: npt.NDArray[np.bool_]
    next_token: npt.NDArray[np.int64]
    next_sibling: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32] | None = None

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    def nodes(self) -> npt.NDArray[np.int64]:
        """The flat indices (row * width + node) of all that is not padding."""
        return np.flatnonzero(np.arange(self.width) < self.sizes[:, None])


def pack(roots: Sequence[int], trees: Sequence[TokenTree], width: int) -> PackedTrees:
    """Pack `trees` below their `roots` into arrays of `width` nodes a request.

    Trees larger than width - 1 nodes are cut to their first width - 1.
    """
    bs = len(roots)
    tokens = np.zeros((bs, width), dtype=np.int64)
    parents = np.full((bs, width), NO_PARENT, dtype=np.int32)
    nodes = np.array([len(tree.tokens) for tree in trees], dtype=np.int64)
    tokens[:, 0] = roots
    if nodes.any():
        of_trees = np.concatenate([tree.tokens for tree in trees])
        _place(tokens, parents, of_trees, np.concatenate([t.parents for t in trees]), nodes)
    logprobs = None
    if any(tree.logprobs is not None for tree in trees):
        logprobs = np.full((bs, width), np.nan, dtype=np.float32)
        for row, tree in zip(logprobs, trees, strict=True):
            if tree.logprobs is not None:
                own = tree.logprobs[: width - 1]
                row[1 : 1 + len(own)] = own
    return linked(tokens, parents, 1 + np.minimum(nodes, width - 1), logprobs)


def linked(
    tokens: npt.NDArray[np.int64],
    parents: npt.NDArray[np.int32],
    sizes: npt.NDArray[np.int64],
    logprobs: npt.NDArray[np.float32] | None = None,
) -> PackedTrees:
    """The packed trees of these nodes; what is shown by `parents` is made from them."""
    depths, mask, next_token, next_sibling = _link(parents, sizes)
    return PackedTrees(tokens, parents, depths, mask, next_token, next_sibling, sizes, logprobs)


@numba.njit(cache=True, nogil=True)
def _place(tokens, parents, of_trees, their_parents, nodes):
    """Bring trees that stand one behind the other to their rows, behind the roots."""
    first = 0
    for row, size in enumerate(nodes):
        for i in range(min(size, tokens.shape[1] - 1)):
            tokens[row, 1 + i] = of_trees[first + i]
            parents[row, 1 + i] = their_parents[first + i] + 1
        first += size


@numba.njit(cache=True, nogil=True)
def _all_right(tokens, parents, sizes, vocab_size):
    """Whether all tokens and parents of these trees, one behind the other, are possible."""
    if len(parents) != len(tokens):
        return False
    first = 0
    for size in sizes:
        for i in range(size):
            right = 0 <= tokens[first + i] < vocab_size
            if not (right and NO_PARENT <= parents[first + i] < i):
                return False
        first += size
    return True


@numba.njit(cache=True, nogil=True)
def _depths(parents):
    depths = np.empty(len(parents), dtype=np.int32)
    for i in range(len(parents)):
        depths[i] = 1 if parents[i] < 0 else depths[parents[i]] + 1
    return depths


@numba.njit(cache=True, nogil=True)
def _before(tokens, parents, ends):
    keep = np.ones(len(tokens), dtype=np.bool_)
    for i in range(len(tokens)):
        if parents[i] >= 0 and not keep[parents[i]]:
            keep[i] = False
        for end in ends:
            if tokens[i] == end:
                keep[i] = False
    return keep


@numba.njit(cache=True, nogil=True)
def _path(tokens, parents, output):
    on_path = np.zeros(len(tokens), dtype=np.bool_)
    node, depth = -1, 0
    for i in range(len(tokens)):
        if depth < len(output) and parents[i] == node and tokens[i] == output[depth]:
            on_path[i] = True
            node, depth = i, depth + 1
    return on_path


@numba.njit(cache=True, nogil=True)
def _link(parents, sizes):
    bs, width = parents.shape
    depths = np.zeros((bs, width), dtype=np.int64)
    mask = np.zeros((bs, width, width), dtype=np.bool_)
    next_token = np.full((bs, width), -1, dtype=np.int64)
    next_sibling = np.full((bs, width), -1, dtype=np.int64)
    for b in range(bs):
        for i in range(width):
            mask[b, i, i] = True
        for i in range(1, sizes[b]):
            parent = parents[b, i]
            depths[b, i] = depths[b, parent] + 1
            for j in range(i):
                if mask[b, parent, j]:
                    mask[b, i, j] = True
        # Backwards, so that the first child of a node is the one written last.
        for i in range(sizes[b] - 1, 0, -1):
            parent = parents[b, i]
            next_sibling[b, i] = next_token[b, parent]
            next_token[b, parent] = i
    return depths, mask, next_token, next_sibling


@numba.njit(cache=True, nogil=True)
def walk(tokens, next_token, next_sibling, predicted):
    """Follow each tree from its root while the target's own token is one of the drafted ones.

    Args:
        tokens, next_token, next_sibling: int64[bs, width], see PackedTrees.
        predicted: int64[bs, width], the target's token after each node.

    Returns:
        accept_index: int32[bs, width], flat indices (row * width + node) of the nodes on the
            accepted path, root first, then -1.
        accept_lens: int32[bs], nodes on the path = tokens committed, the bonus included.
    """
    bs, width = tokens.shape
    accept_index = np.full((bs, width), -1, dtype=np.int32)
    accept_lens = np.empty(bs, dtype=np.int32)
    for b in range(bs):
        node, n = 0, 0
        while node >= 0:
            accept_index[b, n] = b * width + node
            n += 1
            node = child_with(tokens[b], next_token[b], next_sibling[b], node, predicted[b, node])
        accept_lens[b] = n
    return accept_index, accept_lens


@numba.njit(cache=True, nogil=True)
def child_with(tokens, next_token, next_sibling, node, token):
    """The child of `node` that holds `token`, or -1 (arrays of one tree)."""
    child = next_token[node]
    while child >= 0 and tokens[child] != token:
        child = next_sibling[child]
    return child
