"""Penalties kept on the device equal those of plain decoding after the same tokens, bit for bit."""

from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_ext.step import penalties
from sglang_ext.step.penalties import DevicePenalties
from sglang_ext.tree import TokenTree, pack

VOCAB = 12
PLAIN = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "stop_token_ids": {3},
}
CHOICES = [
    {"frequency_penalty": 0.7},
    {"presence_penalty": 1.1},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": -0.5, "presence_penalty": 0.4, "repetition_penalty": 0.8},
    {"frequency_penalty": 0.1, "presence_penalty": -0.3, "repetition_penalty": 1.05},
    {"min_new_tokens": 9, "frequency_penalty": 0.2},
    {},
]


def request(rid="r", **params):
    return SimpleNamespace(
        rid=rid,
        sampling_params=SimpleNamespace(**PLAIN | params),
        eos_token_ids={2},
        tokenizer=SimpleNamespace(eos_token_id=2, additional_stop_token_ids=None),
    )


def plain_penalties(req, output, vocab=VOCAB) -> tuple[np.ndarray, np.ndarray]:
    """(additive, scaling) on the next token, counted token by token in float32."""
    p = req.sampling_params
    frequency, presence = np.zeros(vocab, np.float32), np.zeros(vocab, np.float32)
    scaling = np.ones(vocab, np.float32)
    for token in output:
        if 0 <= token < vocab:
            frequency[token] += np.float32(p.frequency_penalty)
            presence[token] = p.presence_penalty
            scaling[token] = p.repetition_penalty
    additive = np.zeros(vocab, np.float32) - frequency - presence
    if len(output) < p.min_new_tokens:
        additive[[t for t in p.stop_token_ids | {2} if 0 <= t < vocab]] = -np.inf
    return additive, scaling


def plain(logits: torch.Tensor, req, output) -> torch.Tensor:
    """A row of logits as plain decoding penalizes it."""
    additive, scaling = (torch.from_numpy(a) for a in plain_penalties(req, output))
    logits = logits + additive
    return torch.where(logits < 0, logits * scaling, logits / scaling)


def path_to(trees, b: int, node: int) -> list[int]:
    path: list[int] = []
    while node > 0:
        path.insert(0, int(trees.tokens[b, node]))
        node = int(trees.parents[b, node])
    return path


def check_step(made: DevicePenalties, reqs, outputs, trees, logits) -> None:
    """Both a verify step and a plain one must have plain decoding's numbers."""
    got = logits.clone()
    made.apply_tree(got, reqs, outputs, trees)
    for b, (req, output) in enumerate(zip(reqs, outputs, strict=True)):
        for node in range(int(trees.sizes[b])):
            row = b * trees.width + node
            expected = plain(logits[row], req, output + path_to(trees, b, node))
            assert torch.equal(got[row], expected), (b, node)
    additive, scaling = made.next_token(reqs, outputs)
    for b, (req, output) in enumerate(zip(reqs, outputs, strict=True)):
        if penalties.is_penalized(req):
            expected_pair = plain_penalties(req, output)
            assert np.array_equal(additive[b].numpy(), expected_pair[0])
            assert np.array_equal(scaling[b].numpy(), expected_pair[1])


@pytest.mark.parametrize("params", CHOICES)
def test_each_node_gets_its_own_paths_penalties(params):
    reqs = [request(**params), request(presence_penalty=0.3)]
    tree = TokenTree(
        np.array([5, 4, 5, 5, 6]), np.array([-1, 0, 1, -1, 2], dtype=np.int32), np.ones(5)
    )
    trees = pack([4, 7], [tree, TokenTree.chain([8])], 7)
    check_step(DevicePenalties(VOCAB, "cpu", 2), reqs, [[1, 4, 4], [7]], trees, logits_of(trees))


def test_repetitions_on_a_path_are_added_one_by_one():
    trees = pack([4], [TokenTree.chain([5] * 10)], 11)
    logits = torch.zeros(11, VOCAB)
    check_step(DevicePenalties(VOCAB, "cpu", 1), [request(**CHOICES[4])], [[5, 4]], trees, logits)


def logits_of(trees, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(trees.tokens.size, vocab, generator=generator) * 3


@st.composite
def steps(draw):
    """Steps of a batch: requests join and leave, write, and lose a part of what they wrote."""
    token = st.integers(0, VOCAB + 2)
    alive: dict[int, tuple] = {}
    made = []
    for step in range(draw(st.integers(1, 6))):
        for key in draw(st.sets(st.sampled_from(sorted(alive)))) if alive else ():
            del alive[key]
        for _ in range(draw(st.integers(0 if alive else 1, 3))):
            req = request(f"{step}-{len(alive)}", **draw(st.sampled_from(CHOICES)))
            alive[id(req)] = (req, [draw(token)])
        for key, (req, output) in alive.items():
            kept = len(output) - draw(st.sampled_from([0, 0, 0, 1, 5]))
            new = draw(st.lists(token, max_size=20))
            alive[key] = (req, [*output[: max(1, kept)], *new])
        trees = []
        for req, output in alive.values():
            n = draw(st.integers(0, 6))
            parents = [draw(st.integers(-1, i - 1)) for i in range(n)]
            tokens = draw(st.lists(st.integers(0, 4), min_size=n, max_size=n))
            tree = TokenTree(np.array(tokens, np.int64), np.array(parents, np.int32), np.ones(n))
            depth = penalties.max_depth(req, len(output))
            trees.append(tree if depth is None else tree.clipped(depth))
        made.append((list(alive.values()), trees))
    return made


@given(steps(), st.integers(0, 1000))
@settings(max_examples=80, deadline=None)
def test_requests_that_come_write_and_go_have_plain_decodings_penalties(made, seed):
    # Tables that start as small as can be, so that they grow.
    with mock.patch.multiple(penalties, _FEWEST_ROWS=1, _FEWEST_SLOTS=1):
        kept = DevicePenalties(VOCAB, "cpu", 4)
        for batch, drafts in made:
            reqs, outputs = [r for r, _ in batch], [o for _, o in batch]
            trees = pack([o[-1] for o in outputs], drafts, 7)
            check_step(kept, reqs, outputs, trees, logits_of(trees, seed))


class Batch:
    """What SGLang's penalizers read of a ScheduleBatch."""

    device = "cpu"

    def __init__(self, reqs):
        self.reqs = reqs


def test_the_numbers_are_those_of_sglangs_penalizers_token_by_token():
    from sglang.srt.sampling import penaltylib
    from sglang.srt.sampling.penaltylib.repetition_penalty import apply_scaling_penalties

    vocab, rng = 300, np.random.default_rng(0)
    reqs = [request(str(i), **params) for i, params in enumerate(CHOICES)]
    for req in reqs:
        req.tokenizer.additional_stop_token_ids = {7}
    batch = Batch(reqs)
    theirs = penaltylib.BatchedPenalizerOrchestrator(
        vocab,
        batch,
        {
            penaltylib.BatchedFrequencyPenalizer,
            penaltylib.BatchedPresencePenalizer,
            penaltylib.BatchedRepetitionPenalizer,
            penaltylib.BatchedMinNewTokensPenalizer,
        },
    )
    ours = DevicePenalties(vocab, "cpu", len(reqs))
    outputs: list[list[int]] = [[] for _ in reqs]
    for step in range(60):
        new = np.minimum(rng.geometric(0.2, len(reqs)), vocab - 1)
        theirs.cumulate_output_tokens(torch.from_numpy(new))
        roots = [[*output] for output in outputs]
        for output, token in zip(outputs, new.tolist(), strict=True):
            output.append(token)
        additive = torch.zeros(len(reqs), vocab)
        theirs.accumulate_additive_penalties(additive)
        scaling = theirs.accumulate_scaling_penalties()
        got = ours.next_token(reqs, outputs)
        assert torch.equal(got[0], additive) and torch.equal(got[1], scaling)
        # The same token as a draft behind the output before it.
        chains = [TokenTree.chain([token]) for token in new.tolist()]
        trees = pack([output[-1] if output else 0 for output in roots], chains, 2)
        for dtype in (torch.float32, torch.bfloat16):
            logits = logits_of(trees, step, vocab).to(dtype)
            expected = logits[1::2] + 0  # a copy
            expected.add_(additive)
            with torch.compiler.set_stance("force_eager"):
                apply_scaling_penalties(expected, scaling)
            DevicePenalties(vocab, "cpu", len(reqs)).apply_tree(logits, reqs, roots, trees)
            deep = [i for i, req in enumerate(reqs) if penalties.max_depth(req, step) != 0]
            assert torch.equal(logits[1::2][deep], expected[deep])


class NoWaiting(TorchDispatchMode):
    """Refuses what waits for a device, or mixes one with the host; notes how often host data goes.

    `to_device` stands for sglang_ext.cuda.staging's, whose copy is pinned and not waited for.
    """

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique")

    def __init__(self):
        super().__init__()
        self.copies = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        assert name not in self.WAITS, f"{name} waits for the device"
        assert {x.device.type for x in tensors} <= {"cuda"}, f"{name} copies from the host"
        if name in ("index", "index_put", "index_put_"):
            assert all(i.dtype != torch.bool for i in args[1] if i is not None), "a mask as index"
        out = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(out):
            assert not isinstance(x, torch.Tensor) or x.device.type == "cuda", f"{name} to the host"
        return out

    def to_device(self, arrays, device):
        assert device == "cuda"
        self.copies += 1
        return [
            torch.empty(a.shape, dtype=getattr(torch, a.dtype.name), device="cuda") for a in arrays
        ]


def test_a_step_on_a_device_is_one_copy_and_waits_for_nothing():
    reqs = [request(str(i), **params) for i, params in enumerate(CHOICES)]
    outputs = [[1, 4, 4, i] for i in range(len(reqs))]
    chains = [TokenTree.chain([3, 4])] * len(reqs)
    trees = pack([output[-1] for output in outputs], chains, 4)
    with FakeTensorMode():
        kept = DevicePenalties(VOCAB, "cuda", 8)
        for dtype in (torch.float32, torch.bfloat16):
            logits = torch.empty(trees.tokens.size, VOCAB, dtype=dtype, device="cuda")
            strict = NoWaiting()
            with strict, mock.patch.object(penalties, "to_device", strict.to_device):
                kept.update(reqs, outputs)
                assert strict.copies == 1
                kept.update(reqs, outputs)
                assert strict.copies == 1, "nothing was written"
                kept.apply_tree(logits, reqs, outputs, trees)
                assert strict.copies == 2
                additive, scaling = kept.next_token(reqs, outputs)
                assert strict.copies == 3
            assert additive.shape == scaling.shape == (len(reqs), VOCAB)
            outputs = [[*output, 5] for output in outputs]
            kept.clear()


@pytest.mark.parametrize("stops", [[VOCAB], [-1, 3, VOCAB + 7], [1 << 70], list(range(VOCAB + 3))])
def test_stop_ids_outside_the_vocabulary_are_ignored(stops):
    req = request(min_new_tokens=5, stop_token_ids=set(stops))
    trees = pack([4], [TokenTree.chain([5, 6])], 4)
    kept = DevicePenalties(VOCAB, "cpu", 1)
    check_step(kept, [req], [[1, 4]], trees, logits_of(trees))
    forbidden = {t for t in stops if 0 <= t < VOCAB} | {2}
    additive, _ = kept.next_token([req], [[1, 4]])
    assert set(torch.nonzero(additive[0] == -torch.inf)[:, 0].tolist()) == forbidden


def known(kept: DevicePenalties) -> set[str]:
    return {counted.req.rid for counted in kept._known.values()}


def test_who_leaves_without_a_finish_is_dropped_and_its_row_used_again():
    kept = DevicePenalties(VOCAB, "cpu", 6)
    reqs = [request(str(i), presence_penalty=0.5) for i in range(6)]
    kept.update(reqs, [[i] for i in range(6)])
    assert known(kept) == set("012345") and len(kept._tokens) == 6
    for i in range(50):  # each step one aborts and another comes
        reqs = [*reqs[1:], request(f"new {i}", presence_penalty=0.5)]
        kept.update(reqs, [[2, 3, i % VOCAB] for _ in reqs])
        assert known(kept) == {req.rid for req in reqs}
    assert kept._tokens.shape == kept._counts.shape == (6, penalties._FEWEST_SLOTS)
    additive, _ = kept.next_token(reqs, [[5]] * 6)
    assert additive.count_nonzero() == 6  # nothing of those before
    kept.forget(reqs[2].rid)
    assert known(kept) == {req.rid for req in reqs} - {reqs[2].rid}
    kept.update([request("plain")], [[1]])
    assert known(kept) == set() and kept._tokens.numel() == 0


def test_a_batch_larger_than_said_is_served():
    kept = DevicePenalties(VOCAB, "cpu", 2)
    reqs = [request(str(i), frequency_penalty=0.5) for i in range(11)]
    additive, _ = kept.next_token(reqs, [[i] for i in range(11)])
    assert torch.equal(additive.nonzero(), torch.arange(11)[:, None].expand(11, 2))


@pytest.mark.parametrize("change", ["shorter", "another end", "another object"])
def test_an_output_that_does_not_go_on_is_counted_anew(change):
    kept = DevicePenalties(VOCAB, "cpu", 2)
    req = request(frequency_penalty=0.3, repetition_penalty=1.2)
    kept.update([req], [[1, 4, 4, 6]])
    output = {"shorter": [1, 4], "another end": [1, 5, 5, 5, 7], "another object": [5, 6, 4, 6]}
    if change == "another object":
        req = request(frequency_penalty=0.3, repetition_penalty=1.2)
    additive, scaling = kept.next_token([req], [output[change]])
    expected = plain_penalties(req, output[change])
    assert np.array_equal(additive[0], expected[0]) and np.array_equal(scaling[0], expected[1])


def test_only_new_tokens_are_sent():
    sent: list[int] = []

    def to_device(arrays, device):
        sent.append(len(arrays[0]))
        return staging(arrays, device)

    staging = penalties.to_device
    kept, req = DevicePenalties(VOCAB, "cpu", 1), request(frequency_penalty=0.3)
    output = [1, 2, 3, 4]
    with mock.patch.object(penalties, "to_device", to_device):
        for new in ([], [5], [6, 6, 7]):
            output.extend(new)
            kept.next_token([req], [output])
    assert sent == [4, 1, 3]


def test_long_outputs_of_many_tokens_keep_their_counts():
    vocab, rng = 5000, np.random.default_rng(1)
    params = CHOICES[3]
    reqs = [request(str(i), **params) for i in range(3)]
    outputs: list[list[int]] = [[], [], []]
    kept = DevicePenalties(vocab, "cpu", 3)
    for _ in range(12):
        for spread, output in zip((50, 1000, vocab), outputs, strict=True):
            output.extend(rng.integers(0, spread, 300).tolist())
        additive, scaling = kept.next_token(reqs, outputs)
    for b, output in enumerate(outputs):
        expected = plain_penalties(reqs[b], output, vocab)
        assert np.array_equal(additive[b], expected[0]) and np.array_equal(scaling[b], expected[1])


def test_depth_stops_where_min_new_tokens_is_reached():
    assert penalties.max_depth(request(min_new_tokens=5), output_len=2) == 2
    assert penalties.max_depth(request(min_new_tokens=5), output_len=5) is None
    assert not penalties.is_penalized(request())
    assert penalties.is_penalized(request(min_new_tokens=1))
