"""The budget's replay in a model of a GPU."""

import numpy as np
import pytest

from scripts.bench_cuda_budget import (
    Adaptive,
    Answer,
    Fixed,
    Row,
    compare,
    draft,
    replay,
    summary,
    undrafted,
)
from scripts.lib.gpu_roofline import BATCHES, WIDTHS, Gpu, padded

GPU = Gpu()


def answers(n: int, seed: int = 0) -> list[Answer]:
    """Random tokens, so that nothing repeats."""
    rng = np.random.default_rng(seed)
    made = rng.integers(0, 40_000, (n, 60)).tolist()
    return [Answer(tokens[:12], tokens[12:]) for tokens in made]


def test_the_model_is_flat_to_the_knee_and_linear_past_it():
    assert GPU.linear_s(32) == pytest.approx(GPU.linear_s(1), rel=0.01)
    assert GPU.linear_s(2048) == pytest.approx(2 * GPU.linear_s(1024), rel=0.01)
    assert GPU.linear_s(1) == pytest.approx(5e-3, rel=0.01)


def test_the_models_kv_of_64_long_contexts_takes_about_as_long_as_the_weights():
    reading = GPU.step_s(64, 1, 64 * 2048) - GPU.step_s(64, 1, 0)
    assert 0.9 < reading / GPU.linear_s(64) < 1.5


def test_batches_are_padded_to_captured_ones():
    assert [padded(n) for n in (1, 3, 17, 64)] == [1, 4, 24, 64]
    assert all(padded(n) == n for n in BATCHES)


def test_plain_decoding_costs_its_steps_and_no_host():
    made = undrafted(answers(4))
    assert replay(made, 1, GPU, Fixed(1), 40) == replay(made, 1, Gpu(host=9.0), Fixed(1), 40)
    contexts = [12 + place for place in range(1, 41)]
    expected = np.mean([GPU.step_s(1, 1, context) for context in contexts])
    assert replay(made, 1, GPU, Fixed(1), 40) == pytest.approx(expected)


def test_drafts_are_right_where_the_answer_was_seen_and_nowhere_else():
    known, new = answers(6), answers(6, seed=1)
    seen = draft(known, known)
    for answer in seen:
        assert len(answer.trees) == len(answer.right) == len(answer.output)
        assert all(right.any() for right in answer.right[1:-1])
    assert not any(right.any() for answer in draft(new, known) for right in answer.right)


def test_a_fixed_width_pays_for_every_look_also_where_nothing_is_found():
    made = undrafted(answers(4))
    looking, plain = (replay(made, 2, GPU, Fixed(w), 200) for w in (4, 1))
    extra = GPU.step_s(2, 4, 0) - GPU.step_s(2, 1, 0) + GPU.look_s(2) + GPU.stage_s(2)
    assert looking - plain == pytest.approx(extra / 2, rel=0.01)


@pytest.mark.parametrize("batch", [1, 64])
def test_where_nothing_is_found_the_product_is_nearly_as_fast_as_plain(batch):
    row = compare(undrafted(answers(8)), batch, GPU, 0, 300 * batch)
    assert row.adaptive > 0.98
    assert row.vs_best == row.adaptive


@pytest.mark.parametrize("batch", [1, 32])
def test_what_was_served_before_is_verified_nearly_at_the_best_width(batch):
    made = answers(8)
    row = compare(draft(made, made), batch, GPU, 0, 600 * batch)
    assert row.adaptive > 3
    assert row.vs_best > 0.95


def test_the_product_knows_a_steps_time_one_step_late():
    class Spy(Adaptive):
        told, asked = 0, 0

        def step(self, running):
            assert self.told == max(0, self.asked - 1)
            self.asked += 1
            return super().step(running)

        def learn(self, rows, width, read, seconds):
            self.told += 1
            super().learn(rows, width, read, seconds)

    spy = Spy(GPU, np.random.default_rng(0))
    replay(undrafted(answers(4)), 2, GPU, spy, 40)
    assert spy.asked == 20


def test_the_figures_are_the_least_of_all_rows():
    rows = {
        ("new", 1): Row(1.2, {1: 1.0, 4: 1.25}),
        ("none", 64): Row(0.99, dict.fromkeys(WIDTHS, 0.5) | {1: 1.0}),
    }
    figures = summary(rows)
    assert figures["model_min_ratio_vs_plain"] == 0.99
    assert figures["model_min_ratio_vs_best_fixed"] == pytest.approx(0.96)
    assert all(name.startswith("model_") for name in figures)
