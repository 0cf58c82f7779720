"""Telling drafters, in the middle of a step's pass, what the target's early exit says."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sglang_ext.mirror.early_exit import EarlyExit, Look
from sglang_ext.mirror.exit_view import ExitView

if TYPE_CHECKING:
    from sglang_ext.step.asking import AskedDrafter
    from sglang_ext.step.request_table import RunningRequest
    from sglang_ext.step.step_plan import Step
    from sglang_ext.tree import PackedTrees


class ExitViews:
    """An early exit's answers, as the requests' drafters take them.

    Args:
        exit: of the target.
    """

    def __init__(self, exit: EarlyExit) -> None:
        self._exit = exit

    @contextmanager
    def watching(self, step: "Step", ragged: bool) -> Iterator[Look]:
        """In the step's pass, which runs within, tell the drafters that use the exit.

        Gives the pass's Look, which stays empty where no request's drafter is to be told.

        Args:
            ragged: the pass runs real nodes alone; else `width` of every request.
        """
        whose = by_drafter(step.running)
        if not whose:
            yield Look()
            return
        packed = step.packed
        asked = [b for requests in whose.values() for b in requests]
        rows = rows_of(packed, asked, ragged)
        total = int(packed.sizes.sum()) if ragged else packed.tokens.size

        def told(candidates: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32]) -> None:
            first = 0
            for drafter, requests in whose.items():
                end = first + int(packed.sizes[requests].sum())
                view = view_of(step, requests, candidates[first:end], logprobs[first:end])
                drafts = [step.running[b].draft for b in requests]
                drafter.tell(drafter.drafter.early_exit, drafts, view)
                first = end

        with self._exit.watching(rows, total, told) as look:
            yield look


def by_drafter(running: "Sequence[RunningRequest]") -> "dict[AskedDrafter, list[int]]":
    """The places in a batch of the requests of each drafter that uses the exit."""
    whose: dict[AskedDrafter, list[int]] = {}
    for b, request in enumerate(running):
        if request.drafter is not None and request.drafter.wants_exit(request.draft):
            whose.setdefault(request.drafter, []).append(b)
    return whose


def rows_of(packed: "PackedTrees", requests: Sequence[int], ragged: bool) -> npt.NDArray[np.int64]:
    """int64[n]: where the real nodes of these requests are among a pass's tokens."""
    bs, width = packed.tokens.shape
    starts = np.cumsum(packed.sizes) - packed.sizes if ragged else np.arange(bs) * width
    return np.concatenate([starts[b] + np.arange(packed.sizes[b]) for b in requests])


def view_of(
    step: "Step",
    requests: Sequence[int],
    candidates: npt.NDArray[np.int32],
    logprobs: npt.NDArray[np.float32],
) -> ExitView:
    """What one drafter is told.

    Args:
        requests: places in the batch.
        candidates: int32[n, kappa], of the requests' real nodes, one request behind the other.
        logprobs: float32[n, kappa].
    """
    packed, index = step.packed, np.asarray(requests)
    counts = packed.sizes[index]
    width = int(counts.max())
    real = np.arange(width) < counts[:, None]
    shape = (len(index), width, candidates.shape[1])
    all_candidates = np.zeros(shape, np.int32)
    all_logprobs = np.full(shape, -np.inf, np.float32)
    all_candidates[real], all_logprobs[real] = candidates, logprobs
    return ExitView(
        rids=tuple(step.running[b].draft.rid for b in requests),
        tokens=packed.tokens[index, :width].astype(np.int32),
        parents=packed.parents[index, :width],
        counts=counts.astype(np.int32),
        candidates=all_candidates,
        logprobs=all_logprobs,
        started=step.started,
    )
