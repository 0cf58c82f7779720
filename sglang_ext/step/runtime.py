"""What differs in a step between a target on the host and one on a device.

On the host a step has ended when its pass returns: its tokens, times and lessons are at hand. On a
device it has only been queued by then, and all of these come later.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, ClassVar

import torch

from sglang_ext.options import Options
from sglang_ext.step.prefills import Prefills
from sglang_ext.step.step_plan import Step
from sglang_ext.step.step_result import StepResult
from sglang_ext.step.verify import Accepted
from sglang_ext.step.verify_batch import VerifyTensors

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import ScheduleBatch


class StepRuntime(ABC):
    """Runs what is asked of it for one target, in the order of a step.

    Attributes:
        on_host: whether tensors can be read at any time.
        prefills: those of the target.
        moved: told of slots whose K and V were moved (VerifyBatches.moved).
    """

    on_host: ClassVar[bool]
    prefills: Prefills
    moved: Callable[[torch.Tensor, torch.Tensor], None] | None = None

    @staticmethod
    @abstractmethod
    def first_widths(most: int) -> tuple[int, ...] | None:
        """Widths that steps may have before graphs are captured, 1 to `most`; None: any."""

    # While the server starts

    @abstractmethod
    def prepare_attention(self) -> None:
        """The target has its attention backend, and no graph yet."""

    @abstractmethod
    def capture_graphs(self, options: Options) -> None:
        """Capture those that SGLang has not."""

    @abstractmethod
    def open_exit(self, options: Options) -> None:
        """Look into passes from now on, where drafters are to be told of them.

        Raises:
            ExitError: the options name a layer or a file that cannot be used.
        """

    # In a step

    @abstractmethod
    def begin(self, batch: "ScheduleBatch") -> None:
        """A step of this batch begins, of whatever kind."""

    @abstractmethod
    def learn(self, wait: bool = True) -> None:
        """Tell drafters and the planner what earlier steps have shown.

        Args:
            wait: for their ends, and tell what the next drafts need alone: `learn_behind_launch`
                tells the rest. Else what has not ended is left for later.
        """

    @abstractmethod
    def learn_behind_launch(self) -> None:
        """Tell the planner what `learn` left until the device has the next step to run."""

    @abstractmethod
    def can_go_blind(self, batch: "ScheduleBatch") -> bool:
        """Whether a plain step of this batch can run before the host knows its roots."""

    @abstractmethod
    def note_ended(self) -> None:
        """Tell the planner how long those steps took that have ended since; waits for none."""

    @property
    @abstractmethod
    def padded(self) -> bool:
        """Whether a verify pass runs equally many nodes of every request."""

    @abstractmethod
    def leave_padding_out(self, step: Step, verify: VerifyTensors) -> None:
        """Have the pass run the trees' nodes alone, where it can."""

    @abstractmethod
    def passing(self, step: Step, read: float) -> AbstractContextManager[None]:
        """The time, graph and attention backend of the step's pass and what belongs to it.

        The planner is told of the tokens that it runs and the seconds that it took.

        Args:
            read: KV entries that attention reads.
        """

    @abstractmethod
    def rows_of_nodes(
        self, step: Step, verify: VerifyTensors, output: "LogitsProcessorOutput"
    ) -> torch.Tensor:
        """float[T, vocab]: the pass's logits, of every node where something counts on that.

        `verify.nodes` says of which they are.
        """

    @abstractmethod
    def accept(self, logits: torch.Tensor, step: Step, verify: VerifyTensors) -> Accepted:
        """The acceptance rules (verify.py) on what `rows_of_nodes` gave."""

    @abstractmethod
    def note_accepted(self, step: Step, accepted: Accepted) -> None:
        """Learn from a verify step within its time, where that needs no waiting."""

    @abstractmethod
    def launched(self, step: Step, accepted: Accepted, result: StepResult) -> None:
        """`result` is what SGLang gets of a verify step; `learn` takes from it what is left.

        To be called on ranks that have drafters.
        """

    @abstractmethod
    def clear(self) -> None:
        """Forget running requests."""
