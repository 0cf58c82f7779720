"""The KV pool: no memory before tokens come, zeros where none have been."""

from types import SimpleNamespace

import psutil
import torch

from sglang_ext.cpu.kv_pool import _unback_pool, unback

MIB = 1 << 20


def resident():
    return psutil.Process().memory_info().rss


def test_a_pool_takes_memory_as_it_is_written_to():
    keys, values = ([torch.zeros(16 * MIB)] for _ in range(2))
    full = resident()
    _unback_pool(None, SimpleNamespace(k_buffer=keys, v_buffer=values))
    assert full - resident() > 120 * MIB
    keys[0][:MIB] = 1.0
    assert full - resident() > 110 * MIB
    assert keys[0].sum() == MIB and not values[0].any()


def test_what_lies_beside_the_zeros_stays():
    whole = torch.ones(MIB)
    part = whole[1000:-1000]
    part.zero_()
    unback(part)
    assert not part.any()
    assert whole[:1000].all() and whole[-1000:].all()


def test_less_than_a_page_stays_as_it_is():
    few = torch.zeros(3)
    unback(few)
    few[1] = 2.0
    assert few.tolist() == [0.0, 2.0, 0.0]
