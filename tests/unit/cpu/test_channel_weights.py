"""8-bit weights by channels: what they restore, exact sums, and rows that depend on no others."""

import pytest
import torch

from sglang_ext.cpu import channel_weights
from sglang_ext.cpu.channel_weights import ChannelWeight, by_channels
from sglang_ext.cpu.group_weights import GroupWeight
from sglang_ext.cpu.packed_weights import BITS, for_prefill
from tests.unit.cpu.packed_products import check_bias_shapes_and_types

pytestmark = pytest.mark.skipif(
    not channel_weights.has_exact_products(), reason="this CPU's 8-bit products are not exact"
)


def error(weight, x):
    exact = x.double() @ weight.double().T
    return float((ChannelWeight(weight).linear(x).double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("shape", [(96, 64), (50, 100), (16, 32), (7, 1536)])
@pytest.mark.parametrize("size", [1e-20, 1.0, 1e20])
def test_products_are_near_those_of_the_weights(generator, shape, size):
    weight = torch.randn(shape, generator=generator) * size
    for rows in (1, 5, 40):
        assert error(weight, torch.randn(rows, shape[1], generator=generator)) < 0.02, rows


@pytest.mark.parametrize("inputs", [32, 512, 5120])
@pytest.mark.parametrize("signs", [(1, 1), (1, -1), (-1, -1)])
def test_sums_of_extreme_levels_are_exact(inputs, signs):
    """Products that saturate at 16 bits, as those of CPUs without VNNI, would show here."""
    rows = torch.full((33, inputs), 127.0 * signs[0])
    weight = torch.full((48, inputs), 127.0 * signs[1])
    out = ChannelWeight(weight).linear(rows)
    assert torch.equal(out, torch.full_like(out, signs[0] * signs[1] * 127.0**2 * inputs))


def test_sums_are_those_of_64_bits(generator):
    levels = torch.randint(-127, 128, (96, 2048), generator=generator)
    rows = torch.randint(-127, 128, (70, 2048), generator=generator)
    levels[:, 0], rows[:, 0] = 127, -127  # so that levels are kept
    out = ChannelWeight(levels.float()).linear(rows.float())
    assert torch.equal(out, (rows @ levels.T).float())


def test_a_row_does_not_depend_on_its_batch(generator):
    weight = ChannelWeight(torch.randn(96, 576, generator=generator))
    x = torch.randn(200, 576, generator=generator)
    bias = torch.randn(96, generator=generator)
    full = weight.linear(x, bias)
    for rows in (1, 2, 3, 7, 16, 31, 32, 33, 64, 65, 130):
        assert torch.equal(weight.linear(x[:rows], bias), full[:rows]), rows
    assert torch.equal(weight.linear(x[142:143], bias), full[142:143])


def test_the_number_of_threads_changes_nothing(generator):
    weight = ChannelWeight(torch.randn(80, 64, generator=generator))
    x = torch.randn(37, 64, generator=generator)
    results = []
    for weight._threads in (1, 2, 3, 7):
        results.append(weight.linear(x))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan"), -float("nan")])
def test_a_row_that_is_not_finite_spoils_itself_alone(generator, bad):
    weight = ChannelWeight(torch.randn(32, 64, generator=generator))
    x = torch.randn(6, 64, generator=generator)
    expected = weight.linear(x)
    x[2, 40] = bad
    out = weight.linear(x)
    assert out[2].isnan().all()
    others = [0, 1, 3, 4, 5]
    assert torch.equal(out[others], expected[others])


@pytest.mark.parametrize("small", [0.0, 1e-42, 1e-33])
def test_zeros_and_rows_next_to_zero_give_numbers(generator, small):
    weight = torch.randn(32, 64, generator=generator)
    weight[3] = 0
    out = ChannelWeight(weight).linear(torch.full((2, 64), small))
    assert torch.equal(out, torch.zeros(2, 32))


def test_bias_shapes_and_types(generator):
    packed = ChannelWeight(torch.randn(50, 64, generator=generator))
    check_bias_shapes_and_types(packed, generator)
    assert packed.nbytes == 50 * 64 + 4 * 50


def test_what_does_not_fit_is_packed_otherwise(generator, monkeypatch, caplog):
    infinite = torch.full((16, 32), float("inf"))
    assert by_channels(infinite) is None and "infinite or NaN" in caplog.text
    weight = torch.randn(16, 32, generator=generator)
    assert type(for_prefill(weight, 4)) is ChannelWeight
    assert type(for_prefill(weight, BITS["bf16"])) is not ChannelWeight
    monkeypatch.setattr("sglang_ext.cpu.channel_weights.has_exact_products", lambda: False)
    assert type(for_prefill(weight, 8)) is GroupWeight
