"""A small language model drafts in a process of its own, while the target is still verifying.

Source: Mirror Speculative Decoding (Bhendawade et al., Apple, 2025), section 3.1: where the early
exit has told of the pass (`early_exit`), the next window is there when the target has ended; else,
and where the outcome was not foreseen, the step waits for a fresh rollout: ordinary speculative
decoding with a draft model. The executor is `sglang_ext.mirror.executor`.
"""

import time
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any
from weakref import WeakValueDictionary, finalize

import numpy as np
from numpy.typing import NDArray

from sglang_ext import models
from sglang_ext.drafters import Drafter, DrafterContext, DrafterError, DraftRequest
from sglang_ext.mirror import messages
from sglang_ext.mirror.executor_client import (
    Connection,
    ExecutorClient,
    ExecutorError,
)
from sglang_ext.mirror.executor_settings import check_tokenizer, settings_of
from sglang_ext.mirror.exit_view import ExitView
from sglang_ext.mirror.foresight import Foreseen, Foresight
from sglang_ext.mirror.lm_loading import DraftModelError
from sglang_ext.mirror.messages import Kind
from sglang_ext.mirror.mirror_options import PARAMETER, MirrorOptions
from sglang_ext.mirror.mirrored_text import MirroredText
from sglang_ext.mirror.pacing import Pacing
from sglang_ext.mirror.payoff import kappa_for
from sglang_ext.mirror.shared_ring import ChannelError, Record
from sglang_ext.tree import TokenTree

# An executor that owes an answer for so long is started again.
_LAG_S = 30.0


class MirrorDrafter(Drafter):
    """Drafts with a language model whose process follows each request.

    Raises:
        DrafterError: the draft model cannot be had, or has another tokenizer than the target.
    """

    def __init__(self, context: DrafterContext) -> None:
        self._window = context.options.mirror_window
        self._mirrors = context.options.mirror_exit
        self._budget = context.options.budget
        self._vocab_size = context.vocab_size
        try:
            settings = settings_of(context.options)
            check_tokenizer(settings.model, context.tokenizer_fingerprint)
            self._client = ExecutorClient(settings)
            self._client.start()
        except (models.ModelError, DraftModelError, ExecutorError, ValueError) as error:
            name = context.options.draft_model
            raise DrafterError(f"drafter mirror, draft model {name!r}: {error}") from error
        self._texts: WeakValueDictionary[int, MirroredText] = WeakValueDictionary()
        self._left: list[int] = []
        self._asks = count(1)
        self._pacing = Pacing()
        self._executor: dict[str, float] = {}
        self._counters = dict.fromkeys(_COUNTERS, 0.0)
        self._foresight = Foresight()

    @property
    def counters(self) -> Mapping[str, float]:
        """Totals since the start; those of the draft model are the running executor's."""
        connection = self._client.connection
        if connection is not None:
            self._hear(connection)
        waited = self._counters["waited_seconds"]
        hidden = max(0.0, self._executor.get("draft_seconds", 0.0) - waited)
        restarts = float(self._client.restarts)
        mine = {**self._counters, "hidden_seconds": hidden, "executor_restarts": restarts}
        return {**self._executor, **self._foresight.counters, **mine}

    @staticmethod
    def check(params: Mapping[str, Any]) -> None:
        """Refuse custom_params that this drafter cannot use.

        Raises:
            ValueError: custom_params.mirror has an unknown name or a value of the wrong kind.
        """
        try:
            MirrorOptions.parse(params.get(PARAMETER))
        except ValueError as error:
            raise ValueError(f"custom_params.{error}") from None

    @property
    def uses_early_exit(self) -> bool:
        """Whether drafting is to be hidden behind the target's passes."""
        return self._mirrors

    def close(self) -> None:
        """End the executor, which otherwise ends with this process."""
        self._client.stop()

    # Of a request's life

    def prefill(self, requests: Sequence[DraftRequest]) -> None:
        """Have the executor read the prompts while the target does."""
        for request in requests:
            self._open(request)
            self._tell(request)

    def start(self, request: DraftRequest) -> None:
        """Take the output so far."""
        text = request.state
        if not isinstance(text, MirroredText) or text.length != len(request.prompt):
            text = self._open(request)
        text.extend(request.output)
        self._tell(request)

    def observe(self, request: DraftRequest, tokens: Sequence[int]) -> None:
        """Tell the executor what was committed, and learn how good its draft was."""
        self._pacing.note_committed()
        connection = self._client.connection
        if connection is not None:
            self._hear(connection)  # in steps without a look too: its answers are not to pile up
        text: MirroredText = request.state
        self._pacing.note_draft(*text.agreed(tokens))
        if text.view is not None and tokens:
            self._foresight.note(text.view, tokens)
        text.view = None
        text.extend(tokens)
        self._tell(request)

    def finish(self, request: DraftRequest, completed: bool) -> None:
        """Have the executor forget the request."""
        request.state = None
        self._close_left()

    def wants_early_exit(self, request: DraftRequest) -> bool:
        """Whether the request lets drafts be made ahead."""
        text = request.state
        return isinstance(text, MirroredText) and text.options.exit

    def early_exit(self, requests: Sequence[DraftRequest], view: ExitView) -> None:
        """Pass on what the target is about to say, so that its outcomes are drafted now."""
        connection = self._client.connection
        if connection is None:
            return
        most = kappa_for(len(requests), view.candidates.shape[2])
        rows = {rid: row for row, rid in enumerate(view.rids)}
        records: list[Record] = []
        for request in requests:
            text, row = request.state, rows.get(request.rid)
            if row is None or not isinstance(text, MirroredText) or not text.follows:
                continue
            nodes, kappa = view.counts[row], min(most, text.options.kappa or most)
            text.view = seen = Foreseen(
                view.tokens[row, :nodes], view.parents[row, :nodes], view.candidates[row, :nodes]
            )
            records += messages.view_records(
                text.number,
                text.length,
                seen.tokens,
                seen.parents,
                seen.candidates[:, :kappa],
                view.logprobs[row, :nodes, :kappa],
                view.started,
            )
            text.viewed = True
        self._send(connection, records)

    # Drafting

    def propose(self, requests: Sequence[DraftRequest], max_nodes: int) -> list[TokenTree]:
        """What was drafted behind each text; a step waits for it while that pays."""
        most = min(self._window, max_nodes)
        connection = self._heard()
        texts: list[MirroredText] = [request.state for request in requests]
        if connection is not None:
            for request in requests:
                self._tell(request)
            self._count(texts)
            self._ask(connection, texts, most)
        trees = [self._tree(text, most) for text in texts]
        self._counters["plain"] += sum(not len(tree) for tree in trees)
        self._pacing.note_proposed()
        return trees

    def _tree(self, text: MirroredText, most: int) -> TokenTree:
        tokens, probs = text.chain(most)
        text.proposed = tokens
        if not tokens:
            return TokenTree.empty()
        parents: NDArray[np.int32] = np.arange(-1, len(tokens) - 1, dtype=np.int32)
        beliefs = np.array(probs, dtype=np.float32)
        return TokenTree(np.array(tokens, dtype=np.int64), parents, beliefs)

    def _count(self, texts: Sequence[MirroredText]) -> None:
        for text in texts:
            hit = text.viewed and bool(text.chain(1)[0])
            self._counters["hits" if hit else "fallbacks"] += 1
            text.viewed = False

    def _ask(self, connection: Connection, texts: Sequence[MirroredText], most: int) -> None:
        """Ask for the chains that are worth a wait, and wait for them."""
        able = [text for text in texts if text.follows and text.heard and not text.ask]
        ready = [len(text.chain(most)[0]) for text in able]
        others = [len(text.chain(most)[0]) for text in texts if text not in able]
        length, wait_s = self._pacing.length(ready, others, most)
        asked = [text for text, held in zip(able, ready, strict=True) if held < length]
        records, now = [], time.perf_counter()
        for text in asked:
            text.ask, text.asked_at = next(self._asks) & 0x7FFFFFFF, now
            records.append(messages.ask_record(text.number, text.length, text.ask, length))
        if asked and self._send(connection, records):
            self._wait(connection, asked, texts, length, wait_s)
            return
        for text in asked:  # those that were sent are answered to nobody
            text.ask = 0

    def _wait(
        self,
        connection: Connection,
        asked: Sequence[MirroredText],
        texts: Sequence[MirroredText],
        length: int,
        wait_s: float,
    ) -> None:
        """Wait for what was asked, for at most `wait_s` seconds, while another token pays.

        Args:
            texts: the whole batch.
            length: of the chains that were asked for.
        """
        begun, held = time.perf_counter(), min(len(text.chain(length)[0]) for text in asked)
        while any(text.ask for text in asked) and not connection.broken:
            left = begun + wait_s - time.perf_counter()
            if left <= 0 or not connection.channel.wait(left):
                break
            self._hear(connection)
            self._stop_asking(connection, asked, texts, length, time.perf_counter() - begun)
        waited = time.perf_counter() - begun
        for text in asked:
            text.heard = not text.ask
        late = sum(not text.heard for text in asked)
        gained = min(len(text.chain(length)[0]) for text in asked) - held
        self._pacing.note_wait(waited, max(1, gained), in_time=not late)
        self._counters["waited_seconds"] += waited
        self._counters["late"] += late

    def _stop_asking(
        self,
        connection: Connection,
        asked: Sequence[MirroredText],
        texts: Sequence[MirroredText],
        length: int,
        waited_s: float,
    ) -> None:
        """Ask for no more where another token does not pay; whole chains are waited for to the end.

        Args:
            waited_s: seconds that the step has waited.
        """
        waiting = [text for text in asked if text.ask]
        if not waiting or any(text.whole for text in waiting):
            return
        chains = {text.number: text.chain(length)[1] for text in texts}
        longer = [chains[text.number] for text in waiting]
        if self._pacing.another_pays(list(chains.values()), longer, waited_s):
            return
        self._send(connection, [messages.ask_record(t.number, t.length, t.ask, 0) for t in waiting])
        for text in waiting:
            text.ask = 0

    # The channel

    def _open(self, request: DraftRequest) -> MirroredText:
        options = MirrorOptions.parse(request.params.get(PARAMETER))
        whole = (request.options.budget or self._budget) == "fixed"
        request.state = text = MirroredText(request.prompt, options, whole)
        self._texts[text.number] = text
        # Whichever way the request leaves: of one that was retracted no `finish` is heard.
        finalize(text, self._left.append, text.number).atexit = False
        return text

    def _close_left(self) -> None:
        """Have the executor forget the texts of requests that have left."""
        connection = self._client.connection
        if connection is None:
            self._left.clear()  # the next one knows none of them
        elif self._left:
            records = [Record(Kind.CLOSE, number) for number in self._left]
            if self._send(connection, records):
                self._left.clear()

    def _tell(self, request: DraftRequest) -> None:
        connection = self._client.connection
        if connection is not None:
            try:
                request.state.tell(connection, request.output)
            except ChannelError as error:
                connection.broken = f"has broken its channel ({error})"

    @staticmethod
    def _send(connection: Connection, records: Sequence[Record]) -> bool:
        """Whether all of them could be sent."""
        try:
            return connection.channel.send(*records) == len(records)
        except ChannelError as error:
            connection.broken = f"has broken its channel ({error})"
        return False

    def _heard(self) -> Connection | None:
        """The executor, after what it has said was taken."""
        connection = self._client.connection
        if connection is not None:
            self._hear(connection)
            self._close_left()
            long_ago = time.perf_counter() - _LAG_S
            waiting = [t for t in self._texts.values() if t.waits_for(connection)]
            if any(text.asked_at < long_ago for text in waiting):
                connection.broken = f"has not answered for {_LAG_S:g} s"
        return self._client.connection

    def _hear(self, connection: Connection) -> None:
        try:
            for record in connection.channel.receive():
                self._take(record)
        except ChannelError as error:
            connection.broken = f"has broken its channel ({error})"

    def _take(self, record: Record) -> None:
        if record.kind == Kind.TOTALS:
            self._executor = messages.totals_of(record)
            return
        text = self._texts.get(record.request)
        if text is None:
            return
        if record.kind == Kind.NODES:
            for key, length, token, prob in messages.nodes_of(record).tolist():
                if not (token >= 0 and 0.0 <= prob <= 1.0 + 1e-6):
                    raise ChannelError(f"token {token} of probability {prob}")
                if token < self._vocab_size:  # a draft model may have spare rows
                    text.take(key, length, token, min(prob, 1.0))
        elif record.kind == Kind.DONE and record.number == text.ask:
            text.ask = 0
        elif record.kind == Kind.UNKNOWN:
            text.lost(forever=bool(record.number))


_COUNTERS = ("hits", "fallbacks", "plain", "late", "waited_seconds")
