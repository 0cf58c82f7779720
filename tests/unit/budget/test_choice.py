"""The budget: gain against cost, over the whole batch, and I_knee."""

import time

import numpy as np
import pytest

from sglang_ext.budget.choice import (
    CAUTION,
    Calibration,
    choose_nodes,
    choose_width,
    knee,
    token_grid,
)
from sglang_ext.budget.cost_model import NODE_READS, CostModel

# Relative costs of 1..64 tokens through prepacked fp32 layers (shared/facts.md).
PRIOR = {1: 20.0, 2: 21.0, 4: 27.0, 8: 30.0, 16: 41.0, 32: 76.0, 64: 110.0}


def nodes(*probs: list[float], **options) -> list[int]:
    return choose_nodes([np.array(p) for p in probs], CostModel(PRIOR), **options).nodes.tolist()


def test_no_draft_is_a_plain_step():
    assert nodes([]) == [0]
    assert nodes([], []) == [0, 0]


def test_poor_drafts_are_not_verified():
    assert nodes([0.05] * 15) == [0]


def test_sure_drafts_are_verified_whole():
    assert nodes([0.97**i for i in range(1, 16)]) == [15]


def test_a_request_with_poor_drafts_gets_no_nodes_beside_a_sure_one():
    sure, poor = [0.97**i for i in range(1, 16)], [0.05] * 15
    chosen = nodes(sure, poor, poor, poor)
    assert chosen[0] >= 4 and chosen[1:] == [0, 0, 0]


def test_one_requests_gain_must_be_worth_what_it_costs_the_others():
    fair = [0.7**i for i in range(1, 16)]
    assert sum(nodes(fair, *[[]] * 7)) == 0
    assert sum(nodes(*[fair] * 8)) > 0
    assert sum(nodes(fair)) > 0


def test_the_budget_shrinks_as_the_batch_grows():
    probs = [0.7**i for i in range(1, 16)]
    mean = [np.mean(nodes(*[probs] * bs)) for bs in (1, 4, 16)]
    assert mean[0] > mean[1] >= mean[2]


def test_what_nodes_save_is_the_plain_steps_they_stand_for():
    cost, sure, none = CostModel(PRIOR), np.array([1.0]), np.empty(0)
    assert choose_nodes([none, none], cost).saved_s == 0.0
    expected = 2 * cost.cost(1) - cost.cost(2, verify=True)
    assert choose_nodes([sure], cost).saved_s == pytest.approx(expected)
    expected = 1.5 * cost.cost(2) - cost.cost(3, verify=True)
    assert choose_nodes([sure, none], cost).saved_s == pytest.approx(expected)


def test_past_the_knee_only_sure_drafts_pay():
    # A GPU: flat to 64 tokens, then every token costs its share.
    cost = CostModel({1: 1.0, 64: 1.0, 128: 2.0, 1024: 16.0})
    fair, sure = [0.6**i for i in range(1, 16)], [0.99**i for i in range(1, 16)]
    chosen = choose_nodes([np.array(fair)] * 16, cost).nodes
    assert 16 < 16 + chosen.sum() <= 64
    assert choose_nodes([np.array(fair)] * 64, cost).nodes.sum() == 0
    # A CPU, where reading and computing add up: past I_knee a node costs a part of a plain step.
    many = 2 * knee(PRIOR)
    assert sum(nodes(*[[0.4]] * many)) == 0
    assert sum(nodes(*[sure] * many)) >= many


def test_the_user_may_bound_what_a_step_verifies():
    sure = [0.97**i for i in range(1, 16)]
    assert sum(nodes(*[sure] * 4)) > 12
    assert sum(nodes(*[sure] * 4, most_tokens=16)) == 12
    assert sum(nodes(*[sure] * 4, most_tokens=4)) == 0


def test_nodes_of_long_contexts_must_be_surer():
    # 10,000 entries are read in the time that the linear layers take for two tokens.
    cost = CostModel(PRIOR, read_s=PRIOR[2] / 10_000)
    fair = np.array([0.415])
    assert choose_nodes([fair, fair], cost, [10_000, 10_000]).nodes.sum() == 0
    assert choose_nodes([fair, fair], cost, [10, 10]).nodes.tolist() == [1, 1]
    sure = np.array([0.95])
    choice = choose_nodes([sure, sure], cost, [9_000, 1_000])
    assert choice.nodes.tolist() == [1, 1]
    both = cost.cost(4, verify=True, read=10_000 * (1 + NODE_READS))
    assert choice.saved_s == pytest.approx((1 + 0.95**CAUTION) * cost.cost(2, read=10_000) - both)


def test_nodes_never_lose_to_plain_in_expectation():
    rng = np.random.default_rng(0)
    cost = CostModel(PRIOR)
    for _ in range(200):
        bs = int(rng.integers(1, 9))
        probs = [rng.random(int(rng.integers(0, 16))) ** 3 for _ in range(bs)]
        chosen = choose_nodes(probs, cost).nodes
        assert (chosen <= [len(p) for p in probs]).all()
        gain = sum(p[:n].sum() for p, n in zip(probs, chosen, strict=True))
        total = bs + chosen.sum()
        assert total == bs or (bs + gain) / cost.cost(total) > bs / cost.cost(bs)


def test_drafting_that_takes_long_must_pay_for_itself():
    probs = [0.5, 0.2, 0.1]
    assert sum(nodes(probs)) > 0
    assert nodes(probs, drafting_s=12.0) == [0]


def test_padding_that_costs_more_than_the_drafts_gain_is_a_plain_step():
    sure = [0.97**i for i in range(1, 16)]
    batch = [sure, *[[]] * 3]
    assert nodes(*batch)[0] >= 4
    assert sum(nodes(*batch, padded=True)) == 0


def test_token_grid():
    assert token_grid(3, 40) == [*range(4, 33), 40]
    assert token_grid(32, 80) == [40, 48, 56, 64, 80]
    assert token_grid(5, 5) == []


@pytest.mark.parametrize("overlap", [True, False])
def test_knee_is_where_computing_takes_as_long_as_reading_the_weights(overlap):
    read, per_token = 8.0, 0.1
    counts = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    cost = {n: max(read, n * per_token) if overlap else read + n * per_token for n in counts}
    assert knee(cost) == pytest.approx(80, rel=0.02)


def test_knee_of_a_device_that_stays_flat_is_the_largest_count():
    assert knee({1: 1.0, 64: 1.0, 128: 1.01, 256: 1.02}) == 256
    assert knee({1: 1.0, 64: 1.0, 128: 0.99, 256: 0.98}) == 256


def test_calibration_converges_to_what_is_observed():
    rng = np.random.default_rng(0)
    calibration = Calibration()
    probs = np.full(100, 0.8, dtype=np.float32)
    assert calibration(probs)[0] == pytest.approx(0.8)
    for _ in range(50):
        calibration.observe(probs, rng.random(100) < 0.3)
    assert calibration(probs)[0] == pytest.approx(0.3, abs=0.05)
    # Other bins keep their prediction.
    assert calibration(np.array([0.2], dtype=np.float32))[0] == pytest.approx(0.2)


def test_a_request_departs_from_its_drafters_calibration():
    rng = np.random.default_rng(0)
    shared = Calibration()
    probs = np.full(10, 0.5, dtype=np.float32)
    for _ in range(200):
        shared.observe(probs, rng.random(10) < 0.2)
    request = shared.for_request()
    assert request(probs)[0] == pytest.approx(0.2, abs=0.05)
    for _ in range(20):
        request.observe(probs, np.ones(10, dtype=bool))
    assert request(probs)[0] > 0.85
    assert shared.for_request()(probs)[0] < 0.3


WIDTHS = (1, 2, 4, 8, 16)
# A GPU: flat to 256 tokens, then every token costs its share.
GPU = {1: 1.0, 256: 1.0, 512: 2.0, 1024: 4.0}


def falling(share: float) -> np.ndarray:
    return share ** np.arange(1.0, 16.0)


def width(*probs, **options):
    return choose_width([np.array(p) for p in probs], CostModel(GPU), WIDTHS, **options)


def test_without_drafts_the_width_is_a_plain_step():
    for choice in (width([]), width([], []), width(falling(0.05))):
        assert choice.width == 1 and choice.saved_s == 0.0 and not choice.nodes.any()


def test_every_request_verifies_its_best_nodes_of_the_captured_width():
    choice = width(falling(0.97), falling(0.9)[:5], [])
    assert choice.width == 16
    assert choice.nodes.tolist() == [15, 5, 0]


def test_the_width_shrinks_as_the_batch_grows():
    widths = [width(*[falling(0.7)] * bs).width for bs in (1, 32, 64, 128, 256)]
    assert widths[0] == 16 and widths[-1] == 1
    assert widths == sorted(widths, reverse=True) and len(set(widths)) >= 4


def test_the_width_has_the_most_tokens_a_second():
    rng = np.random.default_rng(0)
    cost = CostModel(GPU)
    for _ in range(100):
        bs, share = int(rng.integers(1, 65)), float(rng.uniform(0.2, 0.95))
        chosen = choose_width([falling(share)] * bs, cost, WIDTHS, min_gain=1.0).width
        gain = {w: 1 + float((falling(share) ** CAUTION)[: w - 1].sum()) for w in WIDTHS}
        rate = {w: gain[w] / cost.cost(bs * w, verify=w > 1) for w in WIDTHS}
        assert rate[chosen] == pytest.approx(max(rate.values()))


def test_what_padding_runs_is_paid_for():
    probs = [falling(0.7)] * 33
    assert width(*probs, padded_batch=64).width < width(*probs).width


def test_what_is_saved_is_the_plain_steps_that_the_tokens_stand_for():
    cost, sure = CostModel(GPU), np.array([1.0])
    choice = choose_width([sure, np.empty(0)], cost, WIDTHS, padded_batch=4)
    assert choice.width == 2
    assert choice.saved_s == pytest.approx(1.5 * cost.cost(4) - cost.cost(8, verify=True))


def test_a_few_requests_that_repeat_themselves_do_not_widen_everyones_steps():
    # As many tokens in the mean; but who gets them all is done soon, and the others remain.
    cost = CostModel({1: 1.0, 64: 1.0, 128: 1.2, 256: 1.6, 512: 3.2, 1024: 6.4})
    few = [falling(0.97)] * 4 + [falling(0.3)] * 28
    even = [np.mean(few, axis=0)] * 32
    chosen = [choose_width(probs, cost, WIDTHS).width for probs in (few, even)]
    assert chosen[0] < chosen[1]


def test_drafting_is_paid_for_by_now_but_makes_wide_steps_better():
    probs = [falling(0.7)] * 48
    assert width(*probs).width < width(*probs, drafting_s=5.0).width
    # It takes no more of a step that verifies than of a plain one.
    assert width([0.5], drafting_s=0.3).width > 1


def test_the_user_may_bound_what_a_captured_step_verifies():
    probs = [falling(0.97)] * 4
    assert width(*probs, most_tokens=16).width == 4
    assert width(*probs, padded_batch=8, most_tokens=16).width == 2
    assert width(*probs, most_tokens=4).width == 1


def test_on_a_gpu_a_requests_nodes_read_its_kv_once():
    contexts, probs = [10_000] * 8, [falling(0.6)] * 8
    shared = CostModel(GPU, read_s=1e-5, node_reads=0.0)
    each = CostModel(GPU, read_s=1e-5, node_reads=0.4)
    wide = choose_width(probs, shared, WIDTHS, contexts).width
    assert choose_width(probs, each, WIDTHS, contexts).width < wide


def test_choosing_a_width_takes_a_small_part_of_a_millisecond():
    probs, cost = [falling(0.7)] * 64, CostModel(GPU)
    took = []
    for _ in range(50):
        start = time.perf_counter()
        choose_width(probs, cost, WIDTHS, [500] * 64)
        took.append(time.perf_counter() - start)
    assert min(took) < 0.3e-3
