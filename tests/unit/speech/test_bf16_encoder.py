"""Attention of Whisper's encoder in bfloat16, with AMX and without."""

import pytest
import torch
import torch.nn.functional as F

from speech import bf16_encoder
from speech.bf16_encoder import attended


@pytest.fixture
def heads():
    """Queries, keys and values [2, 3, 700, 32], of several blocks."""
    generator = torch.Generator().manual_seed(0)
    return (2 * torch.randn(3, 2, 3, 700, 32, generator=generator)).bfloat16().unbind()


@pytest.mark.parametrize("fused", [True, False])
def test_attention_is_float32s_but_for_rounding(heads, fused):
    found = attended(*heads, 0.2, fused=fused)
    exact = F.scaled_dot_product_attention(*(x.float() for x in heads), scale=0.2)
    assert found.dtype == torch.bfloat16
    # Rounded scores of up to 20 are off by 0.06 at most.
    assert (found.float() - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("amx", [True, False])
def test_torchs_own_is_for_processors_with_amx(heads, amx, monkeypatch):
    calls = []

    def fused(*args, **kwargs):
        calls.append(args)
        return args[0]

    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(bf16_encoder.F, "scaled_dot_product_attention", fused)
    attended(*heads, 0.2)
    assert len(calls) == amx


def test_heads_of_any_strides_are_attended_to(heads):
    frames_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in heads]
    assert torch.equal(
        attended(*frames_first, 0.2, fused=False), attended(*heads, 0.2, fused=False)
    )
