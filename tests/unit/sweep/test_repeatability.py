"""How far two sweeps agree, against what each says of itself."""

import math
import random
from dataclasses import replace

import pytest

from sglang_ext.sweep.repeatability import agreement_limit
from sglang_ext.sweep.results import Results
from sglang_ext.sweep.summary import summarize
from sglang_ext.sweep.sweep_comparison import compare
from tests.unit.sweep.finished_sweep import PLAN, write_sweep


def summary_of(folder, plan=PLAN, change=None):
    return summarize(Results.read(write_sweep(folder, plan, change=change)))


def test_the_limit_is_that_of_iso_5725_for_all_points_together():
    # Two points, two repeats each, both 10% apart: s = ln(1.1) / sqrt(2), two degrees of freedom.
    s = math.log(1.1) / math.sqrt(2)
    t = 6.2053  # of a probability of 0.05 / 2 / 2 at each end
    limit = agreement_limit([[1.0, 1.1], [2.2, 2.0]])
    assert limit == pytest.approx(100 * math.expm1(t * s * math.sqrt(2 / 2)), rel=1e-4)


def test_without_repeats_there_is_no_limit():
    assert agreement_limit([[1.0], [2.0]]) is None
    assert agreement_limit([]) is None


def test_a_point_that_was_run_once_is_no_surer_for_the_others_repeats():
    repeated = [[1.0, 1.1, 1.0], [2.0, 2.1, 2.0]]
    with_one_more = agreement_limit([*repeated, [3.0]])
    assert with_one_more > 1.5 * agreement_limit(repeated)


@pytest.mark.parametrize("repeats", [2, 3, 6])
def test_sweeps_of_one_machine_agree_19_times_of_20(repeats):
    chance = random.Random(repeats)

    def sweep():
        return [sorted(math.exp(chance.gauss(0, 0.05)) for _ in range(repeats)) for _ in range(30)]

    def median(values):
        return (values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2

    def agree():
        one, two = sweep(), sweep()
        limit = max(agreement_limit(one), agreement_limit(two)) / 100
        pairs = [(median(a), median(b)) for a, b in zip(one, two, strict=True)]
        return all(abs(a - b) / ((a + b) / 2) <= limit for a, b in pairs)

    assert sum(agree() for _ in range(200)) / 200 >= 0.9


def test_two_sweeps_are_compared_point_by_point(tmp_path):
    def uneven(result, requests):
        own = 1.0 if result.method == "ar" else 1.0 + 0.05 * result.repeat
        return replace(result, duration_s=own * result.duration_s), requests

    def on_a_slower_machine(result, requests):
        result, requests = uneven(result, requests)
        own = 1.5 if result.method != "ar" and result.load == 4 else 1.01
        return replace(result, duration_s=2 * own * result.duration_s), requests

    first = summary_of(tmp_path / "a", change=uneven)
    second = summary_of(tmp_path / "b", change=on_a_slower_machine)
    found = compare(first, second)
    assert found["points"] == 12  # plain decoding's own four have no speedup
    assert found["within_spread_percent"] == 50.0
    assert found["worst_difference_percent"] == pytest.approx(39, abs=0.5)
    stated = agreement_limit([[1.0, 1 / 1.05, 1 / 1.1]] * 12)
    assert found["stated_spread_percent"] == pytest.approx(stated)
    assert found["throughput_difference_percent"] > 60
    assert compare(first, first)["within_spread_percent"] == 100.0


def test_sweeps_without_repeats_state_nothing(tmp_path):
    once = replace(PLAN, repeats=1)
    found = compare(summary_of(tmp_path / "a", once), summary_of(tmp_path / "b", once))
    assert found["points"] == 12 and "within_spread_percent" not in found
