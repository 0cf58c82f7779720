"""Prefills of a server on a CPU: drafters read the prompts, and drafts are read behind them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from sglang_ext.bias import Expected, prefer_next_tokens
from sglang_ext.encoder_decoder import DecoderTimer, decoder_starts
from sglang_ext.prefill_drafts import (
    KnownTokens,
    can_read_drafts,
    prefill_with_drafts,
    write_known,
)
from sglang_ext.ragged import can_leave_padding_out

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.managers.utils import GenerationBatchResult

    from sglang_ext.drafters import Bias
    from sglang_ext.drafting import DraftPlanner
    from sglang_ext.requests import RunningRequest


@dataclass(frozen=True)
class KnownHead:
    """Tokens that requests get in a step before it runs, since their prefill has shown them.

    Attributes:
        tokens: int64[bs, n], zeros behind each request's own.
        lens: int32[bs], how many each request has.
    """

    tokens: torch.Tensor
    lens: torch.Tensor

    def joined(self, tokens: torch.Tensor, lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """These and, behind them, what the step gave.

        Args:
            tokens: int[bs, m].
            lens: int32[bs], how many of them each request got.

        Returns:
            The same of both, int[bs, n + m or less] and int32[bs].
        """
        total = self.lens + lens
        both = torch.zeros(len(total), int(total.max()), dtype=tokens.dtype)
        for row, (before, after) in enumerate(zip(self.lens.tolist(), lens.tolist(), strict=True)):
            both[row, :before] = self.tokens[row, :before]
            both[row, before : before + after] = tokens[row, :after]
        return both, total.to(lens.dtype)


class HostPrefill:
    """Runs prefills, and keeps what they show of an output until its first decode step.

    Args:
        target: SGLang's worker.
        planner: whose drafters read along.
        drafts: False where no drafts may be read behind prompts (pages of several tokens, more
            than one rank).
    """

    def __init__(self, target: "TpModelWorker", planner: "DraftPlanner", drafts: bool) -> None:
        self._target = target
        self._req_to_token_pool, self._allocator = target.get_memory_pool()
        self._planner = planner
        self._drafts = drafts
        self._known: dict[str, tuple[Req, KnownTokens]] = {}
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
        """One prefill step.

        Args:
            biases: of the tokens that the requests will write.
            plainly: no drafts may be read behind the prompts of this batch.
        """
        if self._can_draft and not plainly and can_read_drafts(batch):
            drafted = self._run_with_drafts(batch, biases)
            if drafted is not None:
                return drafted
        start = self._start()
        result = self._target.forward_batch_generation(batch, pp_proxy_tensors=pp_proxy_tensors)
        prefer_next_tokens(result, batch, Expected.of_next_tokens(biases))
        self._note(start)
        return result

    def take(self, running: Sequence["RunningRequest"]) -> "list[KnownTokens | None]":
        """What prefills have shown of each of these requests; empty if of none anything.

        A request's first decode step is the last chance: what is not used then is forgotten.
        """
        if not self._known:
            return []
        found: list[KnownTokens | None] = []
        for r in running:
            req, known = self._known.pop(r.draft.rid, (None, None))
            fits = known is not None and req is r.req and r.draft.output == [known.first]
            found.append(known if fits else None)
        return found if any(found) else []

    def store(self, batch: "ScheduleBatch", known: "Sequence[KnownTokens | None]") -> KnownHead:
        """Bring the K and V of known tokens to their requests' slots."""
        start = time.perf_counter()
        counts = [len(k.tokens) if k is not None else 0 for k in known]
        tokens = torch.zeros(len(known), max(counts), dtype=torch.int64)
        rows, firsts = batch.req_pool_indices.tolist(), decoder_starts(batch).tolist()
        for i, (k, row, first) in enumerate(zip(known, rows, firsts, strict=True)):
            if k is None:
                continue
            tokens[i, : len(k.tokens)] = torch.tensor(k.tokens)
            slots = self._req_to_token_pool.req_to_token[row, first : first + len(k.tokens)]
            write_known(k, self._allocator.get_kvcache(), slots.long())
        self._planner.note_known([n for n in counts if n], time.perf_counter() - start)
        return KnownHead(tokens, torch.tensor(counts, dtype=torch.int32))

    def forget(self, rid: str) -> None:
        """The request ended."""
        self._known.pop(rid, None)

    def clear(self) -> None:
        """Forget every request."""
        self._known.clear()

    def _run_with_drafts(
        self, batch: "ScheduleBatch", biases: "Sequence[Bias | None]"
    ) -> "GenerationBatchResult | None":
        chains = self._planner.foresee(batch.reqs)
        if not any(map(len, chains)):
            return None
        start = self._start()
        drafted = prefill_with_drafts(self._target, self._allocator, batch, chains, biases)
        if drafted is None:
            return None
        self._note(start)
        self._planner.foreseen(batch.reqs, chains, drafted.predicted)
        for req, known in zip(batch.reqs, drafted.known, strict=True):
            if known is not None:
                self._known[req.rid] = req, known
        return drafted.result

    def _start(self) -> float:
        if self._timer is not None:
            self._timer.take()
        return time.perf_counter()

    def _note(self, start: float) -> None:
        decoder = self._timer.take() if self._timer is not None else 0.0
        self._planner.note_prefill(time.perf_counter() - start, decoder)
