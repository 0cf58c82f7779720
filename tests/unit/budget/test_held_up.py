"""Steps that other programs held up are told from dear ones, and teach the cost model nothing."""

import pytest

from sglang_ext.budget.cost_model import CostModel
from sglang_ext.budget.held_up import HeldUp

PRIOR = {1: 0.020, 8: 0.030, 16: 0.041, 32: 0.076}


def usual_steps(held_up: HeldUp, count: int = 50, cores: float = 1.8) -> None:
    for _ in range(count):
        assert not held_up.note(0.02, 0.02 * cores, verify=False)


def test_a_step_with_less_than_its_usual_processors_was_held_up():
    held_up = HeldUp()
    usual_steps(held_up)
    assert held_up.note(0.06, 0.04, verify=False)


def test_a_dear_step_uses_its_processors_for_longer():
    held_up = HeldUp()
    usual_steps(held_up)
    assert not held_up.note(0.2, 0.36, verify=False)
    assert not held_up.note(0.2, 0.32, verify=False)


def test_verify_steps_have_an_own_measure():
    held_up = HeldUp()
    usual_steps(held_up)
    # More of a verify step is Python, which one processor runs.
    for _ in range(50):
        assert not held_up.note(0.04, 0.05, verify=True)
    assert held_up.note(0.04, 0.03, verify=True)


def test_the_first_steps_tell_nothing_yet():
    held_up = HeldUp()
    assert not any(held_up.note(0.02 * n, 0.036, verify=False) for n in range(1, 8))


def test_on_a_machine_that_is_shared_for_good_steps_are_learned_from_again():
    held_up = HeldUp()
    usual_steps(held_up)
    said = [held_up.note(0.04, 0.045, verify=False) for _ in range(400)]
    assert all(said[:50]) and not any(said[300:])


def test_a_step_of_no_time_is_not_held_up():
    assert not HeldUp().note(0.0, 0.0, verify=False)


def test_held_up_steps_make_no_kind_of_step_look_dear():
    cost, untouched = CostModel(PRIOR), CostModel(PRIOR)
    for model in (cost, untouched):
        for _ in range(30):
            model.observe(1, 0.03)
            model.observe(8, 0.045, verify=True)
    for _ in range(50):
        cost.observe(8, 0.200, verify=True, held_up=True)
        untouched.observe(8, 0.200, verify=True)
    assert cost.cost(8, verify=True) == pytest.approx(0.045, rel=0.1)
    assert untouched.cost(8, verify=True) > 0.060  # where nobody says so, they do
