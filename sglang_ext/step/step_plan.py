"""What a decode step is to run, as arrays: rank 0 plans it, the other ranks get it from there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from sglang_ext.step.bias import Expected
from sglang_ext.tree import PackedTrees, TokenTree, linked

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from sglang_ext.step.drafter_choice import CountedStep
    from sglang_ext.step.known_tokens import KnownHead
    from sglang_ext.step.request_table import RunningRequest


@dataclass(frozen=True)
class StepPlan:
    """A decode step.

    Attributes:
        packed: what is verified; of width 1: a plain step, the roots alone.
        expected: what its tokens are biased to; None: nothing is.
    """

    packed: PackedTrees
    expected: Expected | None

    @property
    def width(self) -> int:
        """Nodes of each request, the root included."""
        return self.packed.width

    def to_array(self) -> npt.NDArray[np.int64]:
        """int64[n], its content behind what `from_array` is told."""
        packed = self.packed
        parts = [packed.tokens, packed.parents.astype(np.int64), packed.sizes]
        if self.expected is not None:
            parts += [self.expected.tokens, self.expected.betas.astype(np.float64).view(np.int64)]
        if packed.logprobs is not None:
            parts.append(packed.logprobs.astype(np.float64).view(np.int64))
        return np.concatenate([part.reshape(-1) for part in parts])

    @classmethod
    def from_array(
        cls, array: npt.NDArray[np.int64], bs: int, width: int, biased: bool, scored: bool = False
    ) -> "StepPlan":
        """The plan that `to_array` was made of.

        Args:
            biased: it has `expected`.
            scored: its nodes have log-probabilities.
        """
        sizes = [bs * width, bs * width, bs, *([bs * width, bs] if biased else [])]
        tokens, parents, nodes, *rest = np.split(array, np.cumsum(sizes))
        logprobs = None
        if scored:
            logprobs = rest.pop().view(np.float64).astype(np.float32).reshape(bs, width)
        packed = linked(
            tokens.reshape(bs, width), parents.reshape(bs, width).astype(np.int32), nodes, logprobs
        )
        expected = None
        if biased:
            betas = rest[1].view(np.float64).astype(np.float32)
            expected = Expected(rest[0].reshape(bs, width), betas)
        return cls(packed, expected)


@dataclass
class Step:
    """What a step hands on from method to method, each filling in what it has found.

    Attributes:
        batch: SGLang's.
        on_publish: to be told of the new lengths, under overlap scheduling.
        running: the requests of a decode step; empty where it needs nothing of them.
        known_at: when the requests' tokens were all on the host (time.perf_counter).
        head: tokens that they get before the pass.
        trees: what was drafted for them; empty ones on ranks that plan nothing.
        plan: what is run; None: roots alone, which the host does not know.
        counted: what is measured of drafters that were chosen; None: nothing.
        started: when the host began to make its pass ready (time.perf_counter).
    """

    batch: "ScheduleBatch"
    on_publish: Callable[[torch.Tensor], None] | None = None
    running: "Sequence[RunningRequest]" = ()
    known_at: float = 0.0
    head: "KnownHead | None" = None
    trees: Sequence[TokenTree] = ()
    plan: StepPlan | None = None
    counted: "CountedStep | None" = None
    started: float = 0.0

    @property
    def packed(self) -> PackedTrees:
        """What is verified, or the roots alone, of a step that has a plan."""
        assert self.plan is not None
        return self.plan.packed

    @property
    def expected(self) -> Expected | None:
        """What its tokens are biased to; None: nothing is."""
        return None if self.plan is None else self.plan.expected

    @property
    def width(self) -> int:
        """Nodes that its pass runs of each request; 1: a plain step."""
        return 1 if self.plan is None else self.plan.width

    def publish(self, new_seq_lens: torch.Tensor) -> None:
        """Tell of the lengths that the next step finds: int64[bs]."""
        if self.on_publish is not None:
            self.on_publish(new_seq_lens)


def array_size(bs: int, width: int, biased: bool, scored: bool = False) -> int:
    """How long `StepPlan.to_array` is."""
    return bs * (2 * width + 1 + (width + 1 if biased else 0) + (width if scored else 0))


def share(plan: StepPlan | None, bs: int, group: Any) -> StepPlan:
    """Rank 0's plan on every rank: two broadcasts of numbers among the hosts.

    Args:
        plan: rank 0's; None on the other ranks.
        bs: requests of the batch, the same on every rank.
        group: SGLang's GroupCoordinator of the tensor-parallel ranks.
    """
    head = torch.zeros(3, dtype=torch.int64)
    if plan is not None:
        head[0], head[1] = plan.width, plan.expected is not None
        head[2] = plan.packed.logprobs is not None
    _broadcast(head, group)
    width, biased, scored = int(head[0]), bool(head[1]), bool(head[2])
    body = (
        torch.from_numpy(plan.to_array())
        if plan is not None
        else torch.empty(array_size(bs, width, biased, scored), dtype=torch.int64)
    )
    _broadcast(body, group)
    return plan or StepPlan.from_array(body.numpy(), bs, width, biased, scored)


def share_flag(flag: bool, group: Any) -> bool:
    """Rank 0's flag on every rank."""
    told = torch.tensor([flag], dtype=torch.int64)
    _broadcast(told, group)
    return bool(told[0])


def _broadcast(tensor: torch.Tensor, group: Any) -> None:
    torch.distributed.broadcast(tensor, src=group.ranks[0], group=group.cpu_group)
