"""The requests that are decoding, and what each one asked of speculation."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sglang_ext.budget.choice import Calibration
from sglang_ext.drafters import Drafter, DraftRequest
from sglang_ext.request_options import NO_DRAFTER, RequestOptionError, RequestOptions
from sglang_ext.whisper.encoder_decoder import audio_features

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

logger = logging.getLogger(__name__)


@dataclass
class RunningRequest:
    """A decoding request: SGLang's, the drafter's view of it, and its drafter.

    `draft.output` is its committed output, complete on the host also under overlap scheduling
    (where SGLang's own `req.output_ids` is one step behind).
    """

    req: "Req"
    draft: DraftRequest
    drafter: Drafter | None
    max_nodes: int
    calibration: Calibration
    fixed_budget: bool = False
    finished: bool = False
    """It has left; under overlap scheduling a step that was launched before may still end."""
    ends: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """int64[k], tokens that end it. None is drafted: with what follows it committed in the same
    step SGLang would look for stop strings behind the end (Req.update_finish_state)."""
    ready_at: float | None = None
    """When its drafter was prepared while its KV was on its way (time.perf_counter), until that
    has been reported."""

    @property
    def context(self) -> int:
        """KV entries that its next token attends to."""
        return len(self.draft.prompt) + len(self.draft.output)

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
    """Follows the requests of the running batch and tells their drafters."""

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        names: Sequence[str],
        default: str,
        max_nodes: int,
        limit: int,
    ):
        self._drafters = drafters
        self._names = names  # of all that the server loads, also where this rank has none
        self._default = default
        self._prompts_are_read = any(hasattr(d, "prefill") for d in drafters.values())
        self._max_nodes = max_nodes
        self._limit = limit
        self._running: dict[str, RunningRequest] = {}
        # Their prompts are read (here or elsewhere), their first step is still to come.
        self._prefilled: dict[str, RunningRequest] = {}
        self._calibrations = {name: Calibration() for name in [*drafters, NO_DRAFTER]}

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
                self._append(known, req.output_ids, extra)
            # Its last token is the root that the target reads next.
            assert len(known.draft.output) == len(req.output_ids) + len(extra), req.rid
            running.append(known)
        if len(self._running) > self._limit:
            self._drop_departed(reqs)
        return running

    def prefill(self, reqs: Sequence["Req"]) -> bool:
        """Tell the drafters that ask for it of requests whose prompts are about to be read.

        Returns:
            whether any drafter was told.
        """
        for req in reqs:
            self._undo(req)
        if not self._prompts_are_read:
            return False
        new: dict[Callable[[list[DraftRequest]], None], list[DraftRequest]] = {}
        for req in reqs:
            known = self._prefilled.get(req.rid) or self._running.get(req.rid)
            if known is not None and known.req is req:
                continue  # a later chunk of its prompt, or it comes back after a retraction
            known = self._make(req, ())
            prefill = getattr(known.drafter, "prefill", None)
            if prefill is not None:
                self._prefilled[req.rid] = known
                new.setdefault(prefill, []).append(known.draft)
        for prefill, drafts in new.items():
            try:
                prefill(drafts)
            except Exception:
                logger.exception("drafter failed in prefill; %d requests", len(drafts))
        return bool(new)

    def _undo(self, req: "Req") -> None:
        """Forget a request that was retracted before tokens that its drafter knows were served."""
        known = self.running(req)
        if known is not None and len(known.draft.output) > len(req.output_ids):
            del self._running[req.rid]
            known.finished = True
            self._tell(known, "finish", False)

    def arrive(self, req: "Req") -> bool:
        """Tell a request's drafter of it while another server reads its prompt.

        Returns:
            whether it was told.
        """
        known = self._make(req, ())
        hook = getattr(known.drafter, "prepare", None) or getattr(known.drafter, "prefill", None)
        if hook is None or known.max_nodes == 0:
            return False
        try:
            hook([known.draft])
        except Exception:
            logger.exception("drafter failed to prepare for request %s", req.rid)
            return False
        if len(self._prefilled) >= self._limit:  # those that failed on their way tell nobody
            self._prefilled = {k: r for k, r in self._prefilled.items() if not r.req.finished()}
        known.ready_at = time.perf_counter()
        self._prefilled[req.rid] = known
        return True

    def running(self, req: "Req") -> RunningRequest | None:
        """A request that has begun to decode; None: it has not, or it has left."""
        known = self._running.get(req.rid)
        return known if known is not None and known.req is req else None

    def prefilled(self, req: "Req") -> RunningRequest | None:
        """A request whose prompt is being read; None: no drafter asked for it."""
        known = self._prefilled.get(req.rid)
        return known if known is not None and known.req is req else None

    def advance(self, running: RunningRequest, tokens: Sequence[int]) -> None:
        """`tokens` are committed in the step that is about to run; its root is the last one."""
        running.draft.output.extend(tokens)
        self._tell(running, "observe", list(tokens))

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
        self._tell(known, "finish", not aborted)

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
        self._tell(known, "start")
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
        draft = DraftRequest(
            rid=req.rid,
            prompt=req.origin_input_ids_unpadded,
            output=[*req.output_ids, *extra],
            params=params,
            features=audio_features(req),
        )
        name = options.drafter or self._default
        return RunningRequest(
            req,
            draft,
            self._drafters.get(name),
            min(length, self._max_nodes),
            self._calibrations[name if name in self._drafters else NO_DRAFTER].for_request(),
            fixed_budget=options.budget == "fixed",
            ends=ending_tokens(req),
        )

    def _append(self, known: RunningRequest, output_ids: Any, extra: Sequence[int]) -> None:
        seen = len(known.draft.output)
        new = [*output_ids[seen:], *extra[max(0, seen - len(output_ids)) :]]
        if new:
            known.draft.output.extend(new)
            self._tell(known, "observe", new)

    def _tell(self, known: RunningRequest, event: str, *args: Any) -> None:
        if known.drafter is None:
            return
        try:
            getattr(known.drafter, event)(known.draft, *args)
        except Exception:
            logger.exception(
                "drafter failed in %s; request %s goes on without", event, known.req.rid
            )
            known.drafter = None

    def _drop_departed(self, reqs: Sequence["Req"]) -> None:
        # Requests that were aborted or retracted and never came back through finish().
        present = {req.rid for req in reqs}
        for rid in [rid for rid in self._running if rid not in present]:
            del self._running[rid]
        self._prefilled.clear()
