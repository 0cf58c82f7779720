"""Live speech that is heard again: the last hypothesis of the same audio is the next one's draft.

What SSBD does for translations (arXiv 2509.21740), without its bias: a window of live audio is
transcribed again whenever it has grown, and says mostly what it said before. Behind a disagreement
the last hypothesis is realigned (realignment.py). Audio that was not heard before is the server's
own drafter's, as SpecASR; behind a hypothesis it is not asked: its encoder takes longer than the
few new words. The output is plain decoding's.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_ext.drafters import Drafter, DrafterContext, DraftRequest, load
from sglang_ext.drafters.realignment import PreviousOutput
from sglang_ext.drafters.session_outputs import Output, SessionOutputs
from sglang_ext.request_options import NO_DRAFTER, shown
from sglang_ext.tree import TokenTree

PARAMETER = "rehearing"
"""The key of custom_params with the name of the audio that is heard again."""

_LONGEST_NAME = 256


@dataclass
class _State:
    """A request's.

    Attributes:
        source: the hypothesis that is drafted; None: there is none.
        other: the request as the server's own drafter sees it; None: that was not asked yet.
        started: whether that drafter has started it.
    """

    name: str | None
    previous: PreviousOutput
    source: Output | None
    other: DraftRequest | None = None
    started: bool = False


class RehearingDrafter(Drafter):
    """Drafts what the same audio was heard as last, and goes on with the server's own drafter."""

    def __init__(self, context: DrafterContext) -> None:
        options = context.options
        self._eos = context.eos_token_ids
        self._heard = SessionOutputs(options.ssbd_sessions, options.ssbd_idle_seconds)
        name = options.default_drafter
        self._other = None if name in (NO_DRAFTER, PARAMETER) else load(name, context)
        self._counters = {"hypotheses": 0.0, "drafted_hypotheses": 0.0}

    @staticmethod
    def check(params: Mapping[str, Any]) -> None:
        """Refuse custom_params that this drafter cannot use.

        Raises:
            ValueError: custom_params.rehearing is no name.
        """
        name = params.get(PARAMETER)
        if name is not None and not (isinstance(name, str) and 0 < len(name) <= _LONGEST_NAME):
            raise ValueError(
                f"custom_params.{PARAMETER} must be a string of 1 to {_LONGEST_NAME} characters, "
                f"got {shown(name)}"
            )

    @property
    def counters(self) -> Mapping[str, float]:
        """Hypotheses that are kept now, and requests that were drafted for since the start."""
        return self._counters

    def prefill(self, requests: Sequence[DraftRequest]) -> None:
        """Look up what each audio was heard as; audio that is new goes to the other drafter."""
        for request in requests:
            request.state = self._open(request)
        new = [request for request in requests if not request.state.previous.tokens]
        if self._other is not None and new:
            self._other.prefill([self._of_other(request) for request in new])

    def prefill_draft(self, requests: Sequence[DraftRequest], max_nodes: int) -> list[TokenTree]:
        """The beginning of each last hypothesis; of new audio, the other drafter's."""
        trees = [self._state(r).previous.drafts(max_nodes) for r in requests]
        rows = [i for i, r in enumerate(requests) if r.state.other is not None]
        if self._other is not None and rows:
            others = [requests[i].state.other for i in rows]
            found = self._other.prefill_draft(others, max_nodes)
            for i, tree in zip(rows, found, strict=True):
                trees[i] = tree
        return trees

    def start(self, request: DraftRequest) -> None:
        """Take the output so far: one token, or more after a retraction."""
        if request.state is None:
            request.state = self._open(request)
        state = self._state(request)
        state.previous.follow(request.output)
        if state.other is not None:
            self._start_other(state)

    def observe(self, request: DraftRequest, tokens: Sequence[int]) -> None:
        """Follow the last hypothesis."""
        state = self._state(request)
        state.previous.follow(request.output)
        if self._other is not None and state.started and state.other is not None:
            self._other.observe(state.other, tokens)

    def verified(self, request: DraftRequest, tree: TokenTree, predicted: Sequence[int]) -> None:
        """The other drafter learns from what the target said of its draft."""
        state = self._state(request)
        if self._other is not None and state.started and state.other is not None:
            self._other.verified(state.other, tree, predicted)

    def propose(self, requests: Sequence[DraftRequest], max_nodes: int) -> list[TokenTree]:
        """The rest of the last hypothesis, realigned where it went wrong; of new audio, the other
        drafter's."""
        trees = [self._state(r).previous.drafts(max_nodes) for r in requests]
        rows = [i for i, r in enumerate(requests) if not r.state.previous.tokens]
        if self._other is not None and rows:
            others = [self._asked(requests[i]) for i in rows]
            found = self._other.propose(others, max_nodes)
            for i, tree in zip(rows, found, strict=True):
                trees[i] = tree
        return trees

    def finish(self, request: DraftRequest, completed: bool) -> None:
        """Keep the output as the next draft."""
        if request.state is None:
            return
        state = self._state(request)
        request.state = None
        if self._other is not None and state.other is not None:
            self._other.finish(state.other, completed)
        forgotten = state.source is not None and state.source.forgotten
        if not completed or state.name is None or forgotten:
            return
        output = list(request.output)
        while output and output[-1] in self._eos:
            output.pop()
        namespace = request.options.namespace
        self._heard.put(namespace, state.name, request.deletion_name, output, state.source)
        self._counters["hypotheses"] = len(self._heard)

    def forget(self, namespace: str | None, name: str | None = None) -> None:
        """Forget hypotheses, as SessionOutputs.forget; in any thread."""
        self._heard.forget(namespace, name)
        self._counters["hypotheses"] = len(self._heard)

    def _open(self, request: DraftRequest) -> _State:
        name = request.params.get(PARAMETER)
        name = name if isinstance(name, str) else None
        source = None if name is None else self._heard.get(request.options.namespace, name)
        tokens = () if source is None else source.tokens
        self._counters["drafted_hypotheses"] += bool(len(tokens))
        return _State(name, PreviousOutput(tokens), source)

    @staticmethod
    def _state(request: DraftRequest) -> _State:
        """The request's state, without its draft once that was deleted."""
        state: _State = request.state
        if state.source is not None and state.source.forgotten and state.previous.tokens:
            state.previous = PreviousOutput(())
            state.previous.follow(request.output)
        return state

    @staticmethod
    def _of_other(request: DraftRequest) -> DraftRequest:
        """The request as the other drafter sees it: the same output, another state."""
        state: _State = request.state
        if state.other is None:
            state.other = dataclasses.replace(request, state=None)
        return state.other

    def _asked(self, request: DraftRequest) -> DraftRequest:
        """The same, started."""
        other = self._of_other(request)
        self._start_other(request.state)
        return other

    def _start_other(self, state: _State) -> None:
        if self._other is not None and state.other is not None and not state.started:
            state.started = True
            self._other.start(state.other)
