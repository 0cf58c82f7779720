"""Which points are repeated, and that a sweep repeats them."""

from dataclasses import replace

import pytest

from sglang_ext.sweep.items import Item, Workload
from sglang_ext.sweep.methods import METHODS
from sglang_ext.sweep.results import Results
from sglang_ext.sweep.runner import Runner
from sglang_ext.sweep.settling import open_runs
from sglang_ext.sweep.summary import summarize
from tests.unit.sweep.fake_server import FakeServers
from tests.unit.sweep.finished_sweep import PLAN, batch, run_of, write_sweep

PLAN = replace(PLAN, workloads=("mt-bench",), batches=(4,), most_repeats=5)


def results(speeds, workload="mt-bench"):
    """Runs of these output tokens/s, method by method, repeat by repeat."""
    return [
        replace(run_of(repeat, batch(method, 4, workload))[0], output_tokens=n, duration_s=1.0)
        for method, numbers in speeds.items()
        for repeat, n in enumerate(numbers)
    ]


def again(speeds, plan=PLAN, workload="mt-bench"):
    """What is made once more: methods, by repeat."""
    return [(r, p.method) for r, p in open_runs(plan, results(speeds, workload))]


def test_a_clear_lead_or_a_clear_lag_is_not_repeated():
    near = {"ar": [100, 101, 99], "ngram": [70, 71, 70]}
    assert again({**near, "suffix": [110, 111, 109], "sssd-live": [120, 121, 119]}) == []
    assert again({**near, "suffix": [130, 131, 129], "sssd-live": [120, 121, 119]}) == []


def test_what_is_close_is_repeated_with_its_rival():
    clear = {"ar": [100, 101, 99], "ngram": [70, 71, 70], "sssd-live": [120, 121, 119]}
    assert again({**clear, "suffix": [110, 125, 119]}) == [(3, "suffix"), (3, "sssd-live")]
    # Among peers the best one decides, though another one varies as much.
    assert again({**clear, "ngram": [60, 130, 70], "suffix": [130, 131, 129]}) == []
    close = {"ar": [100, 130, 99], "sssd-live": [110, 121, 105]}
    assert again(close) == [(3, "ar"), (3, "sssd-live")]
    # Peers count on MT-Bench and GSM8K alone.
    assert again({**clear, "suffix": [110, 125, 119]}, workload="long") == []


def test_one_repeat_decides_nothing_and_there_are_not_more_than_asked_for():
    assert again({"ar": [1], "sssd-live": [100]}) == [(1, "ar"), (1, "sssd-live")]
    close = {"ar": [100, 130, 99], "sssd-live": [110, 121, 105]}
    assert again(close, replace(PLAN, most_repeats=3)) == []
    assert again(close, replace(PLAN, most_repeats=0)) == []


def test_a_sweep_goes_on_until_all_is_settled_or_repeated_enough(tmp_path):
    item = Item("m", "c", (1, 2), 20)
    text = Workload("mt-bench", "text", (item,), (Item("s", "c", (3, 4), 20),))
    plan = replace(PLAN, methods=("ar", "sssd-live"), batches=(1,), repeats=1, most_repeats=4)
    servers = FakeServers({"plain": (), "sssd": ("--speculative-algorithm", "SSSD")})
    with Results.create_or_resume(tmp_path, plan) as found, servers:
        Runner(
            found, {"mt-bench": text}, METHODS, servers, "/no/model", str, servers.said.append
        ).run()
    points = Results.read(tmp_path).points
    repeats = sorted({p.repeat for p in points})
    assert len(points) == 2 * len(repeats) and 2 <= len(repeats) <= 4
    assert repeats[-1] == 3 or open_runs(plan, points) == []
    summary = summarize(Results.read(tmp_path))
    assert summary.runs == summary.planned == len(points)


@pytest.mark.parametrize(("most", "unfinished"), [(0, 0), (9, 2)])
def test_what_is_still_to_repeat_is_unfinished(tmp_path, most, unfinished):
    def tie(result, requests):
        return replace(result, output_tokens=44, duration_s=1.0), requests

    plan = replace(PLAN, methods=("ar", "sssd-live"), most_repeats=most)
    summary = summarize(Results.read(write_sweep(tmp_path, plan, change=tie)))
    assert summary.planned - summary.runs == unfinished
