"""Prefills of a server on a CPU: drafters read the prompts, and drafts are read behind them."""

import time
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from sglang_ext.step.attended_frames import AttendedFrames
from sglang_ext.step.known_tokens import KnownHead, KnownTokens
from sglang_ext.step.prefill_drafts import (
    can_read_drafts,
    prefill_plainly,
    prefill_with_drafts,
    write_known,
)
from sglang_ext.step.prefills import Prefills
from sglang_ext.step.ragged import can_leave_padding_out
from sglang_ext.step.relaxed_info import note_first_token
from sglang_ext.step.sequence_states import KeptStates
from sglang_ext.whisper.encoder_decoder import DecoderTimer, decoder_starts

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.managers.utils import GenerationBatchResult

    from sglang_ext.drafters import Bias
    from sglang_ext.step.planner import DraftPlanner
    from sglang_ext.step.step_result import StepResult


class HostPrefill(Prefills):
    """Prefills whose outcome is known at once.

    Args:
        target: SGLang's worker.
        planner: whose drafters read along.
        drafts: False where no drafts may be read behind prompts (pages of several tokens, more
            than one rank).
        states: take the target's states of prompts; None: nobody asks for them.

    Attributes:
        attended: what requests ask of a pass's cross-attention; None: it cannot be read.
    """

    def __init__(
        self,
        target: "TpModelWorker",
        planner: "DraftPlanner",
        drafts: bool,
        states: KeptStates | None = None,
    ) -> None:
        super().__init__(target, planner)
        self._drafts, self._states = drafts, states
        self.attended: AttendedFrames | None = None
        runner = target.model_runner
        timed = planner.metrics is not None and runner.model_config.is_encoder_decoder
        self._timer = DecoderTimer(runner.model) if timed else None

    @cached_property
    def _can_draft(self) -> bool:
        return self._drafts and can_leave_padding_out(self._target.model_runner)

    def run(
        self,
        batch: "ScheduleBatch",
        biases: "Sequence[Bias | None]",
        plainly: bool,
        pp_proxy_tensors: Any,
    ) -> "GenerationBatchResult":
        """Run one prefill step."""
        if self._states is None:
            return self._read(batch, biases, plainly, pp_proxy_tensors)
        with self._states.reading(batch):
            result = self._read(batch, biases, plainly, pp_proxy_tensors)
        self._planner.note_kept_states(self._states.take_seconds())
        return result

    def _read(
        self,
        batch: "ScheduleBatch",
        biases: "Sequence[Bias | None]",
        plainly: bool,
        pp_proxy_tensors: Any,
    ) -> "GenerationBatchResult":
        # Of what a draft has shown, no frames are known.
        asked = self.attended is not None and self.attended.asked
        if self._can_draft and not plainly and not asked and can_read_drafts(batch):
            drafted = self._run_with_drafts(batch, biases)
            if drafted is not None:
                return drafted
        start = self._start()
        result = prefill_plainly(self._target, batch, biases, pp_proxy_tensors)
        self._note(start)
        if self.attended is not None:
            self.attended.note_prefill(batch)
        return result

    def store(self, batch: "ScheduleBatch", known: "Sequence[KnownTokens | None]") -> KnownHead:
        """Bring the K and V of known tokens to their requests' slots."""
        start = time.perf_counter()
        rows, firsts = batch.req_pool_indices.tolist(), decoder_starts(batch).tolist()
        for k, row, first in zip(known, rows, firsts, strict=True):
            if k is None:
                continue
            slots = self._req_to_token_pool.req_to_token[row, first : first + len(k.tokens)]
            write_known(k, self._allocator.get_kvcache(), slots.long())
            if self._states is not None:
                self._states.forget(slots.long())
        head = KnownHead.of(known, lambda arrays: [torch.from_numpy(a) for a in arrays])
        self._planner.note_known([n for n in head.counts if n], time.perf_counter() - start)
        self._planner.note_relaxed(head.relaxed)
        return head

    def launched(self, result: "StepResult") -> None:
        """Nothing is read back: what a prefill has shown is known at once."""

    def learn(self, wait: bool) -> None:
        """Nothing is left to take: `run` has added it to `known`."""

    def _run_with_drafts(
        self, batch: "ScheduleBatch", biases: "Sequence[Bias | None]"
    ) -> "GenerationBatchResult | None":
        chains = self._planner.foresee(batch.reqs)
        if not any(map(len, chains)):
            return None
        start = self._start()
        running = self._planner.relaxed_in_prefill(batch.reqs)
        drafted = prefill_with_drafts(self._target, self._allocator, batch, chains, biases, running)
        if drafted is None:
            return None
        self._note(start)
        self._planner.foreseen(batch.reqs, chains, drafted.predicted)
        for req, known in zip(batch.reqs, drafted.known, strict=True):
            if known is not None:
                self.known.add(req, known)
                if any(known.relaxed[:1]):
                    note_first_token(req)
                    self._planner.note_relaxed(torch.ones(1, 1))
        return drafted.result

    def _start(self) -> float:
        if self._timer is not None:
            self._timer.take()
        return time.perf_counter()

    def _note(self, start: float) -> None:
        decoder = self._timer.take() if self._timer is not None else 0.0
        self._planner.note_prefill(time.perf_counter() - start, decoder)
