"""Packed weights' memory: one array behind the other, on huge pages, or as numpy has it."""

import gc
import weakref

import numpy as np
import pytest

from sglang_ext.cpu import huge_pages
from sglang_ext.cpu.huge_pages import VARIABLE, HugePages, on_huge_pages


@pytest.mark.parametrize("wanted", ["1", "0"])
def test_a_copy_holds_the_parts_one_behind_the_other(monkeypatch, wanted):
    monkeypatch.setenv(VARIABLE, wanted)
    parts = [np.arange(6, dtype=np.uint16).reshape(2, 3), np.full((1, 3), 9, np.uint16)]
    made = on_huge_pages(parts)
    assert made.dtype == np.uint16 and made.flags.c_contiguous and made.flags.writeable
    assert made.tolist() == [[0, 1, 2], [3, 4, 5], [9, 9, 9]]


def test_small_arrays_share_a_page_and_lie_apart(monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")
    if not huge_pages.is_wanted():
        pytest.skip("this system has no huge pages on request")
    pages = HugePages()
    first, second = (pages.empty((5, 7), np.dtype(np.float32)) for _ in range(2))
    first[:], second[:] = 1.0, 2.0
    assert (first == 1.0).all() and (second == 2.0).all()
    starts = [array.ctypes.data for array in (first, second)]
    assert starts[0] % (2 << 20) == 0 and starts[1] - starts[0] == 192


def test_what_is_larger_than_is_mapped_at_once_has_a_mapping_of_its_own(monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.setattr(huge_pages, "_CHUNK", 1 << 20)
    pages = HugePages()
    large = pages.empty((3 << 20,), np.dtype(np.uint8))
    large[-1] = 7
    assert large.size == 3 << 20 and large[-1] == 7
    assert pages.empty((0, 4), np.dtype(np.int8)).shape == (0, 4)


def test_memory_goes_with_its_last_array(monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")
    rooms, mapped = [], huge_pages._mapped

    def recorded(size):
        room = mapped(size)
        rooms.append(weakref.ref(room.base if room.base is not None else room))
        return room

    monkeypatch.setattr(huge_pages, "_mapped", recorded)
    pages = HugePages()
    made = [pages.empty((8,), np.dtype(np.int64)) for _ in range(2)]
    del pages
    made.pop()
    gc.collect()
    made[0][:] = 3
    assert rooms[0]() is not None
    made.clear()
    gc.collect()
    assert rooms[0]() is None
