"""How many rows a product runs with: by its bits, and by its time."""

import pytest
import torch

from sglang_ext.cpu import product_rows
from sglang_ext.cpu.packed_weights import PackedWeight
from sglang_ext.cpu.product_rows import rounded_up, rows_to_run

SHAPE = (37, 19)


@pytest.fixture
def timed(monkeypatch):
    """Sets what products of 1, 2, ... 8 rows take, and the fewest rows with equal bits."""

    def set_to(seconds, fewest=1):
        monkeypatch.setattr(product_rows, "_seconds_by_rows", lambda weight: seconds)
        monkeypatch.setattr(product_rows, "fewest_rows", lambda weight: fewest)
        rows_to_run.cache_clear()
        return rows_to_run(*SHAPE, torch.float32, 2)

    yield set_to
    rows_to_run.cache_clear()


def test_more_rows_run_where_that_is_quicker(timed):
    seconds = [2.9, 3.4, 2.7, 2.6, 2.4, 2.6, 3.3, 3.2]
    assert timed(seconds) == (0, 5, 5, 5, 4, 5, 6, 7, 8)


def test_a_gain_within_the_noise_is_none(timed):
    assert timed([1.0, 1.09, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]) == (0, 1, 2, 3, 4, 5, 6, 7, 8)


def test_what_bits_need_comes_first(timed):
    assert timed([1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0], fewest=3) == (0, 3, 3, 3, 4, 5, 6, 7, 8)
    assert timed([1.0, 1.0, 2.0, 2.0, 1.5, 2.0, 2.0, 2.0], fewest=3) == (0, 5, 5, 5, 5, 5, 6, 7, 8)


def test_rows_that_are_not_there_leave_no_trace(timed, generator):
    assert timed([8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]) == (0, 8, 8, 8, 8, 8, 8, 8, 8)
    weight = torch.randn(*SHAPE, generator=generator)
    bias = torch.randn(SHAPE[0], generator=generator)
    packed = PackedWeight(weight)
    for size in ((0,), (1,), (2, 2), (1, 5), (9,), (65,)):
        x = torch.randn(*size, SHAPE[1], generator=generator)
        out = packed.linear(x, bias)
        assert out.shape == (*size, SHAPE[0])
        torch.testing.assert_close(out, torch.nn.functional.linear(x, weight, bias))


def test_many_rows_run_as_one_of_few_numbers():
    runs = [rounded_up(n) for n in range(1, 8193)]
    assert runs[:64] == list(range(1, 65))
    assert all(n <= run <= n * 17 / 16 for n, run in enumerate(runs, 1))
    assert len(set(runs)) == 64 + 7 * 16
    assert all(rounded_up(run) == run for run in runs)


def test_times_are_of_this_machine():
    seconds = product_rows._seconds_by_rows(torch.randn(SHAPE))
    assert len(seconds) == 8 and all(0 < s < 1 for s in seconds)


def test_bits_that_depend_on_few_rows_are_found(monkeypatch):
    def product(x, packed, bias):
        return x + (1 if len(x) < 4 else 0)

    monkeypatch.setattr(product_rows, "product", product)
    assert product_rows.fewest_rows(torch.zeros(8, 8)) == 4


def test_bits_that_depend_on_every_count_are_warned_of(monkeypatch, caplog):
    monkeypatch.setattr(product_rows, "product", lambda x, packed, bias: x + len(x))
    assert product_rows.fewest_rows(torch.zeros(8, 8)) == 1
    assert "8 x 8" in caplog.text and "depend on the number of rows" in caplog.text
