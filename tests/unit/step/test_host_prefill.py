"""What a prefill has shown, from there to the first decode step."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sglang_ext.request_options import RelaxedRule
from sglang_ext.step import host_prefill, relaxed_info
from sglang_ext.step.host_prefill import HostPrefill
from sglang_ext.step.known_tokens import KnownTokens
from sglang_ext.tree import TokenTree
from tests.unit.step.test_prefill_drafts import Allocator, Target, prefill_batch

UNBIASED = [None, None]


class Planner:
    metrics = None

    def __init__(self, *chains: list[int]):
        self.chains = [TokenTree.chain(chain) for chain in chains]
        self.told: list = []
        self.relaxing: list = []
        self.relaxed = 0

    def foresee(self, reqs):
        return self.chains

    def foreseen(self, reqs, chains, predicted):
        self.told.append(predicted)

    def relaxed_in_prefill(self, reqs):
        return self.relaxing or [None] * len(reqs)

    def note_relaxed(self, marks):
        if marks is not None:
            self.relaxed += int(marks.sum())

    def note_prefill(self, seconds, decoder_seconds):
        self.told.append("note")

    def note_known(self, tokens, seconds):
        self.told.append(("known", tokens))


class Runner(Target):
    """A target that can also run a prefill as it is."""

    def __init__(self):
        super().__init__()
        self.allocator = Allocator()
        self.model_runner = SimpleNamespace(
            model_config=SimpleNamespace(is_encoder_decoder=True), model=torch.nn.Identity()
        )
        self.table = SimpleNamespace(req_to_token=torch.arange(2 * 1600).view(2, 1600) % 64)

    def get_memory_pool(self):
        return self.table, self.allocator

    def forward_batch_generation(self, batch, is_verify=False, pp_proxy_tensors=None):
        if is_verify:
            return super().forward_batch_generation(batch, is_verify)
        return "as SGLang does"


@pytest.fixture
def prefill(monkeypatch):
    monkeypatch.setattr(host_prefill, "can_leave_padding_out", lambda runner: True)
    target = Runner()
    made = HostPrefill(target, Planner([6, 7, 9], [30]), drafts=True)
    made.target = target
    return made


def batch_of(*rids: str):
    batch = prefill_batch()
    batch.reqs = [
        SimpleNamespace(rid=rid, sampling_params=SimpleNamespace(
            frequency_penalty=0, presence_penalty=0, repetition_penalty=1, min_new_tokens=0,
            logit_bias=None,
        ))
        for rid in rids
    ]  # fmt: skip
    return batch


def running(batch, *outputs):
    return [
        SimpleNamespace(req=req, draft=SimpleNamespace(rid=req.rid, output=list(output)))
        for req, output in zip(batch.reqs, outputs, strict=False)
    ]


def test_what_is_right_of_a_draft_waits_for_the_first_decode_step(prefill):
    batch = batch_of("a", "b")
    result = prefill.run(batch, UNBIASED, False, None)
    assert result.next_token_ids.tolist() == [6, 21]
    (known,) = prefill.known.take(running(batch, [6])[:1])
    assert (known.first, known.tokens) == (6, [7, 8])
    assert prefill.known.take(running(batch, [6])[:1]) == []  # once


def test_what_relaxation_accepts_is_marked_counted_and_known(prefill):
    rule, none = RelaxedRule(top_beta=2, tau=1.0), np.empty(0, np.int64)
    prefill._planner.relaxing = [SimpleNamespace(relaxed=rule, ends=none), None]
    prefill._planner.chains = [TokenTree.chain([40, 41, 9]), TokenTree.chain([30])]
    batch = batch_of("a", "b")
    for req in batch.reqs:
        req.customized_info = None
    prefill.run(batch, UNBIASED, False, None)
    assert batch.reqs[0].customized_info == {relaxed_info.KEY: [1]}
    assert batch.reqs[1].customized_info is None and prefill._planner.relaxed == 1
    known, nothing = prefill.known.take(running(batch, [40], [21]))
    assert (known.tokens, known.relaxed, nothing) == ([41, 9, 10], [True, False, True, False], None)
    assert known.before({10}).relaxed == [True, False, True]
    step = SimpleNamespace(
        req_pool_indices=torch.tensor([1, 0]), seq_lens=torch.tensor([3, 2]),
        encoder_lens=torch.tensor([1500, 1500]),
    )  # fmt: skip
    head = prefill.store(step, [known, None])
    assert head.relaxed.tolist() == [[False, True, False], [False] * 3]
    assert prefill._planner.relaxed == 2
    assert prefill.store(step, [KnownTokens(6, [7], known.kv[:0]), None]).relaxed is None


@pytest.mark.parametrize("output", [[5], [6, 7]], ids=["another token", "a later step"])
def test_what_no_longer_fits_is_forgotten(prefill, output):
    batch = batch_of("a", "b")
    prefill.run(batch, UNBIASED, False, None)
    assert prefill.known.take(running(batch, output)) == []
    assert prefill.known.take(running(batch, [6])) == []


def test_others_of_the_step_may_have_nothing_known(prefill):
    batch = batch_of("a", "b")
    prefill.run(batch, UNBIASED, False, None)
    known, nothing = prefill.known.take(running(batch, [6], [21]))
    assert known.tokens == [7, 8] and nothing is None


def test_another_request_of_the_same_name_gets_nothing(prefill):
    batch = batch_of("a", "b")
    prefill.run(batch, UNBIASED, False, None)
    assert prefill.known.take(running(batch_of("a"), [6])) == []


@pytest.mark.parametrize("how", ["forget", "clear"])
def test_requests_that_end_are_forgotten(prefill, how):
    batch = batch_of("a", "b")
    prefill.run(batch, UNBIASED, False, None)
    prefill.forget("a") if how == "forget" else prefill.clear()
    assert prefill.known.take(running(batch, [6])[:1]) == []


def test_known_tokens_are_stored_where_the_sequence_goes_on(prefill):
    layers = [(torch.full((2, 1, 1), 7.0), torch.full((2, 1, 1), 8.0))] * 2
    known = [
        KnownTokens(6, [7, 8], layers),
        None,
        KnownTokens(1, [2], [(k[:1], v[:1]) for k, v in layers]),
    ]
    batch = SimpleNamespace(
        req_pool_indices=torch.tensor([1, 1, 0]),
        seq_lens=torch.tensor([3, 9, 2]),
        encoder_lens=torch.tensor([1500, 1500, 1500]),
    )
    head = prefill.store(batch, known)
    assert head.tokens.tolist() == [[7, 8], [0, 0], [2, 0]] and head.lens.tolist() == [2, 0, 1]
    assert prefill._planner.told == [("known", [2, 1])]
    table, pool = prefill.target.table.req_to_token, prefill.target.allocator.pool
    written = [*table[1, 1503:1505].tolist(), table[0, 1502].item()]
    assert pool.k_buffer[1][written].flatten().tolist() == [7.0] * 3
    assert int((pool.v_buffer[0] == 8.0).sum()) >= 3


@pytest.mark.parametrize("drafts, plainly", [(False, False), (True, True)])
def test_where_drafts_may_not_be_read_the_prefill_is_sglangs(monkeypatch, drafts, plainly):
    monkeypatch.setattr(host_prefill, "can_leave_padding_out", lambda runner: True)
    target, planner = Runner(), Planner([6], [30])
    made = HostPrefill(target, planner, drafts=drafts)
    assert made.run(batch_of("a", "b"), UNBIASED, plainly, None) == "as SGLang does"
    assert planner.told == ["note"]


def test_a_drafter_with_nothing_to_say_costs_nothing(prefill):
    prefill._planner.chains = [TokenTree.empty()] * 2
    assert prefill.run(batch_of("a", "b"), UNBIASED, False, None) == "as SGLang does"
