"""The budget: gain against cost, over the whole batch, and I_knee."""

import numpy as np
import pytest

from sglang_ext.budget import (
    Calibration,
    CostModel,
    choose_nodes,
    knee,
    saved_seconds,
    token_grid,
)

# Relative costs of 1..64 tokens through prepacked fp32 layers (shared/facts.md).
PRIOR = {1: 20.0, 2: 21.0, 4: 27.0, 8: 30.0, 16: 41.0, 32: 76.0, 64: 110.0}
KNEE = knee(PRIOR)


def nodes(*probs: list[float], knee_tokens: int = KNEE, **options) -> list[int]:
    chosen = choose_nodes([np.array(p) for p in probs], CostModel(PRIOR), knee_tokens, **options)
    return chosen.tolist()


def test_no_draft_is_a_plain_step():
    assert nodes([]) == [0]
    assert nodes([], []) == [0, 0]


def test_poor_drafts_are_not_verified():
    assert nodes([0.05] * 15) == [0]


def test_sure_drafts_are_verified_whole():
    assert nodes([0.97**i for i in range(1, 16)], knee_tokens=64) == [15]


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
    assert saved_seconds([sure, none], np.array([0, 0]), cost) == 0.0
    expected = 2 * cost.cost(1) - cost.cost(2, verify=True)
    assert saved_seconds([sure], np.array([1]), cost) == pytest.approx(expected)
    expected = 2**0.5 * cost.cost(2) - cost.cost(3, verify=True)
    assert saved_seconds([sure, none], np.array([1, 0]), cost) == pytest.approx(expected)
    assert saved_seconds([0.01 * sure], np.array([1]), cost) == 0.0


def test_past_the_knee_only_sure_drafts_pay():
    # A GPU: flat to 64 tokens, then every token costs its share.
    cost = CostModel({1: 1.0, 64: 1.0, 128: 2.0, 1024: 16.0})
    fair, sure = [0.6**i for i in range(1, 16)], [0.99**i for i in range(1, 16)]
    chosen = choose_nodes([np.array(fair)] * 16, cost, 64)
    assert 16 < 16 + chosen.sum() <= 64
    assert choose_nodes([np.array(fair)] * 64, cost, 64).sum() == 0
    assert choose_nodes([np.array(sure)] * 8, cost, 64).sum() <= 64
    # A CPU, where reading and computing add up.
    assert sum(nodes(*[fair] * 8)) <= KNEE - 8
    assert sum(nodes(*[sure] * 8)) > 3 * KNEE


def test_nodes_never_lose_to_plain_in_expectation():
    rng = np.random.default_rng(0)
    cost = CostModel(PRIOR)
    for _ in range(200):
        bs = int(rng.integers(1, 9))
        probs = [rng.random(int(rng.integers(0, 16))) ** 3 for _ in range(bs)]
        chosen = choose_nodes(probs, cost, KNEE)
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
    assert token_grid(3, 20) == [*range(4, 17), 20]
    assert token_grid(16, 40) == [20, 24, 28, 32, 40]
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


def test_cost_model_learns_and_scales_its_prior():
    cost = CostModel(PRIOR)
    assert cost.cost(12) == pytest.approx(35.5)
    for _ in range(100):
        cost.observe(1, 0.040)
    assert cost.cost(1) == pytest.approx(0.040)
    assert cost.cost(16) == pytest.approx(0.040 * 41 / 20, rel=0.01)


def test_verify_steps_are_learned_apart_from_plain_ones():
    cost = CostModel(PRIOR)
    for _ in range(100):
        cost.observe(8, 0.030)
        cost.observe(16, 0.041)
        cost.observe(8, 0.030 * 1.3, verify=True)
        cost.observe(16, 0.041 * 1.3, verify=True)
    assert cost.cost(16) == pytest.approx(0.041, rel=0.05)
    assert cost.cost(16, verify=True) == pytest.approx(0.041 * 1.3, rel=0.05)
    # What was not run yet costs as much more than the prior.
    assert cost.cost(32, verify=True) == pytest.approx(0.076 * 1.3, rel=0.05)


def test_what_a_token_costs_besides_the_linear_layers_is_learned():
    cost = CostModel(PRIOR)

    def seconds(tokens, per_token):
        return np.interp(tokens, list(PRIOR), list(PRIOR.values())) / 1e3 + per_token * tokens

    # Wide steps of one request's method say nothing against verifying few nodes of another's.
    for tokens in [4, 48, 56, 64] * 50:
        cost.observe(tokens, seconds(tokens, 0.001), verify=tokens > 4)
    ratio = seconds(20, 0.001) / seconds(16, 0.001)
    assert cost.cost(20, verify=True) / cost.cost(16) == pytest.approx(ratio, rel=0.07)
    # Contexts grow long: attention, which each token pays, is most of a step.
    for tokens in [4, 8, 12] * 60:
        cost.observe(tokens, seconds(tokens, 0.01), verify=tokens > 4)
    ratio = seconds(12, 0.01) / seconds(4, 0.01)
    assert cost.cost(12, verify=True) / cost.cost(4) == pytest.approx(ratio, rel=0.1)


def test_a_spell_of_stalls_does_not_make_plain_steps_look_dear_for_good():
    cost = CostModel(PRIOR)
    for _ in range(20):
        cost.observe(8, 0.030)
    for _ in range(20):
        cost.observe(8, 0.130)  # something else has the machine; then drafts seem to pay
    for _ in range(200):
        cost.observe(9, 0.035, verify=True)
    assert cost.cost(8) < 0.045


def test_drafts_are_dropped_where_verify_steps_prove_dear():
    cost, fair = CostModel(PRIOR), [np.array([0.6, 0.4, 0.2])] * 4
    assert choose_nodes(fair, cost, KNEE).sum() > 0
    for _ in range(100):
        cost.observe(4, 0.027)
        for tokens in token_grid(4, 16):
            cost.observe(tokens, 0.060, verify=True)
    assert choose_nodes(fair, cost, KNEE).sum() == 0


def test_dear_verify_steps_between_plain_ones_are_no_stalls():
    cost = CostModel(PRIOR)
    for _ in range(100):
        cost.observe(8, 0.030)
        cost.observe(9, 0.060, verify=True)
    assert cost.cost(9, verify=True) > 1.4 * cost.cost(8)


def test_cost_model_shrugs_off_a_stall():
    cost = CostModel(PRIOR)
    for _ in range(10):
        cost.observe(1, 0.02)
    cost.observe(1, 5.0)
    assert cost.cost(1) < 0.025


def test_lone_stalls_do_not_make_verify_steps_look_dear():
    cost, rng = CostModel(PRIOR), np.random.default_rng(0)
    seconds = {8: 0.030, 12: 0.035}
    for step in range(2000):
        tokens = 12 if step % 5 == 0 else 8
        stall = 1.0 if rng.random() < 0.05 else 0.0
        cost.observe(tokens, seconds[tokens] * 1.04 ** (tokens > 8) + stall, verify=tokens > 8)
    assert cost.cost(8) == pytest.approx(0.030, rel=0.02)
    assert cost.cost(12, verify=True) == pytest.approx(0.035 * 1.04, rel=0.02)


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
