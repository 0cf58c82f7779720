"""Whisper's encoder in fewer bits: one request's states, whoever is encoded beside it."""

import pytest
import torch
import torch.nn.functional as F

from sglang_ext.cpu import linear, whisper_encoder
from sglang_ext.cpu.packed_weights import ENCODER_VARIABLE, for_encoder
from sglang_ext.whisper import audio_context
from speech.bf16_encoder import Bf16Stem
from speech.bf16_products import _rounded_up, has_fast_bf16

SIZE, HEADS = 64, 2


class Linear(torch.nn.Linear):
    """One of SGLang's linear layers, packed."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self._runs_at_prefill_only = "encoder.layer"
        self.quant_method = linear.PackedLinearMethod(self)

    def forward(self, x):
        return self.quant_method.apply(self, x, self.bias), None


class Layer(torch.nn.Module):
    """The parts of SGLang's WhisperEncoderLayer that are read."""

    def __init__(self):
        super().__init__()
        self.self_attn = torch.nn.Module()
        self.self_attn.num_heads, self.self_attn.scaling = HEADS, (SIZE // HEADS) ** -0.5
        self.self_attn.qkv_proj, self.self_attn.out_proj = (
            Linear(SIZE, 3 * SIZE),
            Linear(SIZE, SIZE),
        )
        self.self_attn_layer_norm = torch.nn.LayerNorm(SIZE)
        self.final_layer_norm = torch.nn.LayerNorm(SIZE)
        self.fc1, self.fc2 = Linear(SIZE, 4 * SIZE), Linear(4 * SIZE, SIZE)
        self.activation_fn = torch.nn.GELU()

    def plain(self, x, forward_batch):
        """What SGLang computes, with the weights as they were loaded."""
        own = self.self_attn
        parts = F.linear(self.self_attn_layer_norm(x), own.qkv_proj.weight, own.qkv_proj.bias)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts.chunk(3, -1))
        seen = F.scaled_dot_product_attention(q, k, v, scale=own.scaling).transpose(1, 2).flatten(2)
        x = x + F.linear(seen, own.out_proj.weight, own.out_proj.bias)
        inner = F.linear(self.final_layer_norm(x), self.fc1.weight, self.fc1.bias)
        return x + F.linear(F.gelu(inner), self.fc2.weight, self.fc2.bias)

    def forward(self, x, forward_batch):
        return whisper_encoder._layer(Layer.plain, self, x, forward_batch)


class Encoder(torch.nn.Module):
    """SGLang's WhisperEncoder, with two layers."""

    def __init__(self):
        super().__init__()
        self.conv1 = torch.nn.Conv1d(8, SIZE, 3, padding=1)
        self.conv2 = torch.nn.Conv1d(SIZE, SIZE, 3, stride=2, padding=1)
        self.embed_positions = torch.nn.Embedding(300, SIZE)
        self.layers = torch.nn.ModuleList([Layer(), Layer()])
        self.layer_norm = torch.nn.LayerNorm(SIZE)

    def plain(self, features, places, forward_batch):
        x = F.gelu(self.conv2(F.gelu(self.conv1(features)))).mT + self.embed_positions(places)
        for layer in self.layers:
            x = layer(x, forward_batch)
        return self.layer_norm(x)

    def forward(self, features, places, forward_batch):
        return whisper_encoder._one_by_one(Encoder.plain, self, features, places, forward_batch)


needs_fast_bf16 = pytest.mark.skipif(
    not has_fast_bf16(), reason="without AMX or AVX-512's bf16 nothing is computed in bfloat16"
)


@pytest.fixture
def int8(monkeypatch):
    monkeypatch.setenv("SGLANG_EXT_CPU_WEIGHTS", "int8")
    monkeypatch.setenv("SGLANG_EXT_CPU_KEEP_WEIGHTS", "1")


@pytest.mark.usefixtures("int8")
@pytest.mark.parametrize("lengths", [(600, 600, 600), (600, 200, 600), (300, 302, 2)])
@torch.no_grad()
def test_states_do_not_depend_on_requests_beside(lengths):
    torch.manual_seed(0)
    encoder = Encoder()
    features = [torch.rand(8, length) for length in lengths]
    together = audio_context.encoded(encoder, features, None)
    alone = [audio_context.encoded(encoder, [part], None) for part in features]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.usefixtures("int8")
@needs_fast_bf16
@torch.no_grad()
def test_states_are_near_those_of_float32(monkeypatch):
    torch.manual_seed(0)
    encoder, features, places = Encoder(), torch.randn(2, 8, 100), torch.arange(50)[None]
    found = encoder(features, places, None)
    monkeypatch.setattr(Layer, "forward", Layer.plain)
    plain = encoder.plain(features, places, None)
    assert 0 < float((found - plain).norm() / plain.norm()) < 0.01


@torch.no_grad()
def test_layers_that_are_packed_otherwise_are_left_to_sglang(monkeypatch):
    layer, x = Layer(), torch.randn(1, 10, SIZE)
    monkeypatch.setattr(linear.PackedLinearMethod, "product_of", lambda *given: None)
    assert torch.equal(layer(x, None), layer.plain(x, None))


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
    assert packed[0][0] is type(for_encoder(packed[0][1], 8))
    assert packed[1][0].__name__ == "GroupWeight"


def test_products_run_with_few_counts_of_rows():
    counts = {_rounded_up(rows) for rows in range(500, 1501)}
    assert len(counts) < 40 and 1500 in counts
    assert all(rows <= _rounded_up(rows) <= rows * 17 / 16 for rows in range(1, 3001))


@needs_fast_bf16
def test_the_stem_is_near_that_of_float32():
    torch.manual_seed(0)
    first, second = torch.nn.Conv1d(8, SIZE, 3, padding=1), torch.nn.Conv1d(SIZE, SIZE, 3, 2, 1)
    features = torch.randn(2, 8, 100)
    with torch.no_grad():
        plain = F.gelu(second(F.gelu(first(features)))).mT
        found = Bf16Stem([(conv.weight, conv.bias) for conv in (first, second)])(features)
    assert found.shape == plain.shape and found.dtype == torch.float32
    assert 0 < float((found - plain).norm() / plain.norm()) < 0.02
