"""What prefills on the host (host_prefill.py) and on a device (cuda/prefill.py) have in common."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from sglang_ext.step.known_tokens import KnownHead, KnownTable, KnownTokens

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.managers.utils import GenerationBatchResult

    from sglang_ext.drafters import Bias
    from sglang_ext.step.planner import DraftPlanner
    from sglang_ext.step.request_table import RunningRequest
    from sglang_ext.step.step_result import StepResult


class Prefills(ABC):
    """Runs prefills, and keeps what they show of an output until its first decode step (`known`).

    Args:
        target: SGLang's worker.
        planner: whose drafters read along.
    """

    def __init__(self, target: "TpModelWorker", planner: "DraftPlanner") -> None:
        self._target = target
        self._req_to_token_pool, self._allocator = target.get_memory_pool()
        self._planner = planner
        self.known = KnownTable()

    @abstractmethod
    def run(
        self,
        batch: "ScheduleBatch",
        biases: "Sequence[Bias | None]",
        plainly: bool,
        pp_proxy_tensors: Any,
    ) -> "GenerationBatchResult":
        """Run one prefill step; `launched` must be called with what is made of it.

        Args:
            biases: of the tokens that the requests will write.
            plainly: no drafts may be read behind the prompts of this batch.
        """

    @abstractmethod
    def store(self, batch: "ScheduleBatch", known: "Sequence[KnownTokens | None]") -> KnownHead:
        """Bring known tokens to where the step reads them, their K and V to the requests' slots."""

    @abstractmethod
    def launched(self, result: "StepResult") -> None:
        """`result` is what SGLang gets of the last prefill."""

    @abstractmethod
    def learn(self, wait: bool) -> None:
        """Take what prefills have shown.

        Args:
            wait: for their ends; else those that have not ended are left for later.
        """

    def take_known(
        self, batch: "ScheduleBatch", running: "Sequence[RunningRequest]"
    ) -> KnownHead | None:
        """Commit what prefills have shown of a decode batch's requests; the step goes on behind it.

        Returns:
            None: nothing is known, and nothing was changed.
        """
        known = self.known.take(running)
        if not all(known):  # a pass goes on behind them
            known = [k and k.before(r.ends) for r, k in zip(running, known, strict=True)]
        if not any(known) or batch.return_logprob:  # which known tokens come without
            return None
        head = self.store(batch, known)
        for r, k in zip(running, known, strict=True):
            if k is not None:
                self._planner.requests.advance(r, k.tokens)
        batch.seq_lens = batch.seq_lens + head.lens
        batch.seq_lens_cpu = batch.seq_lens_cpu + torch.tensor(head.counts)
        batch.seq_lens_sum = None
        return head

    def expects(self, reqs: "Sequence[Req]") -> bool:
        """Whether prefills have shown, or will have, how one of these goes on."""
        return any(self.known.has(req) for req in reqs)

    def forget(self, rid: str) -> None:
        """Drop what is known of a request: it ended, or its prompt is read again."""
        self.known.forget(rid)

    def clear(self) -> None:
        """Forget every request."""
        self.known.clear()
