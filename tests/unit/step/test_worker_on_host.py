"""Steps of the worker on the host: what SGLang gets, what the KV pool holds, and who is told."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.server_args import ServerArgs

from sglang_ext.cpu.attention import TreeAttentionBackend
from sglang_ext.drafters import Drafter
from sglang_ext.mirror.early_exit import Look
from sglang_ext.options import Options
from sglang_ext.step import host_runtime, planner, planner_setup, verify_batch
from sglang_ext.step.exit_views import ExitViews
from sglang_ext.step.known_tokens import KnownTokens
from sglang_ext.tree import TokenTree
from sglang_ext.worker import SpeculativeWorker

VOCAB, WIDTH, ROWS, COLUMNS = 50, 8, 4, 32
PROMPT = [3, 4]
# A branch that is wrong before the path that is right.
BRANCHES = TokenTree(
    np.array([40, 7, 41, 8]), np.array([-1, -1, 1, 1], np.int32), np.ones(4, np.float32)
)

_PARAMS: dict[str, Any] = {
    "custom_params": None, "ignore_eos": False, "stop_token_ids": None, "max_new_tokens": 20,
    "min_new_tokens": 0, "frequency_penalty": 0.0, "presence_penalty": 0.0,
    "repetition_penalty": 1.0, "logit_bias": None,
}  # fmt: skip


class Pool:
    """A KV pool of one layer, whose K and V of a slot are the token that they were made of."""

    def __init__(self) -> None:
        self.k_buffer = [torch.full((ROWS * COLUMNS,), -1)]
        self.v_buffer = [torch.full((ROWS * COLUMNS,), -1)]

    def move_kv_cache(self, to: torch.Tensor, source: torch.Tensor) -> None:
        for buffer in (self.k_buffer[0], self.v_buffer[0]):
            buffer[to] = buffer[source]


class Target:
    """A TpModelWorker whose model says the token after the one it reads: 7 after 6.

    Attributes:
        ran: mode and tokens of each pass.
    """

    tokenizer = None

    def __init__(self, ragged: bool) -> None:
        self.ran: list[tuple[ForwardMode, list[int]]] = []
        self.rows = torch.arange(ROWS * COLUMNS, dtype=torch.int32).view(ROWS, COLUMNS)
        self.pool = Pool()
        self.model_runner = SimpleNamespace(
            device="cpu",
            sampler=torch.nn.Identity(),
            max_running_requests=ROWS,
            attn_backend=object.__new__(TreeAttentionBackend) if ragged else None,
            lora_manager=None,
            model_config=SimpleNamespace(
                vocab_size=VOCAB,
                hf_eos_token_id=None,
                model_path="",
                is_encoder_decoder=False,
                model_is_mrope=False,
            ),
        )

    def get_memory_pool(self) -> tuple[Any, Any]:
        allocator = SimpleNamespace(get_kvcache=lambda: self.pool)
        return SimpleNamespace(req_to_token=self.rows), allocator

    def forward_batch_generation(
        self, batch: Any, pp_proxy_tensors: Any = None, is_verify: bool = False
    ) -> Any:
        assert is_verify == (batch.forward_mode == ForwardMode.TARGET_VERIFY)
        assert len(batch.input_ids) == len(batch.out_cache_loc)
        self.ran.append((batch.forward_mode, batch.input_ids.tolist()))
        for buffer in (self.pool.k_buffer[0], self.pool.v_buffer[0]):
            buffer[batch.out_cache_loc] = batch.input_ids
        said = batch.input_ids + 1
        if batch.forward_mode == ForwardMode.EXTEND:
            said = said[torch.tensor(batch.extend_lens).cumsum(0) - 1]
        logits = torch.nn.functional.one_hot(said, VOCAB).float()
        return SimpleNamespace(
            logits_output=LogitsProcessorOutput(next_token_logits=logits),
            next_token_ids=None if is_verify else said,
            can_run_cuda_graph=False,
        )


class Scripted(Drafter):
    """Proposes the trees that a test has set, by request; keeps what it is told."""

    def __init__(self) -> None:
        self.trees: dict[str, TokenTree] = {}
        self.told: list[tuple[str, str, Any]] = []

    def propose(self, requests, max_nodes):
        return [self.trees.pop(r.rid, TokenTree.empty()) for r in requests]

    def start(self, request):
        self.told.append(("start", request.rid, list(request.output)))

    def observe(self, request, tokens):
        self.told.append(("observe", request.rid, list(tokens)))

    def verified(self, request, tree, predicted):
        self.told.append(("verified", request.rid, list(predicted)))

    def finish(self, request, completed):
        self.told.append(("finish", request.rid, list(request.output)))


class Serving:
    """SGLang's synchronous loop around a worker: one step is processed before the next."""

    def __init__(self, ragged: bool) -> None:
        self.target, self.drafter = Target(ragged), Scripted()
        self.worker = SpeculativeWorker(None, 0, 0, self.target)  # type: ignore[arg-type]
        self.published: list[tuple[int, list[int]]] = []

    @staticmethod
    def request(rid: str, output: list[int], **params: Any) -> Any:
        """A request that decodes; the KV of its last token is still to be written."""
        return SimpleNamespace(
            rid=rid,
            row=0,
            origin_input_ids=PROMPT,
            origin_input_ids_unpadded=PROMPT,
            output_ids=list(output),
            eos_token_ids=None,
            tokenizer=None,
            grammar=None,
            finished_reason=None,
            output_ids_through_stop=[],
            sampling_params=SimpleNamespace(**_PARAMS | params),
        )

    def known(self, req: Any, tokens: list[int]) -> None:
        """A prefill has shown these tokens behind a request's first one."""
        read = torch.tensor([req.output_ids[-1], *tokens[:-1]])
        known = KnownTokens(req.output_ids[-1], tokens, [(read, read)])
        self.worker._runtime.prefills.known.add(req, known)

    def decode(self, *reqs: Any, **fields: Any) -> list[list[int]]:
        """The tokens that a decode step gives each request, appended to its output."""
        for row, req in enumerate(reqs):
            req.row = row
            self._write(req)
        self.batch = self._batch(reqs, **fields)
        self.result = self.worker.forward_batch_generation(self.batch, self._publish)
        rows = self.result.rows()
        for req, row in zip(reqs, rows, strict=True):
            req.output_ids += row
        return rows

    def kv(self, req: Any) -> list[int]:
        """The tokens whose K and V a request's slots hold, as far as its length goes."""
        length = len(PROMPT) + len(req.output_ids) - 1
        slots = self.target.rows[req.row, :length].long()
        keys, values = self.target.pool.k_buffer[0][slots], self.target.pool.v_buffer[0][slots]
        assert torch.equal(keys, values)
        return keys.tolist()

    def _publish(self, lens: torch.Tensor) -> None:
        self.published.append((len(self.target.ran), lens.tolist()))

    def _write(self, req: Any) -> None:
        read = torch.tensor([*PROMPT, *req.output_ids[:-1]])
        slots = self.target.rows[req.row, : len(read)].long()
        self.target.pool.k_buffer[0][slots] = self.target.pool.v_buffer[0][slots] = read

    @staticmethod
    def _batch(reqs: Any, **fields: Any) -> Any:
        lens = torch.tensor([len(PROMPT) + len(r.output_ids) - 1 for r in reqs])
        made = SimpleNamespace(
            reqs=list(reqs),
            forward_mode=ForwardMode.DECODE,
            seq_lens=lens,
            seq_lens_cpu=lens.clone(),
            seq_lens_sum=int(lens.sum()),
            orig_seq_lens=lens.clone(),
            req_pool_indices=torch.tensor([r.row for r in reqs]),
            encoder_lens=None,
            encoder_lens_cpu=None,
            input_ids=None,
            out_cache_loc=None,
            spec_info=None,
            sampling_info=SimpleNamespace(
                has_custom_logit_processor=False,
                has_watermark_candidates=False,
                sampling_mask_batch_indices=None,
                is_all_greedy=True,
                logit_bias=None,
            ),
            has_grammar=False,
            return_logprob=False,
            return_hidden_states=False,
            is_prefill_only=False,
        )
        vars(made).update(fields)
        return made


@pytest.fixture(params=[True, False], ids=["ragged", "padded"])
def serving(request, monkeypatch) -> Iterator[Serving]:
    """A server with a scripted drafter whose drafts are all verified."""
    args = ServerArgs(
        model_path="dummy",
        device="cpu",
        speculative_algorithm="NGRAM",
        speculative_num_draft_tokens=WIDTH,
        speculative_eagle_topk=2,
        disable_overlap_schedule=True,
    )
    ranks = runtime_context.SpawnRanks(world_rank=0, gpu_id=0)
    runtime_context.publish(args, role="scheduler", ranks=ranks)
    options = Options(drafter="scripted", budget="fixed")
    monkeypatch.setattr(Options, "from_env", lambda: options)
    monkeypatch.setattr(planner_setup, "costs_of", lambda *_: {})
    monkeypatch.setattr(planner_setup, "cost_model_of", lambda *_: None)
    monkeypatch.setattr(verify_batch, "mambaish_config", lambda _config: None)
    made = Serving(request.param)
    monkeypatch.setattr(planner, "load_all", lambda _: {"scripted": made.drafter})
    made.worker.alloc_memory_pool()
    yield made
    runtime_context.reset_context()


def test_a_plain_step_commits_a_token_each(serving):
    a, b = serving.request("a", [6]), serving.request("b", [20, 21])
    assert serving.decode(a, b) == [[7], [22]]
    assert serving.target.ran == [(ForwardMode.DECODE, [6, 21])]
    assert serving.batch.seq_lens.tolist() == serving.batch.seq_lens_cpu.tolist() == [3, 4]
    assert serving.kv(a) == [*PROMPT, 6] and serving.kv(b) == [*PROMPT, 20, 21]


def test_a_verify_step_commits_the_right_path_and_one_token_more(serving):
    a, b, c = (serving.request(rid, [root]) for rid, root in (("a", 6), ("b", 20), ("c", 30)))
    serving.drafter.trees = {"a": BRANCHES, "b": TokenTree.chain([9])}
    assert serving.decode(a, b, c) == [[7, 8, 9], [21], [31]]
    assert [mode for mode, _ in serving.target.ran] == [ForwardMode.TARGET_VERIFY]
    assert serving.result.new_seq_lens.tolist() == [5, 3, 3]
    # The right path stood behind a wrong branch: its K and V come to the front.
    assert serving.kv(a) == [*PROMPT, 6, 7, 8]
    assert serving.kv(b) == [*PROMPT, 20] and serving.kv(c) == [*PROMPT, 30]


@pytest.mark.parametrize("serving", [True], indirect=True, ids=["ragged"])
def test_our_own_attention_runs_no_padding(serving):
    a, b = serving.request("a", [6]), serving.request("b", [20])
    serving.drafter.trees = {"a": BRANCHES}
    serving.decode(a, b)
    assert serving.target.ran == [(ForwardMode.TARGET_VERIFY, [6, 40, 7, 41, 8, 20])]


@pytest.mark.parametrize("serving", [False], indirect=True, ids=["padded"])
def test_other_attention_runs_equally_many_nodes_of_each(serving):
    a, b = serving.request("a", [6]), serving.request("b", [20])
    serving.drafter.trees = {"a": BRANCHES}
    serving.decode(a, b)
    [(_, tokens)] = serving.target.ran
    assert tokens[:6] == [6, 40, 7, 41, 8, 20] and len(tokens) == 10


def test_logits_are_by_place_again_where_something_counts_on_it(serving):
    a, b = serving.request("a", [6]), serving.request("b", [20])
    serving.drafter.trees = {"a": BRANCHES, "b": TokenTree.chain([21])}
    bias = torch.zeros(2, VOCAB)
    bias[0, 33] = bias[1, 44] = 5.0
    info = Serving._batch([]).sampling_info
    info.logit_bias = bias
    assert serving.decode(a, b, sampling_info=info) == [[33], [44]]


def test_drafters_learn_within_the_step(serving):
    a, b = serving.request("a", [6]), serving.request("b", [20])
    serving.drafter.trees = {"a": BRANCHES}
    serving.decode(a, b)
    # After the root, then after 40, 7, 41 and 8.
    assert ("verified", "a", [7, 41, 8, 42, 9]) in serving.drafter.told
    serving.drafter.told.clear()
    serving.decode(a, b)
    assert serving.drafter.told[:2] == [("observe", "a", [7, 8, 9]), ("observe", "b", [21])]


def test_lengths_are_known_before_a_plain_pass_and_behind_a_verify_pass(serving):
    a = serving.request("a", [6])
    serving.decode(a)
    assert serving.published == [(0, [3])]
    serving.drafter.trees = {"a": TokenTree.chain([8, 9])}
    serving.decode(a)
    assert serving.published[1:] == [(2, [6])]


def test_tokens_are_relayed_at_the_fixed_width(serving):
    a, b = serving.request("a", [6]), serving.request("b", [20])
    serving.drafter.trees = {"a": TokenTree.chain([7, 8])}
    serving.decode(a, b)
    relay = serving.result.next_draft_input
    assert relay.accept_tokens.view(2, WIDTH)[0].tolist() == [7, 8, 9, 0, 0, 0, 0, 0]
    assert relay.accept_tokens.view(2, WIDTH)[1, 0] == 21 and relay.accept_lens.tolist() == [3, 1]


@pytest.mark.parametrize("feature", [
    "has_custom_logit_processor", "has_watermark_candidates", "sampling_mask_batch_indices",
])  # fmt: skip
def test_what_a_tree_cannot_carry_is_decoded_plainly(serving, feature):
    a = serving.request("a", [6])
    serving.drafter.trees = {"a": TokenTree.chain([7])}
    info = Serving._batch([]).sampling_info
    setattr(info, feature, [0])
    assert serving.decode(a, sampling_info=info) == [[7]]
    assert serving.target.ran == [(ForwardMode.DECODE, [6])]


def test_penalties_of_a_plain_step_are_of_the_whole_output(serving):
    a, b = serving.request("a", [5, 6, 6], frequency_penalty=0.5), serving.request("b", [20])
    serving.decode(a, b)
    additive = serving.batch.sampling_info.acc_additive_penalties
    assert additive[0, [5, 6, 7]].tolist() == [-0.5, -1.0, 0.0] and not additive[1].any()


def test_known_tokens_of_all_requests_need_no_pass(serving):
    a, b = serving.request("a", [6], stop_token_ids=[8]), serving.request("b", [20])
    serving.known(a, [7, 8])
    serving.known(b, [21])
    # The known end stays: nothing follows it.
    assert serving.decode(a, b) == [[7, 8], [21]]
    assert serving.target.ran == [] and serving.published == [(0, [4, 3])]
    assert serving.kv(a) == [*PROMPT, 6, 7] and serving.kv(b) == [*PROMPT, 20]
    assert ("observe", "a", [7, 8]) in serving.drafter.told


@pytest.mark.parametrize("known", [[7, 8, 9], [7, 8]], ids=["with its end", "without"])
def test_a_pass_goes_on_behind_known_tokens_of_some(serving, known):
    a, b = serving.request("a", [6], stop_token_ids=[9]), serving.request("b", [20])
    serving.known(a, known)
    # The pass writes a known end again: nothing may follow it in the same step.
    assert serving.decode(a, b) == [[7, 8, 9], [21]]
    assert serving.target.ran == [(ForwardMode.DECODE, [8, 20])]
    assert serving.batch.seq_lens.tolist() == serving.batch.seq_lens_cpu.tolist()
    assert serving.kv(a) == [*PROMPT, 6, 7, 8] and serving.kv(b) == [*PROMPT, 20]


def test_an_end_that_is_all_that_is_known_is_written_by_the_pass(serving):
    a, b = serving.request("a", [6], stop_token_ids=[7]), serving.request("b", [20])
    serving.known(a, [7])
    assert serving.decode(a, b) == [[7], [21]]
    assert serving.target.ran == [(ForwardMode.DECODE, [6, 20])]


def test_drafts_behind_known_tokens_stay_within_the_fixed_width(serving):
    a, b = serving.request("a", [6]), serving.request("b", [20])
    serving.known(a, [7, 8, 9])
    serving.drafter.trees = {"a": TokenTree.chain(list(range(10, 17)))}
    assert serving.decode(a, b) == [[7, 8, 9, 10, 11, 12, 13, 14], [21]]
    # What could not be committed is not verified either.
    assert not {14, 15, 16} & set(serving.target.ran[0][1])
    assert serving.kv(a) == [*PROMPT, *range(6, 14)]


def test_known_tokens_come_without_logprobs_and_are_left_where_these_are_asked_for(serving):
    a = serving.request("a", [6])
    serving.known(a, [7, 8])
    passed = serving.target.forward_batch_generation

    def with_logprobs(batch: Any, **options: Any) -> Any:
        result = passed(batch, **options)
        result.logits_output.next_token_logprobs = torch.zeros(len(batch.reqs))
        return result

    serving.target.forward_batch_generation = with_logprobs
    assert serving.decode(a, return_logprob=True) == [[7]]
    assert serving.result.logits_output.next_token_logprobs.shape == (1, 1)


def test_a_prefill_gives_each_request_its_first_token(serving):
    a, b = serving.request("a", []), serving.request("b", [])
    lens = torch.tensor([2, 2])
    batch = Serving._batch([a, b])
    vars(batch).update(
        forward_mode=ForwardMode.EXTEND,
        seq_lens=lens,
        seq_lens_cpu=lens,
        input_ids=torch.tensor([3, 4, 3, 9]),
        out_cache_loc=torch.arange(4),
        extend_lens=[2, 2],
        prefix_lens=[0, 0],
        chunked_req=None,
    )
    result = serving.worker.forward_batch_generation(batch, serving._publish)
    assert result.rows() == [[5], [10]] and result.accept_lens.tolist() == [1, 1]
    assert serving.published == [(1, [2, 2])]


def test_a_request_that_ends_is_known_no_more(serving):
    a = serving.request("a", [6])
    serving.decode(a)
    serving.known(a, [8])
    a.output_ids_through_stop = [6]
    serving.worker.note_request_finished(rid="a", natural_stop=True)
    assert serving.drafter.told[-1] == ("finish", "a", [6])
    assert not serving.worker._runtime.prefills.known


def test_a_flush_forgets_what_runs(serving):
    a = serving.request("a", [6])
    serving.decode(a)
    serving.known(a, [8])
    serving.worker.clear_cache_pool()
    assert not serving.worker._runtime.prefills.known
    serving.drafter.told.clear()
    assert serving.decode(a) == [[8]]
    assert serving.drafter.told == [("start", "a", [6, 7])]


class RowsSaid:
    """An early exit whose candidate behind each node is the token that the target will say."""

    def __init__(self, target: Target) -> None:
        self._target = target

    @contextmanager
    def watching(self, rows, total, told):
        look = Look()
        yield look
        look.reached_at, look.seconds = time.perf_counter(), 0.5
        _, tokens = self._target.ran[-1]
        assert total == len(tokens)
        said = np.array(tokens)[rows] + 1
        told(said[:, None].astype(np.int32), np.zeros((len(said), 1), np.float32))


def test_drafters_are_told_of_early_exits_in_verify_and_plain_passes(serving):
    views = []
    serving.drafter.early_exit = lambda requests, view: views.append(view)
    serving.worker.planner._asked["scripted"].uses_exit = True
    serving.worker._runtime._exits = ExitViews(RowsSaid(serving.target))
    a, b = serving.request("a", [6]), serving.request("b", [20])
    serving.drafter.trees = {"a": BRANCHES}
    assert serving.decode(a, b) == [[7, 8, 9], [21]]
    noted = []
    serving.worker.planner.note_exit = lambda *seconds: noted.append(seconds)
    serving.decode(a, b)
    [(before_s, answer_s)] = noted
    assert 0 < before_s < 60 and answer_s == 0.5
    assert views[0].tokens.tolist() == [[6, 40, 7, 41, 8], [20, 0, 0, 0, 0]]
    assert views[0].candidates[0, :, 0].tolist() == [7, 41, 8, 42, 9]
    assert views[0].candidates[1, 0, 0] == 21 and views[0].counts.tolist() == [5, 1]
    assert views[1].tokens.tolist() == [[9], [21]]
    assert views[1].candidates[:, 0, 0].tolist() == [10, 22]


def test_an_exit_is_opened_where_a_drafter_uses_it_alone(serving, monkeypatch):
    opened = []
    monkeypatch.setattr(host_runtime, "open_exit", lambda *args: opened.append(args))
    serving.worker._runtime.open_exit(Options())
    assert opened == [] and serving.worker._runtime._exits is None
    serving.worker.planner._asked["scripted"].uses_exit = True
    serving.worker._runtime.open_exit(Options())
    assert len(opened) == 1 and serving.worker._runtime._exits is None  # the target has none
