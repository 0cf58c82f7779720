"""OpenMP's waits: short while others want the processors, and as they are set while nobody does."""

import hashlib
import os
import subprocess
import sys
import threading

import pytest
import torch

from sglang_ext.cpu import shared_cores
from sglang_ext.cpu.shared_cores import (
    WAITS_VARIABLE,
    Crowd,
    ShortWaits,
    waited_seconds,
    watch_cores,
)
from tests.eventually import eventually

# CPU time of 200 products' ends, between which the other threads spin or sleep: as they are set,
# with short waits, and as they are set again.
SPENT = """
import os, time
os.sched_setaffinity(0, range(os.cpu_count()))  # a worker of the tests may have one alone
import torch
from sglang_ext.cpu.shared_cores import ShortWaits
torch.set_num_threads(2)
values = torch.ones(1 << 18)
def spent():
    values.add_(1.0)
    before = time.process_time()
    for _ in range(200):
        values.add_(1.0)
        time.sleep(0.002)
    return time.process_time() - before
waits = ShortWaits()
found = [spent()]
for on in (True, False):
    waits.set(on)
    found.append(spent())
print(*found)
"""


def test_threads_hardly_spin_with_short_waits_and_spin_again_without():
    env = {**os.environ, "GOMP_SPINCOUNT": "100000", "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", SPENT], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    before, short, after = map(float, done.stdout.split())
    assert short < 0.6 * before
    assert short < 0.6 * after


class Clock:
    """A clock, and processors of which others use a part.

    Attributes:
        part: of a processor; None: not known.
    """

    def __init__(self, monkeypatch) -> None:
        self.now, self.used, self.part = 100.0, 7.0, 0.0
        monkeypatch.setattr(shared_cores.time, "monotonic", lambda: self.now)

    def others(self) -> float | None:
        return None if self.part is None else self.used

    def looks(self, crowd: Crowd, seconds: float, waited: float) -> list[bool]:
        """What a crowd says five times a second."""
        said = []
        for _ in range(round(5 * seconds)):
            self.now += 0.2
            self.used += 0.2 * (self.part or 0.0)
            said.append(crowd.note(waited))
        return said


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_threads_that_wait_for_processors_tell_of_a_crowd(clock):
    crowd = Crowd(clock.others)
    assert not crowd.note(0.1)
    # Requests that are taken apart beside the model's threads.
    assert not any(crowd.note(0.8) for _ in range(3))
    assert not crowd.note(0.1)
    assert [crowd.note(0.8) for _ in range(4)] == [False, False, False, True]


def test_a_crowd_is_there_while_others_use_processors_whatever_threads_wait(clock):
    crowd = Crowd(clock.others)
    clock.part = 1.7
    assert clock.looks(crowd, 0.8, 0.9)[-1]
    assert all(clock.looks(crowd, 20.0, -0.2))
    clock.part = 0.05
    said = clock.looks(crowd, 2.2, 0.5)
    # The second in which they ended counts as it was used.
    assert said[0] and not said[-1]
    assert not any(clock.looks(crowd, 5.0, 0.3))


def test_what_others_use_in_pauses_is_no_crowd(clock):
    crowd = Crowd(clock.others)
    clock.part = 1.7
    assert clock.looks(crowd, 0.8, 0.9)[-1]
    said = []
    for _ in range(4):  # servers that are asked by turns
        clock.part = 0.0
        said += clock.looks(crowd, 0.6, -0.2)
        # The other's turn begins, and this process is not seen idle before the look's end.
        clock.part = 1.7
        said += clock.looks(crowd, 0.2, -0.2)
        clock.now, clock.used = clock.now + 3.0, clock.used + 5.1
        crowd.pause()
    assert said[0] and not said[-1]


def test_a_crowd_stays_through_pauses_while_others_use_processors_beside_this_process(clock):
    crowd = Crowd(clock.others)
    clock.part = 1.7
    assert clock.looks(crowd, 0.8, 0.9)[-1]
    for _ in range(5):
        assert all(clock.looks(crowd, 0.8, -0.2))
        clock.now, clock.used = clock.now + 3.0, clock.used + 5.1
        crowd.pause()


def test_requests_too_short_to_tell_end_a_crowd_where_others_use_nothing(clock):
    crowd = Crowd(clock.others)
    clock.part = 1.7
    assert clock.looks(crowd, 0.8, 0.9)[-1]
    clock.part = 0.0
    said = []
    for _ in range(6):
        said += clock.looks(crowd, 0.2, -0.2)
        clock.now += 1.0
        crowd.pause()
    assert not said[-1]


def test_where_others_use_is_not_known_waits_tell_again(clock):
    crowd = Crowd(clock.others)
    clock.part = None
    assert clock.looks(crowd, 0.8, 0.9)[-1]
    assert not all(clock.looks(crowd, 1.2, 0.9))
    assert any(clock.looks(crowd, 1.0, 0.9))


def test_the_kernel_counts_waits_of_threads_that_want_the_same_processor():
    end, block = threading.Event(), bytes(1 << 20)

    def want_it():
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # of this thread alone
        while not end.is_set():
            hashlib.sha256(block)  # without Python's lock

    threads = [threading.Thread(target=want_it) for _ in range(2)]
    before = waited_seconds()
    assert before is not None
    try:
        for thread in threads:
            thread.start()
        eventually(lambda: waited_seconds() - before > 0.2, 60, "waits are counted")
    finally:
        end.set()
        for thread in threads:
            thread.join()


def test_waking_up_is_no_wait(monkeypatch, tmp_path):
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    (tmp_path / "1" / "schedstat").write_text("9000000 40000000 1000\n")
    (tmp_path / "2" / "schedstat").write_text("9000000 20000000 1000\n")
    monkeypatch.setattr(shared_cores, "_TASKS", tmp_path)
    assert waited_seconds() == pytest.approx(0.06 - 2000 * 15e-6)


def test_a_kernel_that_does_not_count_waits_is_not_watched(monkeypatch, tmp_path):
    monkeypatch.setattr(shared_cores, "_TASKS", tmp_path)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert waited_seconds() is None
    assert watch_cores() is None


@pytest.fixture
def waits(monkeypatch):
    """What watch_cores sets, with the waits of its threads in `waited`."""
    made = []

    class Recorded(ShortWaits):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr(shared_cores, "ShortWaits", Recorded)
    # Other tests' backends watch this process too, in a crowd perhaps.
    monkeypatch.setattr(shared_cores, "_crowded", threading.Event())
    monkeypatch.setattr(shared_cores, "_LOOK_S", 0.001)
    monkeypatch.setattr(shared_cores, "_IDLE", 0.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    return made


def test_waits_follow_the_crowd(waits, monkeypatch):
    total, step = [0.0], [1.0]

    def waited():
        total[0] += step[0]
        return total[0]

    monkeypatch.setattr(shared_cores, "waited_seconds", waited)
    # Other programs end when the waits do: those of this machine go on.
    used = [0.0]

    def others():
        used[0] += step[0]
        return used[0]

    monkeypatch.setattr(shared_cores, "Crowd", lambda: Crowd(others))
    assert not shared_cores.is_crowded()
    end = watch_cores()
    try:
        eventually(lambda: waits[0].on, 60, "waits are short in a crowd")
        assert shared_cores.is_crowded()
        step[0] = 0.0
        eventually(lambda: not waits[0].on, 60, "waits are as they are set without one")
        assert not shared_cores.is_crowded()
    finally:
        end.set()


def test_an_idle_process_does_not_look(waits, monkeypatch):
    looks = []
    monkeypatch.setattr(shared_cores, "waited_seconds", lambda: looks.append(1) or 1.0)
    monkeypatch.setattr(shared_cores, "_IDLE", 1e6)
    rests = iter([False] * 20 + [True])
    shared_cores._watch(ShortWaits(), lambda seconds: next(rests))
    assert len(looks) == 1  # as it began


def test_short_waits_can_be_had_always_or_never(waits, monkeypatch):
    monkeypatch.setenv(WAITS_VARIABLE, "never")
    assert watch_cores() is None and not waits
    monkeypatch.setenv(WAITS_VARIABLE, "always")
    assert watch_cores() is None and waits[0].on
    waits[0].set(False)
    assert not [t for t in threading.enumerate() if t.name == "openmp-team"]


def test_one_thread_has_nobody_to_wait_for(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert watch_cores() is None


def test_another_value_of_the_variable_is_refused(monkeypatch):
    monkeypatch.setenv(WAITS_VARIABLE, "sometimes")
    with pytest.raises(ValueError, match=f"{WAITS_VARIABLE}.*auto, always, never.*'sometimes'"):
        watch_cores()


@pytest.mark.parametrize(
    ("threads", "processors", "holders"), [(2, 2, 1), (2, 4, 3), (8, 16, 2), (4, 64, 16)]
)
def test_teams_are_held_until_threads_are_more_than_processors(
    monkeypatch, threads, processors, holders
):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(shared_cores.os, "sched_getaffinity", lambda pid: set(range(processors)))
    assert shared_cores._holders_needed() == holders
