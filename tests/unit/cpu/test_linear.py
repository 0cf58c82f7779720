"""Packed products against F.linear, and their independence of the rows beside a row."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
)
from sglang.srt.plugins.hook_registry import HookRegistry

from sglang_ext.cpu import linear, packed_weights
from sglang_ext.cpu.float_weights import FloatWeight
from sglang_ext.cpu.packed_weights import PackedWeight, PlainWeight, as_it_is, in_bits
from sglang_ext.cpu.released_weights import KEEP_VARIABLE

SHAPES = [(960, 576), (576, 1536), (3072, 576), (37, 19), (512, 2048)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_product(generator, shape, biased):
    weight = torch.randn(*shape, generator=generator)
    bias = torch.randn(shape[0], generator=generator) if biased else None
    packed = PackedWeight(weight)
    for size in ((1,), (7,), (2, 5), (3, 1), (0,)):
        x = torch.randn(*size, shape[1], generator=generator)
        expected = F.linear(x.double(), weight.double(), bias if bias is None else bias.double())
        out = packed.linear(x, bias)
        assert out.shape == expected.shape
        torch.testing.assert_close(out.double(), expected, atol=2e-4, rtol=1e-4)
    strided = torch.randn(4, shape[1] * 2, generator=generator)[:, : shape[1]]
    expected = F.linear(strided, weight)
    torch.testing.assert_close(packed.linear(strided), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_does_not_depend_on_its_batch(generator, shape):
    packed = PackedWeight(torch.randn(*shape, generator=generator))
    x = torch.randn(70, shape[1], generator=generator)
    full = packed.linear(x)
    for rows in (1, 2, 3, 4, 6, 8, 11, 16, 31, 48, 64):
        assert torch.equal(packed.linear(x[:rows]), full[:rows]), rows
    assert torch.equal(packed.linear(x[42:43]), full[42:43])


@pytest.mark.parametrize(("wide", "kind"), [(True, FloatWeight), (False, PackedWeight)])
def test_who_multiplies_by_all_bits(generator, monkeypatch, wide, kind):
    """Our product where registers hold the sums of many rows, oneDNN's elsewhere."""
    monkeypatch.setattr(packed_weights, "HAS_WIDE_REGISTERS", wide)
    weight, x = torch.randn(37, 19, generator=generator), torch.randn(5, 19, generator=generator)
    made = as_it_is(weight)
    assert type(made) is kind
    torch.testing.assert_close(made.linear(x), F.linear(x, weight), atol=1e-5, rtol=1e-5)
    assert type(as_it_is(weight.bfloat16())) in (PackedWeight, PlainWeight)
    assert type(as_it_is(weight.double())) is PlainWeight


def layer_of(weight):
    return SimpleNamespace(weight=torch.nn.Parameter(weight, requires_grad=False))


def test_linear_layers_are_switched_over(generator):
    layer = layer_of(torch.randn(24, 16, generator=generator))
    method = UnquantizedLinearMethod()
    linear._pack_linear(None, method, layer)
    assert type(layer.quant_method) is linear.PackedLinearMethod
    x = torch.randn(3, 16, generator=generator)
    torch.testing.assert_close(layer.quant_method.apply(layer, x), F.linear(x, layer.weight))
    half = layer.quant_method.apply(layer_of(layer.weight.bfloat16()), x.bfloat16())
    assert half.dtype == torch.bfloat16

    quantized = layer_of(torch.zeros(4, 4, dtype=torch.int8))
    linear._pack_linear(None, method, quantized)
    assert not hasattr(quantized, "quant_method")


@pytest.mark.parametrize("in_place", [True, False])
def test_new_weights_are_packed_again(generator, in_place):
    layer = layer_of(torch.randn(24, 16, generator=generator))
    linear._pack_linear(None, UnquantizedLinearMethod(), layer)
    x = torch.randn(3, 16, generator=generator)
    layer.quant_method.apply(layer, x)
    fresh = torch.randn(24, 16, generator=generator)
    if in_place:
        layer.weight.data.copy_(fresh)
        linear._note_update(None)
    else:
        layer.weight = torch.nn.Parameter(fresh, requires_grad=False)
    torch.testing.assert_close(layer.quant_method.apply(layer, x), F.linear(x, fresh))


def test_tied_head_keeps_its_table_and_packs_at_the_first_product(generator):
    from sglang.srt.layers.logits_processor import should_apply_lm_head_quant_method

    layer = layer_of(torch.randn(100, 16, generator=generator))
    linear._pack_head(None, UnquantizedEmbeddingMethod(), layer)
    method = layer.quant_method
    ids = torch.tensor([5, 99])
    assert torch.equal(method.embedding(layer, ids), layer.weight[ids])
    assert method._packed is None
    # SGLang's LogitsProcessor must call apply, and not multiply by the table itself.
    assert should_apply_lm_head_quant_method(layer, method)
    x = torch.randn(2, 16, generator=generator)
    torch.testing.assert_close(method.apply(layer, x), F.linear(x, layer.weight))
    assert method._packed is not None


@pytest.mark.parametrize("pack", [linear._pack_linear, linear._pack_head])
def test_weights_of_a_type_that_cannot_be_packed_are_used_as_they_are(generator, pack):
    head = pack is linear._pack_head
    layer = layer_of(torch.randn(24, 16, generator=generator))
    pack(None, (UnquantizedEmbeddingMethod if head else UnquantizedLinearMethod)(), layer)
    x = torch.randn(3, 16, generator=generator).double()
    layer.weight = torch.nn.Parameter(layer.weight.double(), requires_grad=False)
    assert torch.equal(layer.quant_method.apply(layer, x), F.linear(x, layer.weight))


def test_environment_turns_it_off(monkeypatch):
    registered = []
    monkeypatch.setattr(HookRegistry, "register", lambda *a: registered.append(a[0]))
    monkeypatch.setenv(linear.PREPACK_VARIABLE, "0")
    linear.register()
    assert registered == []
    monkeypatch.delenv(linear.PREPACK_VARIABLE)
    linear.register()
    assert len(registered) == 5


@pytest.mark.parametrize(
    ("kind", "bits", "head_bits"), [("bf16", 16, 16), ("int8", 8, 8), ("int4", 4, 8)]
)
def test_weight_formats(generator, monkeypatch, kind, bits, head_bits):
    """Layers get the format's bits, a head 8 at least, and new weights are packed alike."""
    monkeypatch.setenv("SGLANG_EXT_CPU_WEIGHTS", kind)
    monkeypatch.setenv(KEEP_VARIABLE, "1")
    layer, head = (layer_of(torch.randn(48, 64, generator=generator)) for _ in range(2))
    linear._pack_linear(None, UnquantizedLinearMethod(), layer)
    linear._pack_head(None, UnquantizedEmbeddingMethod(), head)
    x = torch.randn(3, 64, generator=generator)
    for made, expected in ((layer, bits), (head, head_bits)):
        out = made.quant_method.apply(made, x)
        assert torch.equal(out, in_bits(made.weight, expected).linear(x))
    fresh = torch.randn(48, 64, generator=generator)
    layer.weight.data.copy_(fresh)
    linear._note_update(None)
    assert torch.equal(layer.quant_method.apply(layer, x), in_bits(fresh, bits).linear(x))
    assert torch.equal(head.quant_method.embedding(head, torch.tensor([7])), head.weight[7:8])


def test_a_layer_that_groups_do_not_fit_has_all_of_its_bits(generator, monkeypatch):
    monkeypatch.setenv("SGLANG_EXT_CPU_WEIGHTS", "int8")
    weight = torch.randn(24, 40, generator=generator)
    layer = layer_of(weight.clone())
    linear._pack_linear(None, UnquantizedLinearMethod(), layer)
    x = torch.randn(3, 40, generator=generator)
    torch.testing.assert_close(layer.quant_method.apply(layer, x), F.linear(x, weight))


def test_formats_do_not_need_prepacking(monkeypatch):
    registered = []
    monkeypatch.setattr(HookRegistry, "register", lambda *a: registered.append(a[0]))
    monkeypatch.setenv(linear.PREPACK_VARIABLE, "0")
    monkeypatch.setenv("SGLANG_EXT_CPU_WEIGHTS", "int8")
    linear.register()
    assert len(registered) == 6


@pytest.mark.parametrize(
    ("kind", "bits_read"), [("fp32", 32), ("bf16", 16), ("int8", 8.5), ("int4", 5)]
)
def test_a_layer_tells_what_its_product_reads(generator, monkeypatch, kind, bits_read):
    monkeypatch.setenv("SGLANG_EXT_CPU_WEIGHTS", kind)
    layer = torch.nn.Linear(64, 48, bias=False)
    linear._pack_linear(None, UnquantizedLinearMethod(), layer)
    assert layer.quant_method.read_bytes(layer) * 8 == 64 * 48 * bits_read
