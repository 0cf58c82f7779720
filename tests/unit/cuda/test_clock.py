"""Steps are timed by events that are read once they have passed."""

from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from sglang_ext.cuda.clock import StepClock


class Event:
    """A second passes between any two records; `passed` says what the device has done."""

    ticks: Iterator[int]
    passed: set[int]

    def __init__(self, enable_timing: bool):
        assert enable_timing

    def record(self) -> None:
        self.at = next(Event.ticks)

    def query(self) -> bool:
        return self.at in Event.passed

    def elapsed_time(self, end: "Event") -> float:
        return 1e3 * (end.at - self.at)


@pytest.fixture
def clock(monkeypatch):
    Event.ticks, Event.passed = count(), set()
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(Event=Event))
    return StepClock("cuda")


def test_a_step_is_told_once_the_device_has_passed_its_end(clock):
    told: list[float] = []
    clock.begin()
    clock.end(told.append)
    clock.collect()
    assert told == []
    Event.passed.add(1)
    clock.collect()
    clock.collect()
    assert told == [1.0]


def test_steps_are_told_in_order_and_none_past_one_that_runs(clock):
    told: list[str] = []
    for name in "ab":
        clock.begin()
        clock.end(lambda _, name=name: told.append(name))
    Event.passed.add(3)
    clock.collect()
    assert told == []
    Event.passed.add(1)
    clock.collect()
    assert told == ["a", "b"]


def test_a_device_that_stands_still_costs_no_memory(clock):
    for _ in range(1000):
        clock.begin()
        clock.end(lambda _: None)
    assert len(clock._open) < 100
