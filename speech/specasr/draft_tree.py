"""A draft in the draft model's tokens, and the same tree in the target's."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from speech.specasr.transcript import Transcript
from speech.specasr.vocabulary import Vocabularies, words

ROOT = -1


@dataclass
class DraftTree:
    """A tree below the committed text, parents before children.

    Attributes:
        tokens: of the draft model.
        parents: index of each node's parent; ROOT for the first ones.
        probs: chance that the text passes through the node (the product along its path).
        texts: a node's bytes as far as they are not committed yet; None: those of its token.
        trunk: nodes of the main chain, from the root on.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)
    texts: list[bytes | None] = field(default_factory=list)
    trunk: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int, prob: float, text: bytes | None = None) -> int:
        """Add a node whose chance, given its parent, is `prob`; returns its index."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.probs.append(prob * self.prob(parent))
        self.texts.append(text)
        return len(self.tokens) - 1

    def prob(self, node: int) -> float:
        """A node's chance; the root's is 1."""
        return 1.0 if node == ROOT else self.probs[node]

    def paths(self) -> list[list[int]]:
        """The nodes from the root to each leaf, in the leaves' order."""
        inner = set(self.parents)
        return [self.path(node) for node in range(len(self)) if node not in inner]

    def path(self, node: int) -> list[int]:
        """The nodes from the root to `node`."""
        path = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return path[::-1]


@dataclass(frozen=True)
class TargetTree:
    """A draft in the target's tokens, best nodes first, parents before children.

    Attributes:
        tokens: int64 [n].
        parents: int32 [n], -1 for the root's children.
        probs: float32 [n], never growing from parent to child.
        covered: int32 [n], how many of the draft model's tokens the path to a node completes.
        ends: int32 [n], which of the trunk's tokens (from 0) ends with a node; -1 for none.
        trunk: nodes on the draft's trunk.
    """

    tokens: npt.NDArray[np.int64]
    parents: npt.NDArray[np.int32]
    probs: npt.NDArray[np.float32]
    covered: npt.NDArray[np.int32]
    ends: npt.NDArray[np.int32]
    trunk: int

    def __len__(self) -> int:
        return len(self.tokens)


def to_target(
    tree: DraftTree, transcript: Transcript, vocabularies: Vocabularies, max_nodes: int
) -> TargetTree:
    """The tree of the target's tokens that `tree` stands for, its best `max_nodes` nodes.

    Where vocabularies differ, each path's text is spelled in the target's tokens; a target's token
    has the chance of the draft's node in which it ends, and paths that spell alike share nodes.
    """
    trie = _Trie(tree)
    trunk = 0
    for path in tree.paths():
        node = ROOT
        spelled = _spell_path(tree, path, transcript, vocabularies)
        on_trunk = bool(tree.trunk) and path[-1] == tree.trunk[-1]
        for piece in spelled:
            place = path.index(piece.source)
            node = trie.child(node, piece, place + piece.is_whole)
            if on_trunk and piece.is_whole:
                trie.ends[node] = place
        if on_trunk:
            trunk = len(spelled)
    return trie.best(max_nodes, trunk)


class _Piece(NamedTuple):
    """A token of the target's, the draft's node in which it ends, and whether both end there."""

    token: int
    source: int
    is_whole: bool


def _spell_path(
    tree: DraftTree, path: Sequence[int], transcript: Transcript, vocabularies: Vocabularies
) -> list[_Piece]:
    """A path in the target's tokens."""
    out: list[_Piece] = []
    # Of the run of text tokens under way: its bytes, and where in them nodes end.
    text, ends = b"", list[tuple[int, int]]()
    open_text, open_tokens = transcript.tail, transcript.tail_tokens

    def flush() -> None:
        nonlocal text, ends, open_text, open_tokens
        out.extend(_spell_text(text, ends, open_text, open_tokens, vocabularies))
        text, ends, open_text, open_tokens = b"", [], b"", []

    for node in path:
        token = tree.tokens[node]
        own = vocabularies.draft.bytes_of[token]
        if own is None:
            flush()
            special = vocabularies.special_to_target(token)
            if special is None:
                return out
            out.append(_Piece(special, node, True))
        elif vocabularies.direct:
            out.append(_Piece(token, node, True))
        else:
            known = tree.texts[node]
            text += own if known is None else known
            ends.append((len(text), node))
    flush()
    return out


def _spell_text(
    text: bytes,
    ends: Sequence[tuple[int, int]],
    open_text: bytes,
    open_tokens: Sequence[int] | None,
    vocabularies: Vocabularies,
) -> list[_Piece]:
    """`text`, which follows the committed open word, in the target's tokens.

    Args:
        ends: where in `text` each of the draft's nodes ends, and the node.
    """
    target = vocabularies.target
    if not text:
        return []
    first, *others = words(open_text + text)
    tokens = list(target.spell(first))
    held = 0 if open_tokens is None else len(open_tokens)
    if open_text and (open_tokens is None or tokens[:held] != list(open_tokens)):
        # The target spelled this word in its own way so far; what is left of it stands alone.
        tokens = target.spell_text(first[len(open_text) :])
    else:
        tokens = tokens[held:]
    for word in others:
        tokens += target.spell(word)
    out: list[_Piece] = []
    position = index = 0
    for token in tokens:
        position += len(target.bytes_of[token] or b"")
        while index + 1 < len(ends) and ends[index][0] < position:
            index += 1
        end, node = ends[index]
        out.append(_Piece(token, node, end == position))
    return out


class _Trie:
    """The target's nodes, each with the draft's nodes that stand behind it."""

    def __init__(self, tree: DraftTree) -> None:
        self._tree = tree
        self._nodes: dict[tuple[int, int], int] = {}
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._sources: list[set[int]] = []
        self._covered: list[int] = []
        self.ends: dict[int, int] = {}

    def child(self, parent: int, piece: _Piece, covered: int) -> int:
        """The child of `parent` with the piece's token, made if it is not there."""
        node = self._nodes.get((parent, piece.token))
        if node is None:
            node = len(self._tokens)
            self._nodes[parent, piece.token] = node
            self._tokens.append(piece.token)
            self._parents.append(parent)
            self._sources.append(set())
            self._covered.append(covered)
        self._sources[node].add(piece.source)
        return node

    def best(self, max_nodes: int, trunk: int) -> TargetTree:
        probs: list[float] = []
        for parent, sources in zip(self._parents, self._sources, strict=True):
            above = 1.0 if parent == ROOT else probs[parent]
            # Different nodes are different ways for the text to go on: their chances add up.
            probs.append(min(above, sum(self._tree.probs[source] for source in sources)))
        order = sorted(range(len(probs)), key=lambda node: (-probs[node], node))[:max_nodes]
        place = {node: i for i, node in enumerate(order)} | {ROOT: ROOT}
        return TargetTree(
            np.array([self._tokens[node] for node in order], dtype=np.int64),
            np.array([place[self._parents[node]] for node in order], dtype=np.int32),
            np.array([probs[node] for node in order], dtype=np.float32),
            np.array([self._covered[node] for node in order], dtype=np.int32),
            np.array([self.ends.get(node, -1) for node in order], dtype=np.int32),
            min(trunk, max_nodes),
        )
