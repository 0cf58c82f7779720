"""Greedy tokens are torch's, ties and NaN too."""

import pytest
import torch

from sglang_ext.cpu.likeliest import likeliest_tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_are_torchs(dtype):
    logits = torch.randn(5, 1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[1, [3, 700]] = 9.0
    logits[2, 400] = float("nan")
    logits[3] = float("-inf")
    found = likeliest_tokens(logits)
    assert found.dtype == torch.int64
    assert torch.equal(found, torch.argmax(logits, dim=-1))


def test_rows_need_not_lie_beside_each_other():
    logits = torch.randn(1000, 5).T
    assert torch.equal(likeliest_tokens(logits), torch.argmax(logits, dim=-1))
    assert likeliest_tokens(logits[:0]).shape == (0,)
