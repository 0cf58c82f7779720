"""The network, its served form, and the tokens that it knows."""

import dataclasses

import numpy as np
import pytest
import torch

from sglang_ext.block_drafter import block_decoder
from sglang_ext.block_drafter.block_decoder import BlockDecoder
from sglang_ext.block_drafter.block_paths import PathSearch
from sglang_ext.block_drafter.block_predictor import (
    BlockPredictor,
    Read,
    Written,
    block_inputs,
    padded,
)
from sglang_ext.block_drafter.fast_dropout import FastDropout, with_fast_dropout
from sglang_ext.block_drafter.kept_tokens import FIRST, MASK, PADDING, UNKNOWN, KeptTokens
from sglang_ext.block_drafter.nat_model import EARLIER, BlockModel
from sglang_ext.block_drafter.shapes import SHAPES, Shape, TargetStates
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
    before = torch.tensor([2, 1])
    places = model.decode(memory, sources != PADDING, tokens, committed, before)
    assert places.shape == (2, SHAPE.block, SHAPE.width)
    logits = model.logits(places, torch.full((2, SHAPE.block, EARLIER), 9))
    assert logits.shape == (2, SHAPE.block, kept.num_classes)
    assert logits.isfinite().all()
    # Of blocks of one source, each reads what it may.
    written = model.remembered(torch.tensor([[8, 9]]), torch.arange(2)[None], written=True)
    joined = torch.cat([memory[:1], written], dim=1)
    seen = torch.tensor([[True, True, True, False, False], [True, True, True, True, False]])
    rows = torch.from_numpy(block_inputs([8, 9], 6))
    committed, before = torch.tensor([1, 2]), torch.tensor([2, 3])
    model.eval()
    both = model.decode(joined, seen, rows, committed, before)
    alone = model.decode(joined[:, :4], seen[1:, :4], rows[1:], committed[1:], before[1:])
    assert torch.allclose(both[1:], alone, atol=1e-5)
    wanted = torch.zeros(2, 6, dtype=torch.bool)
    wanted[1, 3] = True
    part = model.decode(joined, seen, rows, committed, before, wanted)
    assert torch.allclose(part, both[1, 3:4], atol=1e-5)


def test_a_place_depends_on_the_tokens_before_it():
    torch.manual_seed(0)
    model, _ = untrained()
    place = torch.randn(SHAPE.width).expand(3, -1)
    logits = model.logits(place, torch.tensor([[4, 5], [4, 6], [5, 4]]))
    assert not torch.allclose(logits[0], logits[1]) and not torch.allclose(logits[0], logits[2])


def _requests():
    """Sources, the ends of outputs, and what there is to be remembered of these."""
    rng = np.random.default_rng(1)
    sources = [rng.integers(3, 40, n) for n in (5, 1, 9)]
    last = [rng.integers(3, 40, n) for n in (0, 4, 7)]
    written = [Written.of_rows(rows, n) for rows, n in zip(last, (0, 4, 31), strict=True)]
    read = [
        Read(rows[:-1], n - 1 - len(rows[:-1]) + np.arange(len(rows[:-1])))
        for rows, n in zip(last, (0, 4, 31), strict=True)
    ]
    assert [len(each.tokens) for each in read] == [0, 3, 6]
    assert read[1].places.tolist() == [0, 1, 2] and read[2].places[-1] == 29
    return sources, written, read


def _sharp():
    """An untrained model that is surer than one is."""
    torch.manual_seed(0)
    model, kept = untrained()
    with torch.no_grad():
        model.embedding.weight *= 3
    return model.eval(), kept


def _served(model, requests, choices, int8=False):
    sources, written, read = requests
    predictor = BlockPredictor(model, int8, ends=[7])
    memories = predictor.encode(sources)
    predictor.write(memories, read)
    return predictor.predict(memories, written, choices)


def _path_of(paths, node):
    """Rows up to a node."""
    rows = []
    while node >= 0:
        rows.insert(0, int(paths.rows[node]))
        node = paths.parents[node]
    return rows


def test_what_is_served_is_what_was_trained():
    """The predictor's own layers, and its search, compute what the model does."""
    model, _ = _sharp()
    sources, written, new = _requests()
    found = _served(model, (sources, written, new), [4, 4, 4])
    window = SHAPE.window
    read, at = ([getattr(r, name)[-window:] for r in new] for name in ("tokens", "places"))
    tokens, own = torch.from_numpy(padded(sources)), torch.from_numpy(padded(read))
    long = tokens.shape[1]
    before = [
        long + len(r) - 1 if len(r) else len(s) - 1 for r, s in zip(read, sources, strict=True)
    ]
    with torch.no_grad():
        entries = model.remembered(own, torch.from_numpy(padded(at)), written=True)
        places = model.decode(
            torch.cat([model.encode(tokens), entries], dim=1),
            torch.cat([tokens != PADDING, own != PADDING], dim=1),
            torch.from_numpy(block_inputs([w.last[-1] for w in written], SHAPE.block)),
            torch.tensor([w.committed for w in written]),
            torch.tensor(before),
        )
        for paths, row, w in zip(found, places, written, strict=True):
            assert len(paths) > 4
            for node in range(len(paths)):
                *path, last = _path_of(paths, node)
                earlier = torch.tensor([*w.last, *path][-EARLIER:])
                logprobs = model.logits(row[len(path)], earlier).log_softmax(-1)
                assert logprobs[last - UNKNOWN] == pytest.approx(paths.logprobs[node], abs=1e-4)
                assert last in logprobs.topk(4).indices + UNKNOWN


def test_a_search_goes_on_behind_the_likeliest_paths_and_no_end():
    model, _ = _sharp()
    found = _served(model, _requests(), [3, 3, 3])
    for paths in found:
        assert (paths.parents < np.arange(len(paths))).all()
        inner = [p for p in paths.parents if p >= 0]
        assert not {7, UNKNOWN} & set(paths.rows[inner].tolist())
        sums = paths.logprobs + np.where(paths.parents >= 0, paths.scores[paths.parents], 0)
        assert np.allclose(sums, paths.scores, atol=1e-5)
        assert (paths.scores >= np.log(0.01)).all()
        assert paths.likeliest()[0] == paths.rows[paths.scores.argmax()]


def test_one_choice_is_a_chain_and_each_request_has_its_own():
    model, _ = _sharp()
    chains, mixed = _served(model, _requests(), [1] * 3), _served(model, _requests(), [1, 3, 1])
    for chain, one in zip(chains, mixed, strict=True):
        assert chain.parents.tolist() == list(range(-1, len(chain) - 1))
        assert chain.likeliest().tolist() == chain.rows.tolist()
        assert one.likeliest()[0] == chain.rows[0]
    assert [mixed[i].rows.tolist() for i in (0, 2)] == [chains[i].rows.tolist() for i in (0, 2)]
    assert len(mixed[1]) > len(chains[1])


def test_a_path_is_no_longer_than_asked_for():
    model, _ = _sharp()
    sources, written, _ = _requests()
    predictor = BlockPredictor(model, int8=False)
    for paths in predictor.predict(predictor.encode(sources), written, [2] * 3, 1):
        assert (paths.parents == -1).all() and 1 <= len(paths) <= 2


def test_a_batch_predicts_what_each_request_does_alone():
    model, _ = _sharp()
    requests = _requests()
    together = _served(model, requests, [3, 3, 3])
    for i in range(3):
        (alone,) = _served(model, [[each[i]] for each in requests], [3])
        assert np.allclose(alone.logprobs, together[i].logprobs, atol=1e-4)
        assert (alone.rows == together[i].rows).all()


def test_what_is_written_step_by_step_is_what_is_written_at_once():
    """More than the window holds, in parts; the oldest entries make way."""
    model, _ = _sharp()
    sources, written, _ = _requests()
    rows = np.random.default_rng(3).integers(3, 40, 3 * SHAPE.window)
    predictor = BlockPredictor(model, int8=False)
    at_once, by_steps = predictor.encode([sources[0], sources[0]])
    places = np.arange(len(rows))
    predictor.write([at_once], [Read(rows, places)])
    for start, end in ((0, 1), (1, 5), (5, 5), (5, len(rows) - 2), (len(rows) - 2, len(rows))):
        predictor.write([by_steps], [Read(rows[start:end], places[start:end])])
    assert torch.allclose(at_once.last, by_steps.last, atol=1e-5)
    both = predictor.predict([at_once, by_steps], [written[0]] * 2, [3, 3])
    assert len(both[0]) > 3 and (both[0].rows == both[1].rows).all()
    assert np.allclose(both[0].logprobs, both[1].logprobs, atol=1e-4)


@pytest.mark.parametrize("requests", [1, 3])
def test_the_compiled_decoder_finds_what_torchs_does(requests, monkeypatch):
    model, _ = _sharp()
    sources, _, read = (each[:requests] for each in _requests())
    slots = torch.randn(requests, 1 + SHAPE.block, SHAPE.width)
    found = []
    for compiled in (True, False):
        if not compiled:
            monkeypatch.setattr(block_decoder, "_packed_layer", lambda layer: None)
        predictor = BlockPredictor(model, int8=True)
        memories = predictor.encode(sources)
        predictor.write(memories, read)
        found.append(BlockDecoder(model, int8=True).run(slots.clone(), memories))
    by_float = BlockDecoder(model, int8=False).run(slots.clone(), memories)
    assert (found[0] - found[1]).norm() < 0.05 * found[1].norm()
    assert (found[0] - by_float).norm() < 0.05 * by_float.norm()


@pytest.mark.parametrize("width", [0, 64], ids=["own", "the target's"])
@pytest.mark.parametrize("layers", [1, 3])
def test_what_is_remembered_in_8_bits_is_near_what_torch_remembers(layers, width):
    """Of several requests at once, in parts that go round in their rooms, some of them empty."""
    torch.manual_seed(0)
    shape = dataclasses.replace(SHAPE, decoder_layers=layers)
    states = TargetStates(1, width) if width else None
    model = BlockModel(shape, 60, 48, states=states).eval()
    for parameter in (model.memory_norm.weight, model.memory_norm.bias):
        torch.nn.init.normal_(parameter)
    random = np.random.default_rng(1)

    def read(count: int) -> np.ndarray:
        if width:
            return random.standard_normal((count, width)).astype(np.float16)
        return random.integers(3, 50, count)

    sources = [read(5), read(2), read(3)]
    steps = [[read(count) for count in counts] for counts in ((1, 0, 3), (4, 2, 9), (2, 1, 0))]
    last = random.integers(3, 50, 3)
    rooms, inputs = [], []
    for int8 in (False, True):
        predictor = BlockPredictor(model, int8)
        memories = predictor.encode(sources)
        begin = [0, 0, 0]
        for step in steps:
            at = [np.arange(b, b + len(r)) for b, r in zip(begin, step, strict=True)]
            predictor.write(memories, [Read(*each) for each in zip(step, at, strict=True)])
            begin = [b + len(r) for b, r in zip(begin, step, strict=True)]
        rooms.append([memory.entries for memory in memories])
        inputs.append(predictor._inputs(last, [0, 1, 700], memories))
        assert [memory.count for memory in memories] == [9, 5, 7]
    for plain, packed in zip(*rooms, strict=True):
        assert plain.shape == packed.shape == (layers, 2, plain.shape[2], 2, 16)
        assert 0 < (plain - packed).norm() < 0.02 * plain.norm()
    assert 0 < (inputs[0] - inputs[1]).norm() < 0.02 * inputs[0].norm()


def test_int8_is_near_float():
    torch.manual_seed(0)
    model, kept = untrained()
    many = kept.num_classes
    first = []
    for int8 in (False, True):
        own = []
        for paths in _served(model, _requests(), [many] * 3, int8):
            nodes = np.flatnonzero(paths.parents < 0)
            at_first = dict(zip(paths.rows[nodes], paths.logprobs[nodes], strict=True))
            own += [at_first.get(row, np.log(0.01)) for row in range(UNKNOWN, UNKNOWN + many)]
        first.append(np.array(own))
    difference = np.abs(first[0] - first[1])
    assert 0 < difference.mean() < 0.1 * first[0].std()


def test_the_compiled_search_finds_what_torchs_does():
    """Both on one model's places, the compiled one with its head in 8 bits."""
    model, kept = _sharp()
    torch.manual_seed(1)
    places = torch.randn(5, SHAPE.block, SHAPE.width)
    earlier = np.random.default_rng(2).integers(3, 40, (5, EARLIER))
    choices = [3, 1, 4, kept.num_classes, 2]
    plain, compiled = (
        PathSearch(model, int8, ends=[7]).search(places, earlier, choices, SHAPE.block)
        for int8 in (False, True)
    )
    by_path = [
        [{tuple(_path_of(p, n)): p.scores[n] for n in range(len(p))} for p in each]
        for each in (plain, compiled)
    ]
    for sure, rounded in zip(*by_path, strict=True):
        both = set(sure) & set(rounded)
        assert len(both) > 0.8 * max(len(sure), len(rounded)) > 3
        assert max(abs(sure[path] - rounded[path]) for path in both) < 0.2
    chain = compiled[1]
    assert chain.parents.tolist() == list(range(-1, len(chain) - 1))


@pytest.mark.parametrize("int8", [False, True])
def test_a_search_without_hope_finds_nothing(int8):
    model, _ = untrained()
    with torch.no_grad():
        model.embedding.weight.zero_()  # all are as likely, 1 in 49
    large, _ = untrained(vocab=200)
    with torch.no_grad():
        large.embedding.weight.zero_()
    places, earlier = torch.zeros(1, SHAPE.block, SHAPE.width), np.zeros((1, EARLIER), np.int64)
    (paths,) = PathSearch(large, int8, ()).search(places, earlier, [3], SHAPE.block)
    assert not len(paths) and not len(paths.likeliest())
    (paths,) = PathSearch(model, int8, ()).search(places, earlier, [3], SHAPE.block)
    assert len(paths) == 3 and (paths.parents == -1).all()


def test_a_source_keeps_memory_by_its_length_alone():
    predictor = BlockPredictor(untrained()[0], int8=False)
    long, short = predictor.encode([np.arange(3, 15), np.arange(3, 9)])
    keys_values = 2 * 32 * 4
    assert long.nbytes - short.nbytes == 6 * keys_values
    assert long.nbytes == (12 + SHAPE.window) * keys_values + 32 * 4
    (empty,) = predictor.encode([np.array([], dtype=np.int64)])
    assert empty.nbytes == (1 + SHAPE.window) * keys_values + 32 * 4


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
