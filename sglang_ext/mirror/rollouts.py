"""Branch-complete rollouts: what a draft pass reads next, and the pass itself.

Mirror-SD, section 3.1. Outcomes (accepted node r, correction v) are followed best first by their
probability, several in one pass under a tree mask, until the time is used that the target's suffix
takes. Each pass reads the nodes in which there is most belief per second, over all requests, so
that a larger batch follows fewer branches of each (appendix D.1).
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from sglang_ext.mirror.causal_lm import CausalLM, Feed
from sglang_ext.mirror.draft_text import DraftText
from sglang_ext.mirror.hypothesis_tree import ROOT, Named
from sglang_ext.mirror.payoff import RowCosts, rows_that_pay, rows_to_read_ahead, streams_for

# Rows of text that a pass reads at most: what is asked meanwhile waits for the pass.
CHUNK = 64
_MOST_ROWS = 32
# What is less likely is not followed: drafting may share its cores with others.
_LEAST_BELIEF = 0.004
# Nodes for which the text itself is searched in a pass, and what is taken of it.
_GUESSED_FOR = 4
_GUESSES = 6
# An outcome that is later than expected by this factor has no known time.
_LATE = 1.25


@dataclass
class Part:
    """What a pass reads of one request: text, then nodes, parents before children."""

    text: DraftText
    unread: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)

    @property
    def reads_root(self) -> bool:
        """Whether the last token of the text is among it, whose prediction is wanted then."""
        after = self.text.cache.text + len(self.unread)
        return bool(self.unread) and after == len(self.text.tokens)


@dataclass(frozen=True)
class Drafted:
    """What the draft model has said of one request: rows of messages.NODE."""

    text: DraftText
    nodes: list[tuple[int, int, int, float]]


@dataclass
class Totals:
    """What was done since the start, in the order of messages.TOTAL_NAMES.

    Attributes:
        steps, rows: passes, and what they read.
        tokens: that were drafted.
        seconds: of all passes.
        reading_seconds: of those that read text alone, and draft nothing.
        asked_steps, asked_tokens: passes over a text whose draft was waited for, counted for each
            such text, and the tokens that they drafted for it.
    """

    steps: int = 0
    rows: int = 0
    tokens: int = 0
    seconds: float = 0.0
    reading_seconds: float = 0.0
    asked_steps: int = 0
    asked_tokens: int = 0


class Rollouts:
    """Drafts for the texts of an executor.

    Args:
        model: the draft model.
        costs: what its passes cost.
        window: tokens of a continuation (gamma).
    """

    def __init__(self, model: CausalLM, costs: RowCosts, window: int) -> None:
        self._model = model
        self._costs = costs
        self._window = window
        self._streams = 0  # behind a row, of the pass that comes
        self.totals = Totals()

    def next_pass(self, texts: Sequence[DraftText], now: float) -> list[Part]:
        """What to read next: what is waited for, then likely outcomes, then text.

        Args:
            texts: all requests, the one that was used last at the end.
            now: seconds, as time.perf_counter.
        """
        most = 0 if self._model.streams is None else len(self._model.streams)
        self._streams = streams_for(len(texts), most)
        asked = [text for text in texts if text.wanted]
        if asked:
            return self._for_asked(asked)
        return self._for_outcomes(texts, now) or self._for_text(texts)

    def run(self, parts: Sequence[Part]) -> list[Drafted]:
        """Read these parts in one pass."""
        begun = time.perf_counter()
        feeds = []
        for number, part in enumerate(parts):
            nodes = [part.text.tree.tokens[node] for node in part.nodes]
            parents = part.text.cached_parents(part.nodes)
            wanted = len(nodes) + part.reads_root
            # Nobody will ask what streams saw behind the less likely ones.
            looks = bool(part.text.wanted) or number < _GUESSED_FOR
            ahead = self._rows_ahead(part) if looks else []
            rows = (part.unread, nodes, parents)
            feeds.append(Feed(part.text.cache, *rows, wanted, ahead, self._streams))
        roots = [part.reads_root for part in parts]
        said = self._model.forward(feeds)
        pairs = zip(said.tokens.tolist(), said.probs.tolist(), strict=True)
        named = [list(zip(*row, strict=True)) for row in pairs]
        drafted, row = list[Drafted](), 0
        for part, root, feed in zip(parts, roots, feeds, strict=True):
            nodes = [ROOT, *part.nodes] if root else part.nodes
            end = row + len(nodes)
            for place in feed.ahead:
                node = ROOT if place < len(part.unread) else part.nodes[place - len(part.unread)]
                seen = named[end : end + feed.streams]
                part.text.tree.ahead[node] = [likeliest for likeliest, *_ in seen]
                end += feed.streams
            drafted.append(self._take(part, nodes, named[row : row + len(nodes)]))
            row = end
        self._count(feeds, drafted, time.perf_counter() - begun)
        return [one for one in drafted if one.nodes]

    def _cost(self, texts: int) -> Callable[[int], float]:
        """Seconds of a pass by its rows, the streams of so many texts beside them."""
        more = self._streams * texts
        return lambda rows: self._costs(rows + more)

    def _rows_ahead(self, part: Part) -> list[int]:
        """Rows of a part behind which the streams look ahead.

        Those where its likeliest path may end: the node that there is most belief in, or the text's
        end, and the deepest of those that are guessed.
        """
        tree, read = part.text.tree, len(part.unread)
        if not part.text.streams or not (part.nodes or part.reads_root):
            return []
        sure = [row for row, node in enumerate(part.nodes) if not tree.guessed[node]]
        guessed = [row for row, node in enumerate(part.nodes) if tree.guessed[node]]
        rows = {read - 1} if part.reads_root else set[int]()
        if sure and not part.reads_root:
            probs = tree.probs()
            rows.add(read + max(sure, key=lambda row: probs[part.nodes[row]]))
        if guessed:
            rows.add(read + max(guessed, key=lambda row: tree.depths[part.nodes[row]]))
        return sorted(rows)

    def _take(self, part: Part, nodes: Sequence[int], named: Sequence[Named]) -> Drafted:
        """What was predicted behind `nodes`; guesses that were not confirmed say nothing."""
        text, said = part.text, []
        tree = text.tree
        for node, likely in zip(nodes, named, strict=True):
            if not tree.guessed[node]:
                tree.predict(node, likely)
                said.append((tree.keys[node], len(text.tokens) + tree.depths[node], *likely[0]))
        tree.drop_guesses(nodes)
        self.totals.tokens += len(said)
        text.trim()
        return Drafted(text, said)

    def _count(self, feeds: Sequence[Feed], drafted: Sequence[Drafted], seconds: float) -> None:
        totals = self.totals
        rows = sum(feed.rows + feed.rows_ahead for feed in feeds)
        totals.steps += 1
        totals.rows += rows
        totals.seconds += seconds
        if not any(feed.predicted for feed in feeds):
            totals.reading_seconds += seconds
        asked = [one for one in drafted if one.text.wanted and one.nodes]
        totals.asked_steps += len(asked)
        totals.asked_tokens += sum(len(one.nodes) for one in asked)
        if rows <= _MOST_ROWS:
            self._costs.observe(rows, seconds)

    def _for_asked(self, asked: Sequence[DraftText]) -> list[Part]:
        # A text that is not read yet would keep the others waiting.
        ready = [text for text in asked if len(text.unread) <= _MOST_ROWS] or asked[:1]
        parts = []
        for text in ready:
            leaf = text.next_of_chain()
            if leaf == ROOT and not text.unread:
                text.forget_nodes()  # it was read, but what follows it is not known
            part = self._text_first(text)
            if leaf is not None and leaf != ROOT:
                part.nodes.append(leaf)
            if leaf is not None and (part.nodes or part.reads_root):
                part.nodes += self._guessed(text, leaf)
            if part.unread or part.nodes:  # else there is enough, as `next_of_chain` says
                parts.append(part)
        return self._most_of(parts)

    def _guessed(self, text: DraftText, leaf: int) -> list[int]:
        missing = text.wanted - len(text.tree.chain()) - 1
        return text.guess(leaf, min(_GUESSES, missing)) if missing > 0 else []

    def _most_of(self, parts: list[Part]) -> list[Part]:
        """The parts without the guesses that cost more than they promise."""
        must = sum(len(p.unread) + sum(not p.text.tree.guessed[n] for n in p.nodes) for p in parts)
        guesses = []
        for part in parts:
            tree, probs = part.text.tree, part.text.tree.probs()
            fresh = [node for node in part.nodes if tree.guessed[node]]
            base = max(probs[tree.parents[fresh[0]]], 1e-9) if fresh else 1.0
            guesses += [(probs[node] / base, part, node) for node in fresh]
        guesses.sort(key=lambda guess: -guess[0])
        beliefs = [1.0] * max(must, 1) + [belief for belief, _, _ in guesses]
        cost = self._cost(sum(part.text.streams for part in parts))
        kept = max(0, rows_that_pay(beliefs, cost, float("inf")) - max(must, 1))
        for _, part, node in guesses[kept:]:
            part.nodes.remove(node)
            part.text.tree.drop_guesses([node])
        return parts

    def _for_outcomes(self, texts: Iterable[DraftText], now: float) -> list[Part]:
        pool: list[tuple[float, DraftText, int]] = []
        time_left = float("inf")
        for text in texts:
            if not text.mirrored or len(text.unread) > _MOST_ROWS:
                continue
            pool += [(1.0, text, ROOT)] if text.unread else []
            pool += [(p, text, n) for p, n in text.tree.unread(self._window, _LEAST_BELIEF)]
            time_left = min(time_left, _time_left(text, now))
        pool.sort(key=lambda item: -item[0])  # stable: parents stay in front of their children
        if pool:
            pool = self._with_guesses(pool)
        beliefs = [belief for belief, _, _ in pool[:_MOST_ROWS]]
        looking = {id(text) for _, text, _ in pool[:_MOST_ROWS] if text.streams}
        cost = self._cost(min(len(looking), _GUESSED_FOR))
        rows = rows_to_read_ahead(beliefs, cost, time_left)
        self._drop(pool[rows:])
        return self._parts_of(pool[:rows])

    def _with_guesses(
        self, pool: list[tuple[float, DraftText, int]]
    ) -> list[tuple[float, DraftText, int]]:
        more = []
        for belief, text, node in pool[:_GUESSED_FOR]:
            deep = self._window - text.tree.behind[node] - 1
            if deep > 0:
                for guess in text.guess(node, min(_GUESSES, deep)):
                    chance = text.tree.conds[guess]
                    above = text.tree.parents[guess]
                    while above != node:
                        chance *= text.tree.conds[above]
                        above = text.tree.parents[above]
                    more.append((belief * chance, text, guess))
        return sorted([*pool, *more], key=lambda item: -item[0])

    @staticmethod
    def _drop(pool: Iterable[tuple[float, DraftText, int]]) -> None:
        for _, text, node in pool:
            if text.tree.guessed[node]:
                text.tree.drop_guesses([node])

    def _parts_of(self, pool: Iterable[tuple[float, DraftText, int]]) -> list[Part]:
        parts: dict[int, Part] = {}
        for _, text, node in pool:
            if id(text) not in parts:
                parts[id(text)] = Part(text, list(text.unread))
            if node != ROOT:
                parts[id(text)].nodes.append(node)
        for part in parts.values():
            part.nodes.sort()  # as they were made: parents before children
        return list(parts.values())

    def _for_text(self, texts: Sequence[DraftText]) -> list[Part]:
        for text in reversed(texts):
            if text.unread:
                return [self._text_first(text)]
        return []

    @staticmethod
    def _text_first(text: DraftText) -> Part:
        return Part(text, list(text.unread[:CHUNK]))


def _time_left(text: DraftText, now: float) -> float:
    """Seconds until the outcome of the pass under way is expected; inf: not known."""
    if text.viewed_at is None or text.suffix_s is None:
        return float("inf")
    passed = now - text.viewed_at
    return float("inf") if passed > _LATE * text.suffix_s else text.suffix_s - passed
