"""One request, as the draft executor follows it: its text, its cache, what may follow."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from datastores import Continuations, InputTrie, SupposedDrafts
from sglang_ext.mirror import text_keys
from sglang_ext.mirror.hypothesis_tree import ROOT, UNREAD, HypothesisTree
from sglang_ext.mirror.tree_cache import ROOT as CACHED_ROOT
from sglang_ext.mirror.tree_cache import TreeCache
from sglang_ext.mixture import MixtureWeight

# Beyond these a request's tree begins anew.
_MOST_NODES = 2048
_MOST_CACHED_NODES = 512
_SUFFIX_FADE = 0.2


class DraftText:
    """A request's text, and what the draft model knows of it.

    Attributes:
        tokens: the committed text, the prompt included.
        cache: keys and values of its beginning and of nodes behind it.
        tree: what may follow it.
        wanted: tokens that the drafter waits for; 0: it does not wait.
        ask: the number of its last ask.
        mirrored: the target has shown what it verifies: there is drafting to hide.
        viewed_at: when the pass whose exit was seen last began, in seconds; None: no pass runs
            that is known of.
        suffix_s: how long after a view its outcome comes, learned; None: none has come.
        streams: whether the draft model's streams may draft for it.

    Args:
        tokens: its beginning, at least one.
        cache: an empty one.
        retrieves: whether the text itself may draft for the draft model (`guess`).
        streams: whether the model's streams may.
        window: tokens that the target verifies of a chain (gamma).
        trust: in the exit; None: one of its own.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        cache: TreeCache,
        retrieves: bool = True,
        streams: bool = True,
        window: int = 0,
        trust: MixtureWeight | None = None,
    ) -> None:
        self.tokens = list(tokens)
        self._window = window
        self._trust = trust or MixtureWeight()
        self._retrieves = retrieves
        self.streams = streams
        self.cache = cache
        self._key = text_keys.of_text(self.tokens)
        self.tree = HypothesisTree(self.tokens[-1], self._key, self._trust)
        self.wanted = 0
        self.ask = 0
        self.mirrored = False
        self.viewed_at: float | None = None
        self.suffix_s: float | None = None
        self._trie: InputTrie | None = None

    def extend(self, tokens: Sequence[int], now: float) -> None:
        """`tokens` were committed: what leads elsewhere is forgotten, the rest is kept."""
        if self.viewed_at is not None:
            taken, self.viewed_at = now - self.viewed_at, None
            last = taken if self.suffix_s is None else self.suffix_s
            self.suffix_s = last + _SUFFIX_FADE * (taken - last)
        self.tree.learn(tokens)
        root_is_read = self.cache.text == len(self.tokens)
        self.tokens.extend(tokens)
        self._key = text_keys.of_text(tokens, self._key)
        tree, path, kept = self.tree.moved(tokens)
        if not root_is_read:
            assert not path and not kept, "nodes are read behind the whole text"
        elif path or kept:
            self.cache.keep(path, kept)
        else:
            self.cache.truncate(self.cache.text)
        self.tree = tree or HypothesisTree(self.tokens[-1], self._key, self._trust)

    def suppose(self) -> None:
        """Draft for what the target is about to verify, as far as that can be known."""
        if self.mirrored:
            self.tree.suppose(self._window)

    def show(self, nodes: npt.NDArray[np.void], now: float) -> bool:
        """Take what the early exit says; False where it is of another text.

        Args:
            nodes: messages.view_dtype, sound (hypothesis_tree.is_sound).
            now: when it was said.
        """
        if int(nodes["token"][0]) != self.tokens[-1]:
            return False
        self.tree.show(nodes)
        self.mirrored, self.viewed_at = True, now
        return True

    def forget_nodes(self) -> None:
        """Begin the tree anew."""
        # The root is read again: what follows it is in no cache.
        self.cache.truncate(len(self.tokens) - 1)
        self.tree = HypothesisTree(self.tokens[-1], self._key, self._trust)

    def trim(self) -> None:
        """Begin the tree anew if it has grown too large."""
        if len(self.tree) > _MOST_NODES or self.cache.nodes > _MOST_CACHED_NODES:
            self.forget_nodes()

    @property
    def unread(self) -> Sequence[int]:
        """The text that the draft model has not read."""
        return self.tokens[self.cache.text :]

    def next_of_chain(self) -> int | None:
        """The node to read for a longer chain: the root where it was not read; None: long enough.

        The chain is what the drafter waits for.
        """
        chain = self.tree.chain()
        if len(chain) >= self.wanted:
            return None
        return chain[-1] if chain else ROOT

    def drafted(self) -> list[tuple[int, int, int, float]]:
        """The chain so far, as rows of messages.NODE."""
        tree, length, above, rows = self.tree, len(self.tokens), ROOT, []
        for node in tree.chain():
            depth = tree.depths[above]
            rows.append(
                (tree.keys[above], length + depth, tree.tokens[node], tree.confidence(above))
            )
            above = node
        return rows

    def guess(self, node: int, most: int) -> list[int]:
        """Nodes below one, for the draft model to confirm: what its streams saw, and what it finds.

        Those come first that the streams saw; then what the text itself suggests, as its tokens
        went on where it stood so before.
        """
        seen = self._seen_ahead(node, most)
        return seen + (self._retrieved(node, most - len(seen)) if self._retrieves else [])

    def _seen_ahead(self, node: int, most: int) -> list[int]:
        made: list[int] = []
        for token, prob in self.tree.seen_ahead(node)[:most]:
            if self.tree.child(node, token) is not None:
                break  # it is read when there is enough belief in it
            behind = self.tree.behind[node] + 1
            node = self.tree.add(node, token, prob, behind, guessed=True)
            made.append(node)
        return made

    def _retrieved(self, node: int, most: int) -> list[int]:
        """Retrieval as SSSD's, from the request's own tokens."""
        if most < 1:
            return []
        if self._trie is None:
            self._trie = InputTrie()
        self._trie.extend(self.tokens[len(self._trie) :])
        path = self.tree.path(node)
        if len(path) > self._trie.room:
            return []
        supposed = SupposedDrafts([self._trie], [None], Continuations.one(path), most)
        supposed.make()
        [draft] = supposed.drafts
        places: list[int] = []
        for token, parent, prob in zip(
            draft.tokens.tolist(), draft.parents.tolist(), draft.probs.tolist(), strict=True
        ):
            above = places[parent] if parent >= 0 else node
            # What is in the tree already is read when there is enough belief in it.
            if above < 0 or self.tree.child(above, token) is not None:
                places.append(UNREAD)
                continue
            before = float(draft.probs[parent]) if parent >= 0 else 1.0
            behind = self.tree.behind[node] + 1
            places.append(self.tree.add(above, token, prob / before, behind, guessed=True))
        return [place for place in places if place >= 0]

    def cached_parents(self, nodes: Sequence[int]) -> list[int]:
        """What TreeCache.take wants of nodes that are to be read; they get their slots' numbers."""
        parents = []
        for number, node in enumerate(nodes, self.cache.nodes):
            assert self.tree.slots[node] == UNREAD
            above = self.tree.parents[node]
            parents.append(CACHED_ROOT if above == ROOT else self.tree.slots[above])
            self.tree.slots[node] = number
        return parents
