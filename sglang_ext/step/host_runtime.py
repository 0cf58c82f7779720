"""Steps of a target on a CPU: real nodes only, and everything is learned at once."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import torch
from sglang.srt.runtime_context import get_parallel

from sglang_ext.budget.held_up import HeldUp
from sglang_ext.cpu.heap_trim import HeapTrim
from sglang_ext.cpu.packed_weights import packed_product
from sglang_ext.mirror.early_exit import Look, open_exit
from sglang_ext.options import Options
from sglang_ext.step.attended_frames import AttendedFrames
from sglang_ext.step.exit_views import ExitViews
from sglang_ext.step.host_prefill import HostPrefill
from sglang_ext.step.logits_guard import LogitsGuard
from sglang_ext.step.ragged import (
    can_leave_padding_out,
    leave_padding_out,
    needs_every_row,
    put_padding_back,
)
from sglang_ext.step.runtime import StepRuntime
from sglang_ext.step.sequence_states import states_for
from sglang_ext.step.step_plan import Step
from sglang_ext.step.step_result import StepResult
from sglang_ext.step.verify import Accepted, accept_on_host
from sglang_ext.step.verify_batch import VerifyTensors

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker

    from sglang_ext.step.planner import DraftPlanner


class HostRuntime(StepRuntime):
    """A target whose tensors are the host's.

    Args:
        target: SGLang's worker.
        planner: who learns.
        drafts: whether drafts may be read behind prompts (HostPrefill).

    Raises:
        ValueError: the variable of HeapTrim is no number, or a drafter wants states of prompts that
            cannot be kept.
    """

    on_host: ClassVar[bool] = True
    prefills: HostPrefill

    def __init__(self, target: "TpModelWorker", planner: "DraftPlanner", drafts: bool) -> None:
        self._target = target
        self._runner = target.model_runner
        self._exits: ExitViews | None = None
        self._planner = planner
        self._guard = LogitsGuard(self._runner.sampler)
        self._heap = HeapTrim()
        self._held_up = HeldUp()
        self._states = planner.requests.states = states_for(target, planner.drafters.values())
        self.moved = None if self._states is None else self._states.move
        self.prefills = HostPrefill(target, planner, drafts, self._states)

    @staticmethod
    def first_widths(most: int) -> None:
        """Any: what is no node is left out of a pass."""

    def prepare_attention(self) -> None:
        """Our own backend takes trees as they are; it can be asked what a Whisper attends to."""
        if get_parallel().tp_size == 1:  # else a rank has some of the heads
            self.prefills.attended = AttendedFrames.of(self._runner)

    def capture_graphs(self, options: Options) -> None:
        """Nothing to do: there are no graphs."""

    def open_exit(self, options: Options) -> None:
        """Open it where a drafter uses it and the target can have one."""
        if not self._planner.uses_early_exit:
            return
        planner = self._planner
        made = open_exit(
            self._target, options, planner.datastores, packed_product, planner.exit_depth
        )
        self._exits = None if made is None else ExitViews(made)

    def begin(self, batch: "ScheduleBatch") -> None:
        """Look at this batch's logits from now on, and give free heap back now and then."""
        self._guard.reqs = batch.reqs
        if self.prefills.attended is not None:
            self.prefills.attended.begin(batch)
        self._heap.trim_if_due()

    def learn(self, wait: bool = True) -> None:
        """Nothing is left to learn."""
        self.prefills.learn(wait)

    def learn_behind_launch(self) -> None:
        """Nothing: `learn` leaves nothing, as no device waits for it."""

    def can_go_blind(self, batch: "ScheduleBatch") -> bool:
        """Never: a step's tokens are known when it has run."""
        return False

    def note_ended(self) -> None:
        """Nothing to do: `passing` has told of each."""

    @property
    def padded(self) -> bool:
        """Whether something else than our own attention counts nodes."""
        return not self._ragged

    @cached_property
    def _ragged(self) -> bool:
        return can_leave_padding_out(self._runner)

    def leave_padding_out(self, step: Step, verify: VerifyTensors) -> None:
        """Have the pass run the trees' nodes alone, where our own attention runs it."""
        packed = step.packed
        if self._ragged and (packed.sizes < packed.width).any():
            verify.nodes = packed.nodes()
            leave_padding_out(step.batch, verify.verify_input, verify.nodes)

    @contextmanager
    def passing(self, step: Step, read: float) -> Iterator[None]:
        """Time the pass from `step.started` on, and have drafters told of its early exit."""
        step.counted = self._planner.take_counted()
        kept = nullcontext() if self._states is None else self._states.reading(step.batch)
        tokens = len(step.batch.input_ids)
        exits, verify = self._exits, step.width > 1
        began, cpu = time.perf_counter(), time.process_time()
        ragged = self._ragged and verify
        watched = nullcontext(Look()) if exits is None else exits.watching(step, ragged)
        with watched as look, kept:
            yield
        end = time.perf_counter()
        held_up = self._held_up.note(end - began, time.process_time() - cpu, verify)
        if look.reached_at is not None:
            self._planner.note_exit(look.reached_at - step.started, look.seconds)
        seconds = end - step.started
        self._planner.note_step(tokens, seconds, read, verify, step.counted, held_up)
        if self.prefills.attended is not None and step.width == 1:
            self.prefills.attended.note_plain(step.batch)

    def rows_of_nodes(
        self, step: Step, verify: VerifyTensors, output: "LogitsProcessorOutput"
    ) -> torch.Tensor:
        """The pass's logits, padding put back where something counts on it."""
        if verify.nodes is not None and needs_every_row(step.batch):
            put_padding_back(output, step.packed, verify.nodes)
            verify.nodes = None
        return output.next_token_logits

    def accept(self, logits: torch.Tensor, step: Step, verify: VerifyTensors) -> Accepted:
        """The rules for logits on the host."""
        return accept_on_host(
            logits,
            step.packed,
            step.batch.sampling_info,
            verify.positions,
            self._runner.sampler,
            verify.nodes,
            verify.biased,
            verify.relaxed,
        )

    def note_accepted(self, step: Step, accepted: Accepted) -> None:
        """Learn from a verify step."""
        said = None
        if step.batch.sampling_info.is_all_greedy:
            # A sampled node is one on an accepted path; greedily, every node has its token.
            said = accepted.predict.numpy().reshape(step.packed.tokens.shape)
        index = accepted.accept_index.numpy()
        self._planner.observe(step.running, step.trees, step.packed, index, said, step.counted)
        self._planner.note_relaxed(accepted.relaxed)
        if self.prefills.attended is not None:
            self.prefills.attended.note_verified(step.batch, step.packed, accepted, self._ragged)

    def launched(self, step: Step, accepted: Accepted, result: StepResult) -> None:
        """Nothing to do: `note_accepted` has learned from it."""

    def clear(self) -> None:
        """Forget running requests."""
        self.prefills.clear()
