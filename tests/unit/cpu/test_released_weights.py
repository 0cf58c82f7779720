"""Weights that layers do not keep: what is freed, what stays, and what SGLang then refuses."""

import gc
import weakref

import pytest
import torch
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
)
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from sglang.srt.model_executor.model_runner_components.weight_exporter import WeightExporter
from sglang.srt.model_executor.model_runner_components.weight_updater import (
    _unsupported_derived_weight_cache_error,
)

from sglang_ext.cpu import linear
from sglang_ext.cpu.packed_weights import BITS, in_bits
from sglang_ext.cpu.released_weights import KEEP_VARIABLE, check_weights_refused, is_released
from sglang_ext.drafters.target_reader import weights_hash
from sglang_ext.mirror.proxy import Proxy, narrowed
from sglang_ext.mirror.target_parts import TargetParts

WORDS, SIZE = 48, 64


class Head(ParallelLMHead):
    """An LM head without the parallel groups that SGLang's wants."""

    def __init__(self, weight):
        torch.nn.Module.__init__(self)
        self.weight = weight


class Model(torch.nn.Module):
    """A table, a layer and a head, after loading."""

    def __init__(self, generator, *, tied=False):
        super().__init__()
        self.table = torch.nn.Embedding(WORDS, SIZE)
        self.layer = torch.nn.Linear(SIZE, SIZE, bias=False)
        self.lm_head = self.table if tied else Head(parameter(generator))
        for layer in (self.table, self.layer):
            layer.weight = parameter(generator, len(layer.weight))
        self.layer.weight.weight_loader = "SGLang's"
        linear._pack_linear(None, UnquantizedLinearMethod(), self.layer)
        linear._pack_head(None, UnquantizedEmbeddingMethod(), self.lm_head)

    def logits(self, x):
        """What a decode step runs."""
        x = self.layer.quant_method.apply(self.layer, x)
        return self.lm_head.quant_method.apply(self.lm_head, x)


def parameter(generator, rows=WORDS):
    return torch.nn.Parameter(torch.randn(rows, SIZE, generator=generator), requires_grad=False)


@pytest.fixture(params=["bf16", "int8", "int4"])
def bits(request, monkeypatch):
    monkeypatch.setenv("SGLANG_EXT_CPU_WEIGHTS", request.param)
    return BITS[request.param]


def test_packed_weights_are_all_that_is_left_of_layers_and_untied_heads(generator, bits):
    model = Model(generator)
    head = model.lm_head.weight.clone()
    held = weakref.ref(model.lm_head.weight)
    x = torch.randn(3, SIZE, generator=generator)
    out = model.logits(x)
    gc.collect()
    assert held() is None
    assert is_released(model.layer.weight) and is_released(model.lm_head.weight)
    assert model.layer.weight.untyped_storage().nbytes() == 4
    assert model.layer.weight.shape == (SIZE, SIZE)
    assert model.layer.weight.weight_loader == "SGLang's"
    within = model.layer.quant_method.apply(model.layer, x)
    assert torch.equal(out, in_bits(head, max(8, bits)).linear(within))
    assert not is_released(model.table.weight)


def test_a_row_does_not_depend_on_its_batch_once_weights_are_gone(generator, bits):
    model = Model(generator)
    x = torch.randn(9, SIZE, generator=generator)
    together = model.logits(x)
    assert torch.equal(torch.cat([model.logits(row) for row in x.split(1)]), together)


def test_a_tied_head_keeps_the_table_that_embeddings_are_looked_up_in(generator, bits):
    model = Model(generator, tied=True)
    table = model.table.weight.clone()
    model.logits(torch.randn(3, SIZE, generator=generator))
    assert torch.equal(model.table.weight, table)


def test_a_table_that_shares_a_heads_parameter_keeps_it(generator, bits):
    """ParallelLMHead.tie_weights: the parameter is another module's too."""
    model = Model(generator)
    model.lm_head.weight = model.table.weight
    table = model.table.weight.clone()
    model.logits(torch.randn(3, SIZE, generator=generator))
    assert is_released(model.lm_head.weight) and torch.equal(model.table.weight, table)


def test_all_weights_stay_where_that_is_asked_for_or_nothing_is_packed(generator, monkeypatch):
    for kind, keep in (("int8", "1"), ("fp32", "0")):
        monkeypatch.setenv("SGLANG_EXT_CPU_WEIGHTS", kind)
        monkeypatch.setenv(KEEP_VARIABLE, keep)
        model = Model(generator)
        model.logits(torch.randn(3, SIZE, generator=generator))
        assert not any(map(is_released, model.parameters())), kind


def test_updates_and_exports_are_refused_by_sglang_itself(generator, bits):
    model = Model(generator)
    error = _unsupported_derived_weight_cache_error(model)
    assert "cannot be updated" in error and f"{KEEP_VARIABLE}=1" in error
    exporter = WeightExporter(
        tp_rank=0, tp_size=1, gpu_id=0, get_model_path=str, get_model=lambda: model
    )
    assert "cannot be read" in exporter._weight_export_unsupported_reason()
    assert exporter.get_weights_by_name("layer.weight") is None

    class Runner:
        pass

    Runner.model = model
    with pytest.raises(ValueError, match=f"cannot be checked.*{KEEP_VARIABLE}=1"):
        check_weights_refused(Runner, action="checksum", role="target")
    Runner.model = torch.nn.Linear(2, 2)
    check_weights_refused(Runner, action="checksum", role="target")


def test_what_a_refused_update_leaves_behind_changes_nothing(generator, bits):
    """SGLang notes a version and ends the update by processing weights again."""
    model = Model(generator)
    x = torch.randn(3, SIZE, generator=generator)
    before = model.logits(x)
    linear._note_update(None)
    for layer in (model.layer, model.lm_head):
        layer.quant_method.process_weights_after_loading(layer)
    assert torch.equal(model.logits(x), before)
    with pytest.raises(RuntimeError):
        model.layer.weight.data.copy_(torch.zeros(SIZE, SIZE))


def test_a_parameter_put_in_place_is_packed_and_let_go_of_in_turn(generator, bits):
    model = Model(generator)
    fresh = parameter(generator, SIZE)
    model.layer.weight = fresh
    x = torch.randn(3, SIZE, generator=generator)
    out = model.layer.quant_method.apply(model.layer, x)
    assert torch.equal(out, in_bits(fresh, bits).linear(x))
    assert is_released(model.layer.weight)


def test_a_model_is_known_by_its_weights_when_they_are_gone(generator, bits, monkeypatch):
    monkeypatch.setenv(KEEP_VARIABLE, "1")
    kept = weights_hash(Model(generator.manual_seed(1)))
    monkeypatch.setenv(KEEP_VARIABLE, "0")
    assert weights_hash(Model(generator.manual_seed(1))) == kept
    assert weights_hash(Model(generator.manual_seed(2))) != kept


def test_an_early_exit_reads_a_heads_rows_where_its_weight_is_gone(generator, bits):
    model = Model(generator)
    state, asked = torch.randn(32, SIZE, generator=generator), torch.arange(8)
    head = model.lm_head
    logits = head.quant_method.apply(head, state)[:, asked]
    assert is_released(head.weight)
    parts = TargetParts(
        layers=torch.nn.ModuleList(), norm=torch.nn.Identity(), head=head, vocab_size=WORDS
    )
    narrow = narrowed(Proxy(parts, 4), asked).logits(state)
    # The same weights; of the states the packed product has 8 bits.
    assert float((narrow - logits).std()) < 0.01 * float(logits.std())
