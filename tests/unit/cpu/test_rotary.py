"""The rotary operator against SGLang's own, and what it leaves to it."""

import pytest
import torch
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.layers.rotary_embedding.utils import apply_rotary_emb

from sglang_ext.cpu.rotary import rotary_embedding


def embedding(generator, head_size, rotary, halves):
    layer = RotaryEmbedding.__new__(RotaryEmbedding)
    torch.nn.Module.__init__(layer)
    layer.cos_sin_cache = torch.randn(50, rotary, generator=generator)
    layer.head_size, layer.rotary_dim, layer.is_neox_style = head_size, rotary, halves
    layer._apply_rotary_emb_wrapped = apply_rotary_emb
    return layer


def unexpected(*args):
    raise AssertionError("handed over to SGLang")


@pytest.mark.parametrize("halves", [True, False])
@pytest.mark.parametrize("head_size, rotary", [(64, 64), (16, 8)])
@pytest.mark.parametrize("tokens", [1, 9])
def test_equals_sglang(generator, halves, head_size, rotary, tokens):
    layer = embedding(generator, head_size, rotary, halves)
    fused = torch.randn(tokens, 6 * head_size, generator=generator)
    q, k, _ = fused.split([3 * head_size, 2 * head_size, head_size], -1)
    before = fused.clone()
    positions = torch.randint(0, 50, (tokens,), generator=generator)
    out = rotary_embedding(unexpected, layer, positions, q, k)
    expected = RotaryEmbedding.forward_native(layer, positions, q, k)
    for a, b in zip(out, expected, strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-5)
        assert a.is_contiguous()
    assert torch.equal(fused, before)


def test_what_it_does_not_cover_goes_to_sglang(generator):
    layer = embedding(generator, 16, 16, True)
    q, positions = torch.randn(2, 32, generator=generator), torch.tensor([3, 4])
    handed = []

    def original(*args):
        handed.append(args)
        return args[2], args[3]

    rotary_embedding(original, layer, positions, q.bfloat16(), q.bfloat16())
    rotary_embedding(original, layer, positions, q, q, torch.tensor([1, 1]))
    rotary_embedding(original, layer, positions, q.view(2, 2, 16), q.view(2, 2, 16))
    assert len(handed) == 3
