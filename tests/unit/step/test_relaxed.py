"""SpecDec++'s relaxed acceptance: Eqs. 6 and 7 against a slow reference, on both paths."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.drafters import Bias
from sglang_ext.request_options import RelaxedRule
from sglang_ext.step import relaxed, relaxed_info, token_info
from sglang_ext.step.bias import BiasedRows, Expected
from sglang_ext.step.known_tokens import KnownHead
from sglang_ext.step.relaxed import Relaxation
from sglang_ext.step.step_result import Committed
from sglang_ext.step.verify import Accepted, accept_on_device, accept_on_host
from sglang_ext.tree import PackedTrees, TokenTree, merged, pack
from tests.unit.step.test_verify import Multinomial, Sampling

VOCAB = 8
ALONE = SimpleNamespace(world_size=1)


def asking(rule: RelaxedRule | None, ends: tuple[int, ...] = ()) -> SimpleNamespace:
    """What a RunningRequest tells of its rule."""
    return SimpleNamespace(relaxed=rule, ends=np.array(ends, dtype=np.int64))


class Mixed(Multinomial):
    """SGLang's sampler of greedy and sampled rows: a top-k of 1 is greedy."""

    def __call__(self, output, info, *_args):
        likeliest = output.next_token_logits.argmax(dim=-1)
        sampled = super().__call__(output, info)
        return torch.where(info.top_ks == 1, likeliest, sampled)


def on_host(logits, packed, running, *, ragged=False, biased=None, **sampling) -> Accepted:
    relaxation = Relaxation.of(running, packed)
    nodes_of = relaxation and relaxation.nodes([torch.from_numpy(a) for a in relaxation.arrays()])
    info = Sampling(torch.ones(len(running), 1), **({"is_all_greedy": True} | sampling))
    nodes = packed.nodes() if ragged else None
    rows = logits if nodes is None else logits[torch.from_numpy(nodes)]
    positions = torch.arange(packed.tokens.size)
    return accept_on_host(rows.clone(), packed, info, positions, Mixed(0), nodes, biased, nodes_of)


def on_device(logits, packed, running, *, biased=None, **sampling) -> Accepted:
    """The rules that a device runs, on the CPU."""
    relaxation = Relaxation.of(running, packed)
    nodes_of = relaxation and relaxation.nodes([torch.from_numpy(a) for a in relaxation.arrays()])
    info = Sampling(torch.ones(len(running), 1), **({"is_all_greedy": True} | sampling))
    bs, width = packed.tokens.shape
    verify_input = SimpleNamespace(
        draft_token_num=width,
        draft_token=torch.from_numpy(packed.tokens.reshape(-1)),
        retrieve_index=torch.arange(bs * width).view(bs, width),
        retrieve_next_token=torch.from_numpy(packed.next_token),
        retrieve_next_sibling=torch.from_numpy(packed.next_sibling),
        tree_topk=2,
    )
    positions = torch.arange(bs * width)
    return accept_on_device(
        logits.clone(), verify_input, info, positions, Mixed(0), ALONE, biased, nodes_of
    )


def committed(accepted: Accepted) -> list[list[int]]:
    """Each request's tokens, the bonus included."""
    return [
        accepted.predict[row[:n].long()].tolist()
        for row, n in zip(accepted.accept_index, accepted.accept_lens.tolist(), strict=True)
    ]


def marks_in(accepted: Accepted) -> list[list[bool]]:
    """Which of `committed` were accepted by relaxation."""
    lens = accepted.accept_lens.tolist()
    if accepted.relaxed is None:
        return [[False] * n for n in lens]
    assert int(accepted.relaxed.sum()) == sum(
        int(row[:n].sum()) for row, n in zip(accepted.relaxed, lens, strict=True)
    )
    return [row[:n].tolist() for row, n in zip(accepted.relaxed, lens, strict=True)]


def reference(logits, packed: PackedTrees, row: int, asked) -> tuple[list[int], list[bool]]:
    """A request's tokens and which were relaxed, by the rule's words, one node at a time."""
    width, rule = packed.width, asked.relaxed

    def own_of(node: int) -> int:
        return int(logits[row * width + node].argmax())

    def likely(child: int) -> float:
        of = row * width + int(packed.parents[row, child])
        return float(torch.log_softmax(logits[of].double(), dim=-1)[packed.tokens[row, child]])

    def passes(child: int) -> bool:
        node = int(packed.parents[row, child])
        own = own_of(node)
        if packed.tokens[row, child] == own:
            return True
        if rule is None or own in asked.ends or likely(child) == -math.inf:
            return False
        logprobs = torch.log_softmax(logits[row * width + node].double(), dim=-1)
        beta_th = float(logprobs.sort(descending=True).values[rule.top_beta - 1])
        judged = likely(child)
        if rule.by == "drafter" and packed.logprobs is not None:
            given_logprob = float(packed.logprobs[row, child])
            judged = judged if math.isnan(given_logprob) else given_logprob
        return judged >= beta_th - 1e-9 and float(logprobs.max()) - judged <= rule.tau + 1e-6

    def children(node: int) -> list[int]:
        found = {}
        for i in range(1, packed.sizes[row]):
            if packed.parents[row, i] == node:
                found.setdefault(int(packed.tokens[row, i]), i)  # of doubles the first
        return [i for i in found.values() if passes(i)]

    def reach(node: int) -> int:
        return max((1 + reach(child) for child in children(node)), default=0)

    def worth(child: int) -> tuple:
        own = packed.tokens[row, child] == own_of(int(packed.parents[row, child]))
        return reach(child), own, likely(child), -child

    tokens, marks, node = [], [], 0
    while going_on := children(node):
        best = max(going_on, key=worth)
        tokens.append(int(packed.tokens[row, best]))
        marks.append(tokens[-1] != own_of(node))
        node = best
    return [*tokens, own_of(node)], [*marks, False]


@st.composite
def batches(draw):
    """Trees, logits with room for ties, and what each request asks for."""
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    trees, running = [], []
    for _ in range(draw(st.integers(1, 3))):
        n = int(rng.integers(0, 9))
        parents = np.array([rng.integers(max(-1, i - 3), i) for i in range(n)], dtype=np.int32)
        # Siblings hold different tokens more often than not; doubles are legal.
        tokens = rng.integers(0, VOCAB, n)
        logprobs = rng.uniform(-3, 0, n).astype(np.float32)
        logprobs[rng.random(n) < 0.3] = np.nan
        given_them = logprobs if rng.random() < 0.5 else None
        trees.append(TokenTree(tokens, parents, np.ones(n, np.float32), logprobs=given_them))
        rule = RelaxedRule(
            top_beta=int(rng.integers(1, 6)),
            tau=float(rng.uniform(0, 3)),
            by="drafter" if rng.random() < 0.5 else "target",
        )
        ends = tuple(rng.choice(VOCAB, int(rng.integers(0, 3)), replace=False).tolist())
        running.append(asking(rule if rng.random() < 0.8 else None, ends))
    packed = pack([0] * len(trees), trees, 1 + max(1, max(map(len, trees))))
    logits = torch.from_numpy(rng.normal(0, 1.2, (packed.tokens.size, VOCAB)).astype(np.float32))
    forbidden = torch.from_numpy(rng.random(logits.shape) < 0.15)
    forbidden[:, 3] = False  # something is left of every row
    return packed, logits.masked_fill(forbidden, -torch.inf), running


@settings(max_examples=150, deadline=None)
@given(batches())
def test_both_paths_follow_the_rule_on_random_trees(batch):
    packed, logits, running = batch
    wanted = [reference(logits, packed, row, asked) for row, asked in enumerate(running)]
    sampled = {"is_all_greedy": False, "top_ks": torch.ones(len(running), dtype=torch.int64)}
    for accepted in (
        on_host(logits, packed, running),
        on_host(logits, packed, running, ragged=True),
        on_host(logits, packed, running, **sampled),
        on_device(logits, packed, running),
        on_device(logits, packed, running, **sampled),
    ):
        assert committed(accepted) == [tokens for tokens, _ in wanted]
        assert marks_in(accepted) == [marked for _, marked in wanted]


@pytest.mark.parametrize("most", [1, 3 * VOCAB])
def test_rows_are_judged_in_parts_where_they_are_many(most, monkeypatch):
    rng = np.random.default_rng(3)
    trees = [TokenTree.chain(rng.integers(0, VOCAB, 9).tolist()) for _ in range(4)]
    packed = pack([0] * 4, trees, 10)
    logits = torch.from_numpy(rng.normal(0, 1, (40, VOCAB)).astype(np.float32))
    asked = [asking(RelaxedRule(top_beta=4, tau=2.0))] * 4
    whole = on_device(logits, packed, asked)
    monkeypatch.setattr(relaxed, "MOST_LOGITS", most)
    parts = on_device(logits, packed, asked)
    assert committed(parts) == committed(whole) and marks_in(parts) == marks_in(whole)
    assert any(map(any, marks_in(whole)))


@settings(max_examples=50, deadline=None)
@given(batches())
def test_exact_requests_beside_relaxed_ones_are_bit_exact(batch):
    packed, logits, running = batch
    alone = on_host(logits, packed, [asking(None)] * len(running))
    for accepted in (on_host(logits, packed, running), on_device(logits, packed, running)):
        for row, asked in enumerate(running):
            if asked.relaxed is None:
                assert committed(accepted)[row] == committed(alone)[row]
                assert not any(marks_in(accepted)[row])


def test_a_sampled_request_beside_a_relaxed_one_is_sampled_as_ever():
    """The same draws from the sampler, with a relaxed neighbour and without."""
    rng = np.random.default_rng(5)
    trees = [TokenTree.chain([1, 2]), TokenTree.chain([int(rng.integers(VOCAB))])] * 20
    packed = pack([0] * 40, trees, 3)
    logits = torch.from_numpy(rng.normal(0, 1, (120, VOCAB)).astype(np.float32))
    sampling = {"is_all_greedy": False, "top_ks": torch.tensor([1, 1 << 30] * 20)}
    asked = [asking(RelaxedRule(top_beta=8, tau=9)), asking(None)] * 20
    with_it = committed(on_device(logits, packed, asked, **sampling))
    without = committed(on_device(logits, packed, [asking(None)] * 40, **sampling))
    assert with_it[1::2] == without[1::2]
    assert with_it[::2] != without[::2]


def one_step(probs, tokens, rule, ends=(), parents=None, logprobs=None) -> tuple[list, list]:
    """Tokens and marks of one request whose nodes have these distributions."""
    n = len(tokens)
    at = np.arange(-1, n - 1) if parents is None else np.array(parents)
    given_them = None if logprobs is None else np.array(logprobs, dtype=np.float32)
    tree = TokenTree(
        np.array(tokens), at.astype(np.int32), np.ones(n, np.float32), logprobs=given_them
    )
    packed, logits = pack([0], [tree], n + 1), torch.tensor(probs).log()
    made = on_host(logits, packed, [asking(rule, ends)])
    assert committed(made) == committed(on_device(logits, packed, [asking(rule, ends)]))
    return committed(made)[0], marks_in(made)[0]


HALF = [0.5, 0.3, 0.15, 0.05]  # log(0.5 / 0.3) = 0.51, log(0.5 / 0.15) = 1.2


@pytest.mark.parametrize(
    ("rule", "token", "accepted"),
    [
        (RelaxedRule(top_beta=2, tau=0.52), 1, True),
        (RelaxedRule(top_beta=2, tau=0.51), 1, False),  # Eq. 7
        (RelaxedRule(top_beta=1, tau=9.0), 1, False),  # Eq. 6
        (RelaxedRule(top_beta=3, tau=1.3), 2, True),
        (RelaxedRule(top_beta=2, tau=1.3), 2, False),
        (RelaxedRule(top_beta=4, tau=0.0), 1, False),
        (RelaxedRule(top_beta=32, tau=10.0), 3, True),
        (None, 1, False),
    ],
)
def test_a_token_passes_both_equations_or_none(rule, token, accepted):
    tokens, marks = one_step([HALF, HALF], [token], rule)
    assert tokens == ([token, 0] if accepted else [0])
    assert marks == ([True, False] if accepted else [False])


def test_of_equally_long_paths_the_targets_own_token_goes_before_then_the_likeliest():
    rule = RelaxedRule(top_beta=4, tau=9)
    assert one_step([HALF] * 4, [2, 1, 0], rule, parents=[-1] * 3)[0] == [0, 0]
    assert one_step([HALF] * 3, [2, 1], rule, parents=[-1] * 2) == ([1, 0], [True, False])
    # Equally likely ones: the tree's first.
    even = [0.4, 0.3, 0.3, 0.0]
    assert one_step([even] * 3, [2, 1], rule, parents=[-1] * 2)[0] == [2, 0]


def test_the_rule_is_compiled_before_a_request_asks_for_it():
    relaxed.warm_up()
    packed = pack([0, 0], [TokenTree.chain([1]), TokenTree.chain([1, 2])], 4)
    logits = torch.zeros(8, VOCAB)
    for ragged in (False, True):
        on_host(logits, packed, [asking(RelaxedRule())] * 2, ragged=ragged)
    sampled = {"is_all_greedy": False, "top_ks": torch.ones(2, dtype=torch.int64)}
    on_host(logits, packed, [asking(RelaxedRule())] * 2, **sampled)
    assert len(relaxed.relax_on_host.nopython_signatures) == 1


def test_of_paths_that_pass_the_longest_is_taken():
    rule = RelaxedRule(top_beta=2, tau=1)
    # The root's own token, 0, has nothing behind it; behind 1 a child passes.
    longer = [0, 1, 1], [-1, -1, 1]
    assert one_step([HALF] * 4, longer[0], rule, parents=longer[1]) == (
        [1, 1, 0],
        [True, True, False],
    )
    # A child that does not pass makes a path no longer.
    assert one_step([HALF] * 4, [0, 1, 3], rule, parents=[-1, -1, 1])[0] == [0, 0]
    # An exact request follows the target's own tokens.
    assert one_step([HALF] * 4, [0, 1, 1], None, parents=[-1, -1, 1])[0] == [0, 0]


def test_by_drafter_judges_the_drafters_log_probability_where_there_is_one():
    rule = RelaxedRule(top_beta=2, tau=1.0, by="drafter")
    sure, unsure, none = -0.01, -3.0, math.nan
    # 3 is the target's last choice, its drafter is sure of it: as printed, it passes.
    assert one_step([HALF] * 2, [3], rule, logprobs=[sure])[1] == [True, False]
    assert one_step([HALF] * 2, [1], rule, logprobs=[unsure])[1] == [False]
    assert one_step([HALF] * 2, [1], rule, logprobs=[none])[1] == [True, False]
    assert one_step([HALF] * 2, [3], rule, logprobs=[none])[1] == [False]
    assert one_step([HALF] * 2, [1], rule)[1] == [True, False]
    # By the target's own, what the drafter says is not looked at.
    by_target = RelaxedRule(top_beta=2, tau=1.0)
    assert one_step([HALF] * 2, [3], by_target, logprobs=[sure])[1] == [False]


def test_a_forbidden_token_never_passes_and_a_forced_one_stands():
    """A grammar leaves forbidden tokens a probability of 0."""
    forbidden, forced = [0.6, 0.4, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]
    widest = RelaxedRule(top_beta=32, tau=10.0)
    assert one_step([forbidden] * 2, [2], widest)[0] == [0]
    sure = RelaxedRule(top_beta=32, tau=10.0, by="drafter")
    assert one_step([forbidden] * 2, [2], sure, logprobs=[0.0])[0] == [0]
    assert one_step([forced] * 2, [1], widest)[0] == [2]


def test_logits_that_are_no_numbers_relax_nothing():
    packed = pack([0], [TokenTree.chain([1, 2])], 3)
    for bad in (math.nan, -math.inf):
        logits = torch.full((3, VOCAB), bad)
        asked = [asking(RelaxedRule(top_beta=32, tau=10.0))]
        assert not any(marks_in(on_host(logits, packed, asked))[0])
        assert not any(marks_in(on_device(logits, packed, asked))[0])


def test_an_end_of_the_targets_own_is_never_passed_over():
    rule = RelaxedRule(top_beta=4, tau=9)
    assert one_step([HALF] * 2, [1], rule, ends=(0, 7))[0] == [0]
    assert one_step([HALF] * 2, [1], rule, ends=(5,))[0] == [1, 0]
    # With ignore_eos a request has no ends.
    assert one_step([HALF] * 2, [1], rule)[0] == [1, 0]


def test_a_biased_token_is_the_targets_own():
    """SSBD's bias comes first; where its token was not drafted, relaxation is asked."""
    trees = [TokenTree(np.array([1, 2]), np.array([-1, -1], np.int32), np.ones(2, np.float32))]
    packed, logits = pack([0], trees, 3), torch.tensor([HALF] * 3).log()
    asked = [asking(RelaxedRule(top_beta=4, tau=9))]
    for beta, tokens, marks in (
        (0.5, [2, 0], [False, False]),  # the bias makes 2 the target's own
        (0.0, [1, 0], [True, False]),
    ):
        expected = Expected.of_trees([Bias([2], beta)], trees, packed)
        biased = BiasedRows.of(expected)
        for path in (on_host, on_device):
            made = path(logits, packed, asked, biased=biased)
            assert (committed(made)[0], marks_in(made)[0]) == (tokens, marks)


def test_cut_and_merged_trees_keep_their_log_probabilities():
    scored = TokenTree.chain([5, 6, 7])
    scored = TokenTree(
        scored.tokens, scored.parents, scored.probs, None, np.array([-1, -2, -3], np.float32)
    )
    for cut in (scored.first(2), scored.clipped(2), scored.before(np.array([7]))):
        assert cut.logprobs is not None and cut.logprobs.tolist() == [-1, -2]
    both = merged([TokenTree.chain([5, 9]), scored], 8)
    assert both.logprobs is not None
    by_token = dict(zip(both.tokens.tolist(), both.logprobs.tolist(), strict=True))
    assert (by_token[5], by_token[6], by_token[7]) == (-1, -2, -3) and math.isnan(by_token[9])
    assert merged([TokenTree.chain([5, 9])], 8).logprobs is None
    packed = pack([0, 0], [TokenTree.chain([4]), scored], 3)
    assert packed.logprobs is not None and np.isnan(packed.logprobs[0]).all()
    assert packed.logprobs[1, 1:].tolist() == [-1, -2]
    for wrong in (np.zeros(2, np.float32), np.array([0.1, 0, 0], np.float32)):
        with pytest.raises(ValueError, match="logprobs"):
            TokenTree(scored.tokens, scored.parents, scored.probs, None, wrong).check(100)


class FakeReq:
    """What marks read of SGLang's Req."""

    def __init__(self, rule, output):
        self.sampling_params = SimpleNamespace(custom_params={"relaxed": rule})
        self.output_ids, self.customized_info = list(output), None
        self.done = self.is_retracted = False

    def finished(self):
        return self.done


def test_marks_stand_beside_their_tokens():
    asks, exact, done = FakeReq({}, [1]), FakeReq(None, [1]), FakeReq({}, [1])
    done.done = True
    reqs = [asks, exact, done]
    marks = torch.tensor([[True, False, True]] * 3)
    steps = [
        ([[5], [5], [5]], None),  # a plain step
        ([[6, 7, 8], [6], [6]], marks),
        ([[9, 9], [6], [6]], marks),  # cut where a grammar ends
    ]
    for runs, step in steps:
        relaxed_info.note_tokens(reqs, runs, SimpleNamespace(relaxed=step))
        for req, run in zip(reqs, runs, strict=True):
            req.output_ids.extend(run)
    assert asks.customized_info == {relaxed_info.KEY: [0, 0, 1, 0, 1, 1, 0]}
    assert len(asks.output_ids) == 7
    assert exact.customized_info is None and done.customized_info is None


def test_a_prefills_token_is_marked_before_it_is_sent():
    asks, exact = FakeReq({}, [1]), FakeReq(None, [1])
    for req in (asks, exact):
        relaxed_info._collected(None, None, 0, req, None)
    assert asks.customized_info == {relaxed_info.KEY: [0]} and exact.customized_info is None


def test_answers_that_are_sent_together_are_told_of_their_own_tokens():
    """SGLang fills in None for requests beside one that has marks."""

    def tell(meta_info, state, info, index):
        token_info._told(sglangs, None, meta_info, state, info, index, None)

    def sglangs(_manager, meta_info, state, info, index, _reason):
        for key, values in info.items():
            state.customized_info_accumulated.setdefault(key, []).extend(values[index])
            meta_info[key] = state.customized_info_accumulated[key]

    asks, exact = (
        SimpleNamespace(customized_info_accumulated={}, output_ids=[5]) for _ in range(2)
    )
    info = {relaxed_info.KEY: [[1, 0], [None, None]], "other": [[7, 7], [8, 8]]}
    first, second = {}, {}
    tell(first, asks, info, 0)
    tell(second, exact, info, 1)
    # Of what came before, a prefill server's token, nothing was said.
    assert first == {relaxed_info.KEY: [0, 1, 0], "other": [7, 7]}
    assert second == {"other": [8, 8]}
    asks.output_ids += [6, 7]
    tell(first, asks, {relaxed_info.KEY: [[], [None]]}, 0)
    assert first[relaxed_info.KEY] == [0, 1, 0]


def test_known_tokens_in_front_of_a_step_are_not_relaxed():
    head = KnownHead(
        torch.tensor([[3, 4], [0, 0]]), torch.tensor([2, 0], dtype=torch.int32), [2, 0]
    )
    step = Committed(
        torch.tensor([[7, 8, 0], [9, 0, 0]]),
        torch.tensor([2, 1], dtype=torch.int32),
        torch.tensor([9, 9]),
        torch.tensor([[True, False, False], [True, False, False]]),
    )
    made = step.behind(head, 8)
    assert made.tokens.tolist() == [[3, 4, 7, 8, 0], [9, 0, 0, 0, 0]]
    assert made.relaxed is not None and made.relaxed.dtype == torch.bool
    assert made.relaxed.tolist() == [[False, False, True, False, False], [True] + [False] * 4]
