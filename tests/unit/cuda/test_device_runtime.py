"""What a device's steps have shown is told where no device waits for it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sglang_ext.cuda.device_runtime import DeviceRuntime, _LaunchedTrees


class Planner:
    """Notes what it is told."""

    def __init__(self, learns: bool) -> None:
        self.learns_from_steps, self.told = learns, []

    def observe(self, running, trees, packed, index, predicted, counted):
        self.told.append((index.tolist(), None if predicted is None else predicted.tolist()))

    def note_relaxed(self, marks):
        self.told.append(marks)


def runtime(learns: bool, greedy: bool = True, ended: bool = True):
    made = DeviceRuntime.__new__(DeviceRuntime)
    made._planner, made._left = Planner(learns), None
    made._clock = SimpleNamespace(collect=lambda: None)
    made.prefills = SimpleNamespace(learn=lambda wait: None, clear=lambda: None)
    result = SimpleNamespace(
        copy_done=SimpleNamespace(query=lambda: ended),
        wait=lambda: None,
        learned=torch.tensor([[7, 8, 0, -1]], dtype=torch.int32),
        relaxed=None,
    )
    made._to_learn = _LaunchedTrees((), (), np.zeros(0), greedy, result, None)
    return made


TOLD = [([[0, -1]], [[7, 8]]), None]


def test_what_the_next_drafts_do_not_need_is_told_behind_their_launch():
    made = runtime(learns=False)
    made.learn()
    assert made._planner.told == []
    made.learn_behind_launch()
    made.learn_behind_launch()
    assert made._planner.told == TOLD


@pytest.mark.parametrize(("learns", "wait"), [(True, True), (False, False), (True, False)])
def test_a_drafter_that_learns_and_a_request_that_ends_are_told_at_once(learns, wait):
    made = runtime(learns)
    made.learn(wait)
    assert made._planner.told == TOLD


def test_a_step_without_a_launch_behind_it_is_told_with_the_next():
    made = runtime(learns=False, greedy=False)
    made.learn()
    made.learn(wait=False)
    assert made._planner.told == [([[0, -1]], None), None]


def test_a_step_that_has_not_ended_stays():
    made = runtime(learns=True, ended=False)
    made.learn(wait=False)
    assert made._planner.told == [] and made._to_learn is not None


def test_what_is_cleared_is_not_told():
    made = runtime(learns=False)
    made.learn()
    made.clear()
    made.learn_behind_launch()
    assert made._planner.told == []
