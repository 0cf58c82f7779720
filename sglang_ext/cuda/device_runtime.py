"""Steps of a target on a device: widths with captured graphs, and all is learned one step late."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.spec_utils import record_stream_for_v2_verify

from sglang_ext.cuda import backends
from sglang_ext.cuda.clock import StepClock
from sglang_ext.cuda.graphs import WidthGraphs
from sglang_ext.cuda.prefill import DevicePrefill
from sglang_ext.cuda.warm_up import warm_up
from sglang_ext.cuda.widths import default_widths
from sglang_ext.drafters import DrafterError
from sglang_ext.options import Options
from sglang_ext.step.runtime import StepRuntime
from sglang_ext.step.step_plan import Step
from sglang_ext.step.step_result import StepResult
from sglang_ext.step.verify import Accepted, accept_on_device
from sglang_ext.step.verify_batch import VerifyTensors
from sglang_ext.tree import PackedTrees, TokenTree

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker

    from sglang_ext.step.drafter_choice import CountedStep
    from sglang_ext.step.planner import DraftPlanner
    from sglang_ext.step.request_table import RunningRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _LaunchedTrees:
    """A verify step whose outcome is still to be learned from; of its batch nothing is kept.

    Attributes:
        greedy: whether every node has the target's token, not only the accepted ones.
        result: whose `learned` comes to the host.
        counted: what is measured of drafters that were chosen; None: nothing.
    """

    running: "Sequence[RunningRequest]"
    trees: Sequence[TokenTree]
    packed: PackedTrees
    greedy: bool
    result: StepResult
    counted: "CountedStep | None"


class DeviceRuntime(StepRuntime):
    """A target on a device, launched ahead of what the host knows.

    Args:
        target: SGLang's worker.
        planner: who learns.
        drafts: whether drafts may be read behind prompts (DevicePrefill).

    Raises:
        DrafterError: a drafter wants the target's states of prompts.
    """

    on_host: ClassVar[bool] = False

    def __init__(self, target: "TpModelWorker", planner: "DraftPlanner", drafts: bool) -> None:
        if any(drafter.states_layer for drafter in planner.drafters.values()):
            raise DrafterError(
                "a drafter with the target's encoder is served on CPUs alone; train one with "
                "--encoder own"
            )
        self._runner = target.model_runner
        self._planner = planner
        self._device = self._runner.device
        self._clock = StepClock(self._device)
        self._graphs: WidthGraphs | None = None
        self._to_learn: _LaunchedTrees | None = None
        self._left: Callable[[], None] | None = None  # to be learned behind the next launch
        self.prefills = DevicePrefill(target, planner, drafts, self._device)

    @staticmethod
    def first_widths(most: int) -> tuple[int, ...]:
        """Those that graphs are captured for where there is room."""
        return default_widths(most)

    def prepare_attention(self) -> None:
        """Have the target's backend take tree masks that are right."""
        backends.prepare(self._runner.attn_backend, self._runner)

    def capture_graphs(self, options: Options) -> None:
        """Capture a graph set for each width, and load the kernels that no graph holds."""
        self._graphs = WidthGraphs(self._runner, options)
        self._planner.use_widths(self._graphs.widths, self._graphs.padded_batch)
        warm_up(self._graphs.widths, self._device)

    def open_exit(self, options: Options) -> None:
        """None is opened: passes run in captured graphs, which call no hook of a layer."""
        if self._planner.uses_early_exit:
            logger.warning("sglang-ext early exit: none, passes on a device run in CUDA graphs")

    def begin(self, batch: "ScheduleBatch") -> None:
        """Keep the scheduler's tensors from being used again before this stream has read them."""
        stream = torch.get_device_module(self._device).current_stream()
        record_stream_for_v2_verify(batch, None, stream)

    def learn(self, wait: bool = True) -> None:
        """Tell drafters what prefills and the last verify step have shown."""
        self.learn_behind_launch()
        self.prefills.learn(wait)
        launched = self._to_learn
        if launched is not None and (wait or launched.result.copy_done.query()):
            self._to_learn = None
            launched.result.wait()
            assert launched.result.learned is not None
            said, index = np.hsplit(launched.result.learned.numpy(), 2)
            predicted = said if launched.greedy else None
            self._left = partial(self._observe, launched, index, predicted)
            # The device waits for the next drafts: what they do not need comes behind them.
            if not wait or self._planner.learns_from_steps:
                self.learn_behind_launch()
        self.note_ended()

    def learn_behind_launch(self) -> None:
        """Tell what the last verify step has shown of drafts' worth."""
        left, self._left = self._left, None
        if left is not None:
            left()

    def _observe(
        self,
        launched: _LaunchedTrees,
        index: npt.NDArray[np.int32],
        predicted: npt.NDArray[np.int32] | None,
    ) -> None:
        self._planner.observe(
            launched.running,
            launched.trees,
            launched.packed,
            index,
            predicted,
            launched.counted,
        )
        self._planner.note_relaxed(launched.result.relaxed)

    def can_go_blind(self, batch: "ScheduleBatch") -> bool:
        """Whether a plain step of this batch can run before the host knows its roots."""
        if batch.has_grammar or (self._graphs is not None and 1 not in self._graphs.widths):
            return False
        return not self.prefills.expects(batch.reqs)

    def note_ended(self) -> None:
        """Tell the planner how long those steps took that have ended since."""
        self._clock.collect()

    @property
    def padded(self) -> bool:
        """Always: graphs have a fixed number of nodes for each request."""
        return True

    def leave_padding_out(self, step: Step, verify: VerifyTensors) -> None:
        """Nothing to do: padding is run as well."""

    @contextmanager
    def passing(self, step: Step, read: float) -> Iterator[None]:
        """Time the pass by events, on the graph of its width."""
        width = step.width
        step.counted = counted = self._planner.take_counted()
        tokens = self._padded_batch(len(step.batch.reqs)) * width

        def note(seconds: float) -> None:
            self._planner.note_step(tokens, seconds, read, width > 1, counted)

        self._clock.begin()
        with self._at_width(width):
            yield
        self._clock.end(note)

    def rows_of_nodes(
        self, step: Step, verify: VerifyTensors, output: "LogitsProcessorOutput"
    ) -> torch.Tensor:
        """The pass's logits, which are of every node."""
        return output.next_token_logits

    def accept(self, logits: torch.Tensor, step: Step, verify: VerifyTensors) -> Accepted:
        """The rules on the device."""
        return accept_on_device(
            logits,
            verify.verify_input,
            step.batch.sampling_info,
            verify.positions,
            self._runner.sampler,
            get_parallel().tp_group,
            verify.biased,
            verify.relaxed,
        )

    def note_accepted(self, step: Step, accepted: Accepted) -> None:
        """Nothing to do: it would have to be waited for."""

    def launched(self, step: Step, accepted: Accepted, result: StepResult) -> None:
        """Have what the step shows come to the host with the readback of `result`."""
        result.learned = accepted.learned
        greedy = step.batch.sampling_info.is_all_greedy
        self._to_learn = _LaunchedTrees(
            step.running, step.trees, step.packed, greedy, result, step.counted
        )

    def clear(self) -> None:
        """Forget running requests, and what is still to be learned of them."""
        self._to_learn = self._left = None
        self.prefills.clear()

    def _padded_batch(self, bs: int) -> int:
        """Requests that a pass over `bs` runs."""
        return bs if self._graphs is None else self._graphs.padded_batch(bs)

    def _at_width(self, width: int) -> AbstractContextManager[Any]:
        """The graph and the attention backend of a width."""
        return nullcontext() if self._graphs is None else self._graphs.use(width)
