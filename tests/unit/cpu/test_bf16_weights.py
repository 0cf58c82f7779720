"""bfloat16 weights: rows stay float32, and a row's bits do not depend on other rows."""

import pytest
import torch

from sglang_ext.cpu.bf16_weights import Bf16Weight

SHAPES = [(96, 64), (50, 37), (1, 1), (16, 1536)]


@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_those_of_the_weights_rounded_to_bfloat16(generator, shape):
    weight = torch.randn(shape, generator=generator)
    packed = Bf16Weight(weight)
    for rows in (1, 5, 40):
        x = torch.randn(rows, shape[1], generator=generator)
        expected = (x.double() @ weight.bfloat16().double().T).float()
        torch.testing.assert_close(packed.linear(x), expected, rtol=1e-5, atol=1e-4)


def test_weights_of_a_16_bit_checkpoint_lose_nothing(generator):
    weight = torch.randn(32, 48, generator=generator).bfloat16().float()
    one_by_one = Bf16Weight(weight).linear(torch.eye(48)).T
    assert torch.equal(one_by_one, weight)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_depends_on_no_other_and_on_no_thread(generator, threads):
    weight = Bf16Weight(torch.randn(96, 575, generator=generator))
    x = torch.randn(70, 575, generator=generator)
    full = weight.linear(x)
    weight._threads = threads
    for rows in (1, 2, 3, 4, 5, 7, 8, 13, 16, 33, 64):
        assert torch.equal(weight.linear(x[:rows]), full[:rows]), rows
    assert torch.equal(weight.linear(x[42:43]), full[42:43])


def test_a_row_that_is_not_finite_spoils_itself_alone(generator):
    weight = Bf16Weight(torch.randn(32, 64, generator=generator))
    x = torch.randn(6, 64, generator=generator)
    expected = weight.linear(x)
    x[2, 40] = float("nan")
    out = weight.linear(x)
    others = [0, 1, 3, 4, 5]
    assert out[2].isnan().all() and torch.equal(out[others], expected[others])


def test_bias_shapes_types_and_bytes(generator):
    packed = Bf16Weight(torch.randn(50, 64, generator=generator))
    bias = torch.randn(50, generator=generator)
    x = torch.randn(2, 3, 64, generator=generator)
    out = packed.linear(x, bias)
    assert torch.equal(out, packed.linear(x) + bias)
    assert out.shape == (2, 3, 50) and out.is_contiguous()
    assert packed.linear(x.bfloat16()).dtype == torch.bfloat16
    assert packed.linear(x[:0]).shape == (0, 3, 50)
    strided = torch.randn(4, 128, generator=generator)[:, :64]
    assert torch.equal(packed.linear(strided), packed.linear(strided.contiguous()))
    assert packed.nbytes == 64 * 64 * 2  # outputs by sixteens
