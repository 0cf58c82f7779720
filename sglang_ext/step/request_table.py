"""The requests that are decoding, and what each one asked of speculation."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sglang_ext.budget.choice import Calibration
from sglang_ext.drafters import DraftRequest
from sglang_ext.drafters.predicted_text import TOKENS_KEY
from sglang_ext.request_options import (
    NO_DRAFTER,
    RelaxedRule,
    RequestOptionError,
    RequestOptions,
)
from sglang_ext.step.asking import AskedDrafter
from sglang_ext.step.drafter_choice import DrafterChoice, Tally
from sglang_ext.step.drafter_info import note_drafter
from sglang_ext.step.sequence_states import KeptStates
from sglang_ext.whisper.encoder_decoder import audio_features

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

logger = logging.getLogger(__name__)

# A drafter that fails so often with one request is not asked for it any more.
_MOST_FAILURES = 3


@dataclass
class RunningRequest:
    """A decoding request: SGLang's, the drafter's view of it, and its drafter.

    `draft.output` is its committed output, complete on the host also under overlap scheduling
    (where SGLang's own `req.output_ids` is one step behind).
    """

    req: "Req"
    draft: DraftRequest
    drafter: AskedDrafter | None
    max_nodes: int
    calibration: Calibration
    fixed_budget: bool = False
    prompt_told: bool = False
    """Whether its drafter was told of its prompt, by `prefill` or `prepare`."""
    lost: AskedDrafter | None = None
    """Its drafter (and `drafter` None) after a failure in a hook that follows the request: what it
    knows of it may be wrong, so it is told to start anew in the request's next step."""
    failures: int = 0
    """Of such hooks."""
    finished: bool = False
    """It has left; under overlap scheduling a step that was launched before may still end."""
    ends: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """int64[k], tokens that end it. None is drafted: with what follows it committed in the same
    step SGLang would look for stop strings behind the end (Req.update_finish_state)."""
    relaxed: RelaxedRule | None = None
    """What is accepted of its drafts beside the target's own tokens; None: nothing."""
    tally: Tally | None = None
    """What its drafts gain, where its drafter was chosen for it; None: it was not."""
    ready_at: float | None = None
    """When its drafter was prepared while its KV was on its way (time.perf_counter), until that
    has been reported."""

    @property
    def context(self) -> int:
        """KV entries that its next token attends to."""
        return len(self.draft.prompt) + len(self.draft.output)

    def as_new(self) -> "RunningRequest":
        """The same request as if nothing had been said of it yet."""
        draft = replace(self.draft, output=list(self.req.output_ids), state=None)
        drafter = self.drafter or self.lost
        return replace(self, draft=draft, drafter=drafter, lost=None, prompt_told=False)

    @property
    def remaining_tokens(self) -> int:
        """How many tokens the request may still write."""
        limit = self.req.sampling_params.max_new_tokens
        return (1 << 30 if limit is None else limit) - len(self.draft.output)


def ending_tokens(req: "Req") -> npt.NDArray[np.int64]:
    """int64[k], the tokens that end a request: those of SGLang's Req._check_token_based_finish."""
    ends = () if req.sampling_params.ignore_eos else stop_tokens(req)
    return np.array(sorted(ends), dtype=np.int64)


def stop_tokens(req: "Req") -> set[int]:
    """The tokens that a request's parameters, its model and its tokenizer stop at."""
    tokenizer = req.tokenizer
    tokens = set(req.sampling_params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    tokens |= set(getattr(tokenizer, "additional_stop_token_ids", None) or ())
    tokens.add(getattr(tokenizer, "eos_token_id", None))
    return tokens - {None}


class RequestTable:
    """Follows the requests of the running batch and tells their drafters.

    Where a hook fails that follows a request (`prefill`, `prepare`, `start`, `observe`), its
    drafter is told to finish it and, in the request's next step, to start it anew; after
    `_MOST_FAILURES` failures the request goes on without a drafter.

    Attributes:
        states: of the target's prompts, for drafters that read them; None: none are kept.
    """

    def __init__(
        self,
        drafters: Mapping[str, AskedDrafter],
        names: Sequence[str],
        default: str,
        max_nodes: int,
        limit: int,
        choice: DrafterChoice,
    ):
        self._drafters = drafters
        self._choice = choice
        self.states: KeptStates | None = None
        self._names = names  # of all that the server loads, also where this rank has none
        self._default = default
        self._prompts_are_read = any(drafter.reads_prompts for drafter in drafters.values())
        self._max_nodes = max_nodes
        self._limit = limit
        self._running: dict[str, RunningRequest] = {}
        # Their prompts are read (here or elsewhere), their first step is still to come.
        self._prefilled: dict[str, RunningRequest] = {}
        # By the drafter's name and whether SSSD was chosen beside it, whether the request has a
        # relaxed rule, and whether it brings a prediction, which is drafted first: what each of
        # them accepts tells nothing of others.
        self._calibrations: dict[tuple[str, bool | None, bool, bool], Calibration] = {}

    def update(
        self, reqs: Sequence["Req"], pending: Sequence[Sequence[int]] | None
    ) -> list[RunningRequest]:
        """The batch's requests, their drafters told of what was committed since.

        Args:
            reqs: the batch.
            pending: for each, the committed tokens that its output_ids lack (overlap, relay.py);
                None: it lacks none.
        """
        running = []
        for i, req in enumerate(reqs):
            extra = pending[i] if pending is not None else ()
            known = self._running.get(req.rid)
            if known is None or known.req is not req:
                known = self._start(req, extra)
            else:
                lost = known.lost is not None
                self._append(known, req.output_ids, extra)
                if lost:
                    self._tell_start(known)
            # Its last token is the root that the target reads next.
            assert len(known.draft.output) == len(req.output_ids) + len(extra), req.rid
            running.append(known)
        if len(self._running) > self._limit:
            self._drop_departed(reqs)
        return running

    def prefill(
        self,
        reqs: Sequence["Req"],
        pays: Callable[[AskedDrafter, int], bool] = lambda drafter, requests: True,
    ) -> dict[str, int]:
        """Tell the drafters that ask for it of requests whose prompts are about to be read.

        Args:
            pays: whether a drafter that drafts in prefills is to draft for so many requests, which
                else go on without one. Asked of those whose budget and drafter nobody has fixed,
                and not of a drafter that biases.

        Returns:
            how many requests each drafter was told of.
        """
        told: dict[str, list[RunningRequest]] = {}
        for req in reqs:
            known = self._undo(req)
            if known is None:
                if not self._prompts_are_read or self._follows(req):
                    continue  # among them later chunks of a prompt, and requests retracted before
                known = self._make(req, ())
            self._prefilled[req.rid] = known
            if known.drafter is not None and known.drafter.reads_prompts:
                told.setdefault(known.drafter.name, []).append(known)
        for name, requests in told.items():
            told[name] = requests = self._worth_drafting(self._drafters[name], requests, pays)
            if requests:
                self._tell_of_prompts(self._drafters[name].drafter.prefill, requests)
        return {name: len(requests) for name, requests in told.items() if requests}

    @staticmethod
    def _worth_drafting(
        drafter: AskedDrafter,
        requests: list[RunningRequest],
        pays: Callable[[AskedDrafter, int], bool],
    ) -> list[RunningRequest]:
        """Those that keep their drafter; see `prefill`."""
        free = [r for r in requests if not r.fixed_budget and r.tally is None]
        if not free or not drafter.drafts_in_prefill:
            return requests
        # What a bias has written must not depend on what pays.
        if drafter.biases or pays(drafter, len(requests)):
            return requests
        for request in free:
            request.drafter = None
        return [r for r in requests if r.drafter is not None]

    @property
    def decoding(self) -> int:
        """How many requests are."""
        return len(self._running)

    def _follows(self, req: "Req") -> bool:
        known = self._prefilled.get(req.rid) or self._running.get(req.rid)
        return known is not None and known.req is req

    def _undo(self, req: "Req") -> RunningRequest | None:
        """Forget a request that was retracted before tokens that its drafter knows were served.

        Returns:
            the request as a new one; None: it was none of these.
        """
        known = self.running(req)
        if known is None or len(known.draft.output) <= len(req.output_ids):
            return None
        del self._running[req.rid]
        again = known.as_new()
        known.finished = True
        self._tell_finish(known, False)
        return again

    def arrive(self, req: "Req") -> bool:
        """Tell a request's drafter of it while another server reads its prompt.

        Returns:
            whether it was told.
        """
        known = self._make(req, ())
        if len(self._prefilled) >= self._limit:  # those that failed on their way tell nobody
            self._prefilled = {k: r for k, r in self._prefilled.items() if not r.req.finished()}
        self._prefilled[req.rid] = known
        drafter = known.drafter
        if drafter is None or not drafter.prepares or known.max_nodes == 0:
            return False
        if not self._tell_of_prompts(drafter.drafter.prepare, [known]):
            return False
        known.ready_at = time.perf_counter()
        return True

    def running(self, req: "Req") -> RunningRequest | None:
        """A request that has begun to decode; None: it has not, or it has left."""
        known = self._running.get(req.rid)
        return known if known is not None and known.req is req else None

    def prefilled(self, req: "Req") -> RunningRequest | None:
        """A request whose prompt is being read; None: its drafter was not told of it."""
        known = self._prefilled.get(req.rid)
        told = known is not None and known.req is req and known.prompt_told
        return known if told else None

    def advance(self, running: RunningRequest, tokens: Sequence[int]) -> None:
        """`tokens` are committed in the step that is about to run; its root is the last one."""
        running.draft.output.extend(tokens)
        self._tell_observe(running, list(tokens))

    def reading(self, req: "Req") -> RunningRequest | None:
        """A request whose prompt is being read, or its output again after a retraction."""
        known = self.running(req)
        if known is None:
            return self.prefilled(req)
        self._append(known, req.output_ids, ())
        return known

    def finish(self, rid: str) -> None:
        """The request ended: give its drafter the whole output, without what came after a stop."""
        self._prefilled.pop(rid, None)
        known = self._running.pop(rid, None)
        if known is None:
            return
        known.finished = True
        req = known.req
        self._append(known, req.output_ids, ())
        known.draft.output[:] = req.output_ids_through_stop
        aborted = type(req.finished_reason).__name__ == "FINISH_ABORT"
        self._tell_finish(known, not aborted)
        if known.tally is not None:
            self._choice.finish(known.tally)

    def clear(self) -> None:
        """Forget every request (the cache was flushed)."""
        self._running.clear()
        self._prefilled.clear()

    def _start(self, req: "Req", extra: Sequence[int]) -> RunningRequest:
        known = self._prefilled.pop(req.rid, None)
        if known is None or known.req is not req:
            known = self._make(req, extra)
        else:
            known.draft.output[:] = [*req.output_ids, *extra]
        self._running[req.rid] = known
        self._tell_start(known)
        return known

    def _make(self, req: "Req", extra: Sequence[int]) -> RunningRequest:
        params = getattr(req.sampling_params, "custom_params", None) or {}
        try:
            options = RequestOptions.parse(params, self._names)
        except RequestOptionError as error:
            # The HTTP layer refuses these; whoever comes another way decodes plainly.
            logger.warning("request %s is not drafted for: %s", req.rid, error)
            options = RequestOptions(drafter=NO_DRAFTER)
        length = self._max_nodes if options.draft_length is None else options.draft_length
        tally = self._choice.choose(options, params)
        if tally is not None:
            note_drafter(req, tally.arm.name)
        draft = DraftRequest(
            rid=req.rid,
            prompt=req.origin_input_ids_unpadded,
            output=[*req.output_ids, *extra],
            params=params,
            options=options,
            features=audio_features(req),
            retrieve=None if tally is None else tally.arm.retrieve,
            target_states=None if self.states is None else self.states.reader(req),
        )
        name = options.drafter or (self._default if tally is None else tally.arm.drafter)
        # The HTTP process has refused it elsewhere (SGLang turns temperature 0 into a top-k of 1).
        relaxed = options.relaxed if getattr(req.sampling_params, "top_k", 1) == 1 else None
        return RunningRequest(
            req,
            draft,
            self._drafters.get(name),
            min(length, self._max_nodes),
            self._calibration(name, draft.retrieve, relaxed is not None, TOKENS_KEY in params),
            fixed_budget=options.budget == "fixed",
            ends=ending_tokens(req),
            relaxed=relaxed,
            tally=tally,
        )

    def _calibration(
        self, drafter: str, retrieve: bool | None, relaxed: bool, predicts: bool
    ) -> Calibration:
        """A request's own."""
        known = drafter if drafter in self._drafters else NO_DRAFTER
        key = known, retrieve, relaxed, predicts
        return self._calibrations.setdefault(key, Calibration()).for_request()

    def _append(self, known: RunningRequest, output_ids: Any, extra: Sequence[int]) -> None:
        seen = len(known.draft.output)
        new = [*output_ids[seen:], *extra[max(0, seen - len(output_ids)) :]]
        if new:
            known.draft.output.extend(new)
            self._tell_observe(known, new)

    def _tell_of_prompts(
        self,
        hook: Callable[[Sequence[DraftRequest]], None],
        requests: Sequence[RunningRequest],
    ) -> bool:
        """Call `prefill` or `prepare` of the requests' drafter; whether it went through."""
        drafter = requests[0].drafter
        assert drafter is not None
        for known in requests:
            known.prompt_told = True
        start = time.perf_counter()
        told = drafter.tell(hook, [known.draft for known in requests])
        self._choice.charge([known.tally for known in requests], time.perf_counter() - start)
        if told:
            return True
        for known in requests:
            self._lose(known)
        return False

    def _tell_start(self, known: RunningRequest) -> None:
        if known.lost is not None:
            known.drafter, known.lost = known.lost, None
        drafter = known.drafter
        if drafter is not None and not drafter.tell(drafter.drafter.start, known.draft):
            self._lose(known)

    def _tell_observe(self, known: RunningRequest, tokens: Sequence[int]) -> None:
        drafter = known.drafter
        if drafter is None or not drafter.observes:
            return
        if not drafter.tell(drafter.drafter.observe, known.draft, tokens):
            self._lose(known)

    @staticmethod
    def _tell_finish(known: RunningRequest, completed: bool) -> None:
        if known.drafter is not None:
            known.drafter.tell(known.drafter.drafter.finish, known.draft, completed)

    def _lose(self, known: RunningRequest) -> None:
        """What its drafter knows of a request may be wrong: it starts anew, or goes on without."""
        self._tell_finish(known, False)
        known.draft.state = None
        known.prompt_told = False
        known.failures += 1
        known.lost = known.drafter if known.failures < _MOST_FAILURES else None
        known.drafter = None

    def _drop_departed(self, reqs: Sequence["Req"]) -> None:
        # Requests that were aborted or retracted and never came back through finish().
        present = {req.rid for req in reqs}
        for rid in [rid for rid in self._running if rid not in present]:
            del self._running[rid]
        self._prefilled.clear()
