"""A sweep's plan: its order, its JSON, and what tells two apart."""

import itertools
import json
from collections import Counter
from dataclasses import replace

import pytest

from sglang_ext.sweep.plan import Plan, PlanError, Point

PLAN = Plan(
    model="m", methods=("a", "b", "c"), workloads=("w", "v"), batches=(1, 8), rates=(0.5,),
    repeats=4, prompts=3, max_tokens=5, seed=0, data="/d", server_flags=("--x", "1"),
)  # fmt: skip


def test_every_point_comes_once_a_repeat_and_methods_come_together():
    order = list(PLAN.order())
    assert len(order) == 4 * 2 * 3 * 3
    assert set(Counter(order).values()) == {1}
    assert [repeat for repeat, _ in order] == sorted(repeat for repeat, _ in order)
    for start in range(0, len(order), 3):
        block = order[start : start + 3]
        assert len({(r, p.workload, p.mode, p.load) for r, p in block}) == 1
        assert {p.method for _, p in block} == {"a", "b", "c"}
    assert {(p.mode, p.load) for _, p in order} == {("batch", 1), ("batch", 8), ("rate", 0.5)}


def test_no_method_is_always_first_or_always_behind_the_same_one():
    order = [point for _, point in PLAN.order()]
    blocks = [[p.method for p in order[i : i + 3]] for i in range(0, len(order), 3)]
    assert Counter(block[0] for block in blocks) == {"a": 8, "b": 8, "c": 8}
    followers = {(x, y) for block in blocks for x, y in itertools.pairwise(block)}
    assert len(followers) == 6
    # A point does not keep its place from repeat to repeat.
    places = {blocks[6 * repeat].index("a") for repeat in range(4)}
    assert len(places) > 1


def test_a_plan_survives_json():
    assert Plan.from_json(json.loads(json.dumps(PLAN.to_json()))) == PLAN


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "an object"),
        ({k: v for k, v in PLAN.to_json().items() if k != "seed"}, "without seed"),
        (PLAN.to_json() | {"colour": 1}, "colour"),
    ],
)
def test_what_is_no_plan_is_refused(content, message):
    with pytest.raises(PlanError, match=message):
        Plan.from_json(content)


def test_differences_name_the_fields():
    other = replace(PLAN, batches=(1, 2), max_tokens=9)
    assert PLAN.differences(other) == ["batches 1,8, not 1,2", "max-tokens 5, not 9"]
    assert PLAN.differences(PLAN) == []


def test_ids():
    assert Point("sssd-live", "mt-bench", "batch", 8.0).id == "mt-bench/batch-8/sssd-live"
    assert Point("ar", "long", "rate", 0.5).id == "long/rate-0.5/ar"
