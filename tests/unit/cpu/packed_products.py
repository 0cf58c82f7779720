"""What products with packed weights have in common."""

import torch


def check_bias_shapes_and_types(packed, generator):
    """Of a weight [50, 64]."""
    bias = torch.randn(50, generator=generator)
    x = torch.randn(2, 3, 64, generator=generator)
    out = packed.linear(x, bias)
    assert torch.equal(out, packed.linear(x) + bias)
    assert out.shape == (2, 3, 50) and out.is_contiguous()
    assert packed.linear(x.bfloat16()).dtype == torch.bfloat16
    assert packed.linear(x[:0]).shape == (0, 3, 50)
    strided = torch.randn(4, 128, generator=generator)[:, :64]
    assert torch.equal(packed.linear(strided), packed.linear(strided.contiguous()))
