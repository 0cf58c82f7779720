"""The network, its served form, and the tokens that it knows."""

import numpy as np
import pytest
import torch

from sglang_ext.block_drafter.block_predictor import (
    BlockPredictor,
    Written,
    block_inputs,
    padded,
)
from sglang_ext.block_drafter.fast_dropout import FastDropout, with_fast_dropout
from sglang_ext.block_drafter.kept_tokens import FIRST, MASK, PADDING, UNKNOWN, KeptTokens
from sglang_ext.block_drafter.shapes import SHAPES, Shape
from tests.unit.block_drafter.toy_drafters import SHAPE, untrained


def test_every_named_shape_is_one():
    for shape in SHAPES.values():
        shape.check()


@pytest.mark.parametrize(
    ("changes", "field"), [({"heads": 3}, "width"), ({"block": 0}, "block"), ({"window": 1.5}, "w")]
)
def test_a_shape_that_no_model_can_have_is_refused_by_its_field(changes, field):
    with pytest.raises(ValueError, match=field):
        Shape(**{"width": 32, "heads": 2, **changes}).check()


def test_a_block_is_predicted_in_one_pass():
    torch.manual_seed(0)
    model, kept = untrained()
    sources = torch.tensor([[4, 5, 6], [7, 8, PADDING]])
    tokens = torch.from_numpy(block_inputs([9, PADDING], 6))
    assert tokens.tolist() == [[9, *[MASK] * 6], [PADDING, *[MASK] * 6]]
    memory, committed = model.encode(sources), torch.tensor([1, 0])
    logits = model.decode(memory, sources != PADDING, tokens, committed)
    assert logits.shape == (2, SHAPE.block, kept.num_classes)
    assert logits.isfinite().all()
    # Of blocks of one source, each reads what it may.
    written = model.remembered(torch.tensor([[8, 9]]), torch.arange(2)[None], written=True)
    joined = torch.cat([memory[:1], written], dim=1)
    seen = torch.tensor([[True, True, True, False, False], [True, True, True, True, False]])
    rows = torch.from_numpy(block_inputs([8, 9], 6))
    model.eval()
    both = model.decode(joined, seen, rows, torch.tensor([1, 2]))
    alone = model.decode(joined[:, :4], seen[1:, :4], rows[1:], torch.tensor([2]))
    assert torch.allclose(both[1:], alone, atol=1e-5)
    wanted = torch.zeros(2, 6, dtype=torch.bool)
    wanted[1, 3] = True
    part = model.decode(joined, seen, rows, torch.tensor([1, 2]), wanted)
    assert torch.allclose(part, both[1, 3:4], atol=1e-5)


def _requests():
    rng = np.random.default_rng(1)
    sources = [rng.integers(3, 40, n) for n in (5, 1, 9)]
    last = [rng.integers(3, 40, n) for n in (0, 4, 7)]
    written = [Written.of_rows(rows, n) for rows, n in zip(last, (0, 4, 31), strict=True)]
    assert [len(each.read) for each in written] == [0, 3, 6]
    assert written[1].places.tolist() == [0, 1, 2] and written[2].places[-1] == 29
    return sources, written


def test_what_is_served_is_what_was_trained():
    """The predictor's own layers compute what nn.Transformer's do."""
    torch.manual_seed(0)
    model, kept = untrained()
    model.eval()
    sources, written = _requests()
    predictor = BlockPredictor(model, int8=False)
    blocks = predictor.predict(predictor.encode(sources), written, kept.num_classes)
    window = SHAPE.window
    read, places = ([getattr(w, name)[-window:] for w in written] for name in ("read", "places"))
    with torch.no_grad():
        tokens, before = torch.from_numpy(padded(sources)), torch.from_numpy(padded(read))
        own = model.remembered(before, torch.from_numpy(padded(places)), written=True)
        logits = model.decode(
            torch.cat([model.encode(tokens), own], dim=1),
            torch.cat([tokens != PADDING, before != PADDING], dim=1),
            torch.from_numpy(block_inputs([w.last for w in written], SHAPE.block)),
            torch.tensor([w.committed for w in written]),
        )
    expected = logits.log_softmax(-1)
    for block, row in zip(blocks, expected, strict=True):
        found = torch.empty_like(row)
        found.scatter_(1, torch.from_numpy(block.rows) - UNKNOWN, torch.from_numpy(block.logprobs))
        assert torch.allclose(found, row, atol=1e-4)


def test_a_batch_predicts_what_each_request_does_alone():
    torch.manual_seed(0)
    predictor = BlockPredictor(untrained()[0], int8=False)
    sources, written = _requests()
    together = predictor.predict(predictor.encode(sources), written, 3)
    for i in range(3):
        memories = predictor.encode([sources[i]])
        (alone,) = predictor.predict(memories, [written[i]], 3)
        assert np.allclose(alone.logprobs, together[i].logprobs, atol=1e-4)
        assert (alone.rows == together[i].rows).all()


def test_int8_is_near_float():
    torch.manual_seed(0)
    model, kept = untrained()
    sources, written = _requests()
    many = kept.num_classes
    by_kind = []
    for int8 in (False, True):
        predictor = BlockPredictor(model, int8)
        blocks = predictor.predict(predictor.encode(sources), written, many)
        order = [np.argsort(block.rows, axis=1) for block in blocks]
        logprobs = [
            np.take_along_axis(b.logprobs, o, 1) for b, o in zip(blocks, order, strict=True)
        ]
        by_kind.append(np.stack(logprobs))
    difference = np.abs(by_kind[0] - by_kind[1])
    assert 0 < difference.mean() < 0.1 * by_kind[0].std()


def test_a_source_keeps_memory_by_its_length_alone():
    predictor = BlockPredictor(untrained()[0], int8=False)
    long, short = predictor.encode([np.arange(3, 15), np.arange(3, 9)])
    assert long.nbytes == 2 * short.nbytes == 12 * 2 * 32 * 4
    (empty,) = predictor.encode([np.array([], dtype=np.int64)])
    assert empty.nbytes == 2 * 32 * 4


def test_rare_tokens_are_mapped_out():
    sources, outputs = np.zeros(20, np.int64), np.zeros(20, np.int64)
    outputs[[4, 5, 6]] = 9, 7, 1
    sources[[5, 8]] = 3, 3
    kept = KeptTokens.most_frequent(sources, outputs, 3, 8, always=[2])
    assert kept.tokens.tolist() == [2, 4, 5, 8]
    assert kept.rows([4, 8, 6]).tolist() == [FIRST + 1, FIRST + 3, UNKNOWN]
    assert kept.output_rows([4, 8, 6]).tolist() == [FIRST + 1, UNKNOWN, UNKNOWN]
    assert kept.ids([FIRST + 1, UNKNOWN, FIRST + 3]).tolist() == [4, -1, 8]
    assert kept.num_classes == 4


@pytest.mark.parametrize("tokens", [[1, 1], [20], [-1, 3]])
def test_kept_tokens_that_are_none_are_refused(tokens):
    with pytest.raises(ValueError, match="different ids"):
        KeptTokens(np.array(tokens), 1, 20)


def test_fast_dropout_drops_its_part_keeps_the_mean_and_is_off_in_evaluation():
    torch.manual_seed(3)
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.Dropout(0.1)))
    with_fast_dropout(module)
    [dropout] = [m for m in module.modules() if isinstance(m, FastDropout)]
    x = torch.ones(1003, 37, dtype=torch.bfloat16, requires_grad=True)
    y = dropout(x)
    assert y.dtype == x.dtype and y.shape == x.shape
    assert float((y == 0).float().mean()) == pytest.approx(26 / 256, abs=0.01)
    assert float(y.detach().float().mean()) == pytest.approx(1.0, abs=0.01)
    y.sum().backward()
    assert torch.equal(x.grad == 0, y == 0)
    torch.manual_seed(4)
    again = dropout(x)
    torch.manual_seed(4)
    assert torch.equal(dropout(x), again) and not torch.equal(again, y)
    assert dropout.eval()(x) is x
