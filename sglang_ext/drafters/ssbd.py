"""SSBD: when a source has grown, the last translation is the draft of the next one.

Source: SSBD, "Self-Speculative Biased Decoding for Faster Live Translation" (arXiv 2509.21740).
As published, the previous output is verified as far as it holds, with a bias towards it, and the
rest is written plainly. Behind the first disagreement the previous output is realigned
(realignment.py), and beside it SSSD retrieves; neither is biased unless a request asks for it.
"""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Annotated, Any

from pydantic import Field
from sglang.srt.environ import envs

from sglang_ext.drafters import Bias, Drafter, DrafterContext, DraftRequest, load
from sglang_ext.drafters.realignment import PreviousOutput
from sglang_ext.drafters.session_outputs import Output, SessionOutputs, is_secret
from sglang_ext.request_options import DrafterOptions, shown
from sglang_ext.tree import TokenTree, merged

logger = logging.getLogger(__name__)

# The key of custom_params under which a request sets RetranslationOptions.
PARAMETER = "ssbd"
_MOST_DRAFT_TOKENS = 1 << 16
_LONGEST_NAME = 256
# No step is wider (plugin.MAX_DRAFT_TOKENS).
_FAR_ENOUGH = 256
_Token = Annotated[int, Field(ge=0)]


_EXPECTED = {
    "session": f"a string of 1 to {_LONGEST_NAME} characters",
    "draft": f"a list of at most {_MOST_DRAFT_TOKENS} token ids",
    "beta": "a number from 0 to 1",
    "trim": "a whole number of at least 0",
}


class RetranslationOptions(DrafterOptions):
    """What a request may set in `custom_params.ssbd`.

    Attributes:
        session: whose last output is the draft, and whose next draft this output is; None: no
            session. Names belong to the request's namespace.
        draft: token ids to draft instead; None: the session's last output.
        beta: bias towards the draft, 0 (none, the output is plain decoding's) to 1; None: the
            server's. It counts for a draft that the request brings and for a session whose name
            is a secret (`is_secret`); others of the namespace may have written to the rest.
        trim: so many tokens at the draft's end are not drafted (mask-k that trims the draft too).
        realign: draft on from the previous output behind a disagreement.
        retrieve: draft from the prompt, the output and the datastore behind a disagreement.
        bias_realigned: bias realigned tokens too.
    """

    parameter = PARAMETER
    expected = _EXPECTED

    session: Annotated[str, Field(min_length=1, max_length=_LONGEST_NAME)] | None = None
    draft: Annotated[tuple[_Token, ...], Field(max_length=_MOST_DRAFT_TOKENS)] | None = None
    beta: Annotated[float, Field(ge=0, le=1)] | None = None
    trim: Annotated[int, Field(ge=0)] = 0
    realign: bool = True
    retrieve: bool = True
    bias_realigned: bool = False

    @property
    def owns_its_draft(self) -> bool:
        """Whether nobody else can have written what is drafted, so that a bias may count."""
        return self.draft is not None or (self.session is not None and is_secret(self.session))


@dataclass
class _State:
    options: RetranslationOptions
    previous: PreviousOutput
    source: Output | None
    """The session's output that is drafted; None: the request brought its own draft, or none."""
    retrieved: DraftRequest | None = None
    """The request as the retrieval drafter sees it; None: it was not asked yet."""


class RetranslationDrafter(Drafter):
    """Drafts a session's last output, and goes on behind a disagreement."""

    def __init__(self, context: DrafterContext) -> None:
        options = context.options
        self._beta = options.ssbd_beta
        self._vocab_size = context.vocab_size
        self._eos = context.eos_token_ids
        self._sessions = SessionOutputs(options.ssbd_sessions, options.ssbd_idle_seconds)
        self._retrieval = load("sssd", context)
        self._told = False
        self._counters = {"sessions": 0.0, "drafted_sessions": 0.0}

    @staticmethod
    def check(params: Mapping[str, Any]) -> None:
        """Refuse custom_params that this drafter cannot use.

        Raises:
            ValueError: custom_params.ssbd has an unknown name or a value out of range.
        """
        try:
            options = RetranslationOptions.parse(params.get(PARAMETER))
        except ValueError as error:
            raise ValueError(f"custom_params.{error}") from None
        if options.beta and options.session is not None and not options.owns_its_draft:
            raise ValueError(
                f"custom_params.{PARAMETER}.beta must be 0 or left out for the session "
                f"{shown(options.session)}: others could guess this name and write to it. Name the "
                f"session by a random UUID (version 4), or send the draft"
            )
        # SGLang's msgspec messages hold no list within an object (CustomParamValue in
        # sampling_params.py): the scheduler could not read the request.
        if options.draft is not None and not envs.SGLANG_USE_PICKLE_IPC.get():
            raise ValueError(
                f"custom_params.{PARAMETER}.draft cannot be sent while SGLANG_USE_PICKLE_IPC=0; "
                f"name a {PARAMETER}.session instead"
            )

    @property
    def counters(self) -> Mapping[str, float]:
        """Sessions that are kept now, and requests that were drafted for since the start."""
        return self._counters

    def prefill(self, requests: Sequence[DraftRequest]) -> None:
        """Look up what each request's session wrote last."""
        for request in requests:
            request.state = self._open(request)

    def prefill_draft(self, requests: Sequence[DraftRequest], max_nodes: int) -> list[TokenTree]:
        """The beginning of each session's last output."""
        return [self._state(r).previous.drafts(max_nodes) for r in requests]

    def start(self, request: DraftRequest) -> None:
        """Take the output so far: one token, or more after a retraction."""
        if request.state is None:
            request.state = self._open(request)
        self._state(request).previous.follow(request.output)

    def observe(self, request: DraftRequest, tokens: Sequence[int]) -> None:
        """Follow the previous output."""
        self._state(request).previous.follow(request.output)

    def bias(self, request: DraftRequest) -> Bias | None:
        """Towards what is left of the previous output while the two agree."""
        state = self._state(request)
        if not state.options.owns_its_draft:
            return None
        beta = self._beta if state.options.beta is None else state.options.beta
        tokens = state.previous.expected()
        if not tokens and state.options.bias_realigned:
            tokens = state.previous.realigned()
        return Bias(tokens[:_FAR_ENOUGH], beta) if beta and tokens else None

    def propose(self, requests: Sequence[DraftRequest], max_nodes: int) -> list[TokenTree]:
        """The rest of the previous output; behind a disagreement realigned, and retrieval."""
        trees = [self._from_previous(self._state(r), max_nodes) for r in requests]
        rows = [i for i, r in enumerate(requests) if self._retrieves(r.state)]
        if rows:
            found = self._retrieval.propose([self._retrieved(requests[i]) for i in rows], max_nodes)
            for i, tree in zip(rows, found, strict=True):
                trees[i] = merged([trees[i], tree], max_nodes) if len(trees[i]) else tree
        return trees

    def finish(self, request: DraftRequest, completed: bool) -> None:
        """Keep the output as the session's next draft."""
        if request.state is None:
            return  # a session could not be opened, nothing was drafted
        state = self._state(request)
        request.state = None
        # What was deleted may stand in an output that was biased towards it.
        if not completed or (state.source is not None and state.source.forgotten):
            return
        if state.options.session is not None:
            output = list(request.output)
            while output and output[-1] in self._eos:
                output.pop()
            self._sessions.put(
                request.options.namespace,
                state.options.session,
                request.deletion_name,
                output,
                state.source,
            )
            self._counters["sessions"] = len(self._sessions)
        # Last: a deletion comes the other way, so that it finds the one where it finds the other.
        self._retrieval.finish(dataclasses.replace(request), completed)

    def forget(self, namespace: str | None, name: str | None = None) -> None:
        """Forget what sessions wrote, as SessionOutputs.forget; in any thread.

        A request that drafts from it goes on without in its next step, and is not kept.
        """
        self._sessions.forget(namespace, name)
        self._counters["sessions"] = len(self._sessions)

    def _open(self, request: DraftRequest) -> _State:
        options = RetranslationOptions.parse(request.params.get(PARAMETER))
        draft: Sequence[int] = options.draft or ()
        source = None
        if options.draft is None and options.session is not None:
            source = self._sessions.get(request.options.namespace, options.session)
            draft = () if source is None else source.tokens
        draft = draft[: max(0, len(draft) - options.trim)]
        # What is no token cannot be written: nothing behind it is of use.
        draft = tuple(takewhile(lambda token: token < self._vocab_size, draft))
        if draft:
            self._counters["drafted_sessions"] += 1
        if self._beta and not options.owns_its_draft and options.session is not None:
            self._tell_of_names()
        return _State(options, PreviousOutput(draft), source)

    def _tell_of_names(self) -> None:
        if not self._told:
            self._told = True
            logger.info(
                "SSBD: sessions with names that others could guess are drafted without a bias; "
                "random UUIDs get it (docs/ssbd.md)"
            )

    @staticmethod
    def _state(request: DraftRequest) -> _State:
        """The request's state, without its draft once that was deleted."""
        state: _State = request.state
        if state.source is not None and state.source.forgotten and state.previous.tokens:
            state.previous = PreviousOutput(())
            state.previous.follow(request.output)
        return state

    @staticmethod
    def _from_previous(state: _State, max_nodes: int) -> TokenTree:
        if not state.previous.agreed and not state.options.realign:
            return TokenTree.empty()
        return state.previous.drafts(max_nodes)

    @staticmethod
    def _retrieves(state: _State) -> bool:
        return state.options.retrieve and not state.previous.expected()

    def _retrieved(self, request: DraftRequest) -> DraftRequest:
        state: _State = request.state
        if state.retrieved is None:
            state.retrieved = dataclasses.replace(request, state=None)
            self._retrieval.start(state.retrieved)
        return state.retrieved
