"""The verify width: gain against cost."""

import numpy as np
import pytest

from sglang_ext.budget import Calibration, CostModel, candidate_widths, choose_width

# Relative costs of 1..64 tokens through prepacked fp32 layers (shared/facts.md).
PRIOR = {1: 20.0, 2: 21.0, 4: 27.0, 8: 30.0, 16: 41.0, 32: 76.0, 64: 110.0}


def width(*probs: list[float], max_width: int = 16) -> int:
    return choose_width([np.array(p) for p in probs], candidate_widths(max_width), CostModel(PRIOR))


def test_no_draft_is_a_plain_step():
    assert width([]) == 1
    assert width([], []) == 1


def test_poor_drafts_are_not_verified():
    assert width([0.05] * 15) == 1


def test_sure_drafts_take_the_whole_width():
    assert width([0.97**i for i in range(1, 16)]) == 16


def test_width_shrinks_as_the_batch_grows():
    probs = [0.7**i for i in range(1, 16)]
    widths = [width(*[probs] * bs) for bs in (1, 4, 16)]
    assert widths[0] > widths[1] >= widths[2]


def test_width_never_beats_plain_in_expectation_unless_it_says_so():
    rng = np.random.default_rng(0)
    cost = CostModel(PRIOR)
    for _ in range(200):
        bs = int(rng.integers(1, 9))
        probs = [np.sort(rng.random(int(rng.integers(0, 16))) ** 3)[::-1] for _ in range(bs)]
        chosen = choose_width(probs, candidate_widths(16), cost)
        gain = sum(p[: chosen - 1].sum() for p in probs)
        plain = bs / cost.cost(bs)
        assert chosen == 1 or (bs + gain) / cost.cost(bs * chosen) > plain


def test_candidate_widths_end_at_the_limit():
    assert candidate_widths(16) == [1, 2, 3, 4, 6, 8, 12, 16]
    assert candidate_widths(10)[-1] == 10
    assert candidate_widths(2) == [1, 2]


def test_cost_model_learns_and_scales_its_prior():
    cost = CostModel(PRIOR)
    assert cost.cost(12) == pytest.approx(35.5)
    for _ in range(100):
        cost.observe(1, 0.040)
    assert cost.cost(1) == pytest.approx(0.040)
    assert cost.cost(16) == pytest.approx(0.040 * 41 / 20, rel=0.01)


def test_cost_model_shrugs_off_a_stall():
    cost = CostModel(PRIOR)
    for _ in range(10):
        cost.observe(1, 0.02)
    cost.observe(1, 5.0)
    assert cost.cost(1) < 0.025


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


def test_a_request_departs_from_its_drafters_calibration_quickly():
    rng = np.random.default_rng(0)
    shared = Calibration()
    probs = np.full(10, 0.5, dtype=np.float32)
    for _ in range(100):
        shared.observe(probs, rng.random(10) < 0.2)
    request = shared.for_request()
    assert request(probs)[0] == pytest.approx(0.2, abs=0.05)
    for _ in range(5):
        request.observe(probs, np.ones(10, dtype=bool))
    assert request(probs)[0] > 0.85
    assert shared.for_request()(probs)[0] < 0.3
