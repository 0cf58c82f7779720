"""Prefills on a device: drafts of an encoder's outputs are read behind the prompts.

The encoder takes most of such a prefill, and a few tokens more of the decoder are hidden by it. The
draft is run as a longer prompt: causal attention is a chain's mask, so SGLang's own extend is all
that is needed. Its KV is written to the request's own slots, reserved here as SGLang reserves them
for the first decode step anyway. What of the draft is right is known on the host with the readback
of the prefill's result, and committed by the first decode step (step/known_tokens.py).
"""

import inspect
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.layers.logits_processor import LogitsMetadata
from sglang.srt.mem_cache.allocation import assign_req_to_token_pool_func
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.spec_utils import record_stream_each

from sglang_ext.cuda.staging import to_device
from sglang_ext.step.known_tokens import KnownHead, KnownTokens, right_tokens
from sglang_ext.step.prefill_drafts import can_read_drafts, prefill_plainly, put_back
from sglang_ext.step.prefills import Prefills
from sglang_ext.whisper.encoder_decoder import decoder_starts

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.managers.utils import GenerationBatchResult

    from sglang_ext.drafters import Bias
    from sglang_ext.step.planner import DraftPlanner
    from sglang_ext.step.step_result import StepResult
    from sglang_ext.tree import TokenTree

# What the pass changes of a batch, put back behind it.
_CHANGED = (
    "input_ids", "out_cache_loc", "seq_lens", "seq_lens_cpu", "seq_lens_sum", "extend_lens",
    "extend_num_tokens",
)  # fmt: skip


@dataclass
class _ReadDrafts:
    """Drafts that were read behind prompts.

    Attributes:
        rows: each request and its chain, by the row of `said`.
        said: int32[bs, n], the target's token after each prompt, then after each token of its
            chain; whatever stands behind a shorter one has no meaning.
        result: whose readback brings `said` to the host; None: not launched yet.
    """

    rows: "dict[int, tuple[Req, TokenTree]]"
    said: torch.Tensor
    result: "StepResult | None" = None


class DevicePrefill(Prefills):
    """Prefills whose outcome comes to the host with the readback of their results.

    Args:
        target: SGLang's worker.
        planner: whose drafters read along.
        drafts: False where no drafts may be read behind prompts (pages of several tokens, more
            than one rank).
        device: of the target.
    """

    def __init__(
        self, target: "TpModelWorker", planner: "DraftPlanner", drafts: bool, device: str
    ) -> None:
        super().__init__(target, planner)
        # A text's prefill may run in a captured graph, whose logits are of the last tokens alone.
        self._drafts = drafts and target.model_runner.model_config.is_encoder_decoder
        self._device = device
        self._read: list[_ReadDrafts] = []

    def run(
        self,
        batch: "ScheduleBatch",
        biases: "Sequence[Bias | None]",
        plainly: bool,
        pp_proxy_tensors: Any,
    ) -> "GenerationBatchResult":
        """Run one prefill step."""
        for req in batch.reqs:
            self.forget(req.rid)  # read again after a retraction: its slots are others
        if self._drafts and not plainly and not any(biases) and can_read_drafts(batch):
            result = self._run_with_drafts(batch)
            if result is not None:
                return result
        return prefill_plainly(self._target, batch, biases, pp_proxy_tensors)

    def launched(self, result: "StepResult") -> None:
        """`result` is what SGLang gets of the last prefill: its readback brings what was said."""
        for read in self._read:
            if read.result is None:
                read.result, result.learned = result, read.said

    def learn(self, wait: bool) -> None:
        """Take what prefills have shown, in their order."""
        while self._read:
            read = self._read[0]
            assert read.result is not None and read.result.learned is not None
            if wait:
                read.result.wait()
            elif not read.result.came():
                return
            self._read.pop(0)
            self._learn(read, read.result.learned.tolist())

    def expects(self, reqs: "Sequence[Req]") -> bool:
        """Whether prefills have shown, or will have, how one of these goes on."""
        if not self._read and not self.known:
            return False
        read = {id(req) for each in self._read for req, _ in each.rows.values()}
        return any(id(req) in read for req in reqs) or super().expects(reqs)

    def store(self, batch: "ScheduleBatch", known: Sequence[KnownTokens | None]) -> KnownHead:
        """Bring known tokens to the device; their K and V are there."""
        start = time.perf_counter()
        head = KnownHead.of(known, lambda arrays: to_device(arrays, self._device))
        self._planner.note_known([n for n in head.counts if n], time.perf_counter() - start)
        return head

    def forget(self, rid: str) -> None:
        """Drop what is known of a request, or will be."""
        super().forget(rid)
        for read in self._read:
            read.rows = {row: each for row, each in read.rows.items() if each[0].rid != rid}
        self._read = [read for read in self._read if read.rows]

    def clear(self) -> None:
        """Forget every request."""
        self._read.clear()
        super().clear()

    def _learn(self, read: _ReadDrafts, said: list[list[int]]) -> None:
        reqs, chains = zip(*read.rows.values(), strict=True)
        predicted = [said[row][: len(chain) + 1] for row, (_, chain) in read.rows.items()]
        self._planner.foreseen(reqs, chains, predicted)
        for req, chain, tokens in zip(reqs, chains, predicted, strict=True):
            known = right_tokens(chain.tokens.tolist(), tokens)
            if known is not None:
                self.known.add(req, known)

    def _run_with_drafts(self, batch: "ScheduleBatch") -> "GenerationBatchResult | None":
        chains = self._planner.foresee(batch.reqs)
        lens = np.array([len(chain) for chain in chains], dtype=np.int32)
        if not lens.any():
            return None
        # Rows of logits: of each prompt's last token and of its chain.
        starts = np.cumsum(lens + 1) - (lens + 1)
        ends = np.cumsum(np.array(batch.extend_lens) + lens)
        rows = np.concatenate([np.arange(e - n - 1, e) for e, n in zip(ends, lens, strict=True)])
        at = starts[:, None] + np.minimum(np.arange(lens.max() + 1), lens[:, None])
        tokens, rows, at, more = to_device(
            [np.concatenate([c.tokens for c in chains]), rows, at, lens], self._device
        )
        slots = self._reserve(batch, lens, more)
        if slots is None:
            return None
        with put_back(batch, _CHANGED), _logits_of(self._target.model_runner.model, rows):
            _lengthen(batch, tokens, slots, more, lens)
            # Nothing is sampled: requests here are greedy.
            result = self._target.forward_batch_generation(batch, is_verify=True)
        logits = result.logits_output.next_token_logits
        said = torch.argmax(logits, dim=-1)[at]
        result.logits_output.next_token_logits = logits[at[:, 0]]
        result.next_token_ids = said[:, 0]
        of_row = dict(enumerate(zip(batch.reqs, chains, strict=True)))
        self._read.append(_ReadDrafts(of_row, said.to(torch.int32)))
        return result

    def _reserve(
        self, batch: "ScheduleBatch", lens: np.ndarray, more: torch.Tensor
    ) -> torch.Tensor | None:
        """Slots for drafts, behind each prompt's own; None: there is no room.

        As alloc_for_spec_decode (mem_cache/allocation.py) does for a decode step, which then finds
        them reserved. The rows are written on the forward stream; what the scheduler does with them
        later waits behind this pass (Scheduler._apply_war_barrier in managers/scheduler.py).
        """
        total = int(lens.sum())
        free = getattr(self._allocator, "free_pages", None)
        # Freed slots are put in order on the scheduler's stream, not on this one.
        if free is None or len(free) < total:
            return None
        slots = self._allocator.alloc(total)
        _use_here(slots, self._device)
        begin = decoder_starts(batch).to(torch.int32)
        assign_req_to_token_pool_func(
            batch.req_pool_indices,
            self._req_to_token_pool.req_to_token,
            begin,
            begin + more,
            slots,
            len(lens),
        )
        for req, n in zip(batch.reqs, lens.tolist(), strict=True):
            req.kv.kv_allocated_len += n
        return slots


def _use_here(tensor: torch.Tensor, device: str) -> None:
    """Keep memory of another stream from being used again before this stream has read it."""
    record_stream_each([tensor], torch.get_device_module(device).current_stream())


def _lengthen(
    batch: "ScheduleBatch",
    tokens: torch.Tensor,
    slots: torch.Tensor,
    more: torch.Tensor,
    lens: np.ndarray,
) -> None:
    """Make the chains of `lens` `tokens` part of the prompts, their KV in `slots`."""
    prompts = list(batch.extend_lens)
    counts = lens.tolist()
    batch.input_ids = _interleaved(batch.input_ids, prompts, tokens, counts)
    batch.out_cache_loc = _interleaved(batch.out_cache_loc, prompts, slots, counts)
    batch.extend_lens = [p + n for p, n in zip(prompts, counts, strict=True)]
    batch.extend_num_tokens = sum(batch.extend_lens)
    batch.seq_lens = batch.seq_lens + more
    batch.seq_lens_cpu = batch.seq_lens_cpu + torch.from_numpy(lens)
    batch.seq_lens_sum = None


def _interleaved(
    first: torch.Tensor, firsts: Sequence[int], second: torch.Tensor, seconds: Sequence[int]
) -> torch.Tensor:
    """[a, b] and [c, d] as [a, c, b, d], each of its own length."""
    pairs = zip(first.split(list(firsts)), second.to(first.dtype).split(list(seconds)), strict=True)
    return torch.cat([part for pair in pairs for part in pair])


@contextmanager
def _logits_of(model: Any, rows: torch.Tensor) -> Iterator[None]:
    """Have an extend give logits of these tokens (int64[n]), not of each prompt's last one."""
    processor = model.logits_processor
    signature = inspect.signature(processor.forward)

    def pick(_module: Any, args: Any, kwargs: Any) -> tuple[tuple, dict[str, Any]]:
        given = dict(signature.bind(*args, **kwargs).arguments)
        metadata = LogitsMetadata.from_forward_batch(given["logits_metadata"])
        # Of these, SGLang makes logits of every row that there is.
        metadata.forward_mode = ForwardMode.TARGET_VERIFY
        given |= {"hidden_states": given["hidden_states"][rows], "logits_metadata": metadata}
        return (), given

    handle = processor.register_forward_pre_hook(pick, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
