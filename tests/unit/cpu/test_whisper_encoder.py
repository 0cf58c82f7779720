"""Whisper's encoder in fewer bits: one request's states, whoever is encoded beside it."""

from types import SimpleNamespace

import pytest
import torch

from sglang_ext.cpu import linear, whisper_encoder
from sglang_ext.cpu.packed_weights import ENCODER_VARIABLE, for_prefill
from sglang_ext.whisper import audio_context

SIZE, HEADS = 64, 2


class Layer(torch.nn.Module):
    """One of SGLang's linear layers, packed."""

    def __init__(self, outputs):
        super().__init__()
        self.packed = for_prefill(torch.randn(outputs, SIZE), 8)

    def forward(self, x):
        return self.packed.linear(x), None


class Attention(torch.nn.Module):
    """The parts of SGLang's WhisperAttention that are read."""

    def __init__(self):
        super().__init__()
        self.is_encoder, self.num_heads, self.head_dim = True, HEADS, SIZE // HEADS
        self.scaling = self.head_dim**-0.5
        self.qkv_proj, self.out_proj = Layer(3 * SIZE), Layer(SIZE)


class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = torch.nn.Conv1d(8, SIZE, 3, stride=2, padding=1)
        self.attention = Attention()

    def plain(self, features, places, forward_batch):
        x = self.conv1(features).mT
        return x + whisper_encoder._attend(None, self.attention, x, forward_batch)

    def forward(self, features, places, forward_batch):
        return whisper_encoder._one_by_one(Encoder.plain, self, features, places, forward_batch)


@pytest.mark.parametrize("lengths", [(600, 600, 600), (600, 200, 600), (300, 302, 2)])
@torch.no_grad()
def test_states_do_not_depend_on_requests_beside(lengths):
    torch.manual_seed(0)
    encoder = Encoder()
    features = [torch.rand(8, length) for length in lengths]
    together = audio_context.encoded(encoder, features, None)
    alone = [audio_context.encoded(encoder, [part], None) for part in features]
    assert torch.equal(together, torch.cat(alone))


@torch.no_grad()
def test_attention_is_near_that_of_float32():
    torch.manual_seed(0)
    attention, x = Attention(), torch.randn(2, 50, SIZE) / 8
    qkv, _ = attention.qkv_proj(x)
    q, k, v = (part.view(2, 50, HEADS, -1).transpose(1, 2) for part in qkv.chunk(3, -1))
    weights = torch.softmax(q @ k.mT * attention.scaling, -1)
    expected, _ = attention.out_proj((weights @ v).transpose(1, 2).reshape(2, 50, SIZE))
    out = whisper_encoder._attend(None, attention, x, None)
    assert float((out - expected).norm() / expected.norm()) < 0.03


def test_the_decoders_attention_is_left_to_sglang():
    def original(*given, **named):
        return given, named

    attention = SimpleNamespace(is_encoder=False)
    given = whisper_encoder._attend(original, attention, "x", "batch", "states", more=1)
    assert given == ((attention, "x", "batch", "states"), {"more": 1})


@pytest.mark.parametrize(("kind", "hooks"), [("fp32", 0), ("bf16", 0), ("int8", 2), ("int4", 2)])
def test_it_is_for_eight_and_four_bits(monkeypatch, kind, hooks):
    registered = []
    monkeypatch.setenv("SGLANG_EXT_CPU_WEIGHTS", kind)
    monkeypatch.setattr(whisper_encoder, "hook", lambda *given: registered.append(given))
    whisper_encoder.register()
    assert len(registered) == hooks
    monkeypatch.setenv(ENCODER_VARIABLE, "0")
    whisper_encoder.register()
    assert len(registered) == hooks


def test_only_marked_layers_are_packed_by_channels(monkeypatch):
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    from sglang_ext.whisper.encoder_decoder import _before_weights_load

    monkeypatch.setenv("SGLANG_EXT_CPU_WEIGHTS", "int8")
    model = torch.nn.ModuleDict(
        {part: torch.nn.ModuleDict({"fc1": torch.nn.Linear(64, 32)}) for part in ("encoder", "x")}
    )
    _before_weights_load(model)
    inner, other = model["encoder"]["fc1"], model["x"]["fc1"]
    packed = []
    for layer in (inner, other):
        weight = layer.weight.detach().clone()
        linear._pack_linear(None, UnquantizedLinearMethod(), layer)
        packed.append((type(layer.quant_method.product_of(layer)), weight))
    assert packed[0][0] is type(for_prefill(packed[0][1], 8))
    assert packed[1][0].__name__ == "GroupWeight"
