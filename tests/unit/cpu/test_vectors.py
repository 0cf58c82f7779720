"""The vector loops of the CPU kernels: their sums, and the bits they have in common."""

import numba
import numpy as np
import pytest

from sglang_ext.cpu.vectors import LANES, add_rows, dot, dots, prefetch

LENGTHS = [1, 7, 16, 20, 64, 80, 128]


@numba.njit
def product(a, b):
    return dot(a.ctypes.data, b.ctypes.data, a.size)


@numba.njit
def products(rows, columns, to):
    """All but the last row two at once."""
    length = rows.shape[1]
    for i in range(0, len(rows) - 1, 2):
        prefetch(rows[i].ctypes.data, length)
        pair = (rows[i].ctypes.data, rows[i + 1].ctypes.data)
        dots(pair, columns.ctypes.data, length, to[i].ctypes.data)
    dots((rows[-1].ctypes.data,), columns.ctypes.data, length, to[-1].ctypes.data)


@numba.njit
def add_two(to, weights, rows):
    add_rows(
        to.ctypes.data,
        to.size,
        (weights[0], weights[1]),
        (rows[0].ctypes.data, rows[1].ctypes.data),
    )


@pytest.fixture
def random():
    return np.random.default_rng(7)


@pytest.mark.parametrize("length", LENGTHS)
def test_sixteen_products_are_the_single_ones_to_the_bit(random, length):
    rows = random.standard_normal((3, length), np.float32)
    columns = random.standard_normal((length, LANES), np.float32)
    together = np.empty((3, LANES), np.float32)
    products(rows, columns, together)
    apart = [np.ascontiguousarray(columns[:, lane]) for lane in range(LANES)]
    alone = [[float(product(row, column)) for column in apart] for row in rows]
    assert together.tolist() == alone
    exact = rows.astype(np.float64) @ columns.astype(np.float64)
    bound = 1e-6 * np.abs(rows).astype(np.float64) @ np.abs(columns)
    assert (np.abs(together - exact) <= bound + 1e-12).all()


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
    to = random.standard_normal(length, np.float32)
    rows = random.standard_normal((2, length), np.float32)
    weights = np.array([0.5, -2.0], np.float32)
    expected = to + weights[0] * rows[0]  # exact products: the weights are powers of two
    expected = expected + weights[1] * rows[1]
    add_two(to, weights, rows)
    assert (to == expected).all()
