"""Where a drafter's embedding begins."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from sglang_ext.block_drafter.embedding_start import embedding_start
from sglang_ext.block_drafter.kept_tokens import FIRST, KeptTokens
from sglang_ext.block_drafter.shapes import Shape
from tests.unit.block_drafter.toy_drafters import untrained

KEPT = KeptTokens(np.array([5, 3, 9, 11, 30]), 4, 40)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A folder of a language model whose embedding lies in two directions, and the embedding."""
    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=40, num_hidden_layers=1, **sizes))
    plane = torch.randn(40, 2) @ torch.randn(2, 16)
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(plane)
    model.save_pretrained(folder)
    return folder, plane


def test_what_is_alike_in_the_target_is_alike_at_the_start(target):
    folder, plane = target
    found = embedding_start(str(folder), KEPT, 8)
    assert found.shape == (5, 8) and float(found.std()) == pytest.approx(1.0)
    # All that varies is in two of the dimensions, and distances are the target's.
    assert float(found[:, 2:].abs().max()) < 1e-3
    ratios = torch.pdist(found) / torch.pdist(plane[torch.from_numpy(KEPT.tokens)])
    assert float(ratios.max() / ratios.min()) == pytest.approx(1.0, abs=1e-3)
    assert embedding_start(str(folder), KEPT, 64).shape == (5, 16)


def test_a_model_begins_there(target):
    model, kept = untrained(Shape(32, 2, 64, 1, 1, block=6), vocab=40)
    before = model.embedding.weight.detach().clone()
    start = embedding_start(str(target[0]), kept, 32)
    model.begin_with(start)
    assert torch.equal(model.embedding.weight[:FIRST], before[:FIRST])
    assert torch.allclose(model.embedding.weight[FIRST:, :16], start * 32**-0.5)
    assert torch.equal(model.embedding.weight[:, 16:], before[:, 16:])


def test_a_target_without_such_weights_leaves_the_start_to_chance(target, tmp_path):
    folder, _ = target
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    assert embedding_start(str(tmp_path), KEPT, 8) is None
    save_file({"another": torch.ones(2)}, tmp_path / "model.safetensors")
    assert embedding_start(str(tmp_path), KEPT, 8) is None
