"""The draft model says what transformers says, text and trees, after commits and in batches."""

import numpy as np
import pytest
import torch

from sglang_ext.mirror import lm_loading
from sglang_ext.mirror.causal_lm import NAMED, CausalLM, Feed
from sglang_ext.mirror.lm_loading import DraftModelError
from sglang_ext.mirror.tree_cache import ROOT
from sglang_ext.mirror.weight_formats import PackedWeight, made
from tests.unit.mirror.tiny_lms import VOCAB, Reference, write_lm

TEXT = [5, 17, 99, 3, 42, 8, 8, 61, 150, 2]


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
KINDS = {"llama": {}, "llama 3": {"rope_parameters": LLAMA3}, "qwen2": {}, "qwen3": {}}


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory) -> tuple[CausalLM, Reference]:
    kind = request.param.split()[0]
    folder = write_lm(tmp_path_factory.mktemp("lm"), kind, **KINDS[request.param])
    return lm_loading.load(folder, "fp32"), Reference(folder)


def read(model: CausalLM, cache, text=(), tokens=(), parents=()):
    n = (1 if text else 0) + len(tokens)
    said = model.forward([Feed(cache, text, tokens, parents, n)])
    return list(zip(said.tokens[:, 0].tolist(), said.probs[:, 0].tolist(), strict=True))


def same(said, expected):
    assert said[0] == expected[0]
    assert said[1] == pytest.approx(expected[1], abs=1e-4)


def test_text_in_one_pass_and_in_parts(pair):
    model, reference = pair
    whole = model.new_cache()
    same(read(model, whole, TEXT)[0], reference.best(TEXT))
    parts = model.new_cache()
    read(model, parts, TEXT[:4])
    same(read(model, parts, TEXT[4:])[0], reference.best(TEXT))


def test_nodes_see_their_own_path_alone(pair):
    model, reference = pair
    cache = model.new_cache()
    # Root -> 7 -> 9, root -> 30 -> 9, read in two passes.
    first = read(model, cache, TEXT, [7, 30, 9], [ROOT, ROOT, 0])
    for said, path in zip(first, [[], [7], [30], [7, 9]], strict=True):
        same(said, reference.best(TEXT + path))
    second = read(model, cache, (), [9, 11], [1, 2])
    for said, path in zip(second, [[30, 9], [7, 9, 11]], strict=True):
        same(said, reference.best(TEXT + path))


def test_committed_nodes_become_text_and_those_behind_stay(pair):
    model, reference = pair
    cache = model.new_cache()
    # 0: 7, 1: 30, 2: 9 below 1, 3: 4 below 2, 4: 5 below 2
    read(model, cache, TEXT, [7, 30, 9, 4, 5], [ROOT, ROOT, 1, 2, 2])
    cache.keep([1, 2], [3, 4])
    assert (cache.text, cache.nodes) == (len(TEXT) + 2, 2)
    said = read(model, cache, (), [6, 77], [1, ROOT])
    same(said[0], reference.best([*TEXT, 30, 9, 5, 6]))
    same(said[1], reference.best([*TEXT, 30, 9, 77]))


def test_a_rejected_draft_leaves_nothing(pair):
    model, reference = pair
    cache = model.new_cache()
    read(model, cache, TEXT, [7, 9], [ROOT, 0])
    cache.truncate(len(TEXT))
    same(read(model, cache, [12, 13])[0], reference.best([*TEXT, 12, 13]))


def test_requests_of_one_pass_do_not_see_each_other(pair):
    model, reference = pair
    caches = [model.new_cache(), model.new_cache()]
    feeds = [Feed(caches[0], TEXT, [7], [ROOT], 2), Feed(caches[1], TEXT[:3], [], [], 1)]
    said = model.forward(feeds)
    expected = [reference.best(t) for t in (TEXT, [*TEXT, 7], TEXT[:3])]
    assert said.tokens[:, 0].tolist() == [token for token, _ in expected]
    assert said.probs[:, 0] == pytest.approx([prob for _, prob in expected], abs=1e-4)
    for row, of in enumerate((TEXT, [*TEXT, 7], TEXT[:3])):
        tokens, probs = reference.likeliest(of, NAMED)
        assert said.tokens[row].tolist() == tokens
        assert said.probs[row] == pytest.approx(probs, abs=1e-4)


def test_a_cache_grows_with_its_text(pair):
    model, reference = pair
    text = np.random.default_rng(0).integers(0, VOCAB, 300).tolist()
    cache = model.new_cache()
    for begin in range(0, 300, 50):
        said = read(model, cache, text[begin : begin + 50])
    same(said[0], reference.best(text))
    # 300: 7, 301: 30; the second one becomes text, in its new place.
    read(model, cache, (), [7, 30], [ROOT, ROOT])
    cache.keep([1], [])
    same(read(model, cache, [9])[0], reference.best([*text, 30, 9]))


@pytest.mark.parametrize(("kind", "most"), [("bf16", 0.003), ("int8", 0.012), ("int4", 0.12)])
def test_packed_products_are_near_the_exact_one(kind, most):
    torch.manual_seed(0)
    weight, x = torch.randn(96, 64), torch.randn(70, 64)
    packed = made(weight, kind, "cpu")
    assert isinstance(packed, PackedWeight)
    assert packed.bits == {"bf16": 16, "int8": 8, "int4": 4}[kind]
    exact = x @ weight.T
    assert (packed.product(x) - exact).norm() / exact.norm() < most


def test_a_matrix_of_no_whole_groups_has_sixteen_bits():
    weight, x = torch.randn(96, 40), torch.randn(3, 40)
    packed = made(weight, "int4", "cpu")
    assert isinstance(packed, PackedWeight) and packed.bits == 16
    torch.testing.assert_close(packed.product(x), x @ weight.T, rtol=0.05, atol=0.2)
    with pytest.raises(ValueError, match="finite"):
        made(torch.full((96, 64), float("inf")), "int4", "cpu")


@pytest.mark.parametrize("kind", ["int8", "int4", "bf16"])
def test_smaller_weights_say_nearly_the_same(kind, tmp_path):
    # Wide gaps between tokens, as trained models have.
    folder = write_lm(tmp_path, "llama")
    model, reference = lm_loading.load(folder, kind), Reference(folder)
    rng = np.random.default_rng(1)
    texts = [rng.integers(0, VOCAB, 12).tolist() for _ in range(12)]
    agreed = sum(read(model, model.new_cache(), t)[0][0] == reference.best(t)[0] for t in texts)
    assert agreed >= (10 if kind != "int4" else 5), agreed


def test_what_cannot_draft_is_refused_by_name(tmp_path):
    with pytest.raises(DraftModelError, match=r"config\.json cannot be read"):
        lm_loading.load(tmp_path, "fp32")
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    with pytest.raises(DraftModelError, match="is a GPT2LMHeadModel; expected one of Llama"):
        lm_loading.load(tmp_path, "fp32")
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(DraftModelError, match=r"no \*\.safetensors"):
        lm_loading.load(tmp_path, "fp32")
