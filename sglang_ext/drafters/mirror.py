"""A small language model drafts in a process of its own, while the target is still verifying.

Source: Mirror Speculative Decoding (Bhendawade et al., Apple, 2025), section 3.1: where the early
exit has told of the pass (`early_exit`), the next window is there when the target has ended; else,
and where the outcome was not foreseen, the step waits for a fresh rollout: ordinary speculative
decoding with a draft model. The executor is `sglang_ext.mirror.executor`.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from itertools import count
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from sglang_ext import models
from sglang_ext.drafters import Drafter, DrafterContext, DrafterError, DraftRequest
from sglang_ext.mirror import messages
from sglang_ext.mirror.draft_devices import DraftDevice
from sglang_ext.mirror.executor_client import (
    Connection,
    ExecutorClient,
    ExecutorError,
    ExecutorSettings,
)
from sglang_ext.mirror.exit_view import ExitView
from sglang_ext.mirror.lm_loading import DraftModelError, config_of
from sglang_ext.mirror.messages import Kind
from sglang_ext.mirror.mirrored_text import MirroredText
from sglang_ext.mirror.payoff import kappa_for, length_that_pays
from sglang_ext.mirror.shared_ring import ChannelError, Record
from sglang_ext.models.tokenizers import fingerprint
from sglang_ext.options import Options
from sglang_ext.tree import TokenTree

logger = logging.getLogger(__name__)

# No step waits longer for a draft, and an ask that is older than the second has no answer.
_MOST_WAIT_S, _LAG_S = 1.0, 30.0
# A wait that ends late by this much of what was expected is worth its tokens still.
_FIRST_WAIT_S = 0.25
_FADE = 0.1
_FIRST_ALPHA, _MOST_ALPHA = 0.7, 0.98
# Where waiting does not pay, it is tried again so often, since what is known of it grows old.
_TRY_EVERY = 32


class MirrorDrafter(Drafter):
    """Drafts with a language model whose process follows each request.

    Raises:
        DrafterError: the draft model cannot be had, or has another tokenizer than the target.
    """

    def __init__(self, context: DrafterContext) -> None:
        self._window = context.options.mirror_window
        self._mirrors = context.options.mirror_exit
        self._vocab_size = context.vocab_size
        try:
            self._client = ExecutorClient(settings_of(context.options))
            _check_tokenizer(context)
            self._client.start()
        except (models.ModelError, DraftModelError, ExecutorError, ValueError) as error:
            name = context.options.draft_model
            raise DrafterError(f"drafter mirror, draft model {name!r}: {error}") from error
        self._texts: WeakValueDictionary[int, MirroredText] = WeakValueDictionary()
        self._asks = count(1)
        self._alpha = _FIRST_ALPHA
        self._step_s: float | None = None
        self._token_s: float | None = None
        self._proposed_at: float | None = None
        self._unpaid = 0
        self._wait_s, self._missing = 0.0, 1
        self._executor: dict[str, float] = {}
        self._counters = dict.fromkeys(_COUNTERS, 0.0)

    @property
    def counters(self) -> Mapping[str, float]:
        """Totals since the start; those of the draft model are the running executor's."""
        waited = self._counters["waited_seconds"]
        hidden = max(0.0, self._executor.get("draft_seconds", 0.0) - waited)
        restarts = float(self._client.restarts)
        mine = {**self._counters, "hidden_seconds": hidden, "executor_restarts": restarts}
        return {**self._executor, **mine}

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
        self._note_step()
        connection = self._client.connection
        if connection is not None:
            self._hear(connection)  # in steps without a look too: its answers are not to pile up
        text: MirroredText = request.state
        right, wrong = text.agreed(tokens)
        for outcome in [1.0] * right + [0.0] * wrong:
            self._alpha += _FADE / 4 * (min(outcome, _MOST_ALPHA) - self._alpha)
        text.extend(tokens)
        self._tell(request)

    def finish(self, request: DraftRequest, completed: bool) -> None:
        """Have the executor forget the request."""
        text, request.state = request.state, None
        connection = self._client.connection
        if isinstance(text, MirroredText) and connection is not None:
            self._send(connection, [Record(Kind.CLOSE, text.number)])

    def early_exit(self, requests: Sequence[DraftRequest], view: ExitView) -> None:
        """Pass on what the target is about to say, so that its outcomes are drafted now."""
        connection = self._client.connection
        if connection is None:
            return
        kappa = min(view.candidates.shape[2], kappa_for(len(requests)))
        rows = {rid: row for row, rid in enumerate(view.rids)}
        records: list[Record] = []
        for request in requests:
            text, row = request.state, rows.get(request.rid)
            if row is None or not isinstance(text, MirroredText) or not text.follows:
                continue
            records += messages.view_records(
                text.number,
                text.length,
                view.tokens[row, : view.counts[row]],
                view.parents[row, : view.counts[row]],
                view.candidates[row, : view.counts[row], :kappa],
                view.logprobs[row, : view.counts[row], :kappa],
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
            if asked := self._ask(connection, texts, most):
                self._wait(connection, asked)
        trees = [self._tree(text, most) for text in texts]
        self._counters["plain"] += sum(not len(tree) for tree in trees)
        self._proposed_at = time.perf_counter()
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

    def _ask(
        self, connection: Connection, texts: Sequence[MirroredText], most: int
    ) -> list[MirroredText]:
        """Ask for the chains that are worth a wait, and say whose.

        `_wait_s` is set to the seconds beyond which it is a loss, `_missing` to the tokens missing.
        """
        able = [text for text in texts if text.follows and not text.ask]
        ready = [len(text.chain(most)[0]) for text in able]
        if not able or min(ready) >= most:
            return []
        length, self._wait_s = most, _FIRST_WAIT_S
        if self._step_s is not None and self._token_s is not None:
            others = [len(text.chain(most)[0]) for text in texts if text not in able]
            length, self._wait_s = length_that_pays(
                self._alpha, self._token_s, self._step_s, [*ready, *others], most
            )
            if not length:
                self._unpaid += 1
                if self._unpaid % _TRY_EVERY:
                    return []
                length, self._wait_s = min(2, most), self._step_s
        asked = [text for text, held in zip(able, ready, strict=True) if held < length]
        records, now = [], time.perf_counter()
        for text in asked:
            text.ask, text.asked_at = next(self._asks) & 0x7FFFFFFF, now
            numbers = (0, 0, text.length, text.ask, length, now)
            records.append(Record(Kind.ASK, text.number, *numbers))
        self._missing = max(length - min(ready), 1)
        if self._send(connection, records):
            return asked
        for text in asked:  # those that were sent are answered to nobody
            text.ask = 0
        return []

    def _wait(self, connection: Connection, asked: Sequence[MirroredText]) -> None:
        """Wait for what was asked, no longer than it can pay."""
        begun = time.perf_counter()
        end = begun + min(self._wait_s, _MOST_WAIT_S)
        while any(text.ask for text in asked) and not connection.broken:
            left = end - time.perf_counter()
            if left <= 0 or not connection.channel.wait(left):
                break
            self._hear(connection)
        waited = time.perf_counter() - begun
        self._counters["waited_seconds"] += waited
        late = sum(bool(text.ask) for text in asked)
        self._counters["late"] += late
        sample = waited / self._missing
        if not late or self._token_s is None:
            last = sample if self._token_s is None else self._token_s
            self._token_s = last + _FADE * (sample - last)

    # The channel

    def _open(self, request: DraftRequest) -> MirroredText:
        request.state = text = MirroredText(request.prompt)
        self._texts[text.number] = text
        return text

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

    def _note_step(self) -> None:
        """The first thing that is heard of a step after `propose`: its pass has ended."""
        if self._proposed_at is not None:
            taken, self._proposed_at = time.perf_counter() - self._proposed_at, None
            last = taken if self._step_s is None else self._step_s
            self._step_s = last + _FADE * (taken - last)


_COUNTERS = ("hits", "fallbacks", "plain", "late", "waited_seconds")


def settings_of(options: Options) -> ExecutorSettings:
    """How the options want the executor run.

    Raises:
        models.ModelError, DraftModelError, ValueError: they cannot be met.
    """
    if not options.draft_model:
        raise ValueError("--draft-model is missing: a folder or a name of `sglang-ext models list`")
    folder = models.resolve(options.draft_model)
    config_of(folder)
    device = DraftDevice.parse(options.mirror_device)
    on_cpu = device.torch_name == "cpu"
    weights = options.mirror_weights
    return ExecutorSettings(
        model=folder,
        weights=("int4" if on_cpu else "bf16") if weights == "auto" else weights,
        device=options.mirror_device,
        window=options.mirror_window,
        cache_mb=options.mirror_cache_mb,
        guesses=options.mirror_draft_retrieval,
    )


def _check_tokenizer(context: DrafterContext) -> None:
    """Raise ValueError unless the draft model has the target's tokenizer."""
    if not context.tokenizer_fingerprint:
        return  # the server was started without one
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models.resolve(context.options.draft_model))
    if fingerprint(tokenizer) != context.tokenizer_fingerprint:
        raise ValueError("its tokenizer is not the target's; expected a model of the same family")
