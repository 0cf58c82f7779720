"""The draft executor: follows requests over the token channel, and drafts for them.

It runs in a process of its own (draft_process.py). What it gets is checked before it is used; what
it cannot follow it says so (UNKNOWN), and the drafter tells it the text anew.
"""

import dataclasses
import time
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sglang_ext.mirror import messages
from sglang_ext.mirror.causal_lm import CausalLM, Feed
from sglang_ext.mirror.channel import Channel
from sglang_ext.mirror.draft_text import DraftText
from sglang_ext.mirror.hypothesis_tree import is_sound
from sglang_ext.mirror.messages import Kind
from sglang_ext.mirror.payoff import RowCosts
from sglang_ext.mirror.rollouts import Rollouts
from sglang_ext.mirror.shared_ring import Record
from sglang_ext.mirror.tree_cache import ROOT
from sglang_ext.mixture import MixtureWeight

MOST_TEXTS = 1024
_IDLE_S = 0.5
# While an outcome is expected sooner than any pass ends.
_PAUSE_S = 0.002
_TOTALS_EVERY_S = 0.2
_MIB = 1 << 20
_MEASURED_TEXT, _MEASURED_TIMES = 32, 2


class Executor:
    """Drafts for the requests that come over a channel, until it is told to stop.

    Args:
        channel: its end of the channel.
        model: the draft model.
        window: tokens of a continuation (gamma).
        retrieves: whether retrieval drafts for the draft model.
        cache_mb: MiB that keys and values may take in all; who was used last keeps theirs.
    """

    def __init__(
        self, channel: Channel, model: CausalLM, window: int, retrieves: bool, cache_mb: float
    ) -> None:
        self._channel = channel
        self._model = model
        self._most_bytes = int(cache_mb * _MIB)
        self._retrieves = retrieves
        self._window, self._trust = window, MixtureWeight()
        self._rollouts = Rollouts(model, measured_costs(model), window)
        if retrieves:  # compiled, or loaded from numba's cache, before anybody waits for it
            DraftText([0, 0], model.new_cache()).guess(0, 1)
        # By the drafter's number; the one that was used last stands at the end.
        self._texts: OrderedDict[int, DraftText] = OrderedDict()
        self._views: dict[int, list[npt.NDArray[np.void]]] = {}
        self._told_at, self._told = 0.0, (0, 0)
        self._stopped = False
        # A continuation and its outcomes must fit behind a text.
        self._most_tokens = model.shape.max_positions - 3 * window - 2

    def run(self) -> None:
        """Draft until a STOP comes.

        Raises:
            ChannelError: the drafter wrote what cannot be.
        """
        shape = self._model.shape
        numbers = (0, 0, 0, shape.max_positions, 0, shape.vocab_size)
        self._channel.send(Record(Kind.READY, *numbers))
        while not self._stopped:
            for record in self._channel.receive():
                self._take(record)
            worked = self.step()
            if not worked or time.perf_counter() > self._told_at + _TOTALS_EVERY_S:
                self._tell_totals()
            if not worked:
                expecting = any(text.viewed_at is not None for text in self._texts.values())
                self._channel.wait(_PAUSE_S if expecting else _IDLE_S)

    def step(self) -> bool:
        """One pass of the draft model; False where there is nothing to do."""
        parts = self._rollouts.next_pass(list(self._texts.values()), time.perf_counter())
        if parts:
            for drafted in self._rollouts.run(parts):
                self._send_nodes(self._number_of(drafted.text), drafted.nodes)
            self._make_room()
        done = self._answer()
        return bool(parts) or done

    def _answer(self) -> bool:
        """Tell who waits that what was asked for is there."""
        done = False
        for number, text in self._texts.items():
            if text.wanted and text.next_of_chain() is None:
                self._finish_ask(number, text)
                done = True
        return done

    def _finish_ask(self, number: int, text: DraftText) -> None:
        text.wanted = 0
        text.suppose()
        length = len(text.tokens)
        self._channel.send(Record(Kind.DONE, number, length=length, number=text.ask))

    def _take(self, record: Record) -> None:
        if record.kind == Kind.TEXT:
            self._take_text(record)
        elif record.kind == Kind.VIEW:
            self._take_view(record)
        elif record.kind == Kind.ASK:
            self._take_ask(record)
        elif record.kind == Kind.CLOSE:
            self._texts.pop(record.request, None)
            self._views.pop(record.request, None)
        elif record.kind == Kind.STOP:
            self._stopped = True

    def _take_text(self, record: Record) -> None:
        tokens = messages.tokens_of(record)
        text = self._texts.get(record.request)
        known = 0 if text is None or record.first == 0 else len(text.tokens)
        size = self._model.shape.vocab_size
        inside = len(tokens) > 0 and tokens.min() >= 0 and tokens.max() < size
        possible = inside and record.first + len(tokens) <= self._most_tokens
        if not possible or record.first != known:
            self._refuse(record.request, known, forever=not possible)
            return
        self._views.pop(record.request, None)
        if text is not None and text.wanted:
            self._finish_ask(record.request, text)
        if text is None or record.first == 0:
            retrieves = self._retrieves and not record.number & messages.NO_RETRIEVAL
            streams = self._model.streams is not None and not record.number & messages.NO_STREAMS
            cache = self._model.new_cache()
            self._texts[record.request] = DraftText(
                tokens.tolist(), cache, retrieves, streams, self._window, self._trust
            )
            while len(self._texts) > MOST_TEXTS:
                self._refuse(next(iter(self._texts)), 0)
        else:
            text.extend(tokens.tolist(), record.time)
            text.suppose()
        self._texts.move_to_end(record.request)

    def _refuse(self, number: int, known: int, forever: bool = False) -> None:
        """Say that a request is not followed (any more).

        Args:
            forever: telling its text anew would not help.
        """
        text = self._texts.pop(number, None)
        if text is not None and text.wanted:
            self._finish_ask(number, text)
        self._channel.send(Record(Kind.UNKNOWN, number, length=known, number=int(forever)))

    def _take_view(self, record: Record) -> None:
        nodes = messages.view_of(record)
        text = self._texts.get(record.request)
        if text is None or record.length != len(text.tokens):
            return
        parts = self._views.setdefault(record.request, [])
        if record.first == 0:
            parts.clear()
        parts.append(nodes)
        held = sum(map(len, parts))
        if record.first + record.items != held:  # a part is missing: it will not come
            self._views.pop(record.request)
        elif held == record.total:
            whole = np.concatenate(self._views.pop(record.request))
            if is_sound(whole, self._model.shape.vocab_size):
                text.show(whole, record.time)

    def _take_ask(self, record: Record) -> None:
        text = self._texts.get(record.request)
        if text is None or record.length != len(text.tokens):
            known = 0 if text is None else len(text.tokens)
            self._refuse(record.request, known)
            self._channel.send(Record(Kind.DONE, record.request, number=record.number))
            return
        text.ask, text.wanted = record.number, max(0, record.items)
        self._texts.move_to_end(record.request)
        if not text.wanted:
            self._finish_ask(record.request, text)
            return
        # What was drafted before may have been lost on its way.
        self._send_nodes(record.request, text.drafted())

    def _send_nodes(self, number: int, nodes: Sequence[tuple[int, int, int, float]]) -> None:
        if nodes:
            self._channel.send(*messages.node_records(number, nodes))

    def _number_of(self, text: DraftText) -> int:
        return next(number for number, other in self._texts.items() if other is text)

    def _make_room(self) -> None:
        """Keep keys and values within their bytes: those go first that were used least lately."""
        held = sum(text.cache.nbytes for text in self._texts.values())
        for number in list(self._texts):
            if held <= self._most_bytes:
                return
            held -= self._texts[number].cache.nbytes
            self._refuse(number, 0)

    def _tell_totals(self) -> None:
        """Report what was done, where that is something new."""
        totals = self._rollouts.totals
        state = (totals.steps, len(self._texts))
        if state == self._told:
            return
        self._told_at, self._told = time.perf_counter(), state
        held = sum(text.cache.nbytes for text in self._texts.values()) / _MIB
        done = dataclasses.astuple(totals)
        values = (*done, held, len(self._texts))
        payload = np.array(values, dtype="<f8").tobytes()
        self._channel.send(Record(Kind.TOTALS, items=len(values), payload=payload))


def measured_costs(model: CausalLM) -> RowCosts:
    """What passes of this model cost, by their rows: the shorter of two, as others may run too."""
    cache = model.new_cache()
    model.forward([Feed(cache, [0] * _MEASURED_TEXT, [], [], 1)])

    def seconds(rows: int) -> float:
        begun = time.perf_counter()
        model.forward([Feed(cache, [], [0] * rows, [ROOT] * rows, rows)])
        taken = time.perf_counter() - begun
        cache.truncate(_MEASURED_TEXT)
        return taken

    return RowCosts(lambda rows: min(seconds(rows) for _ in range(_MEASURED_TIMES)))
