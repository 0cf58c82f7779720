"""The one speculative worker: draft, pack, verify, accept, observe, finish.

It follows SGLang's contract for host-drafted trees (speculative/ngram_worker.py): no draft KV,
a TARGET_VERIFY forward under a tree mask, accepted tokens relayed to the next step. What it
adds: drafters behind a protocol, exact sampling and penalties, a verify width chosen per step,
and plain decode steps where drafts do not pay.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.runtime_context import (
    get_device,
    get_disagg,
    get_parallel,
    get_schedule,
    get_spec,
)
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.utils import broadcast_pyobj

from sglang_ext.api.datastore import control
from sglang_ext.cuda.device_runtime import DeviceRuntime
from sglang_ext.disaggregation.arrivals import tell_of_arrivals
from sglang_ext.drafters.corpus_endpoints import CorpusEndpoints
from sglang_ext.drafters.named_corpora import Corpora
from sglang_ext.drafters.target_bigrams import bigrams_of
from sglang_ext.options import Options
from sglang_ext.step.bias import Expected, prefer_next_tokens
from sglang_ext.step.host_runtime import HostRuntime
from sglang_ext.step.penalties import DevicePenalties, is_penalized
from sglang_ext.step.planner import DraftPlanner
from sglang_ext.step.planner_setup import planner_of
from sglang_ext.step.relaxed_info import tell_of_relaxed_tokens
from sglang_ext.step.relay import LastStep, last_tokens
from sglang_ext.step.runtime import StepRuntime
from sglang_ext.step.step_plan import Step, StepPlan, share, share_flag
from sglang_ext.step.step_result import Committed, StepResult
from sglang_ext.step.verify_batch import VerifyBatches
from sglang_ext.tree import TokenTree, pack
from sglang_ext.whisper.encoder_decoder import decoder_starts, keep_encoder_outputs

logger = logging.getLogger(__name__)


class SpeculativeWorker(CorpusEndpoints, BaseSpecWorker):
    """Drives the target with whatever the requests' drafters propose."""

    def __init__(
        self, server_args: ServerArgs, gpu_id: int, nccl_port: int, target_worker: TpModelWorker
    ):
        super().__init__()
        self.server_args = server_args
        self.options = Options.from_env()
        self._target_worker = target_worker
        self.model_runner = target_worker.model_runner
        self.device = get_device().device
        self.enable_overlap = not get_schedule().disable_overlap_schedule
        self.page_size = get_schedule().page_size
        self.topk = get_spec().speculative_eagle_topk
        self.speculative_num_steps = get_spec().speculative_num_steps
        self.speculative_num_draft_tokens: int = get_spec().speculative_num_draft_tokens
        self.adaptive_controller = None
        self.vocab_size: int = self.model_runner.model_config.vocab_size
        self._role: str = get_disagg().disaggregation_mode  # null, prefill or decode
        # The other ranks get rank 0's plans: timing must not tell ranks apart.
        self._plans = get_parallel().tp_rank == 0
        self._last = LastStep()
        # Made in alloc_memory_pool(), once SGLang knows how many requests may run.
        self.planner: DraftPlanner
        self._runtime: StepRuntime

    # What SGLang asks of a speculative worker

    @property
    def draft_worker(self) -> None:
        """There is no draft model: drafts come from the host."""
        return None

    def alloc_memory_pool(self, **kwargs: Any) -> None:
        """Take over the target's pools, which exist by now."""
        pool, allocator = self._target_worker.get_memory_pool()
        self.req_to_token_pool, self.token_to_kv_pool_allocator = pool, allocator
        # What a prefill server reads is drafted for where it is decoded.
        active = self._plans and self._role != "prefill"
        kind: type[HostRuntime] | type[DeviceRuntime] = (
            HostRuntime if runs_on_host(self.device) else DeviceRuntime
        )
        self.planner = planner_of(
            self._target_worker,
            self.options,
            active,
            kind.first_widths(self.speculative_num_draft_tokens),
        )
        drafts = active and self.page_size == 1 and get_parallel().tp_size == 1
        self._runtime = kind(self._target_worker, self.planner, drafts)
        self._penalties = DevicePenalties(
            self.vocab_size, self.device, self.model_runner.max_running_requests
        )
        self._batches = VerifyBatches(
            self._target_worker, pool, allocator, self._penalties, self.device, kind.on_host,
            self._runtime.moved,
        )  # fmt: skip
        drafters = self.planner.drafters
        self._corpora = Corpora(drafters.values())
        rank = get_parallel().dp_rank or 0
        self.control = control.serve(drafters.values(), rank) if active else None
        if self._role == "decode":
            tell_of_arrivals()
        tell_of_relaxed_tokens()
        logger.info(
            "sglang-ext drafters: %s (default %s), up to %d nodes a step, budget %s",
            ", ".join(drafters) or "none",
            self.options.default_drafter,
            self.speculative_num_draft_tokens,
            self.options.budget,
        )

    def init_attention_backends(self) -> None:
        """The target has its backend, and no graph yet."""
        self._runtime.prepare_attention()

    def init_cuda_graphs(self) -> None:
        """Capture those that SGLang has not; the target can be asked from now on."""
        self._runtime.capture_graphs(self.options)
        self._runtime.open_exit(self.options)
        seconds = self.options.bigram_seconds
        if not seconds or not self._from_rank_0([self.planner.wants_bigrams])[0]:
            return
        bigrams = bigrams_of(self._target_worker, seconds, self._from_rank_0)
        if bigrams is not None:
            self.planner.take_bigrams(bigrams)

    def note_arrival(self, req: Req) -> None:
        """A request came to this decode server; its prompt is being read elsewhere."""
        self.planner.arrive(req)

    def clear_cache_pool(self) -> None:
        """/flush_cache: forget running requests; what was learned from finished ones stays."""
        self.planner.requests.clear()
        self._penalties.clear()
        self._last = LastStep()
        self._runtime.clear()

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        """A request ended; its drafter gets the whole output."""
        self._runtime.learn(wait=False)
        self.planner.finish(rid)
        self._penalties.forget(rid)
        self._runtime.prefills.forget(rid)

    # One step

    def forward_batch_generation(
        self,
        batch: ScheduleBatch,
        on_publish: Callable[[torch.Tensor], None] | None = None,
        pp_proxy_tensors: Any = None,
    ) -> StepResult:
        """Run one scheduler step: prefill as SGLang does, decode with speculation."""
        self._runtime.begin(batch)
        step = Step(batch, on_publish)
        if batch.forward_mode.is_decode():
            result = self._decode(step)
        else:
            result = self._prefill(step, pp_proxy_tensors)
        self._last.launched(batch.reqs, result)
        return result

    def _prefill(self, step: Step, pp_proxy_tensors: Any) -> StepResult:
        batch, prefills = step.batch, self._runtime.prefills
        self._runtime.learn(wait=False)  # of what is in the outputs already
        self.planner.prefill(batch.reqs)
        biases = self._from_rank_0(self.planner.biases_in_prefill(batch.reqs))
        plainly = must_decode_plainly(batch)
        passed = prefills.run(batch, biases, plainly, pp_proxy_tensors)
        new_seq_lens = batch.seq_lens.clone()
        step.publish(new_seq_lens)
        committed = Committed.one_each(passed.next_token_ids, new_seq_lens)
        result = StepResult.of(passed, committed, self.speculative_num_draft_tokens)
        prefills.launched(result)
        return result

    def _decode(self, step: Step) -> StepResult:
        batch = step.batch
        look = self.planner.looks() and not must_decode_plainly(batch)
        if self._goes_blind(batch, look):
            return self._decode_blindly(step)
        self._runtime.learn()
        step.running = self.planner.requests.update(batch.reqs, self._pending_tokens(batch))
        step.known_at = time.perf_counter()
        if self._role == "decode":
            self.planner.note_handed_over(step.running)
        step.head = self._runtime.prefills.take_known(batch, step.running)
        if step.head is not None and all(step.head.counts):
            # There is nothing left to compute.
            self._runtime.learn_behind_launch()
            step.publish(batch.seq_lens)
            stride = self.speculative_num_draft_tokens
            return StepResult.of_known(step.head, batch.seq_lens, stride)
        step.trees, step.plan = self._plan(step, look)
        result = self._decode_plainly(step) if step.width == 1 else self._verify(step)
        self._runtime.learn_behind_launch()
        return result

    def _pending_tokens(self, batch: ScheduleBatch) -> list[list[int]] | None:
        """Under overlap, the last step's tokens may be missing in output_ids."""
        return self._last.lacking(batch) if self.enable_overlap else None

    def _plan(self, step: Step, look: bool) -> tuple[list[TokenTree], StepPlan]:
        """The trees that were drafted here, and what is run of them on every rank."""
        running, plan = step.running, None
        trees = [TokenTree.empty()] * len(running)
        if self._plans:
            width = 1
            if not must_decode_plainly(step.batch):
                trees, width = self.planner.plan(
                    running,
                    look,
                    padded=self._runtime.padded,
                    committed=None if step.head is None else step.head.counts,
                )
            packed = pack([r.draft.output[-1] for r in running], trees, width)
            expected = Expected.of_trees(self.planner.biases(running), trees, packed)
            plan = StepPlan(packed, expected)
        if get_parallel().tp_size > 1:
            plan = share(plan, len(running), self.model_runner.tp_group)
        assert plan is not None
        return trees, plan

    def _from_rank_0(self, values: list[Any]) -> list[Any]:
        """Rank 0's values on every rank: only it has drafters."""
        if get_parallel().tp_size == 1:
            return values
        group = self.model_runner.tp_group
        return broadcast_pyobj(values, group.rank, group.cpu_group, src=group.ranks[0])

    # A plain step

    def _goes_blind(self, batch: ScheduleBatch, look: bool) -> bool:
        """Whether this step needs nothing from the host, so that it can be launched at once.

        Its roots are on the device, in the relay: SGLang's plain decoding under overlap.
        """
        if not self.enable_overlap or not self._runtime.can_go_blind(batch):
            return False
        blind = self._plans and not self.planner.needs_host(batch.reqs, look)
        if get_parallel().tp_size > 1:
            blind = share_flag(blind, self.model_runner.tp_group)
        return blind

    def _decode_blindly(self, step: Step) -> StepResult:
        self._runtime.note_ended()
        read = float(step.batch.seq_lens_cpu.sum())
        return self._decode_one_each(step, last_tokens(step.batch), read)

    def _decode_plainly(self, step: Step) -> StepResult:
        [roots] = self._batches.to_device([step.packed.tokens[:, 0]])
        self._set_exact_penalties(step)
        self.planner.note_look(time.perf_counter() - step.known_at)
        return self._decode_one_each(step, roots, self.planner.reads(step.running))

    def _decode_one_each(self, step: Step, roots: torch.Tensor, read: float) -> StepResult:
        """One token a request through SGLang's own decode and sampler.

        Args:
            roots: int64[bs], each request's last token.
            read: KV entries that attention reads.
        """
        batch = step.batch
        step.started = time.perf_counter()
        slots = self.req_to_token_pool.req_to_token[batch.req_pool_indices, decoder_starts(batch)]
        keep_encoder_outputs(batch)
        new_seq_lens = batch.seq_lens + 1
        # Known before the pass is run: the next step need not wait for it.
        step.publish(new_seq_lens)
        batch.input_ids = roots
        batch.out_cache_loc = slots.to(torch.int64)
        batch.seq_lens = new_seq_lens
        batch.seq_lens_cpu = batch.seq_lens_cpu + 1
        batch.orig_seq_lens = batch.orig_seq_lens + 1
        batch.seq_lens_sum = None
        batch.spec_info = None
        with self._runtime.passing(step, read):
            passed = self._target_worker.forward_batch_generation(batch)
            prefer_next_tokens(passed, batch, step.expected)
        logits = passed.logits_output
        if batch.return_logprob:
            logits.next_token_logprobs = logits.next_token_logprobs.view(-1, 1)
        stride = self.speculative_num_draft_tokens
        committed = Committed.one_each(passed.next_token_ids, new_seq_lens)
        return StepResult.of(passed, committed.behind(step.head, stride), stride)

    def _set_exact_penalties(self, step: Step) -> None:
        if any(is_penalized(r.req) for r in step.running):
            info = step.batch.sampling_info
            info.acc_additive_penalties, info.acc_scaling_penalties = self._penalties.next_token(
                step.batch.reqs, [r.draft.output for r in step.running]
            )

    # A verify step

    def _verify(self, step: Step) -> StepResult:
        batch, width = step.batch, step.width
        step.started = time.perf_counter()
        read = self.planner.reads(step.running, step.trees, width)
        verify = self._batches.prepare(step)
        self._runtime.leave_padding_out(step, verify)
        self.planner.note_look(time.perf_counter() - step.known_at)
        with self._runtime.passing(step, read):
            passed = self._target_worker.forward_batch_generation(batch, is_verify=True)
            batch.out_cache_loc = verify.slots
            output = passed.logits_output
            logits = self._runtime.rows_of_nodes(step, verify, output)
            self._batches.adjust_logits(logits, step)
            accepted = self._runtime.accept(logits, step, verify)
            self._batches.commit(batch, accepted, width)
            if batch.return_logprob:
                compute_spec_logprobs(
                    batch, output, accepted.predict, accept_index=accepted.accept_index
                )
            committed = Committed.of_verified(accepted, batch.seq_lens)
            step.publish(committed.new_seq_lens)
            self._runtime.note_accepted(step, accepted)
        stride = self.speculative_num_draft_tokens
        result = StepResult.of(passed, committed.behind(step.head, stride), stride)
        if self._plans:
            self._runtime.launched(step, accepted, result)
        return result


def must_decode_plainly(batch: ScheduleBatch) -> bool:
    """Whether a batch has features whose per-token state the tree walk does not carry."""
    info = batch.sampling_info
    return bool(
        info.has_custom_logit_processor
        or info.has_watermark_candidates
        or info.sampling_mask_batch_indices is not None
        or batch.return_hidden_states
    )


def runs_on_host(device: str) -> bool:
    """Whether a step's tensors can be read at any time, without waiting for a device."""
    return device == "cpu"
