"""SSBD: when a source has grown, the last translation is the draft of the next one.

Source: SSBD, "Self-Speculative Biased Decoding for Faster Live Translation" (arXiv 2509.21740).
As published, the previous output is verified as far as it holds, with a bias towards it, and the
rest is written plainly. Behind the first disagreement the previous output is realigned
(realignment.py), and beside it SSSD retrieves; neither is biased unless a request asks for it.
"""

import dataclasses
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from sglang.srt.environ import envs

from sglang_ext.drafters import Bias, DrafterContext, DraftRequest, load
from sglang_ext.drafters.realignment import PreviousOutput
from sglang_ext.drafters.retrieval import namespace_of
from sglang_ext.requests import shown
from sglang_ext.tree import TokenTree, merged

# The key of custom_params under which a request sets RetranslationOptions.
PARAMETER = "ssbd"
_MOST_DRAFT_TOKENS = 1 << 16
_LONGEST_NAME = 256
# No step is wider (plugin.MAX_DRAFT_TOKENS).
_FAR_ENOUGH = 256


@dataclass(frozen=True)
class RetranslationOptions:
    """What a request may set in `custom_params.ssbd`.

    Attributes:
        session: whose last output is the draft, and whose next draft this output is; None: no
            session. Names belong to the request's namespace.
        draft: token ids to draft instead; None: the session's last output.
        beta: bias towards the draft, 0 (none, the output is plain decoding's) to 1; None: the
            server's.
        trim: so many tokens at the draft's end are not drafted (mask-k that trims the draft too).
        realign: draft on from the previous output behind a disagreement.
        retrieve: draft from the prompt, the output and the datastore behind a disagreement.
        bias_realigned: bias realigned tokens too.
    """

    session: str | None = None
    draft: tuple[int, ...] | None = None
    beta: float | None = None
    trim: int = 0
    realign: bool = True
    retrieve: bool = True
    bias_realigned: bool = False

    @classmethod
    def parse(cls, params: Any) -> "RetranslationOptions":
        """Read `custom_params.ssbd`.

        Raises:
            ValueError: an unknown name, or a value of the wrong kind; the message names it.
        """
        if params is None:
            return cls()
        if not isinstance(params, Mapping):
            raise ValueError(f"{PARAMETER} must be an object, got {shown(params)}")
        names = [field.name for field in dataclasses.fields(cls)]
        for name, value in params.items():
            if name not in names:
                raise ValueError(f"{PARAMETER}.{shown(name)} is unknown; known: {', '.join(names)}")
            if value is not None:
                _check(name, value)
        given = {name: value for name, value in params.items() if value is not None}
        if "draft" in given:
            given["draft"] = tuple(given["draft"])
        return cls(**given)


def _check(name: str, value: Any) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    whole = isinstance(value, int) and not isinstance(value, bool)
    if name == "session":
        good = isinstance(value, str) and 0 < len(value) <= _LONGEST_NAME
        expected = f"a string of 1 to {_LONGEST_NAME} characters"
    elif name == "draft":
        good = (
            isinstance(value, list | tuple)
            and len(value) <= _MOST_DRAFT_TOKENS
            and all(type(token) is int and token >= 0 for token in value)
        )
        expected = f"a list of at most {_MOST_DRAFT_TOKENS} token ids"
    elif name == "beta":
        good = number and 0 <= value <= 1
        expected = "a number from 0 to 1"
    elif name == "trim":
        good = whole and value >= 0
        expected = "a whole number of at least 0"
    else:
        good = isinstance(value, bool)
        expected = "true or false"
    if not good:
        raise ValueError(f"{PARAMETER}.{name} must be {expected}, got {shown(value)}")


class SessionOutputs:
    """The last output of each session, the least recently used forgotten first.

    What is forgotten costs a session its draft, nothing else.

    Args:
        most: sessions kept.
        idle_s: seconds after which a session that was not used is forgotten.
    """

    def __init__(self, most: int, idle_s: float) -> None:
        self._most = most
        self._idle_s = idle_s
        self._outputs: OrderedDict[tuple[str, str], tuple[float, tuple[int, ...]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._outputs)

    def get(self, namespace: str, session: str) -> tuple[int, ...]:
        """A session's last output; empty if it is not known."""
        self._drop_idle()
        _, tokens = self._outputs.get((namespace, session), (0.0, ()))
        return tokens

    def put(self, namespace: str, session: str, tokens: Sequence[int]) -> None:
        """This is a session's last output now."""
        self._outputs[namespace, session] = time.monotonic(), tuple(tokens)
        self._outputs.move_to_end((namespace, session))
        self._drop_idle()

    def _drop_idle(self) -> None:
        oldest = time.monotonic() - self._idle_s
        while self._outputs:
            used, _ = next(iter(self._outputs.values()))
            if len(self._outputs) <= self._most and used >= oldest:
                break
            self._outputs.popitem(last=False)


@dataclass
class _State:
    options: RetranslationOptions
    previous: PreviousOutput
    retrieved: DraftRequest | None
    """The request as the retrieval drafter sees it; None: it was not asked yet."""


class RetranslationDrafter:
    """Drafts a session's last output, and goes on behind a disagreement."""

    def __init__(self, context: DrafterContext) -> None:
        options = context.options
        self._beta = options.ssbd_beta
        self._vocab_size = context.vocab_size
        self._eos = context.eos_token_ids
        self._sessions = SessionOutputs(options.ssbd_sessions, options.ssbd_idle_seconds)
        self._retrieval = load("sssd", context)
        self.counters: dict[str, float] = {"sessions": 0.0, "drafted_sessions": 0.0}

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
        # SGLang's msgspec messages hold no list within an object (CustomParamValue in
        # sampling_params.py): the scheduler could not read the request.
        if options.draft is not None and not envs.SGLANG_USE_PICKLE_IPC.get():
            raise ValueError(
                f"custom_params.{PARAMETER}.draft cannot be sent while SGLANG_USE_PICKLE_IPC=0; "
                f"name a {PARAMETER}.session instead"
            )

    def prefill(self, requests: Sequence[DraftRequest]) -> None:
        """Look up what each request's session wrote last."""
        for request in requests:
            request.state = self._open(request)

    def foresee(self, requests: Sequence[DraftRequest], max_nodes: int) -> list[TokenTree]:
        """The beginning of each session's last output."""
        return [r.state.previous.drafts(max_nodes) for r in requests]

    def start(self, request: DraftRequest) -> None:
        """Take the output so far: one token, or more after a retraction."""
        if request.state is None:
            request.state = self._open(request)
        request.state.previous.follow(request.output)

    def observe(self, request: DraftRequest, tokens: Sequence[int]) -> None:
        """Follow the previous output."""
        request.state.previous.follow(request.output)

    def bias(self, request: DraftRequest) -> Bias | None:
        """Towards what is left of the previous output while the two agree."""
        state: _State = request.state
        beta = self._beta if state.options.beta is None else state.options.beta
        tokens = state.previous.expected()
        if not tokens and state.options.bias_realigned:
            tokens = state.previous.realigned()
        return Bias(tokens[:_FAR_ENOUGH], beta) if beta and tokens else None

    def propose(self, requests: Sequence[DraftRequest], max_nodes: int) -> list[TokenTree]:
        """The rest of the previous output; behind a disagreement realigned, and retrieval."""
        trees = [self._from_previous(r.state, max_nodes) for r in requests]
        rows = [i for i, r in enumerate(requests) if self._retrieves(r.state)]
        if rows:
            found = self._retrieval.propose([self._retrieved(requests[i]) for i in rows], max_nodes)
            for i, tree in zip(rows, found, strict=True):
                trees[i] = merged([trees[i], tree], max_nodes) if len(trees[i]) else tree
        return trees

    def finish(self, request: DraftRequest, completed: bool) -> None:
        """Keep the output as the session's next draft."""
        state: _State = request.state
        request.state = None
        if not completed:
            return
        self._retrieval.finish(dataclasses.replace(request), completed)
        if state.options.session is not None:
            output = list(request.output)
            while output and output[-1] in self._eos:
                output.pop()
            self._sessions.put(namespace_of(request), state.options.session, output)
            self.counters["sessions"] = len(self._sessions)

    def _open(self, request: DraftRequest) -> _State:
        options = RetranslationOptions.parse(request.params.get(PARAMETER))
        draft = options.draft
        if draft is None:
            session = options.session
            draft = self._sessions.get(namespace_of(request), session) if session else ()
        draft = draft[: max(0, len(draft) - options.trim)]
        # What is no token cannot be written: nothing behind it is of use.
        draft = tuple(takewhile(lambda token: token < self._vocab_size, draft))
        if draft:
            self.counters["drafted_sessions"] += 1
        return _State(options, PreviousOutput(draft), None)

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
