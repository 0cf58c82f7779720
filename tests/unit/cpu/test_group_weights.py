"""8- and 4-bit weights: what they restore, and that a row's bits do not depend on other rows."""

import numba
import numpy as np
import pytest
import torch

from sglang_ext.cpu import group_dots, group_kernel
from sglang_ext.cpu.group_rows import row_functions
from sglang_ext.cpu.group_weights import GroupWeight, grouped
from tests.unit.cpu.packed_products import check_bias_shapes_and_types

# Largest error of a product by its length, relative, for normal weights and rows.
WITHIN = {8: 0.02, 4: 0.14}
SHAPES = [(96, 64), (50, 96), (16, 32), (7, 1536)]


def error(weight, x, bits):
    exact = x.double() @ weight.double().T
    return float((GroupWeight(weight, bits).linear(x).double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_near_those_of_the_weights(generator, shape, bits):
    weight = torch.randn(shape, generator=generator)
    for rows in (1, 5, 40):
        x = torch.randn(rows, shape[1], generator=generator)
        assert error(weight, x, bits) < WITHIN[bits], rows


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e12, 1e30])
def test_weights_of_any_size_keep_their_precision(generator, bits, size):
    """float16 alone makes zeros or infinities of such scales."""
    x = torch.randn(3, 64, generator=generator)
    assert error(torch.randn(32, 64, generator=generator) * size, x, bits) < WITHIN[bits]


@pytest.mark.parametrize("bits", [8, 4])
def test_a_group_far_smaller_than_the_largest_is_kept(generator, bits):
    weight = torch.randn(16, 64, generator=generator)
    weight[:8] *= 1e-5
    x = torch.randn(3, 64, generator=generator)
    exact = x @ weight[:8].T
    difference = GroupWeight(weight, bits).linear(x)[:, :8] - exact
    assert difference.norm() < WITHIN[bits] * exact.norm()


@pytest.mark.parametrize("highest", [15, 11, 1])
def test_four_bits_restore_what_has_sixteen_levels(generator, highest):
    """Weights that had 4 bits and float16 scales, as GGUF's, are not rounded to other levels."""
    scale = torch.rand(16, 2, 1, generator=generator).to(torch.float16).float()
    least = torch.randn(16, 2, 1, generator=generator).to(torch.float16).float()
    levels = torch.randint(0, highest + 1, (16, 2, 32), generator=generator)
    levels[..., 0], levels[..., 1] = 0, highest
    weight = (levels * scale + least).view(16, 64)
    x = torch.zeros(64, 64).fill_diagonal_(127.0)  # exact in 8 bits
    restored = GroupWeight(weight, 4).linear(x).T / 127
    torch.testing.assert_close(restored, weight, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_does_not_depend_on_its_batch(generator, bits):
    weight = GroupWeight(torch.randn(96, 576, generator=generator), bits)
    x = torch.randn(70, 576, generator=generator)
    full = weight.linear(x)
    for rows in (1, 2, 3, 4, 5, 7, 8, 11, 12, 13, 23, 24, 31, 32, 33, 36, 64):
        assert torch.equal(weight.linear(x[:rows]), full[:rows]), rows
    assert torch.equal(weight.linear(x[42:43]), full[42:43])


@pytest.mark.parametrize("bits", [8, 4])
def test_the_number_of_threads_changes_nothing(generator, bits):
    weight = GroupWeight(torch.randn(80, 64, generator=generator), bits)
    x = torch.randn(37, 64, generator=generator)
    results = []
    for weight._threads in (1, 2, 3, 7):
        results.append(weight.linear(x))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_row_that_is_not_finite_spoils_itself_alone(generator, bits, bad):
    weight = GroupWeight(torch.randn(32, 64, generator=generator), bits)
    x = torch.randn(6, 64, generator=generator)
    expected = weight.linear(x)
    x[2, 40] = bad
    out = weight.linear(x)
    assert out[2].isnan().all()
    others = [0, 1, 3, 4, 5]
    assert torch.equal(out[others], expected[others])


@pytest.mark.parametrize("bits", [8, 4])
def test_zeros_stay_zeros(generator, bits):
    weight = torch.randn(32, 64, generator=generator)
    weight[:, :32] = 0
    x = torch.zeros(2, 64)
    assert torch.equal(GroupWeight(weight, bits).linear(x), torch.zeros(2, 32))
    x[:, :32] = 1
    assert torch.equal(GroupWeight(weight, bits).linear(x), torch.zeros(2, 32))
    assert torch.equal(GroupWeight(torch.zeros(16, 32), bits).linear(x[:, :32]), torch.zeros(2, 16))


def test_bias_shapes_and_types(generator):
    weight = torch.randn(50, 64, generator=generator)
    packed = GroupWeight(weight, 8)
    check_bias_shapes_and_types(packed, generator)


def test_memory(generator):
    weight = torch.randn(64, 128, generator=generator)
    assert GroupWeight(weight, 8).nbytes * 8 == weight.numel() * 8.5
    assert GroupWeight(weight, 4).nbytes * 8 == weight.numel() * 5


@pytest.mark.parametrize("bits", [8, 4])
def test_what_does_not_fit_is_left_out_with_a_warning(generator, caplog, bits):
    assert grouped(torch.randn(16, 40, generator=generator), bits) is None
    infinite = torch.randn(16, 32, generator=generator)
    infinite[3, 3] = float("inf")
    assert grouped(infinite, bits) is None
    reasons = [record.getMessage() for record in caplog.records]
    assert "40 inputs: expected a multiple of 32" in reasons[0]
    assert "infinite or NaN" in reasons[1]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    "features", [{"avx2"}, {"avx2", "f16c"}, set()], ids=["avx2", "avx2 and f16c", "none"]
)
def test_processors_without_vnni_give_the_same_bits(generator, monkeypatch, features, bits):
    if not features <= group_dots.features_of(numba.core.registry.cpu_target.target_context):
        pytest.skip("this processor has no " + ", ".join(features))
    weight = GroupWeight(torch.randn(32, 96, generator=generator), bits)
    x = torch.randn(9, 96, generator=generator)
    expected = weight.linear(x)
    monkeypatch.setattr(group_dots, "features_of", lambda context: features)
    empty_rows, _, quantize_rows, multiply = row_functions()
    monkeypatch.setattr(group_kernel, "_empty_rows", empty_rows)
    monkeypatch.setattr(group_kernel, "_quantize_rows", quantize_rows)
    monkeypatch.setattr(group_kernel, "_multiply", multiply)
    out = torch.empty_like(expected)
    numba.njit(group_kernel.product.py_func)(
        bits,
        x.numpy(),
        weight.levels,
        weight.scales,
        out.numpy(),
        np.float32(weight.factor),
        1,
    )
    assert torch.equal(out, expected)
