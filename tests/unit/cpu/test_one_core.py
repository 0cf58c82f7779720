"""Where a team of two threads runs while others keep the processors busy."""

import os
import threading

import pytest
import torch

from sglang_ext.cpu import one_core as module
from sglang_ext.cpu.one_core import OneCore, one_core, place_threads


class Machine:
    """A clock, what two processors were idle, and where threads were placed.

    Attributes:
        idle: of a second, by processor; None: not known.
    """

    def __init__(self, monkeypatch) -> None:
        self.now, self.idle, self.placed = 100.0, {0: 0.0, 1: 0.0}, []
        self._total = {0: 7.0, 1: 7.0}
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(module.os, "sched_getaffinity", lambda pid: {0, 1})
        self.core = OneCore(self._seconds, lambda where: self.placed.append(set(where)))

    def looks(self, seconds: float, crowded: bool = True) -> None:
        """Look five times a second."""
        for _ in range(round(5 * seconds)):
            self.now += 0.2
            if self.idle is not None:
                self._total = {one: self._total[one] + 0.2 * self.idle[one] for one in self._total}
            self.core.look(crowded)

    def _seconds(self) -> dict[int, float] | None:
        return None if self.idle is None else dict(self._total)


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


def test_threads_are_on_one_core_while_all_are_busy(machine):
    machine.looks(0.8)
    assert machine.placed == []  # not yet known
    machine.looks(5.0)
    assert machine.placed == [{machine.core.at}]
    machine.looks(1.0, crowded=False)
    assert machine.placed[1:] == [{0, 1}] and machine.core.at is None


def test_they_are_on_all_where_one_is_idle(machine):
    machine.idle = {0: 0.0, 1: 0.6}
    machine.looks(5.0)
    assert machine.placed == []
    machine.idle = {0: 0.1, 1: 0.1}
    machine.looks(3.0)
    assert machine.core.at is not None
    machine.idle = {0: 0.0, 1: 0.6}
    machine.looks(3.0)
    assert machine.placed[1:] == [{0, 1}]


def test_servers_on_the_same_core_come_apart(monkeypatch):
    """Each of two is drawn to one of two processors, until they differ: then neither is idle."""
    first, second = Machine(monkeypatch), Machine(monkeypatch)
    monkeypatch.setattr(module.time, "monotonic", lambda: max(first.now, second.now))
    draws = iter([0, 0, 1, 1, 1, 0])
    monkeypatch.setattr(module.random, "choice", lambda of: next(draws))
    for _ in range(100):
        at = {first.core.at, second.core.at}
        idle = {one: 1.0 if None not in at and one not in at else 0.0 for one in (0, 1)}
        first.idle = second.idle = idle
        first.looks(0.2)
        second.looks(0.2)
    assert (first.core.at, second.core.at) == (1, 0)
    # Together on 0, on all, together on 1, on all, apart.
    assert first.placed == [*second.placed[:4], {1}] and second.placed[4:] == [{0}]


def test_nothing_is_done_where_the_kernel_does_not_say(machine):
    machine.idle = None
    machine.looks(5.0)
    assert machine.placed == []


@pytest.mark.parametrize(
    ("threads", "processors", "asked"), [(2, 2, True), (1, 2, False), (2, 1, False), (4, 4, False)]
)
def test_only_a_team_of_two_with_room_for_two_is_asked_for(monkeypatch, threads, processors, asked):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda pid: set(range(processors)))
    monkeypatch.setattr(module, "idle_seconds", lambda: {0: 1.0, 1: 1.0})
    assert (one_core() is not None) == asked


def test_pythons_other_threads_stay_where_they_are():
    before = os.sched_getaffinity(0)
    one, end, seen = {min(before)}, threading.Event(), []

    def other() -> None:
        place_threads(one)
        seen.append((os.sched_getaffinity(0), os.sched_getaffinity(os.getpid())))
        end.set()

    try:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    finally:
        place_threads(before)
    assert end.is_set() and seen == [(before, one)]
    assert os.sched_getaffinity(0) == before
