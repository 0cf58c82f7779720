"""What may follow a request's text: a token tree with the belief in each node.

Mirror-SD's hypothesis tree (section 3.1). Its nodes are what the target is verifying, behind each
of these the exit's candidates and the draft model's own, and what the draft model says behind any
of them. Node 0 is the root, the text's last token. The draft model's own candidates are ours: where
its likeliest token is not the target's, the target's is most often its second.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from sglang_ext.mirror import text_keys
from sglang_ext.mixture import MixtureWeight

ROOT = 0
UNREAD = -1
_NONE = -1
# What is left to tokens that are not named: at least so much, and each has so many parts of it.
_LEAST_REST, _UNNAMED = 0.02, 8

# Likely next tokens and their probabilities, the best first.
Named = Sequence[tuple[int, float]]


class HypothesisTree:
    """Nodes in an order where every parent precedes its children.

    Attributes:
        tokens, parents: of each node.
        conds: belief in the node once its parent is right, 0 to 1.
        behind: how many tokens were drafted since the last one that the target was shown or named.
        slots: the node's number in the cache (TreeCache); UNREAD: the draft model has not read it.
        predicted: the child that the draft model says follows; -1: it was not asked.
        depths, keys: tokens below the root, and the key of the text that ends with the node.
        guessed: whether it was proposed and the draft model has not confirmed it yet.
        ahead: of a node, what the draft model's streams saw behind its predicted child: tokens and
            their probabilities. `ahead_of_root`: behind the root, when it was drafted.

    Args:
        token, key: the root's.
        trust: in the exit.
    """

    def __init__(self, token: int, key: int, trust: MixtureWeight) -> None:
        self.tokens = [token]
        self.parents = [_NONE]
        self.conds = [1.0]
        self.behind = [0]
        self.slots = [UNREAD]
        self.predicted = [_NONE]
        self.depths = [0]
        self.keys = [key]
        self.guessed = [False]
        self.ahead: dict[int, list[tuple[int, float]]] = {}
        self.ahead_of_root: list[tuple[int, float]] = []
        self._gone = [False]
        self._children: dict[tuple[int, int], int] = {}
        self._trust = trust
        # By node: what the draft model and the exit say of the token behind it.
        self._said: dict[int, dict[int, float]] = {}
        self._foreseen: dict[int, dict[int, float]] = {}
        # Nodes that the target verifies, as far as is known: an outcome is a token behind one.
        self._verified: set[int] = set()

    def __len__(self) -> int:
        return len(self.tokens)

    def child(self, parent: int, token: int) -> int | None:
        """The node of `token` below `parent`; None: there is none."""
        return self._children.get((parent, token))

    def add(self, parent: int, token: int, cond: float, behind: int, guessed: bool = False) -> int:
        """The node of `token` below `parent`, made if it is not there."""
        node = self._children.setdefault((parent, token), len(self.tokens))
        if node == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
            self.conds.append(cond)
            self.behind.append(behind)
            self.slots.append(UNREAD)
            self.predicted.append(_NONE)
            self.depths.append(self.depths[parent] + 1)
            self.keys.append(text_keys.extended(self.keys[parent], token))
            self.guessed.append(guessed)
            self._gone.append(False)
        return node

    def predict(self, node: int, named: Named) -> int:
        """The draft model says what follows `node`; returns the child of the likeliest."""
        self._said[node] = dict(named)
        child = self.add(node, named[0][0], 0.0, self.behind[node] + 1)
        self.guessed[child] = False
        self.predicted[node] = child
        if node in self._verified:
            self._branch(node)
        self._weigh(node)
        return child

    def confidence(self, node: int) -> float:
        """The probability that the draft model gives the child that it predicts behind `node`."""
        return self._said[node][self.tokens[self.predicted[node]]]

    def suppose(self, window: int) -> None:
        """The target is about to verify the first `window` tokens of the chain."""
        self._verify([ROOT, *self.chain()[:window]])

    def show(self, nodes: npt.NDArray[np.void]) -> None:
        """Take what the early exit says (messages.view_dtype); node 0 of it is the root."""
        places = [ROOT]
        for row in range(1, len(nodes)):
            parent = places[min(max(int(nodes["parent"][row]), 0), row - 1)]
            places.append(self.add(parent, int(nodes["token"][row]), 0.0, 0))
        probs = np.exp(np.minimum(nodes["logprobs"].astype(np.float64), 0.0))
        probs = np.nan_to_num(probs)
        for place, tokens, of_tokens in zip(
            places, nodes["candidates"].tolist(), probs.tolist(), strict=True
        ):
            self._foreseen[place] = dict(zip(tokens, of_tokens, strict=True))
        self._verify(places)

    def learn(self, tokens: Sequence[int]) -> None:
        """`tokens` were committed: who has foreseen them is trusted more."""
        node = ROOT
        for token in tokens:
            if node in self._said and node in self._foreseen:
                drafted, foreseen = self._said[node], self._foreseen[node]
                self._trust.note(_share(drafted, token), _share(foreseen, token))
            below = self.child(node, token)
            if below is None:
                return
            node = below

    def _verify(self, places: Sequence[int]) -> None:
        self._verified = set(places)
        for place in places:
            self.behind[place], self.guessed[place] = 0, False
        for place in places:
            self._branch(place)
            self._weigh(place)

    def _branch(self, node: int) -> None:
        """Make nodes of all tokens that are named behind a node: each may be the outcome."""
        for token in {**self._said.get(node, {}), **self._foreseen.get(node, {})}:
            child = self.add(node, token, 0.0, 0)
            self.behind[child], self.guessed[child] = 0, False

    def _weigh(self, node: int) -> None:
        """Have the belief in what stands behind a node follow what was said of it."""
        said, foreseen = self._said.get(node), self._foreseen.get(node)
        for child in self._named_behind(node):
            token = self.tokens[child]
            if said is None or foreseen is None:
                self.conds[child] = _share(said or foreseen or {}, token)
            else:
                self.conds[child] = self._trust.mixed(_share(said, token), _share(foreseen, token))

    def _named_behind(self, node: int) -> Iterable[int]:
        """Children that were predicted, named or are verified."""
        tokens = {**self._said.get(node, {}), **self._foreseen.get(node, {})}
        found = (self._children.get((node, token)) for token in tokens)
        named = {child for child in found if child is not None and not self.guessed[child]}
        return named | {child for child in self._verified if self.parents[child] == node}

    def probs(self) -> list[float]:
        """The belief that the target's output passes through each node."""
        probs = [1.0]
        for node in range(1, len(self.tokens)):
            probs.append(probs[self.parents[node]] * self.conds[node])
        return probs

    def unread(self, window: int, least: float) -> list[tuple[float, int]]:
        """Nodes that could be read next, with their belief; an ancestor always has no less.

        Args:
            window: nodes behind so many drafted tokens are left out.
            least: and those of less belief than this.
        """
        probs = self.probs()
        return [
            (probs[node], node)
            for node in range(1, len(probs))
            if self.slots[node] == UNREAD
            and not self._gone[node]
            and self.behind[node] < window
            and probs[node] >= least
        ]

    def chain(self) -> list[int]:
        """The draft model's own continuation of the text: nodes from the root's child on."""
        path: list[int] = []
        node = self.predicted[ROOT]
        while node != _NONE:
            path.append(node)
            node = self.predicted[node]
        return path

    def seen_ahead(self, node: int) -> list[tuple[int, float]]:
        """What the streams saw behind a node that the draft model had predicted."""
        if node == ROOT:
            return self.ahead_of_root
        above = self.parents[node]
        return self.ahead.get(above, []) if self.predicted[above] == node else []

    def path(self, node: int) -> list[int]:
        """Tokens from below the root to a node."""
        tokens = []
        while node != ROOT:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def drop_guesses(self, nodes: Sequence[int]) -> None:
        """Of these nodes, forget those that a retrieval proposed and nothing has confirmed."""
        for node in nodes:
            if self.guessed[node] or self._gone[self.parents[node]]:
                self._gone[node] = True
                self._children.pop((self.parents[node], self.tokens[node]), None)

    def moved(self, tokens: Sequence[int]) -> tuple["HypothesisTree | None", list[int], list[int]]:
        """The tree when `tokens` were committed.

        Returns:
            the tree below the last of them, None where they lead out of this one; the cached nodes
            that became text, from the root down; and those cached nodes that are in the tree, in
            the order of their new numbers.
        """
        node, path = ROOT, []
        for token in tokens:
            below = self.child(node, token)
            if below is None:
                break
            node = below
            path.append(node)
        read = []
        for place in path:
            if self.slots[place] == UNREAD:
                break
            read.append(self.slots[place])
        if len(path) < len(tokens):
            return None, read, []
        tree, kept = self._below(node)
        return tree, read, kept

    def _below(self, root: int) -> tuple["HypothesisTree", list[int]]:
        tree = HypothesisTree(self.tokens[root], self.keys[root], self._trust)
        tree.ahead_of_root = self.seen_ahead(root)
        places = {root: ROOT}
        for node in range(root + 1, len(self.tokens)):
            above = places.get(self.parents[node])
            if above is None or self._gone[node] or self.guessed[node]:
                continue
            # What was drafted before counts no more: from here on the draft may go as far again.
            places[node] = tree.add(above, self.tokens[node], self.conds[node], 0)
        cached = sorted((self.slots[n], p) for n, p in places.items() if p and self.slots[n] >= 0)
        for number, (_, place) in enumerate(cached):
            tree.slots[place] = number
        for node, place in places.items():
            tree.predicted[place] = places.get(self.predicted[node], _NONE)
            if node in self._said:
                tree._said[place] = self._said[node]
            if tree.predicted[place] != _NONE and node in self.ahead:
                tree.ahead[place] = self.ahead[node]
        return tree, [slot for slot, _ in cached]


def is_sound(nodes: npt.NDArray[np.void], vocab_size: int) -> bool:
    """Whether a view's tokens and parents are possible."""
    tokens = (nodes["token"], nodes["candidates"])
    inside = all(((t >= 0) & (t < vocab_size)).all() for t in tokens)
    rows = np.arange(len(nodes))
    above = (nodes["parent"][1:] >= 0) & (nodes["parent"][1:] < rows[1:])
    return bool(inside and above.all() and not math.isnan(float(nodes["logprobs"].sum())))


def _share(named: Mapping[int, float], token: int) -> float:
    """The probability of a token of which a distribution's likeliest are given."""
    if token in named:
        return named[token]
    return max(_LEAST_REST, 1.0 - sum(named.values())) / _UNNAMED
