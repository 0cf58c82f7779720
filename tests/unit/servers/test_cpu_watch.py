"""Who else used the processors: read from the kernel, and told apart from what is ours."""

import os
import sys
import time

import pytest

from sglang_ext.servers import cpu_watch, processes
from sglang_ext.servers.cpu_watch import (
    CpuUse,
    CpuWatch,
    Shares,
    family_seconds,
    idle_seconds,
    processor_seconds,
)
from tests.eventually import eventually

# user nice system idle iowait irq softirq steal guest guest_nice, in ticks of 10 ms.
STAT = """\
cpu  1110 20 30 400 5 6 7 80 9 0
cpu0 100 10 20 200 5 1 2 30 0 0
cpu1 1000 10 10 200 0 5 5 50 9 0
intr 1 2 3
"""
BUSY = "while True: pass"


@pytest.fixture
def ticks(monkeypatch):
    monkeypatch.setattr(cpu_watch.os, "sysconf", lambda name: 100)


def readings(*uses):
    """What CpuWatch reads, one after the other."""
    rest = iter(uses)
    return lambda: next(rest)


def test_work_and_steal_of_our_processors_are_counted(ticks):
    # Guests' time is within user's, and waiting for disks is no work.
    assert processor_seconds(STAT, {0}) == pytest.approx((1.33, 0.3))
    assert processor_seconds(STAT, {0, 1}) == pytest.approx((1.33 + 10.3, 0.8))


def test_a_processor_without_a_line_is_told(ticks):
    with pytest.raises(ValueError, match="cpu2"):
        processor_seconds(STAT, {0, 2})


def test_what_is_not_ours_is_foreign():
    before = CpuUse(clock=100.0, busy=50.0, stolen=3.0, own=20.0)
    after = CpuUse(clock=120.0, busy=65.0, stolen=4.0, own=25.0)
    watch = CpuWatch(read=readings(before, after))
    assert watch.shares is None
    with watch.span():
        pass
    shares = watch.shares
    assert shares == Shares(foreign=0.5, stolen=0.05) and shares.disturbed
    assert "50.0%" in str(shares) and "5.0%" in str(shares)


def test_spans_add_up_and_what_lies_between_does_not_count():
    uses = [CpuUse(t, t, 0.0, t) for t in (0.0, 10.0)]  # all is ours
    uses += [CpuUse(100.0, 90.0, 0.0, 20.0), CpuUse(110.0, 100.0, 0.0, 20.0)]  # all is another's
    watch = CpuWatch(read=readings(*uses))
    for _ in range(2):
        with watch.span():
            pass
    assert watch.shares == Shares(0.5, 0.0)


def test_ticks_counted_to_the_wrong_one_make_no_negative_share():
    watch = CpuWatch(read=readings(CpuUse(0.0, 0.0, 0.0, 0.0), CpuUse(1.0, 0.5, 0.0, 0.51)))
    with watch.span():
        pass
    shares = watch.shares
    assert shares == Shares(0.0, 0.0) and not shares.disturbed


def test_a_server_that_is_not_ours_is_not_told_from_other_programs():
    uses = readings(CpuUse(0.0, 0.0, 0.0, 0.0), CpuUse(1.0, 0.9, 0.01, 0.0))
    watch = CpuWatch(whole=False, read=uses)
    with watch.span():
        pass
    assert watch.shares == Shares(None, pytest.approx(0.01))
    assert "other programs" not in str(watch.shares)


def test_where_the_kernel_does_not_say_nothing_is_known(monkeypatch, tmp_path):
    monkeypatch.setattr(cpu_watch, "_STAT", str(tmp_path / "none"))
    assert CpuUse.now() is None
    watch = CpuWatch()
    with watch.span():
        pass
    assert watch.shares is None


def test_the_kernel_of_this_machine_says_it():
    before = CpuUse.now()
    assert before is not None
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    after = CpuUse.now()
    assert after is not None
    assert after.clock > before.clock
    assert after.own - before.own >= 0.15  # clock ticks
    assert after.busy - before.busy >= 0.1


def test_processes_below_this_one_are_ours_also_when_they_have_ended():
    before = family_seconds()
    process = processes.start([sys.executable, "-c", BUSY])
    try:
        eventually(lambda: family_seconds() - before > 0.3, 60, "the busy process's time is ours")
    finally:
        processes.stop_group(process)
    assert family_seconds() - before > 0.3


def test_only_processors_that_we_may_use_count(monkeypatch):
    one = {min(os.sched_getaffinity(0))}
    monkeypatch.setattr(cpu_watch.os, "sched_getaffinity", lambda pid: one)
    now = CpuUse.now()
    assert now is not None
    assert now.clock == pytest.approx(time.monotonic(), abs=60)


def test_idle_seconds_are_read(monkeypatch, tmp_path):
    stat = tmp_path / "stat"
    stat.write_text("cpu  9 9 9 9\ncpu0 1 2 3 400 50 6 7 8\ncpu1 1 2 3 500 0 6 7 8\nintr 5\n")
    monkeypatch.setattr(cpu_watch, "_STAT", str(stat))
    monkeypatch.setattr(cpu_watch.os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(cpu_watch.os, "sysconf", lambda name: 100)
    assert idle_seconds() == {0: 4.5, 1: 5.0}
    monkeypatch.setattr(cpu_watch.os, "sched_getaffinity", lambda pid: {0, 2})
    assert idle_seconds() is None
    stat.write_text("cpu0 1 2\n")
    assert idle_seconds() is None
