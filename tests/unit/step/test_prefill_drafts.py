"""Drafts behind prompts: what runs, what is known behind it, and that all is given back."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_ext.drafters import Bias
from sglang_ext.request_options import RelaxedRule
from sglang_ext.step import prefill_drafts
from sglang_ext.step.prefill_drafts import can_read_drafts, prefill_with_drafts, write_known
from sglang_ext.tree import TokenTree

VOCAB = 50


class Pool:
    """Two layers whose K and V of a slot are the slot's number."""

    def __init__(self, slots: int = 64):
        numbers = torch.arange(slots, dtype=torch.float32)[:, None, None]
        self.k_buffer = [numbers.clone(), numbers + 100]
        self.v_buffer = [numbers + 200, numbers + 300]


class Allocator:
    def __init__(self, free: int = 20):
        self.free_slots = list(range(40, 40 + free))
        self.pool = Pool()

    def alloc(self, n):
        if n > len(self.free_slots):
            return None
        taken, self.free_slots = self.free_slots[:n], self.free_slots[n:]
        return torch.tensor(taken, dtype=torch.int64)

    def free(self, slots):
        self.free_slots = sorted([*self.free_slots, *slots.tolist()])

    def get_kvcache(self):
        return self.pool


class Target:
    """Says the token after the one it reads: 7 after 6."""

    def __init__(self, error: Exception | None = None):
        self.error = error
        self.seen = None

    def forward_batch_generation(self, batch, is_verify):
        assert is_verify
        if self.error:
            raise self.error
        self.seen = SimpleNamespace(**vars(batch))
        logits = torch.zeros(len(batch.input_ids), VOCAB)
        logits[torch.arange(len(logits)), batch.input_ids + 1] = 1
        output = SimpleNamespace(next_token_logits=logits)
        return SimpleNamespace(logits_output=output, next_token_ids=None)


def prefill_batch(**more):
    info = SimpleNamespace(logit_bias=None, is_all_greedy=True)
    return SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        encoder_lens=torch.tensor([1500, 1500]),
        chunked_req=None,
        prefix_lens=[0, 0],
        extend_lens=[3, 2],
        input_ids=torch.tensor([1, 2, 5, 1, 20]),
        out_cache_loc=torch.tensor([10, 11, 12, 30, 31]),
        seq_lens=torch.tensor([3, 2]),
        seq_lens_cpu=torch.tensor([3, 2]),
        seq_lens_sum=5,
        spec_info=None,
        sampling_info=info,
        return_logprob=False,
        has_grammar=False,
        reqs=[],
        **more,
    )


def read(target, allocator, batch, *drafts, biases=(None, None)):
    """The pass with these drafts behind the prompts."""
    chains = [TokenTree.chain(draft) for draft in drafts]
    return prefill_with_drafts(target, allocator, batch, chains, biases)


def test_the_pass_reads_each_draft_behind_its_prompt():
    target, allocator, batch = Target(), Allocator(), prefill_batch()
    read(target, allocator, batch, [6, 7, 9], [])
    seen = target.seen
    assert seen.forward_mode == ForwardMode.TARGET_VERIFY
    assert seen.input_ids.tolist() == [1, 2, 5, 6, 7, 9, 1, 20]
    assert seen.out_cache_loc.tolist() == [10, 11, 12, 40, 41, 42, 30, 31]
    assert seen.seq_lens.tolist() == seen.seq_lens_cpu.tolist() == [0, 0]
    assert seen.spec_info.positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 1]
    assert seen.spec_info.draft_token_num == 6
    assert seen.spec_info.nodes.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    mask = seen.spec_info.custom_mask.view(2, 6, 6)
    assert mask.equal(torch.tril(torch.ones(6, 6, dtype=torch.bool)).expand(2, 6, 6))


def test_first_tokens_are_the_prompts_and_what_is_right_is_known():
    allocator, batch = Allocator(), prefill_batch()
    done = read(Target(), allocator, batch, [6, 7, 9], [30, 31])
    assert done.result.next_token_ids.tolist() == [6, 21]
    assert done.result.logits_output.next_token_logits.argmax(-1).tolist() == [6, 21]
    assert done.predicted == [[6, 7, 8, 10], [21, 31, 32]]
    known, nothing = done.known
    assert nothing is None
    assert (known.first, known.tokens) == (6, [7, 8])
    assert [k.flatten().tolist() for k, _ in known.kv] == [[40, 41], [140, 141]]
    assert [v.flatten().tolist() for _, v in known.kv] == [[240, 241], [340, 341]]
    pool = Pool()
    write_known(known, pool, torch.tensor([3, 9]))
    assert pool.k_buffer[1][[3, 9]].flatten().tolist() == [140, 141]
    assert pool.v_buffer[0][[2, 3, 9]].flatten().tolist() == [202, 240, 241]


def test_a_cached_prefix_is_behind_what_is_read():
    target, batch = Target(), prefill_batch()
    batch.encoder_lens, batch.prefix_lens = None, [7, 0]
    batch.seq_lens = batch.seq_lens_cpu = torch.tensor([10, 2])
    read(target, Allocator(), batch, [6], [30])
    assert target.seen.seq_lens.tolist() == target.seen.seq_lens_cpu.tolist() == [7, 0]
    assert target.seen.spec_info.positions.tolist() == [7, 8, 9, 10, 0, 1, 2]
    assert batch.seq_lens.tolist() == [10, 2]


def test_biased_tokens_are_known_as_the_draft_has_them():
    # The target says 6, 7, 8 and 21 with a probability of e / (49 + e) = 5%; of all others 2%.
    biases = [Bias([6, 30, 31], 0.05), None]
    done = read(Target(), Allocator(), prefill_batch(), [6, 30], [33], biases=biases)
    assert done.result.next_token_ids.tolist() == [6, 21]
    assert done.predicted == [[6, 30, 31], [21, 34]]
    assert done.known[0].tokens == [30, 31] and done.known[1] is None
    unbiased = [Bias([6, 30, 31], 0.01), None]
    done = read(Target(), Allocator(), prefill_batch(), [6, 30], [33], biases=unbiased)
    assert done.predicted == [[6, 7, 31], [21, 34]]


def test_a_relaxed_rule_holds_behind_prompts_too():
    # What the target says is by 1 likelier than all else, which is level.
    rule = RelaxedRule(top_beta=2, tau=1.0)
    chains = [TokenTree.chain([6, 30, 31, 9]), TokenTree.chain([33])]
    for asking, ends, tokens, marks in (
        (rule, (), [30, 31, 9, 10], [False, True, False, True, False]),
        (rule, (32,), [30, 31, 32], [False, True, False, False]),  # the target ends here
        (RelaxedRule(top_beta=2, tau=0.9), (), [7], []),
        (RelaxedRule(top_beta=1, tau=2.0), (), [7], []),
        (None, (), [7], []),
    ):
        asked = SimpleNamespace(relaxed=asking, ends=np.array(ends, dtype=np.int64))
        done = prefill_with_drafts(
            Target(), Allocator(), prefill_batch(), chains, [None] * 2, [asked, None]
        )
        known, beside = done.known
        assert (known.first, known.tokens, known.relaxed) == (6, tokens, marks)
        assert beside is None and done.result.next_token_ids.tolist() == [6, 21]


def test_a_first_token_may_be_relaxed():
    asked = SimpleNamespace(relaxed=RelaxedRule(top_beta=2, tau=1.0), ends=np.empty(0, np.int64))
    done = prefill_with_drafts(
        Target(), Allocator(), prefill_batch(),
        [TokenTree.chain([40, 41]), TokenTree.empty()], [None] * 2, [asked, None],
    )  # fmt: skip
    assert done.result.next_token_ids.tolist() == [40, 21]
    assert (done.known[0].tokens, done.known[0].relaxed) == ([41, 42], [True, False, False])


@pytest.mark.parametrize("error", [None, RuntimeError("out of memory")])
def test_the_batch_and_the_slots_are_given_back(error):
    allocator, batch = Allocator(), prefill_batch()
    before = dict(vars(batch))
    if error is None:
        read(Target(), allocator, batch, [6], [7, 8])
    else:
        with pytest.raises(RuntimeError):
            read(Target(error), allocator, batch, [6], [7, 8])
    assert len(allocator.free_slots) == 20
    assert all(vars(batch)[name] is value for name, value in before.items())


def test_without_room_nothing_is_run():
    target = Target()
    assert read(target, Allocator(free=2), prefill_batch(), [6], [7, 8]) is None
    assert target.seen is None


@pytest.mark.parametrize(
    "change",
    [
        {"forward_mode": ForwardMode.MIXED},
        {"chunked_req": object()},
        {"extend_lens": [3, 200], "input_ids": torch.arange(203)},
        {"return_logprob": True},
        {"has_grammar": True},
        {"input_ids": None},
    ],
)
def test_other_prefills_run_as_sglang_does(change):
    batch = prefill_batch()
    assert can_read_drafts(batch)
    for name, value in change.items():
        setattr(batch, name, value)
    assert not can_read_drafts(batch)


def test_attention_reads_such_a_pass_as_it_reads_an_extend_pass():
    from sglang_ext.cpu.attention import extend_slots, verify_slots

    target, batch = Target(), prefill_batch()
    read(target, Allocator(), batch, [6, 7, 9], [])
    table = np.zeros((2, 1520), dtype=np.int64)
    table[0, 1500:1506] = [10, 11, 12, 40, 41, 42]
    table[1, 1500:1502] = [30, 31]
    common = {"req_pool_indices": torch.tensor([0, 1]), "encoder_lens": batch.encoder_lens}
    verify = verify_slots(SimpleNamespace(**{**vars(target.seen), **common, "batch_size": 2}))
    extend = extend_slots(
        SimpleNamespace(
            **common,
            extend_seq_lens=torch.tensor([6, 2]),
            extend_prefix_lens=torch.tensor([0, 0]),
        ),
        causal=True,
    )

    def seen(slots):
        out = []
        for t in range(len(slots.row)):
            own = table[slots.row[t], slots.start[t] :][: slots.count[t]].tolist()
            out.append(own + slots.extra[slots.extra_start[t] :][: slots.extra_count[t]].tolist())
        return out

    assert seen(verify) == seen(extend)


def test_module_names_what_it_changes():
    assert all(hasattr(prefill_batch(), name) for name in prefill_drafts._CHANGED)
