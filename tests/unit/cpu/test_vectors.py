"""The vector loops of the CPU kernels: their sums, and the bits they have in common."""

import numba
import numpy as np
import pytest
import torch

from sglang_ext.cpu.vectors import (
    add_slots,
    dot,
    dots,
    exponentials,
    gated,
    largest,
    prefetch,
    store_row,
    total,
)

LENGTHS = [1, 7, 16, 20, 64, 80, 128]


@numba.njit
def product(a, b):
    return dot(a, a.ctypes.data, b.ctypes.data, a.size)


@numba.njit
def products(rows, columns, scale, to):
    """Two rows by two columns at once, and the first row by itself."""
    length = rows.shape[1]
    prefetch(rows, rows[0].ctypes.data, length)
    pair = (rows[0].ctypes.data, rows[1].ctypes.data)
    others = (columns[0].ctypes.data, columns[1].ctypes.data)
    stride = np.uintp(to.strides[0])
    dots(rows, pair, others, length, np.uintp(to.ctypes.data), stride, scale)
    single, last = (rows[2].ctypes.data,), (columns[2].ctypes.data,)
    dots(rows, single, last, length, np.uintp(to[2].ctypes.data), stride, scale)


@numba.njit
def add_two(to, weights, rows):
    """Two rows to each of two places, the second row of the array first."""
    slots = np.array([1, 0])
    add_slots(
        rows,
        (to[0].ctypes.data, to[1].ctypes.data),
        to.shape[1],
        np.uintp(weights.ctypes.data),
        np.uintp(weights.strides[0]),
        np.uintp(rows.ctypes.data),
        np.uintp(rows.strides[0]),
        np.uintp(slots.ctypes.data),
        slots.size,
    )


@numba.njit
def raise_e(x, count):
    exponentials(x.ctypes.data, count, largest(x.ctypes.data, count))


@numba.njit
def gate(gates, ups, to):
    gated(gates.ctypes.data, ups.ctypes.data, to.ctypes.data, gates.size)


@numba.njit
def store(values, to):
    store_row(to, np.uintp(to.ctypes.data), np.uintp(values.ctypes.data), values.size)


@numba.njit
def reduced(x):
    return largest(x.ctypes.data, x.size), total(x.ctypes.data, x.size)


@pytest.fixture
def random():
    return np.random.default_rng(7)


def halves(array):
    """An array in bfloat16: its bits, and what they stand for."""
    rounded = torch.from_numpy(array).bfloat16()
    return rounded.view(torch.uint16).numpy(), rounded.float().numpy()


@pytest.mark.parametrize("length", LENGTHS)
def test_several_products_are_the_single_ones_to_the_bit(random, length):
    rows = random.standard_normal((3, length), np.float32)
    columns = random.standard_normal((3, length), np.float32)
    together = np.zeros((3, 2), np.float32)
    products(rows, columns, np.float32(0.5), together)
    alone = [[0.5 * float(product(row, column)) for row in rows[:2]] for column in columns[:2]]
    alone.append([0.5 * float(product(rows[2], columns[2])), 0.0])
    assert together.tolist() == alone
    exact = 0.5 * columns[:2].astype(np.float64) @ rows[:2].astype(np.float64).T
    bound = 1e-6 * np.abs(columns[:2]).astype(np.float64) @ np.abs(rows[:2]).T
    assert (np.abs(together[:2] - exact) <= bound + 1e-12).all()


@pytest.mark.parametrize("length", LENGTHS)
def test_floats_are_reduced(random, length):
    x = random.standard_normal(length, np.float32)
    top, added = reduced(x)
    assert top == x.max()
    assert added == product(x, np.ones(length, np.float32))


@pytest.mark.parametrize("length", LENGTHS)
def test_a_number_s_exponential_depends_on_no_other(random, length):
    x = np.zeros(length + 16, np.float32)
    x[:length] = 8 * random.standard_normal(length, np.float32)
    x[0], x[length - 1] = 40.0, -300.0  # the largest, and what is nothing beside it
    together, top = x.copy(), x[:length].max()
    raise_e(together, length)
    below = np.maximum(x[:length].astype(np.float64) - top, -87)
    bound = (2e-7 - 1e-7 * below) * np.exp(below) + 1e-37
    assert (np.abs(together[:length] - np.exp(below)) <= bound).all()
    for i in range(length):
        alone = np.zeros(32, np.float32)
        alone[:2] = top, x[i]
        raise_e(alone, 2)
        assert alone[1] == together[i]


def test_gates_are_silu_times_up(random):
    gates, ups = 20 * random.standard_normal((2, 96), np.float32)
    gates[:4] = 0.0, -0.0, 200.0, -200.0  # whose exponentials are 1, and none of float32
    made = np.empty(96, np.float32)
    gate(gates, ups, made)
    exact = gates.astype(np.float64)
    expected = exact * ups / (1 + np.exp(-exact))
    assert np.allclose(made, expected, rtol=1e-5, atol=1e-30)


def test_a_gate_that_is_no_number_stays_none(random):
    gates, ups = random.standard_normal((2, 32), np.float32)
    gates[5] = np.nan
    made = np.empty(32, np.float32)
    gate(gates, ups, made)
    assert np.flatnonzero(np.isnan(made)).tolist() == [5]


def test_products_are_added_lane_by_lane_then_in_halves(random):
    # Powers of two that only this order adds without loss.
    a = np.ones(32, np.float32)
    b = np.zeros(32, np.float32)
    b[0], b[8], b[1] = 2.0**24, -(2.0**24), 1.0
    assert product(a, b) == 1.0
    b[8], b[1], b[16] = 0.0, 1.0, -(2.0**24)
    assert product(a, b) == 1.0


@pytest.mark.parametrize("length", LENGTHS)
def test_rows_are_added_in_their_order(random, length):
    to = random.standard_normal((2, length), np.float32)
    rows = random.standard_normal((2, length), np.float32)
    # Exact products: the weights are powers of two.
    weights = np.array([[0.5, -2.0], [4.0, 0.25]], np.float32)
    expected = to + weights[:, :1] * rows[1]
    expected = expected + weights[:, 1:] * rows[0]
    add_two(to, weights, rows)
    assert (to == expected).all()


@pytest.mark.parametrize("length", LENGTHS)
def test_bfloat16_is_read_as_the_floats_that_it_stands_for(random, length):
    bits, rows = halves(random.standard_normal((3, length), np.float32))
    columns = random.standard_normal((3, length), np.float32)
    wide, narrow = np.zeros((3, 2), np.float32), np.zeros((3, 2), np.float32)
    products(rows, columns, np.float32(0.5), wide)
    products(bits, columns, np.float32(0.5), narrow)
    assert narrow.tobytes() == wide.tobytes()
    assert product(bits[0], columns[0]) == product(rows[0], columns[0])
    weights = random.standard_normal((2, 2), np.float32)
    wide, narrow = columns[:2].copy(), columns[:2].copy()
    add_two(wide, weights, rows)
    add_two(narrow, weights, bits)
    assert narrow.tobytes() == wide.tobytes()


@pytest.mark.parametrize("length", LENGTHS)
def test_floats_are_stored_as_torch_rounds_them(random, length):
    values = random.standard_normal(length, np.float32)
    values[0] = 1.00390625  # half-way between two: to the even one
    kept = np.zeros(length, np.float32)
    store(values, kept)
    assert kept.tobytes() == values.tobytes()
    rounded = np.zeros(length + 1, np.uint16)
    store(values, rounded[:length])
    assert rounded[:length].tobytes() == halves(values)[0].tobytes() and rounded[length] == 0


def test_what_is_no_number_stays_none():
    values = np.array([np.nan, np.inf, -np.inf, 3.4e38], np.float32)
    values = np.concatenate([values, np.uint32([0x7FFFFFFF]).view(np.float32), np.zeros(20, "f4")])
    rounded = np.zeros(25, np.uint16)
    store(values, rounded)
    floats = torch.from_numpy(rounded).view(torch.bfloat16).float().numpy()
    assert np.isnan(floats[[0, 4]]).all()
    assert (floats[1:4] == [np.inf, -np.inf, np.inf]).all()
