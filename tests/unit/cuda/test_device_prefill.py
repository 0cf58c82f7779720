"""Drafts behind prompts on a device: what is run, where its KV goes, and when it is known."""

import copy
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from scripts.emulation.overlap_loop import Allocator, LogitsOfStates, _assign_slots
from sglang_ext.cuda import prefill as module
from sglang_ext.cuda.prefill import DevicePrefill
from sglang_ext.drafters import Bias
from sglang_ext.step import prefill_drafts
from sglang_ext.step.known_tokens import KnownTokens
from sglang_ext.step.step_result import StepResult
from sglang_ext.tree import TokenTree

VOCAB, ENCODER = 50, 3
UNBIASED = [None, None]


class Planner:
    def __init__(self, *chains: list[int]):
        self.chains = [TokenTree.chain(chain) for chain in chains]
        self.told: list = []

    def foresee(self, reqs):
        return self.chains

    def foreseen(self, reqs, chains, predicted):
        self.told.append(([req.rid for req in reqs], predicted))

    def note_known(self, tokens, seconds):
        self.told.append(tokens)


class Target:
    """Says the token after the one it reads: 7 after 6."""

    def __init__(self, free: int = 20, encodes: bool = True):
        self.rows = torch.arange(2 * 16, dtype=torch.int32).view(2, 16)
        self.allocator = Allocator(torch.arange(100, 100 + free))
        self.model_runner = SimpleNamespace(
            model=SimpleNamespace(logits_processor=LogitsOfStates()),
            model_config=SimpleNamespace(is_encoder_decoder=encodes),
        )
        self.seen = None

    def get_memory_pool(self):
        return SimpleNamespace(req_to_token=self.rows), self.allocator

    def forward_batch_generation(self, batch, is_verify=False, pp_proxy_tensors=None):
        self.seen = SimpleNamespace(**vars(batch), is_verify=is_verify)
        states = torch.nn.functional.one_hot(batch.input_ids + 1, VOCAB).float()
        logits = self.model_runner.model.logits_processor(states, batch)
        return SimpleNamespace(
            logits_output=SimpleNamespace(next_token_logits=logits),
            next_token_ids=logits.argmax(-1),
        )


def made(monkeypatch, *chains, **of_target) -> DevicePrefill:
    monkeypatch.setattr(module, "assign_req_to_token_pool_func", _assign_slots)
    monkeypatch.setattr(module.LogitsMetadata, "from_forward_batch", copy.copy)
    return DevicePrefill(Target(**of_target), Planner(*chains), True, "cpu")


def request(rid: str):
    params = SimpleNamespace(
        frequency_penalty=0, presence_penalty=0, repetition_penalty=1, min_new_tokens=0,
        logit_bias=None,
    )  # fmt: skip
    return SimpleNamespace(
        rid=rid, sampling_params=params, kv=SimpleNamespace(kv_allocated_len=ENCODER + 2)
    )


def prefill_batch(*rids: str):
    """Two prompts, of two tokens and of one, behind an encoder's."""
    lens = torch.tensor([2, 1])
    return SimpleNamespace(
        reqs=[request(rid) for rid in rids],
        forward_mode=ForwardMode.EXTEND,
        chunked_req=None,
        input_ids=torch.tensor([4, 5, 20]),
        out_cache_loc=torch.tensor([3, 4, 19]),
        extend_lens=[2, 1],
        extend_num_tokens=3,
        seq_lens=lens,
        seq_lens_cpu=lens,
        seq_lens_sum=3,
        req_pool_indices=torch.tensor([0, 1]),
        encoder_lens=torch.tensor([ENCODER, ENCODER]),
        return_logprob=False,
        has_grammar=False,
        sampling_info=SimpleNamespace(logit_bias=None, is_all_greedy=True),
    )


def read(prefill, batch) -> StepResult:
    """The prefill's result as the scheduler has it once the readback has come."""
    result = StepResult(next_token_ids=prefill.run(batch, UNBIASED, False, None).next_token_ids)
    prefill.launched(result)
    return result


def test_a_draft_is_the_end_of_a_longer_prompt(monkeypatch):
    prefill = made(monkeypatch, [6, 7, 9], [30])
    batch = prefill_batch("a", "b")
    before = copy.copy(vars(batch))
    result = read(prefill, batch)
    seen = prefill._target.seen
    assert seen.input_ids.tolist() == [4, 5, 6, 7, 9, 20, 30] and seen.is_verify
    assert seen.out_cache_loc.tolist() == [3, 4, 100, 101, 102, 19, 103]
    assert seen.extend_lens == [5, 2] and seen.extend_num_tokens == 7
    assert seen.seq_lens.tolist() == seen.seq_lens_cpu.tolist() == [5, 2]
    assert result.next_token_ids.tolist() == [6, 21]
    assert vars(batch) == before


def test_its_kv_stands_in_the_requests_own_slots(monkeypatch):
    prefill = made(monkeypatch, [6, 7, 9], [30])
    batch = prefill_batch("a", "b")
    read(prefill, batch)
    assert prefill._target.rows[0, ENCODER + 2 : ENCODER + 5].tolist() == [100, 101, 102]
    assert prefill._target.rows[1, ENCODER + 1].item() == 103
    # SGLang frees what a request has reserved when it ends.
    assert [req.kv.kv_allocated_len for req in batch.reqs] == [ENCODER + 5, ENCODER + 3]


def test_what_is_right_is_known_when_the_result_comes(monkeypatch):
    prefill = made(monkeypatch, [6, 7, 9], [30])
    batch = prefill_batch("a", "b")
    result = read(prefill, batch)
    came = SimpleNamespace(came=False, query=lambda: came.came, synchronize=lambda: None)
    result.copy_done = came
    assert prefill.expects(batch.reqs[:1]) and not prefill.expects([request("c")])
    prefill.learn(wait=False)
    assert not prefill.known
    came.came = True
    prefill.learn(wait=False)
    assert prefill._planner.told == [(["a", "b"], [[6, 7, 8, 10], [21, 31]])]
    assert prefill.expects(batch.reqs) and not prefill.expects(batch.reqs[1:])
    running = [SimpleNamespace(req=batch.reqs[0], draft=SimpleNamespace(rid="a", output=[6]))]
    (known,) = prefill.known.take(running)
    assert known == KnownTokens(6, [7, 8])
    assert prefill.store(batch, [known]).tokens.tolist() == [[7, 8]]


@pytest.mark.parametrize("when", ["before it came", "after"])
def test_a_prompt_that_is_read_again_has_other_slots(monkeypatch, when):
    prefill = made(monkeypatch, [6, 7, 9], [21])
    batch = prefill_batch("a", "b")
    read(prefill, batch)
    if when == "after":
        prefill.learn(wait=True)
    again = prefill_batch("a", "c")
    again.reqs[0] = batch.reqs[0]
    prefill._planner.chains = [TokenTree.empty()] * 2
    read(prefill, again)
    prefill.learn(wait=True)
    assert not prefill.expects([batch.reqs[0]]) and prefill.expects([batch.reqs[1]])


@pytest.mark.parametrize("how", ["forget", "clear"])
def test_requests_that_end_before_are_forgotten(monkeypatch, how):
    prefill = made(monkeypatch, [6, 7, 9], [30])
    batch = prefill_batch("a", "b")
    read(prefill, batch)
    if how == "forget":
        prefill.forget("a")
        prefill.forget("b")
    else:
        prefill.clear()
    prefill.learn(wait=True)
    assert prefill._planner.told == [] and not prefill.expects(batch.reqs)


def plainly(prefill, batch, biases=UNBIASED, plain=False):
    allocator, free = prefill._target.allocator, prefill._target.allocator.free_pages
    assert prefill.run(batch, biases, plain, None).next_token_ids.tolist() == [6, 21]
    assert prefill._target.seen.extend_lens == [2, 1] and not prefill._target.seen.is_verify
    assert allocator.free_pages is free and not prefill.expects(batch.reqs)


def test_where_no_draft_may_be_read_the_prefill_is_sglangs(monkeypatch):
    monkeypatch.setattr(prefill_drafts, "prefer_next_tokens", lambda *_: None)
    plainly(made(monkeypatch, [6], [30]), prefill_batch("a", "b"), plain=True)
    plainly(made(monkeypatch, [6], [30]), prefill_batch("a", "b"), biases=[Bias([6], 0.5), None])
    plainly(made(monkeypatch, [6], [30], encodes=False), prefill_batch("a", "b"))


def test_without_room_or_drafts_the_prefill_is_sglangs(monkeypatch):
    plainly(made(monkeypatch, [6, 7], [30], free=2), prefill_batch("a", "b"))
    plainly(made(monkeypatch, [], []), prefill_batch("a", "b"))
