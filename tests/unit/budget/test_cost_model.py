"""What a step costs: the prior, and what is learned from the steps that are run."""

import numpy as np
import pytest

from sglang_ext.budget.choice import choose_nodes
from sglang_ext.budget.cost_model import DELAYED_CUDA, NODE_READS_CUDA, CostModel

# Relative costs of 1..64 tokens through prepacked fp32 layers (shared/facts.md).
PRIOR = {1: 20.0, 2: 21.0, 4: 27.0, 8: 30.0, 16: 41.0, 32: 76.0, 64: 110.0}
# Of reading a KV entry, seconds.
READ_S = 2e-6


def linear(tokens: int) -> float:
    """Seconds of the linear layers."""
    return float(np.interp(tokens, list(PRIOR), list(PRIOR.values()))) / 1e3


def in_seconds() -> dict[int, float]:
    return {tokens: ms / 1e3 for tokens, ms in PRIOR.items()}


def test_the_prior_holds_before_any_step():
    cost = CostModel(PRIOR)
    assert cost.cost(12) == pytest.approx(35.5)
    assert cost.cost(128) == pytest.approx(220.0)
    assert cost.cost(12, verify=True) > cost.cost(12)


def test_the_prior_is_scaled_to_what_is_observed():
    cost = CostModel(PRIOR)
    for _ in range(100):
        cost.observe(1, 0.040)
    assert cost.cost(1) == pytest.approx(0.040)
    assert cost.cost(16) == pytest.approx(0.040 * 41 / 20, rel=0.01)


def test_a_count_that_looks_dearer_than_a_larger_one_was_disturbed():
    cost = CostModel({1: 20.0, 2: 50.0, 4: 24.0})
    assert cost.cost(1) <= cost.cost(2) <= 24.0


def test_costs_of_many_counts_are_those_of_each():
    cost = CostModel(in_seconds(), READ_S)
    cost.observe(4, 0.05, read=1e3)
    tokens, read = np.array([5, 20, 100]), np.array([1e3, 2e3, 9e3])
    each = [cost.cost(int(n), True, r) for n, r in zip(tokens, read, strict=True)]
    assert cost.verify_costs(tokens, read) == pytest.approx(each)


def test_verify_steps_are_learned_apart_from_plain_ones():
    cost = CostModel(in_seconds())
    for _ in range(300):
        cost.observe(8, linear(8))
        cost.observe(16, linear(16))
        cost.observe(8, linear(8) + 0.01, verify=True)
        cost.observe(16, linear(16) + 0.01, verify=True)
    assert cost.cost(16) == pytest.approx(linear(16), rel=0.05)
    assert cost.cost(16, verify=True) == pytest.approx(linear(16) + 0.01, rel=0.05)
    # What was not run yet costs as much more than the linear layers.
    assert cost.cost(32, verify=True) == pytest.approx(linear(32) + 0.01, rel=0.07)


def test_what_steps_and_tokens_cost_besides_the_linear_layers_is_learned():
    cost = CostModel(in_seconds())

    def seconds(tokens: int) -> float:
        return 1.2 * linear(tokens) + 0.015 + 0.001 * tokens

    # Wide steps of one request's method say nothing against verifying few nodes of another's.
    for tokens in [1, *[4, 48, 56, 64] * 50]:
        cost.observe(tokens, seconds(tokens), verify=tokens > 4)
    ratio = seconds(20) / seconds(16)
    assert cost.cost(20, verify=True) / cost.cost(16, verify=True) == pytest.approx(ratio, rel=0.03)


@pytest.mark.parametrize("slower", [1.0, 2.0])
def test_reading_kv_is_learned_and_known_before(slower):
    cost = CostModel(in_seconds(), READ_S)

    def seconds(tokens: int, read: float) -> float:
        return linear(tokens) + 0.02 + slower * READ_S * read

    for tokens in [1, 8] * 20:
        cost.observe(tokens, seconds(tokens, 100 * tokens), read=100 * tokens)
    # Long contexts come: at first what the weights tell of the memory's speed, then the steps'.
    expected = seconds(8, 50_000)
    assert cost.cost(8, read=50_000) == pytest.approx(expected, rel=0.1 if slower == 1 else 0.5)
    for tokens in [1, 4, 8] * 30:
        cost.observe(tokens, seconds(tokens, 6_000 * tokens), read=6_000 * tokens)
    ratio = seconds(8, 48_000) / seconds(1, 6_000)
    found = cost.cost(8, read=48_000) / cost.cost(1, read=6_000)
    assert found == pytest.approx(ratio, rel=0.1)
    # Short ones again.
    ratio = seconds(8, 800) / seconds(1, 100)
    assert cost.cost(8, read=800) / cost.cost(1, read=100) == pytest.approx(ratio, rel=0.15)


def test_noise_does_not_make_verify_steps_look_dear():
    cost, rng = CostModel(in_seconds()), np.random.default_rng(0)
    for step in range(1000):
        tokens = (8, 12)[step % 2]
        true = linear(tokens) * (1.04 if tokens == 12 else 1.0)
        cost.observe(tokens, true * rng.lognormal(0.0, 0.15), verify=tokens == 12)
    ratio = 1.04 * linear(12) / linear(8)
    assert cost.cost(12, verify=True) / cost.cost(8) == pytest.approx(ratio, rel=0.05)


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
    assert choose_nodes(fair, cost).nodes.sum() > 0
    for _ in range(100):
        cost.observe(4, 0.027)
        for tokens in range(5, 17):
            cost.observe(tokens, 0.060, verify=True)
    assert choose_nodes(fair, cost).nodes.sum() == 0


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


# A GPU: 5 ms of reading weights, flat to some 256 tokens; KV entries of 131,072 bytes at 3 TB/s.
ROOFLINE = {n: (5.0**4 + (n * 0.0214) ** 4) ** 0.25 / 1e3 for n in (1, 16, 64, 128, 256, 512, 1024)}
KV_S = 131_072 / 3e12


def on_gpu(tokens: int, verify: bool, read: float) -> float:
    """Seconds: attention's own kernels read slower than weights are read, a verify's most."""
    linear = (5.0**4 + (tokens * 0.0214) ** 4) ** 0.25 / 1e3
    besides = 0.4e-3 + 2.5e-6 * tokens + verify * 0.15e-3
    return linear + besides + read * KV_S * (1.5 if verify else 1.15)


def test_a_roofline_is_followed_to_64_requests_of_2048_tokens():
    cost = CostModel(ROOFLINE, KV_S, NODE_READS_CUDA, DELAYED_CUDA)
    rng = np.random.default_rng(0)
    for step in range(600):
        rows = (8, 32, 64)[step % 3]
        width = (1, 2, 4, 8)[step // 3 % 4]
        read = rows * float(rng.uniform(200, 2048))
        true = on_gpu(rows * width, width > 1, read)
        cost.observe(rows * width, true * rng.lognormal(0, 0.015), width > 1, read)
    for rows in (8, 64):
        for width in (1, 2, 4, 8, 16):
            for context in (300, 2048):
                true = on_gpu(rows * width, width > 1, rows * context)
                found = cost.cost(rows * width, width > 1, rows * context)
                assert found == pytest.approx(true, rel=0.06), (rows, width, context)


def test_a_delayed_step_at_the_start_tells_a_devices_own_clock_nothing():
    clean, delayed = (CostModel(ROOFLINE, KV_S, NODE_READS_CUDA, DELAYED_CUDA) for _ in range(2))
    for step in range(8):
        true = on_gpu(96, True, 7_000)
        clean.observe(96, true, True, 7_000)
        delayed.observe(96, true * (1.4 if step == 4 else 1.0), True, 7_000)
    for tokens in (24, 384):
        assert delayed.cost(tokens, True) == pytest.approx(clean.cost(tokens, True), rel=0.01)


def test_a_gpu_that_slows_down_is_followed():
    cost = CostModel(ROOFLINE, KV_S, NODE_READS_CUDA, DELAYED_CUDA)
    for factor in (1.0, 1.6):
        for _ in range(60):
            cost.observe(8, factor * on_gpu(8, False, 0))
    assert cost.cost(8) == pytest.approx(1.6 * on_gpu(8, False, 0), rel=0.05)
