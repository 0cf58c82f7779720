"""The worker's drafting half: whose drafter proposes what, and how much of it is verified."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_ext import penalties
from sglang_ext.budget import CostModel, candidate_widths, choose_width
from sglang_ext.drafters import Drafter, DrafterContext, load
from sglang_ext.requests import RequestTable, RunningRequest
from sglang_ext.tree import PackedTrees, TokenTree

logger = logging.getLogger(__name__)


class DraftPlanner:
    """Asks the requests' drafters for trees and chooses the width of each verify step.

    Args:
        context: what the drafters are told of the server.
        max_width: most nodes a step verifies per request, the root included.
        max_requests: requests to follow at most before those that left are forgotten.
        cost: measured cost of forward passes, for variable widths; None: every step is
            `max_width` wide, so that captured CUDA graphs serve them all.
        active: False on the tensor-parallel ranks that get their trees from rank 0.
    """

    def __init__(
        self,
        context: DrafterContext,
        max_width: int,
        max_requests: int,
        cost: CostModel | None,
        active: bool,
    ):
        self._options = context.options
        self._vocab_size = context.vocab_size
        self._max_width = max_width
        self._widths = candidate_widths(max_width)
        self.cost = cost
        names = context.options.loaded_drafters()
        self.drafters: dict[str, Drafter] = (
            {name: load(name, context) for name in names} if active else {}
        )
        self.requests = RequestTable(
            self.drafters, names, context.options.drafter, max_width - 1, max_requests
        )

    def plan(self, running: Sequence[RunningRequest]) -> tuple[list[TokenTree], int]:
        """Each request's tree, and the width to verify them at; width 1 is a plain step."""
        trees = [TokenTree.empty()] * len(running)
        for drafter in self.drafters.values():
            self._propose(drafter, running, trees)
        return trees, self._choose_width(running, trees)

    def observe(
        self,
        running: Sequence[RunningRequest],
        trees: Sequence[TokenTree],
        packed: PackedTrees,
        accept_index: npt.NDArray[np.int32],
    ) -> None:
        """Learn from a verify step how far the drafters' probabilities can be trusted.

        Args:
            accept_index: int32[bs, width], see verify.Accepted.
        """
        on_path = np.zeros(packed.tokens.shape, dtype=bool)
        on_path.reshape(-1)[accept_index[accept_index >= 0]] = True
        for b, (request, tree) in enumerate(zip(running, trees, strict=True)):
            n = int(packed.sizes[b]) - 1
            if n:
                request.calibration.observe(tree.probs[:n], on_path[b, 1 : n + 1])

    def corpus_drafter(self) -> Any:
        """The loaded drafter that keeps named corpora.

        Raises:
            ValueError: none does.
        """
        for drafter in self.drafters.values():
            if hasattr(drafter, "add_corpus"):
                return drafter
        raise ValueError("no loaded drafter keeps corpora; start the server with --drafter sssd")

    def _propose(
        self, drafter: Drafter, running: Sequence[RunningRequest], trees: list[TokenTree]
    ) -> None:
        rows = [i for i, r in enumerate(running) if r.drafter is drafter and _depth(r) > 0]
        if not rows:
            return
        try:
            proposed = drafter.propose([running[i].draft for i in rows], self._max_width - 1)
            for i, tree in zip(rows, proposed, strict=True):
                tree.check(self._vocab_size)
                trees[i] = tree.clipped(_depth(running[i])).first(running[i].max_nodes)
        except Exception:
            # A drafter must not take the scheduler down with it: this step goes undrafted.
            logger.exception("drafter %s failed to propose", type(drafter).__name__)

    def _choose_width(self, running: Sequence[RunningRequest], trees: Sequence[TokenTree]) -> int:
        if self.cost is None:
            return self._max_width
        longest = max(len(tree) for tree in trees)
        if self._options.budget == "fixed" or longest == 0:
            return min(longest + 1, self._max_width)
        probs = [
            request.calibration(tree.probs) if len(tree) else np.empty(0)
            for request, tree in zip(running, trees, strict=True)
        ]
        return choose_width(probs, self._widths, self.cost)


def _depth(running: RunningRequest) -> int:
    """How deep a tree is of use: the bonus token needs a place too."""
    depth = min(running.remaining_tokens - 1, running.max_nodes)
    bound = penalties.max_depth(running.req, len(running.draft.output))
    return depth if bound is None else min(depth, bound)
