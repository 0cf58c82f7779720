"""The one speculative worker: draft, pack, verify, accept, observe, finish.

It follows SGLang's contract for host-drafted trees (speculative/ngram_worker.py): no draft KV,
a TARGET_VERIFY forward under a tree mask, accepted tokens relayed to the next step. What it
adds: drafters behind a protocol, exact sampling and penalties, a verify width chosen per step,
and plain decode steps where drafts do not pay.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.runtime_context import (
    get_device,
    get_disagg,
    get_observability,
    get_parallel,
    get_schedule,
    get_serving,
    get_spec,
)
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from sglang.srt.speculative.spec_utils import (
    record_stream_for_v2_verify,
)
from sglang.srt.utils import broadcast_pyobj

from sglang_ext.api.datastore import control
from sglang_ext.budget.choice import knee
from sglang_ext.budget.cost_sweep import cost_model_of, costs_of
from sglang_ext.cpu.heap_trim import HeapTrim
from sglang_ext.cuda import backends
from sglang_ext.cuda.clock import StepClock
from sglang_ext.cuda.graphs import WidthGraphs
from sglang_ext.cuda.prefill import DevicePrefill
from sglang_ext.cuda.widths import default_widths
from sglang_ext.disaggregation.arrivals import tell_of_arrivals
from sglang_ext.drafters import DrafterContext
from sglang_ext.drafters.named_corpora import Corpora, documents_of
from sglang_ext.drafters.target_bigrams import bigrams_of
from sglang_ext.models.tokenizers import fingerprint
from sglang_ext.options import Options
from sglang_ext.step.bias import Expected, prefer_next_tokens
from sglang_ext.step.host_prefill import HostPrefill
from sglang_ext.step.known_tokens import KnownHead
from sglang_ext.step.logits_guard import LogitsGuard
from sglang_ext.step.metrics import SpeculationMetrics
from sglang_ext.step.penalties import DevicePenalties, is_penalized
from sglang_ext.step.planner import DraftPlanner
from sglang_ext.step.ragged import (
    can_leave_padding_out,
    leave_padding_out,
    needs_every_row,
    put_padding_back,
)
from sglang_ext.step.relay import LastStep, StepResult
from sglang_ext.step.request_table import RunningRequest
from sglang_ext.step.step_plan import LaunchedTrees, Step, StepPlan, share, share_flag
from sglang_ext.step.verify import Accepted, accept_on_device, accept_on_host
from sglang_ext.step.verify_batch import VerifyBatches
from sglang_ext.tree import PackedTrees, TokenTree, pack
from sglang_ext.whisper.encoder_decoder import decoder_starts, keep_encoder_outputs

logger = logging.getLogger(__name__)


class SpeculativeWorker(BaseSpecWorker):
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
        self.on_host = runs_on_host(self.device)
        self._role: str = get_disagg().disaggregation_mode  # null, prefill or decode
        # The other ranks get rank 0's plans: timing must not tell ranks apart.
        self._plans = get_parallel().tp_rank == 0
        self._last = LastStep()
        self._to_learn: LaunchedTrees | None = None
        self._clock: StepClock | None = None if self.on_host else StepClock(self.device)
        self._guard = LogitsGuard(self.model_runner.sampler) if self.on_host else None
        self._heap = HeapTrim() if self.on_host else None
        # Made in init_cuda_graphs(), where there is a device.
        self._graphs: WidthGraphs | None = None
        # Made in alloc_memory_pool(), once SGLang knows how many requests may run.
        self.planner: DraftPlanner
        self._prefills: HostPrefill | DevicePrefill

    # What SGLang asks of a speculative worker

    @property
    def draft_worker(self) -> None:
        """There is no draft model: drafts come from the host."""
        return None

    def alloc_memory_pool(self, **kwargs: Any) -> None:
        """Take over the target's pools, which exist by now."""
        self.req_to_token_pool, self.token_to_kv_pool_allocator = (
            self._target_worker.get_memory_pool()
        )
        context = DrafterContext(
            vocab_size=self.vocab_size,
            options=self.options,
            tokenizer_fingerprint=fingerprint(self._target_worker.tokenizer),
            eos_token_ids=frozenset(self.model_runner.model_config.hf_eos_token_id or ()),
            model_path=self.model_runner.model_config.model_path,
            device=self.device,
        )
        costs = costs_of(self.model_runner, get_parallel().tp_size)
        # What a prefill server reads is drafted for where it is decoded.
        active = self._plans and self._role != "prefill"
        self.planner = DraftPlanner(
            context,
            self.speculative_num_draft_tokens,
            4 * self.model_runner.max_running_requests,
            cost_model_of(self.model_runner, costs),
            active=active,
            knee=knee(costs) if costs else None,
            metrics=self._metrics() if active and get_observability().enable_metrics else None,
            widths=None if self.on_host else default_widths(self.speculative_num_draft_tokens),
        )
        self._penalties = DevicePenalties(
            self.vocab_size, self.device, self.model_runner.max_running_requests
        )
        self._batches = VerifyBatches(
            self._target_worker,
            self.req_to_token_pool,
            self.token_to_kv_pool_allocator,
            self._penalties,
            self.device,
            self.on_host,
        )
        self._corpora = Corpora(self.planner.drafters.values())
        drafts = active and self.page_size == 1 and get_parallel().tp_size == 1
        self._prefills = (
            HostPrefill(self._target_worker, self.planner, drafts)
            if self.on_host
            else DevicePrefill(self._target_worker, self.planner, drafts, self.device)
        )
        rank = get_parallel().dp_rank or 0
        self.control = control.serve(self.planner.drafters.values(), rank) if active else None
        if self._role == "decode":
            tell_of_arrivals()
        logger.info(
            "sglang-ext drafters: %s (default %s), up to %d nodes a step, budget %s",
            ", ".join(self.planner.drafters) or "none",
            self.options.default_drafter,
            self.speculative_num_draft_tokens,
            self.options.budget,
        )

    def init_attention_backends(self) -> None:
        """The target has its backend, and no graph yet."""
        if not self.on_host:
            backends.prepare(self.model_runner.attn_backend, self.model_runner)

    def init_cuda_graphs(self) -> None:
        """Capture those that SGLang has not; the target can be asked from now on."""
        if not self.on_host:
            self._graphs = WidthGraphs(self.model_runner, self.options)
            self.planner.use_widths(self._graphs.widths, self._graphs.padded_batch)
        seconds = self.options.bigram_seconds
        if not seconds or not self._from_rank_0([self.planner.wants_bigrams])[0]:
            return
        bigrams = bigrams_of(self._target_worker, seconds, self._from_rank_0)
        if bigrams is not None:
            self.planner.take_bigrams(bigrams)

    def _metrics(self) -> SpeculationMetrics:
        labels = {"model_name": get_serving().served_model_name}
        if get_parallel().dp_rank is not None:
            labels["dp_rank"] = str(get_parallel().dp_rank)
        return SpeculationMetrics(labels)

    def note_arrival(self, req: Req) -> None:
        """A request came to this decode server; its prompt is being read elsewhere."""
        self.planner.arrive(req)

    def clear_cache_pool(self) -> None:
        """/flush_cache: forget running requests; what was learned from finished ones stays."""
        self.planner.requests.clear()
        self._penalties.clear()
        self._last, self._to_learn = LastStep(), None
        self._prefills.clear()

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        """A request ended; its drafter gets the whole output."""
        self._learn(wait=False)
        self.planner.finish(rid)
        self._penalties.forget(rid)
        self._prefills.forget(rid)

    def add_external_corpus(self, corpus_id: str, token_chunks: list[list[int]]) -> int:
        """SGLang's /add_external_corpus; returns the number of tokens loaded."""
        return self._corpora.add(corpus_id, documents_of(token_chunks))

    def commit_corpus_load(self, corpus_id: str, loaded_token_count: int) -> None:
        """Nothing left to do: a corpus serves as soon as it is added."""

    def remove_external_corpus(self, corpus_id: str) -> None:
        """SGLang's /remove_external_corpus."""
        self._corpora.remove(corpus_id)

    def list_external_corpora(self) -> dict[str, int]:
        """SGLang's /list_external_corpora: tokens by corpus."""
        return self._corpora.tokens_by_name()

    @cached_property
    def _ragged(self) -> bool:
        return self.on_host and can_leave_padding_out(self.model_runner)

    # One step

    def forward_batch_generation(
        self,
        batch: ScheduleBatch,
        on_publish: Callable[[torch.Tensor], None] | None = None,
        pp_proxy_tensors: Any = None,
    ) -> StepResult:
        """Run one scheduler step: prefill as SGLang does, decode with speculation."""
        result = self._run(batch, on_publish, pp_proxy_tensors)
        self._last.launched(batch.reqs, result)
        return result

    def _run(self, batch: ScheduleBatch, on_publish, pp_proxy_tensors) -> StepResult:
        if self._guard is not None:
            self._guard.reqs = batch.reqs
        if self._heap is not None:
            self._heap.trim_if_due()
        if not self.on_host:
            stream = torch.get_device_module(self.device).current_stream()
            record_stream_for_v2_verify(batch, None, stream)
        if not batch.forward_mode.is_decode():
            return self._prefill(batch, on_publish, pp_proxy_tensors)
        look = self.planner.looks() and not self._must_decode_plainly(batch)
        if self._goes_blind(batch, look):
            return self._decode_blindly(batch, on_publish)
        self._learn()
        running = self.planner.requests.update(batch.reqs, self._pending_tokens(batch))
        known_at = time.perf_counter()
        if self._role == "decode":
            self.planner.note_handed_over(running)
        head = self._take_known(batch, running)
        if head is not None and all(head.counts):
            # There is nothing left to compute.
            if on_publish is not None:
                on_publish(batch.seq_lens)
            logits = LogitsProcessorOutput(next_token_logits=None)
            return self._result(logits, False, head.tokens, head.lens, batch.seq_lens)
        trees, plan = self._plan(batch, running, head, look)
        step = Step(batch, running, trees, plan, head, on_publish, known_at)
        return self._plain_decode(step) if plan.width == 1 else self._verify(step)

    def _prefill(self, batch, on_publish, pp_proxy_tensors) -> StepResult:
        self._learn(wait=False)  # of what is in the outputs already
        self.planner.prefill(batch.reqs)
        biases = self._from_rank_0(self.planner.biases_in_prefill(batch.reqs))
        plainly = self._must_decode_plainly(batch)
        result = self._prefills.run(batch, biases, plainly, pp_proxy_tensors)
        new_seq_lens = batch.seq_lens.clone()
        if on_publish is not None:
            on_publish(new_seq_lens)
        lens = torch.ones(len(batch.reqs), dtype=torch.int32, device=self.device)
        made = self._result(
            result.logits_output,
            result.can_run_cuda_graph,
            result.next_token_ids.view(-1, 1),
            lens,
            new_seq_lens,
        )
        self._prefills.launched(made)
        return made

    def _pending_tokens(self, batch: ScheduleBatch) -> list[list[int]] | None:
        """Under overlap, the last step's tokens may be missing in output_ids."""
        return self._last.lacking(batch) if self.enable_overlap else None

    def _take_known(
        self, batch: ScheduleBatch, running: Sequence[RunningRequest]
    ) -> KnownHead | None:
        """Commit what prefills have shown of these requests; the step goes on behind it."""
        known = self._prefills.known.take(running)
        if not all(known):  # a pass goes on behind them
            known = [k and k.before(r.ends) for r, k in zip(running, known, strict=True)]
        if not any(known) or batch.return_logprob:  # which known tokens come without
            return None
        head = self._prefills.store(batch, known)
        for r, k in zip(running, known, strict=True):
            if k is not None:
                self.planner.requests.advance(r, k.tokens)
        batch.seq_lens = batch.seq_lens + head.lens
        batch.seq_lens_cpu = batch.seq_lens_cpu + torch.tensor(head.counts)
        batch.seq_lens_sum = None
        return head

    def _plan(
        self,
        batch: ScheduleBatch,
        running: Sequence[RunningRequest],
        head: KnownHead | None,
        look: bool,
    ) -> tuple[list[TokenTree], StepPlan]:
        """The trees that were drafted here, and what is run of them on every rank."""
        trees, plan = [TokenTree.empty()] * len(running), None
        if self._plans:
            width = 1
            if not self._must_decode_plainly(batch):
                trees, width = self.planner.plan(
                    running,
                    look,
                    padded=not self._ragged,
                    committed=None if head is None else head.counts,
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

    @staticmethod
    def _must_decode_plainly(batch: ScheduleBatch) -> bool:
        """Features whose per-token state the tree walk does not carry."""
        info = batch.sampling_info
        return bool(
            info.has_custom_logit_processor
            or info.has_watermark_candidates
            or info.sampling_mask_batch_indices is not None
            or batch.return_hidden_states
        )

    # A plain step

    def _goes_blind(self, batch: ScheduleBatch, look: bool) -> bool:
        """Whether this step needs nothing from the host, so that it can be launched at once.

        Its roots are on the device, in the relay: SGLang's plain decoding under overlap.
        """
        if self.on_host or not self.enable_overlap or batch.has_grammar:
            return False
        if self._graphs is not None and 1 not in self._graphs.widths:
            return False
        if self._prefills.expects(batch.reqs):
            return False
        blind = self._plans and not self.planner.needs_host(batch.reqs, look)
        if get_parallel().tp_size > 1:
            blind = share_flag(blind, self.model_runner.tp_group)
        return blind

    def _decode_blindly(self, batch: ScheduleBatch, on_publish) -> StepResult:
        assert self._clock is not None
        self._clock.collect()
        relayed = batch.spec_info.accept_tokens.view(len(batch.reqs), -1)
        last = (batch.spec_info.accept_lens - 1).clamp(min=0).long()
        roots = relayed.gather(1, last[:, None])[:, 0].long()
        return self._decode(batch, roots, float(batch.seq_lens_cpu.sum()), on_publish)

    def _plain_decode(self, step: "Step") -> StepResult:
        batch = step.batch
        [roots] = self._batches.to_device([step.plan.packed.tokens[:, 0]])
        self._set_exact_penalties(batch, step.running)
        self.planner.note_look(time.perf_counter() - step.known_at)
        read = self.planner.reads(step.running)
        return self._decode(batch, roots, read, step.on_publish, step.plan.expected, step.head)

    def _decode(
        self,
        batch: ScheduleBatch,
        roots: torch.Tensor,
        read: float,
        on_publish,
        expected: Expected | None = None,
        head: KnownHead | None = None,
    ) -> StepResult:
        """One token a request through SGLang's own decode and sampler.

        Args:
            roots: int64[bs], each request's last token.
            read: KV entries that attention reads.
        """
        start = time.perf_counter()
        slots = self.req_to_token_pool.req_to_token[batch.req_pool_indices, decoder_starts(batch)]
        keep_encoder_outputs(batch)
        new_seq_lens = batch.seq_lens + 1
        if on_publish is not None:
            # Known before the pass is run: the next step need not wait for it.
            on_publish(new_seq_lens)
        batch.input_ids = roots
        batch.out_cache_loc = slots.to(torch.int64)
        batch.seq_lens = new_seq_lens
        batch.seq_lens_cpu = batch.seq_lens_cpu + 1
        batch.orig_seq_lens = batch.orig_seq_lens + 1
        batch.seq_lens_sum = None
        batch.spec_info = None
        bs = len(batch.reqs)
        with self._timed(self._padded(bs), read, start), self._at_width(1):
            result = self._target_worker.forward_batch_generation(batch)
            prefer_next_tokens(result, batch, expected)
        logits = result.logits_output
        if batch.return_logprob:
            logits.next_token_logprobs = logits.next_token_logprobs.view(-1, 1)
        lens = torch.ones(bs, dtype=torch.int32, device=self.device)
        tokens = result.next_token_ids.view(-1, 1)
        return self._result(logits, result.can_run_cuda_graph, tokens, lens, new_seq_lens, head)

    def _set_exact_penalties(self, batch, running: Sequence[RunningRequest]) -> None:
        if any(is_penalized(r.req) for r in running):
            additive, scaling = self._penalties.next_token(
                batch.reqs, [r.draft.output for r in running]
            )
            batch.sampling_info.acc_additive_penalties = additive
            batch.sampling_info.acc_scaling_penalties = scaling

    # Of every step

    def _padded(self, bs: int) -> int:
        """Requests that a pass over `bs` runs."""
        return bs if self._graphs is None else self._graphs.padded_batch(bs)

    def _at_width(self, width: int) -> AbstractContextManager[Any]:
        """The graph and the attention backend of a width."""
        return nullcontext() if self._graphs is None else self._graphs.use(width)

    @contextmanager
    def _timed(
        self, tokens: int, read: float, since: float, verify: bool = False
    ) -> Iterator[None]:
        """Tell the planner what a step over `tokens` tokens took; on a device, once it has run.

        Args:
            since: when it began on the host (time.perf_counter); a device begins now.
        """

        def note(seconds: float) -> None:
            self.planner.note_step(tokens, seconds, read, verify)

        if self._clock is None:
            yield
            note(time.perf_counter() - since)
        else:
            self._clock.begin()
            yield
            self._clock.end(note)

    def _learn(self, wait: bool = True) -> None:
        """Tell drafters what the last verify step on a device has shown, once it has ended.

        Args:
            wait: for its end; else it is left for later where it has not ended.
        """
        self._prefills.learn(wait)
        if self._clock is None:
            return  # on the host they learn at once
        launched = self._to_learn
        if launched is not None and (wait or launched.result.copy_done.query()):
            self._to_learn = None
            launched.result.wait()
            assert launched.result.learned is not None
            said, index = np.hsplit(launched.result.learned.numpy(), 2)
            predicted = said if launched.greedy else None
            self.planner.observe(
                launched.running, launched.trees, launched.packed, index, predicted
            )
        self._clock.collect()

    # A verify step

    def _verify(self, step: "Step") -> StepResult:
        batch, packed = step.batch, step.plan.packed
        width = packed.width
        start = time.perf_counter()
        read = self.planner.reads(step.running, step.trees, width)
        verify_input, biased = self._batches.prepare(batch, step.plan)
        positions = verify_input.positions
        slots = batch.out_cache_loc
        nodes = packed.nodes() if self._ragged else None
        if nodes is not None:
            leave_padding_out(batch, verify_input, nodes)
        forwarded = len(batch.input_ids) if self.on_host else self._padded(len(batch.reqs)) * width
        self.planner.note_look(time.perf_counter() - step.known_at)
        with self._timed(forwarded, read, start, verify=True), self._at_width(width):
            result = self._target_worker.forward_batch_generation(batch, is_verify=True)
            batch.out_cache_loc = slots
            logits_output = result.logits_output
            if nodes is not None and needs_every_row(batch):
                put_padding_back(logits_output, packed, nodes)
                nodes = None
            logits = logits_output.next_token_logits
            self._batches.adjust_logits(logits, batch, step.running, packed)
            accepted = self._accept(logits, batch, packed, verify_input, positions, nodes, biased)
            self._batches.commit(batch, accepted, width)
            if batch.return_logprob:
                compute_spec_logprobs(
                    batch, logits_output, accepted.predict, accept_index=accepted.accept_index
                )
            new_seq_lens = batch.seq_lens + accepted.accept_lens
            if step.on_publish is not None:
                step.on_publish(new_seq_lens)
            greedy = batch.sampling_info.is_all_greedy
            if self.on_host:
                # A sampled node is one on an accepted path; greedily, every node has its token.
                said = accepted.predict.numpy().reshape(packed.tokens.shape) if greedy else None
                index = accepted.accept_index.numpy()
                self.planner.observe(step.running, step.trees, packed, index, said)
        made = self._result(
            logits_output,
            result.can_run_cuda_graph,
            accepted.predict[accepted.accept_index.long()],
            accepted.accept_lens,
            new_seq_lens,
            step.head,
        )
        if not self.on_host and self._plans:
            made.learned = accepted.learned
            self._to_learn = LaunchedTrees(step.running, step.trees, packed, greedy, made)
        return made

    def _accept(
        self, logits, batch, packed: PackedTrees, verify_input, positions, nodes, biased
    ) -> Accepted:
        sampler = self.model_runner.sampler
        info = batch.sampling_info
        if self.on_host:
            return accept_on_host(logits, packed, info, positions, sampler, nodes, biased)
        group = get_parallel().tp_group
        return accept_on_device(logits, verify_input, info, positions, sampler, group, biased)

    def _result(
        self, logits_output, can_run_cuda_graph, accept_tokens, lens, new_seq_lens, head=None
    ) -> StepResult:
        """The result of a step; `accept_tokens` [bs, n] is padded to the relay's fixed width.

        Args:
            head: what the requests got before it.
        """
        stride = self.speculative_num_draft_tokens
        if head is not None:
            accept_tokens, lens = head.joined(accept_tokens, lens, stride)
        relay = torch.zeros(len(lens), stride, dtype=torch.int32, device=self.device)
        relay[:, : accept_tokens.shape[1]] = accept_tokens
        return StepResult(
            logits_output=logits_output,
            next_token_ids=accept_tokens.flatten(),
            can_run_cuda_graph=can_run_cuda_graph,
            accept_lens=lens,
            new_seq_lens=new_seq_lens,
            next_draft_input=NgramVerifyInput(
                draft_token_num=stride,
                new_seq_lens=new_seq_lens,
                accept_tokens=relay.flatten(),
                accept_lens=lens,
            ),
            speculative_num_draft_tokens=stride,
            speculative_output_stride=accept_tokens.shape[1],
        )


def runs_on_host(device: str) -> bool:
    """Whether a step's tensors can be read at any time, without waiting for a device."""
    return device == "cpu"
