"""Weights in 32 and 16 bits: rows stay float32, and a row's bits do not depend on other rows."""

import pytest
import torch

from sglang_ext.cpu.float_weights import FloatWeight
from tests.unit.cpu.packed_products import check_bias_shapes_and_types

SHAPES = [(96, 64), (50, 37), (1, 1), (16, 1536), (48, 30), (33, 8)]


@pytest.fixture(params=[32, 16])
def bits(request) -> int:
    return request.param


@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_those_of_the_weights(generator, shape, bits):
    weight = torch.randn(shape, generator=generator)
    packed = FloatWeight(weight, bits)
    rounded = weight.bfloat16() if bits == 16 else weight
    for rows in (*range(1, 14), 24, 40):
        x = torch.randn(rows, shape[1], generator=generator)
        expected = (x.double() @ rounded.double().T).float()
        torch.testing.assert_close(packed.linear(x), expected, rtol=1e-5, atol=1e-4)


def test_weights_of_a_16_bit_checkpoint_lose_nothing(generator):
    weight = torch.randn(32, 48, generator=generator).bfloat16().float()
    one_by_one = FloatWeight(weight, 16).linear(torch.eye(48)).T
    assert torch.equal(one_by_one, weight)


def test_products_of_both_are_the_same_to_the_bit_where_sixteen_bits_lose_nothing(generator):
    weight = torch.randn(96, 575, generator=generator).bfloat16().float()
    x = torch.randn(13, 575, generator=generator)
    assert torch.equal(FloatWeight(weight, 16).linear(x), FloatWeight(weight, 32).linear(x))


@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_depends_on_no_other_and_on_no_thread(generator, threads, bits):
    weight = FloatWeight(torch.randn(96, 575, generator=generator), bits)
    x = torch.randn(70, 575, generator=generator)
    full = weight.linear(x)
    weight._threads = threads
    for rows in (1, 2, 3, 4, 5, 7, 8, 11, 12, 13, 16, 24, 33, 64):
        assert torch.equal(weight.linear(x[:rows]), full[:rows]), rows
    assert torch.equal(weight.linear(x[42:43]), full[42:43])


def test_a_row_that_is_not_finite_spoils_itself_alone(generator, bits):
    weight = FloatWeight(torch.randn(32, 64, generator=generator), bits)
    x = torch.randn(6, 64, generator=generator)
    expected = weight.linear(x)
    x[2, 40] = float("nan")
    out = weight.linear(x)
    others = [0, 1, 3, 4, 5]
    assert out[2].isnan().all() and torch.equal(out[others], expected[others])


def test_bias_shapes_types_and_bytes(generator, bits):
    packed = FloatWeight(torch.randn(50, 64, generator=generator), bits)
    check_bias_shapes_and_types(packed, generator)
    assert packed.nbytes == 64 * 64 * bits // 8  # outputs by sixteens
