"""A decode batch as a verify batch: its tensors, the logits of its nodes, and the KV it leaves."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs_func
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from sglang.srt.speculative.spec_utils import (
    GrammarTree,
    build_grammar_vocab_mask,
    commit_mamba_states_after_verify,
    move_accept_tokens_to_target_kvcache,
    prepare_mamba_track_for_verify,
)

from sglang_ext.cuda import encoder_tokens
from sglang_ext.cuda.staging import full_mask, mask_starts, to_device
from sglang_ext.step.bias import BiasedRows
from sglang_ext.step.penalties import DevicePenalties, is_penalized
from sglang_ext.step.relaxed import Relaxation, RelaxedNodes
from sglang_ext.step.step_plan import Step
from sglang_ext.step.verify import Accepted
from sglang_ext.whisper.encoder_decoder import decoder_starts, keep_encoder_outputs

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker


@dataclass
class VerifyTensors:
    """What a verify step is made of, beside the batch.

    Attributes:
        verify_input: SGLang's; what the pass runs.
        positions: int64[bs * width], each node's in its sequence.
        slots: int64[bs * width], each node's in the KV pool.
        biased: the nodes with a biased token; None: there are none.
        relaxed: the nodes that a relaxed rule may accept; None: there are none.
        nodes: int64[T], the flat indices of the nodes that the pass gives logits of; None: of all.
    """

    verify_input: NgramVerifyInput
    positions: torch.Tensor
    slots: torch.Tensor
    biased: BiasedRows | None = None
    relaxed: RelaxedNodes | None = None
    nodes: npt.NDArray[np.int64] | None = None


@dataclass
class VerifyBatches:
    """Makes verify batches of one target.

    Attributes:
        target: SGLang's worker.
        pool: its request rows (ReqToTokenPool), int32[rows, slots] of KV slots.
        allocator: of its KV pool.
        penalties: of the running requests.
        device: of the target.
        on_host: whether its tensors are the host's.
        moved: told on the host of slots whose K and V were moved, int64[n]: to, of; None: nobody
            follows.
    """

    target: "TpModelWorker"
    pool: Any
    allocator: Any
    penalties: DevicePenalties
    device: str
    on_host: bool
    moved: Callable[[torch.Tensor, torch.Tensor], None] | None = None

    def prepare(self, step: Step) -> VerifyTensors:
        """Make the batch of `step` a verify batch of its plan."""
        batch, packed = step.batch, step.packed
        bs, width = packed.tokens.shape
        lens = batch.seq_lens_cpu.numpy()
        bias = step.expected.arrays() if step.expected is not None else []
        relaxation = Relaxation.of(step.running, packed)
        relaxed = relaxation.arrays() if relaxation is not None else []
        numbers, tokens, positions, first, next_one, mask, *rules = self.to_device(
            [
                np.arange(bs * width),
                packed.tokens.reshape(-1),
                (lens[:, None] + packed.depths).reshape(-1),
                packed.next_token,
                packed.next_sibling,
                packed.mask,
                *bias,
                *relaxed,
                *([] if self.on_host else [mask_starts(lens, width)]),
            ]
        )
        if self.on_host:
            mask = mask.flatten()
        else:
            total = width * (int(lens.sum()) + bs * width)
            mask = full_mask(mask, batch.seq_lens, rules.pop(), total)
        verify_input = NgramVerifyInput(
            draft_token=tokens,
            custom_mask=mask,
            positions=positions,
            retrieve_index=numbers.view(bs, width),
            retrieve_next_token=first,
            retrieve_next_sibling=next_one,
            draft_token_num=width,
        )
        if not self.on_host:
            encoder_tokens.keep_encoder_lens(verify_input, batch)
        self._have_verified(batch, verify_input)
        made = VerifyTensors(verify_input, positions, batch.out_cache_loc)
        if bias and len(bias[0]):
            made.biased = BiasedRows(*rules[: len(bias)])
        if relaxation is not None:
            made.relaxed = relaxation.nodes(rules[len(bias) :])
        return made

    def _have_verified(self, batch: "ScheduleBatch", verify_input: NgramVerifyInput) -> None:
        """Make `batch` one of `verify_input`, whose nodes get the next slots of each request."""
        width = verify_input.draft_token_num
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        batch.input_ids = verify_input.draft_token
        begin = decoder_starts(batch)
        keep_encoder_outputs(batch)
        batch.out_cache_loc = assign_extend_cache_locs_func(
            req_pool_indices=batch.req_pool_indices,
            req_to_token=self.pool.req_to_token,
            start_offset=begin,
            end_offset=begin + width,
            batch_size=len(begin),
            draft_token_num=width,
            device=self.device,
        )
        prepare_mamba_track_for_verify(batch)
        batch.spec_info = verify_input

    def to_device(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """The arrays as the target's tensors."""
        if self.on_host:
            return [torch.from_numpy(array) for array in arrays]
        return to_device(arrays, self.device)

    def adjust_logits(self, logits: torch.Tensor, step: Step) -> None:
        """Penalties, grammar, bias, in the order of SamplingBatchInfo.apply_logits_bias."""
        batch, running, packed = step.batch, step.running, step.packed
        if any(is_penalized(r.req) for r in running):
            outputs = [r.draft.output for r in running]
            self.penalties.apply_tree(logits, batch.reqs, outputs, packed)
        if batch.has_grammar:
            mask = build_grammar_vocab_mask(
                reqs=batch.reqs,
                tree=GrammarTree.from_host(
                    torch.from_numpy(packed.next_token),
                    torch.from_numpy(packed.next_sibling),
                    torch.from_numpy(packed.tokens),
                ),
                sampling_info=batch.sampling_info,
                device=self.device,
                barrier=None,
            )
            if mask is not None:
                mask.apply(logits)
        if batch.sampling_info.logit_bias is not None:
            logits += batch.sampling_info.logit_bias.repeat_interleave(packed.width, dim=0)

    def commit(self, batch: "ScheduleBatch", accepted: Accepted, width: int) -> None:
        """Bring the accepted nodes' KV to the front of each request's slots."""
        if self._has_states:
            commit_mamba_states_after_verify(
                self.target, batch, accepted.accept_lens, accepted.accept_index, width
            )
        if self.on_host:
            self._move_on_host(accepted.accept_index.numpy(), batch.out_cache_loc)
            return
        move_accept_tokens_to_target_kvcache(
            batch,
            accepted.accept_index,
            accepted.accept_lens - 1,
            self.allocator,
        )

    @cached_property
    def _has_states(self) -> bool:
        """Whether the target has states as Mamba's, which a commit keeps."""
        return mambaish_config(self.target.model_runner.model_config) is not None

    def _move_on_host(self, index: npt.NDArray[np.int32], slots: torch.Tensor) -> None:
        """As SGLang's move, of the nodes that are not where they belong: mostly there are none.

        Args:
            index: int32[bs, width], see verify.Accepted.
        """
        places = np.arange(index.size, dtype=np.int64)
        sources = index.reshape(-1)
        # A path's i-th node belongs to the i-th slot of its request.
        moved = (sources >= 0) & (sources != places)
        if moved.any():
            to, of = torch.from_numpy(places[moved]), torch.from_numpy(sources[moved])
            self.allocator.get_kvcache().move_kv_cache(slots[to], slots[of])
            if self.moved is not None:
                self.moved(slots[to], slots[of])
