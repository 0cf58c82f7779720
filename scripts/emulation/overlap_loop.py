"""SGLang's overlap loop around our real worker, with a target and a pool that are made up.

What is real: SpeculativeWorker's step (who looks, who decodes blindly, packing, staging, the walk
of the trees, the result), the planner and its requests, and SGLang's FutureMap with its relay. What
is emulated: the scheduler, in the order of event_loop_overlap (managers/scheduler.py, SGLang
0.5.23: launch step t, then process step t - 1), and the target, which answers each request with a
text that is fixed beforehand and sees whether it was asked about the right token, and whether the
KV pool holds every token before it. Results reach the host late: until somebody waits for a step,
its tensors hold -1.

Schedules are random: requests join and finish, prefills follow each other, prompts come in chunks,
requests are retracted and come back, are aborted, or come from another server with their KV. Some
have a relaxed rule that accepts the drafter's mistakes: what is accepted becomes their text, and
must be marked as such, and nothing else.
"""

import copy
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from sglang.srt import runtime_context
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.overlap_utils import FutureMap, RelayPayload
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.ngram_info import NgramVerifyInput

from sglang_ext import worker
from sglang_ext.budget.cost_model import CostModel
from sglang_ext.cuda import device_runtime, prefill
from sglang_ext.cuda.widths import default_widths
from sglang_ext.disaggregation.handoff import first_draft_input
from sglang_ext.drafters import Drafter, DrafterContext
from sglang_ext.options import Options
from sglang_ext.step import relaxed_info, verify_batch
from sglang_ext.step.penalties import DevicePenalties
from sglang_ext.step.planner import DraftPlanner
from sglang_ext.step.relay import LastStep
from sglang_ext.step.verify_batch import VerifyBatches
from sglang_ext.tree import TokenTree

VOCAB, WIDTH, ROWS, SLOTS, LONGEST = 50, 8, 10, 160, 40
POISON = -1
# Of the made-up logits it accepts the second best.
RELAXED = {"top_beta": 2, "tau": 0.6}


@dataclass(eq=False)
class FakeReq:
    """What the worker reads of SGLang's Req, and the text that the target will write."""

    rid: str
    prompt: list[int]
    truth: list[int]
    max_new_tokens: int
    encoder: int = 0
    grammar: bool = False
    drafter: str | None = None
    output_ids: list[int] = field(default_factory=list)
    row: int = 0
    read: int = 0
    """Tokens of the prompt (and the output, after a retraction) whose KV is there."""
    is_retracted: bool = False
    finished_reason: Any = None
    to_abort: bool = False
    multimodal_inputs: Any = None
    relaxed: bool = False
    changed: set[int] = field(default_factory=set)
    """Where relaxation has changed its text."""
    customized_info: dict[str, list[int]] | None = None

    def __post_init__(self) -> None:
        self.kv = SimpleNamespace(kv_allocated_len=0)
        self.origin_input_ids = [0] * self.encoder + self.prompt
        self.origin_input_ids_unpadded = self.prompt
        self.eos_token_ids = self.tokenizer = None
        params: dict[str, Any] = {} if self.drafter is None else {"drafter": self.drafter}
        if self.relaxed:
            params["relaxed"] = RELAXED
        self.sampling_params = SimpleNamespace(
            custom_params=params,
            ignore_eos=False,
            stop_token_ids=None,
            max_new_tokens=self.max_new_tokens,
            top_k=1,
            min_new_tokens=0,
            frequency_penalty=0.0,
            presence_penalty=0.0,
            repetition_penalty=1.0,
            logit_bias=None,
        )

    def finished(self) -> bool:
        """Whether it has its whole output."""
        return self.finished_reason is not None

    def marked(self) -> list[int]:
        """Where its answer says that relaxation accepted a token."""
        marks = (self.customized_info or {}).get(relaxed_info.KEY, [])
        return [place for place, mark in enumerate(marks) if mark]

    @property
    def output_ids_through_stop(self) -> list[int]:
        """The output as far as it counts."""
        return self.output_ids[: self.max_new_tokens]


class LateCopy:
    """SGLang's copy_done: the host has a step's tensors once it has waited for it."""

    NAMES = ("next_token_ids", "accept_lens", "learned", "relaxed")

    def __init__(self, result: Any) -> None:
        self._result = result
        self._there = {name: getattr(result, name) for name in self.NAMES}
        for name, tensor in self._there.items():
            if tensor is not None:
                setattr(result, name, torch.full_like(tensor, POISON))
        self.came = False

    def synchronize(self) -> None:
        """Wait."""
        for name, tensor in self._there.items():
            setattr(self._result, name, tensor)
        self.came = True

    def query(self) -> bool:
        """Whether it has come."""
        return self.came


class NoClock:
    """In place of events on a stream."""

    def begin(self) -> None:
        """A step begins."""

    def end(self, note: Callable[[float], None]) -> None:
        """It has ended."""
        note(0.01)

    def collect(self) -> None:
        """Nothing is waited for."""


class KnowingDrafter(Drafter):
    """Knows the texts: drafts them with mistakes, and looks whether it is told the truth.

    Args:
        texts: of each request, by id.
        wrong: where what is wrong is counted.
    """

    def __init__(self, texts: dict[str, list[int]], chance: random.Random, wrong: Counter[str]):
        self._texts, self._chance, self._wrong = texts, chance, wrong

    def start(self, request: Any) -> None:
        """Its output must be the text's beginning."""
        self._check(request)

    def observe(self, request: Any, tokens: Iterable[int]) -> None:
        """The same."""
        self._check(request)

    def finish(self, request: Any, completed: bool) -> None:
        """The same."""
        self._check(request)

    def verified(self, request: Any, tree: TokenTree, predicted: Sequence[int]) -> None:
        """Must come before what was committed since, and be the target's own tokens."""
        text, n = self._texts[request.rid], len(request.output)
        self._wrong["learned"] += predicted[0] != text[n]
        if request.options.relaxed is not None:
            return  # nodes beside the accepted path have been relaxed as well
        depths = tree.depths()
        self._wrong["learned"] += any(
            said != text[n + depth] for said, depth in zip(predicted[1:], depths, strict=True)
        )

    def prefill_draft(self, requests: Sequence[Any], max_nodes: int) -> list[TokenTree]:
        """Chains of the texts, some of which go wrong somewhere."""
        return [
            TokenTree.chain(
                [
                    t if self._chance.random() < 0.8 else (t + 1) % VOCAB
                    for t in self._texts[r.rid][: self._chance.randint(0, max_nodes)]
                ]
            )
            for r in requests
        ]

    def propose(self, requests: Sequence[Any], max_nodes: int) -> list[TokenTree]:
        """A chain of the text that goes wrong somewhere, with a wrong branch beside it."""
        return [self._tree(r, max_nodes) for r in requests]

    def _tree(self, request: Any, max_nodes: int) -> TokenTree:
        self._check(request)
        text, n = self._texts[request.rid], len(request.output)
        tokens = [
            t if self._chance.random() < 0.8 else (t + 1) % VOCAB
            for t in text[n : n + self._chance.randint(0, max_nodes)]
        ]
        parents = [
            i - 1 if self._chance.random() < 0.9 else self._chance.randint(-1, i - 1)
            for i in range(len(tokens))
        ]
        probs = np.full(len(tokens), 0.9, dtype=np.float32)
        return TokenTree(np.array(tokens, dtype=np.int64), np.array(parents, dtype=np.int32), probs)

    def _check(self, request: Any) -> None:
        text = self._texts[request.rid]
        self._wrong["outputs"] += request.output != text[: len(request.output)]


class LogitsOfStates(torch.nn.Module):
    """SGLang's logits_processor of a model whose hidden states are its logits."""

    def forward(self, hidden_states: torch.Tensor, logits_metadata: Any) -> torch.Tensor:
        """Logits of all rows, or of each prompt's last."""
        if logits_metadata.forward_mode == ForwardMode.TARGET_VERIFY:
            return hidden_states
        return hidden_states[torch.tensor(logits_metadata.extend_lens).cumsum(0) - 1]


class Allocator:
    """SGLang's of a pool of one-token pages."""

    def __init__(self, free: torch.Tensor) -> None:
        self.free_pages = free

    def alloc(self, count: int) -> torch.Tensor:
        """The next free slots; those of rows that are used again are free again."""
        taken, self.free_pages = self.free_pages[:count], self.free_pages[count:]
        return taken


class Target:
    """Answers as each request's text goes on, and counts the roots that are not of the text."""

    def __init__(self, loop: "OverlapLoop", rows: torch.Tensor, allocator: Allocator) -> None:
        self._loop = loop
        self._rows, self._allocator = rows, allocator
        # The token whose K and V each slot holds.
        self._kv = torch.full((int(allocator.free_pages.max()) + 1,), POISON)
        self.model_runner = SimpleNamespace(
            device="cpu",
            sampler=None,
            tp_group=None,
            model=SimpleNamespace(logits_processor=LogitsOfStates()),
            model_config=SimpleNamespace(is_encoder_decoder=loop.encoders),
        )

    def get_memory_pool(self) -> tuple[Any, Any]:
        """The rows of slots, and who lends more."""
        return SimpleNamespace(req_to_token=self._rows), self._allocator

    def forward_batch_generation(self, batch: Any, is_verify: bool = False, **_: Any) -> Any:
        """A forward pass over the batch."""
        self._kv[batch.out_cache_loc.long()] = batch.input_ids
        if batch.forward_mode == ForwardMode.EXTEND:
            answers = self._extended(batch)
        else:
            answers = self._verified(batch) if is_verify else self._next(batch)
        result = SimpleNamespace(
            logits_output=LogitsProcessorOutput(next_token_logits=None),
            next_token_ids=answers,
            can_run_cuda_graph=False,
        )
        if is_verify:
            # Second best is the token that the drafter's mistakes are.
            nearly = 0.5 * _one_hot((answers + 1) % VOCAB)
            result.logits_output.next_token_logits = _one_hot(answers) + nearly
        return result

    def _extended(self, batch: Any) -> torch.Tensor:
        said = []
        for req, count in zip(batch.reqs, batch.extend_lens, strict=True):
            first = len(req.prompt) + len(req.output_ids)
            said += [0] * (first - 1) + req.truth[len(req.output_ids) :][: count - first + 1]
            self._check_kv(req, len(req.output_ids))
        processor = self.model_runner.model.logits_processor
        states = _one_hot(torch.tensor(said))
        return processor(hidden_states=states, logits_metadata=batch).argmax(-1)

    def hand_over(self, req: FakeReq) -> None:
        """Another server has read a request's prompt and output, all but its last token."""
        read = [*req.prompt, *req.output_ids[:-1]]
        self._kv[self._rows[req.row, req.encoder :][: len(read)].long()] = torch.tensor(read)

    def commit(self, batch: Any, accepted: Any, width: int) -> None:
        """The accepted nodes' KV is brought to the front."""
        for row, index in enumerate(accepted.accept_index):
            nodes = index[index >= 0].long()
            slots = batch.out_cache_loc[row * width :][: len(nodes)].long()
            self._kv[slots] = batch.input_ids[nodes]
            if batch.reqs[row].relaxed:
                self._rewrite(batch, batch.reqs[row], nodes[1:])

    def _rewrite(self, batch: Any, req: FakeReq, nodes: torch.Tensor) -> None:
        """The text is what was accepted."""
        places = batch.spec_info.positions[nodes] - len(req.prompt)
        for place, token in zip(places.tolist(), batch.input_ids[nodes].tolist(), strict=True):
            if req.truth[place] != token:
                self._loop.wrong["outputs"] += (req.truth[place] + 1) % VOCAB != token
                self._loop.relaxed += 1
                req.truth[place] = token
                req.changed.add(place)

    def _check_kv(self, req: FakeReq, written: int) -> None:
        right = torch.tensor([*req.prompt, *req.truth[: max(0, written)]])
        slots = self._rows[req.row, req.encoder :][: len(right)].long()
        self._loop.wrong["kv"] += not torch.equal(self._kv[slots], right)

    def _next(self, batch: Any) -> torch.Tensor:
        said = []

        for i, req in enumerate(batch.reqs):
            at = int(batch.seq_lens[i]) - 1 - len(req.prompt)
            self._check(req, int(batch.input_ids[i]), at)
            said.append(req.truth[at + 1])
        return torch.tensor(said)

    def _verified(self, batch: Any) -> torch.Tensor:
        width = batch.spec_info.draft_token_num
        positions = batch.spec_info.positions.view(-1, width)
        said = []
        for i, req in enumerate(batch.reqs):
            at = positions[i] - len(req.prompt)
            self._check(req, int(batch.input_ids[i * width]), int(at[0]))
            said += [req.truth[int(n) + 1] for n in at]
        return torch.tensor(said)

    def _check(self, req: FakeReq, root: int, at: int) -> None:
        self._loop.wrong["roots"] += root != req.truth[at]
        self._loop.wrong["lengths"] += at >= 0 and at < self._loop.committed[req.rid] - 1
        self._check_kv(req, at)


def _slots_of(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    draft_token_num: int,
    **_: Any,
) -> torch.Tensor:
    """SGLang's kernel assign_extend_cache_locs."""
    columns = start_offset[:, None] + torch.arange(draft_token_num)
    return req_to_token[req_pool_indices[:, None], columns].flatten().long()


def _assign_slots(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    _batch_size: int,
) -> None:
    """SGLang's kernel assign_req_to_token_pool."""
    parts = out_cache_loc.split((end_offset - start_offset).tolist())
    for row, first, part in zip(req_pool_indices, start_offset.tolist(), parts, strict=True):
        req_to_token[row, first : first + len(part)] = part.to(req_to_token.dtype)


def _one_hot(tokens: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.one_hot(tokens, VOCAB).float()


class OverlapLoop:
    """One server with a random schedule.

    Args:
        seed: of the schedule.
        lacking: a rule in place of LastStep.lacking, to show that a wrong one is found.
    """

    def __init__(
        self, seed: int, lacking: Callable[[LastStep, Any], list[list[int]]] | None = None
    ) -> None:
        self.chance = random.Random(seed)
        self._relaxing = random.Random(seed)  # of its own, so that schedules stay as they are
        self.wrong: Counter[str] = Counter()
        self.committed: Counter[str] = Counter()
        self.checked = self.blind = self.known = self.requests = self.relaxed = 0
        self.encoders = self.chance.random() < 0.25
        self._from_afar = self.chance.random() < 0.25  # a decode server
        self._drains_prefills = self.chance.random() < 0.5
        self._texts: dict[str, list[int]] = {}
        self._free = list(range(1, ROWS))
        self._waiting: list[FakeReq] = []
        self._chunked: FakeReq | None = None
        self._running: list[FakeReq] = []
        self._joining: list[FakeReq] = []
        self._queue: list[tuple[Any, list[FakeReq], Any, bool]] = []
        self._table = torch.arange(ROWS * SLOTS, dtype=torch.int32).view(ROWS, SLOTS)
        algorithm = SimpleNamespace(
            is_ngram=lambda: True, is_some=lambda: True, is_none=lambda: False
        )
        pool = SimpleNamespace(req_to_token=self._table, req_generation=None)
        self._relay = FutureMap(torch.device("cpu"), algorithm, pool)
        self._worker = self._made_worker(pool)
        if lacking is not None:
            last = self._worker._last
            last.lacking = lambda batch: lacking(last, batch)

    def run(self, steps: int) -> None:
        """So many iterations of the loop."""
        parallel = SimpleNamespace(tp_size=1, tp_group=SimpleNamespace(world_size=1))
        with ExitStack() as stack:
            spec = SimpleNamespace(speculative_num_draft_tokens=WIDTH)
            stack.enter_context(mock.patch.object(runtime_context, "get_spec", lambda: spec))
            for module, name, value in [
                (worker, "get_parallel", lambda: parallel),
                (device_runtime, "get_parallel", lambda: parallel),
                (device_runtime, "record_stream_for_v2_verify", lambda *_: None),
                (verify_batch, "prepare_mamba_track_for_verify", lambda _: None),
                (verify_batch, "assign_extend_cache_locs_func", _slots_of),
                (prefill, "assign_req_to_token_pool_func", _assign_slots),
                (prefill.LogitsMetadata, "from_forward_batch", copy.copy),
            ]:
                stack.enter_context(mock.patch.object(module, name, value))
            for _ in range(steps):
                self._iterate()
            while self._queue:
                self._process()

    def _made_worker(self, pool: Any) -> Any:
        made: Any = object.__new__(worker.SpeculativeWorker)
        made.options = Options(drafter="knowing", budget="fixed")
        drafter = KnowingDrafter(self._texts, self.chance, self.wrong)
        made.planner = DraftPlanner(
            DrafterContext(vocab_size=VOCAB, options=made.options),
            WIDTH,
            4 * ROWS,
            CostModel({1: 1.0, 64: 1.0}),
            active=True,
            widths=default_widths(WIDTH),
            drafters={"knowing": drafter},
        )
        made.planner.looks = lambda: self.chance.random() < 0.6
        lent = Allocator(torch.arange(ROWS * SLOTS, 400 * SLOTS, dtype=torch.int64))
        made._target_worker = self._target = Target(self, self._table, lent)
        made.model_runner = self._target.model_runner
        made.device, made.enable_overlap = "cpu", True
        made.vocab_size, made.speculative_num_draft_tokens = VOCAB, WIDTH
        made.req_to_token_pool = pool
        made._role = "decode" if self._from_afar else "null"
        made._plans, made._last = True, LastStep()
        made._runtime = device_runtime.DeviceRuntime(self._target, made.planner, True)
        made._runtime._clock = NoClock()
        prefills = made._runtime.prefills
        prefills.store = self._counted_tokens(prefills.store)
        made._decode_blindly = self._counted(made._decode_blindly)
        made._penalties = DevicePenalties(VOCAB, "cpu", ROWS)
        made._batches = VerifyBatches(None, pool, None, made._penalties, "cpu", on_host=False)
        made._batches.adjust_logits = lambda *_: None
        made._batches.commit = self._target.commit
        return made

    def _counted(self, decode: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            self.blind += 1
            return decode(*args)

        return counted

    def _counted_tokens(self, store: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            head = store(*args)
            self.known += sum(head.counts)
            return head

        return counted

    # The scheduler

    def _iterate(self) -> None:
        self._running += self._joining
        self._joining = []
        self._running = [r for r in self._running if r.finished_reason is None]
        self._arrive()
        reqs, mode, chunk = self._next_batch()
        if not reqs:
            if self._queue:
                self._process()
            return
        extend = mode == ForwardMode.EXTEND
        drained = extend and self._drains_prefills and self._last_was_extend()
        grammar = not extend and any(r.grammar for r in reqs)
        if (drained or grammar) and self._queue:
            self._process()
        launched = self._launch(reqs, mode, chunk)
        if self._queue:
            self._process()
        if launched is not None:
            self._queue.append(launched)

    def _last_was_extend(self) -> bool:
        return bool(self._queue) and self._queue[-1][3]

    def _arrive(self) -> None:
        if self.chance.random() > 0.35 or len(self._waiting) > 3:
            return
        rid = f"r{self.requests}"
        self.requests += 1
        prompt = [self.chance.randrange(VOCAB) for _ in range(self.chance.randint(1, 20))]
        truth = [self.chance.randrange(VOCAB) for _ in range(LONGEST + 3 * WIDTH)]
        self._texts[rid] = truth
        self._waiting.append(
            FakeReq(
                rid,
                prompt,
                truth,
                self.chance.randint(1, LONGEST),
                encoder=self.chance.randint(1, 9) if self.encoders else 0,
                grammar=self.chance.random() < 0.05,
                drafter="none" if self.chance.random() < 0.2 else None,
                relaxed=self._relaxing.random() < 0.3,
            )
        )

    def _retract_or_abort(self) -> None:
        if self._running and self.chance.random() < 0.06:
            req = self._running.pop(self.chance.randrange(len(self._running)))
            req.is_retracted, req.read = True, 0
            # What is under way is dropped, and found anew as the text itself.
            req.changed = {place for place in req.changed if place < len(req.output_ids)}
            self._free.append(req.row)
            self._waiting.append(req)
        if self._running and self.chance.random() < 0.04:
            self.chance.choice(self._running).to_abort = True

    def _next_batch(self) -> tuple[list[FakeReq], ForwardMode, bool]:
        if self._chunked is not None:
            # SGLang goes on with a chunked prompt before it decodes, unless memory is short.
            if self.chance.random() < 0.8:
                return [self._chunked], ForwardMode.EXTEND, self.chance.random() < 0.5
        elif self._waiting and self._free and self.chance.random() < 0.6:
            count = min(self.chance.randint(1, 2), len(self._waiting), len(self._free))
            reqs = [self._waiting.pop(0) for _ in range(count)]
            for req in reqs:
                req.row, req.is_retracted = self._free.pop(), False
            chunked = count == 1 and not self._from_afar and self.chance.random() < 0.3
            return reqs, ForwardMode.EXTEND, chunked
        self._retract_or_abort()
        return list(self._running), ForwardMode.DECODE, False

    def _launch(
        self, reqs: list[FakeReq], mode: ForwardMode, chunk: bool
    ) -> tuple[Any, list[FakeReq], Any, bool] | None:
        if mode == ForwardMode.EXTEND and self._from_afar:
            self._hand_over(reqs)
            return None
        batch = self._batch(reqs, mode, chunk)
        rows = batch.req_pool_indices
        if mode == ForwardMode.EXTEND:
            for req in reqs:
                req.read = len(req.prompt) + len(req.output_ids)
            self._chunked = reqs[0] if chunk else None
            if not chunk:
                self._joining += reqs
        else:
            batch.spec_info = NgramVerifyInput(
                draft_token_num=WIDTH, new_seq_lens=rows, future_indices=rows
            )
            self._relay.resolve_seq_lens_cpu(batch)
            self._relay._resolve_spec_extras(batch)
            self.checked += len(reqs)
        result = self._worker.forward_batch_generation(
            batch, on_publish=lambda lens: self._relay.publish(rows, lens)
        )
        self._relay.stash(rows, RelayPayload.from_ngram(result.next_draft_input))
        result.copy_done = LateCopy(result)
        return result, reqs, "chunk" if chunk else None, mode == ForwardMode.EXTEND

    def _hand_over(self, reqs: list[FakeReq]) -> None:
        """Requests whose prompts (and outputs, after a retraction) another server has read."""
        for req in reqs:
            if not req.output_ids:
                req.output_ids.append(req.truth[0])
                self.committed[req.rid] = 1
            batch = SimpleNamespace(
                reqs=[req],
                device="cpu",
                enable_overlap=True,
                req_pool_indices=torch.tensor([req.row]),
                seq_lens=torch.tensor([len(req.prompt) + len(req.output_ids) - 1]),
            )
            first_draft_input(batch, torch.tensor(req.output_ids[-1:]), self._relay)
            self._target.hand_over(req)
        self._joining += reqs

    def _batch(self, reqs: list[FakeReq], mode: ForwardMode, chunk: bool = False) -> Any:
        lens = torch.tensor([len(r.prompt) + len(r.output_ids) for r in reqs])
        encoders = [r.encoder for r in reqs] if self.encoders else None
        extend = mode == ForwardMode.EXTEND
        ids = [torch.tensor([*r.prompt, *r.output_ids]) for r in reqs]
        slots = [self._table[r.row, r.encoder :][: len(i)] for r, i in zip(reqs, ids, strict=True)]
        info = SimpleNamespace(
            has_custom_logit_processor=False,
            has_watermark_candidates=False,
            sampling_mask_batch_indices=None,
            is_all_greedy=True,
            logit_bias=None,
        )
        return SimpleNamespace(
            reqs=reqs,
            forward_mode=mode,
            seq_lens=lens,
            seq_lens_cpu=lens,
            seq_lens_sum=None,
            orig_seq_lens=lens,
            req_pool_indices=torch.tensor([r.row for r in reqs]),
            encoder_lens=None if encoders is None else torch.tensor(encoders),
            encoder_lens_cpu=encoders,
            encoder_cached=None,
            input_ids=torch.cat(ids) if extend else None,
            out_cache_loc=torch.cat(slots) if extend else None,
            extend_lens=list(map(len, ids)),
            extend_num_tokens=sum(map(len, ids)),
            chunked_req=reqs[0] if chunk else None,
            spec_info=None,
            sampling_info=info,
            has_grammar=any(r.grammar for r in reqs),
            return_logprob=False,
            return_hidden_states=False,
            is_prefill_only=False,
        )

    def _process(self) -> None:
        result, reqs, chunk, _ = self._queue.pop(0)
        result.copy_done.synchronize()
        width = result.speculative_output_stride
        tokens = result.next_token_ids.view(-1, width).tolist()
        lens = result.accept_lens.tolist()
        if not chunk:
            runs = [row[:n] for row, n in zip(tokens, lens, strict=True)]
            relaxed_info.note_tokens(reqs, runs, result)
        for req, row, n in zip(reqs, tokens, lens, strict=True):
            if req.is_retracted or req.finished_reason is not None or chunk:
                continue
            req.output_ids += row[:n]
            self.committed[req.rid] = len(req.output_ids)
            self.wrong["served"] += req.output_ids != req.truth[: len(req.output_ids)]
            served = sorted(place for place in req.changed if place < len(req.output_ids))
            self.wrong["marks"] += req.marked() != served
            if len(req.output_ids) >= req.max_new_tokens or req.to_abort:
                req.finished_reason = SimpleNamespace()
                self._worker.note_request_finished(rid=req.rid, natural_stop=not req.to_abort)
                self._free.append(req.row)


def relay_as_it_stands(last: LastStep, batch: Any) -> list[list[int]]:
    """The rule that was wrong: a relay row's tokens are taken whatever output_ids has already."""
    lens = batch.spec_info.accept_lens.tolist()
    tokens = batch.spec_info.accept_tokens.view(len(lens), -1).tolist()
    return [row[:n] for row, n in zip(tokens, lens, strict=True)]


def overlap_figures(
    schedules: int,
    iterations: int = 60,
    lacking: Callable[[LastStep, Any], list[list[int]]] | None = None,
) -> dict[str, float]:
    """Run random schedules.

    Args:
        schedules: how many.
        iterations: of the loop, in each.
        lacking: see OverlapLoop.

    Returns:
        wrong_outputs (of a request, as a drafter or a client sees it), wrong_roots, wrong_learned,
        wrong_kv, wrong_marks (of relaxed tokens), request_steps that were checked, requests,
        known_tokens that prefills had shown, relaxed_tokens, and schedules_hit by anything wrong.
    """
    wrong: Counter[str] = Counter()
    steps = requests = hit = known = relaxed = 0
    for seed in range(schedules):
        loop = OverlapLoop(seed, lacking)
        try:
            loop.run(iterations)
        except (AssertionError, RuntimeError):
            if lacking is None:
                raise
            loop.wrong["outputs"] += 1  # the bookkeeping itself has noticed
        wrong += loop.wrong
        steps, requests = steps + loop.checked, requests + loop.requests
        known, relaxed = known + loop.known, relaxed + loop.relaxed
        hit += any(loop.wrong.values())
    return {
        "schedules": schedules,
        "request_steps": steps,
        "requests": requests,
        "known_tokens": known,
        "relaxed_tokens": relaxed,
        "schedules_hit": hit,
        "wrong_outputs": wrong["outputs"] + wrong["served"],
        "wrong_roots": wrong["roots"] + wrong["lengths"],
        "wrong_learned": wrong["learned"],
        "wrong_kv": wrong["kv"],
        "wrong_marks": wrong["marks"],
    }
