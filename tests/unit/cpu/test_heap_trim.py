"""Free heap goes back to the system, seldom enough to cost nothing."""

import ctypes

import numpy as np
import psutil
import pytest

from sglang_ext.cpu.heap_trim import TRIM_VARIABLE, HeapTrim


def test_pages_between_what_is_kept_go_back():
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("this C library has no malloc_trim(3)")
    # Below the size from which malloc maps blocks of their own, which go back at once.
    blocks = [np.ones(100 << 10, np.uint8) for _ in range(2000)]
    kept = blocks[::20]
    del blocks
    before = psutil.Process().memory_info().rss
    heap = HeapTrim(seconds=1e-9)
    assert heap.trim_if_due()
    assert before - psutil.Process().memory_info().rss > 100 << 20
    assert all(block.all() for block in kept)


def test_it_waits_from_one_time_to_the_next(monkeypatch):
    now, calls = [100.0], []
    monkeypatch.setattr("sglang_ext.cpu.heap_trim.time.monotonic", lambda: now[0])
    heap = HeapTrim(seconds=60, trim=lambda pad: calls.append(now[0]) or 1)
    done = []
    for now[0] in (100.0, 159.0, 160.0, 161.0, 219.0, 221.0):
        done.append(heap.trim_if_due())
    assert done == [False, False, True, False, False, True]
    assert calls == [160.0, 221.0]


@pytest.mark.parametrize("text, seconds", [("", 60), ("5", 5), ("0", 0)])
def test_the_variable_says_how_often(monkeypatch, text, seconds):
    monkeypatch.setenv(TRIM_VARIABLE, text)
    now = [0.0]
    monkeypatch.setattr("sglang_ext.cpu.heap_trim.time.monotonic", lambda: now[0])
    heap = HeapTrim(trim=lambda pad: 1)
    now[0] = seconds - 0.1
    assert not heap.trim_if_due()
    now[0] = seconds + 0.1
    assert heap.trim_if_due() == (seconds > 0)


def test_a_variable_that_is_no_number_is_named(monkeypatch):
    monkeypatch.setenv(TRIM_VARIABLE, "often")
    with pytest.raises(ValueError, match=f"{TRIM_VARIABLE} must be a number of seconds"):
        HeapTrim()
