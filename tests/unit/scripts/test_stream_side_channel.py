"""The observer of chunk sizes: what he recognises, and what he can only guess."""

import pytest

from scripts.bench_stream_side_channel import Trace, recognised


def traces(*sizes):
    return [Trace(tuple(each), 0.0) for each in sizes]


def test_traces_of_their_own_are_recognised_through_noise():
    known = traces([1, 4, 1, 2], [2, 2, 2, 2], [8], [1] * 8)
    seen = traces([1, 4, 2, 1], [2, 2, 2, 1, 1], [8], [1] * 8)
    assert recognised(known, seen) == 1


def test_equal_traces_leave_chance():
    same = traces(*[[8, 8]] * 4)
    assert recognised(same, same) == pytest.approx(1 / 4)


def test_a_trace_that_has_changed_leads_astray():
    assert recognised(traces([1, 1], [2]), traces([2], [1, 1])) == 0
