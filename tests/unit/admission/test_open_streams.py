"""Connections that stay open are counted by namespace."""

import gc

import pytest

from sglang_ext.api.http import ApiError
from sglang_ext.api.open_streams import Streams


def test_one_namespace_leaves_room_for_others():
    streams = Streams(8, share=0.5)
    greedy = [streams.enter("greedy") for _ in range(4)]
    with pytest.raises(ApiError, match="4 streams of this namespace") as refused:
        streams.enter("greedy")
    assert refused.value.status == 429
    other = [streams.enter("other"), streams.enter("other")]
    with pytest.raises(ApiError):
        streams.enter("other")
    assert len(streams) == len(greedy) + len(other)


def test_a_closed_stream_makes_room():
    streams = Streams(1)
    with streams.enter("a"), pytest.raises(ApiError):
        streams.enter("b")
    with streams.enter("b"):
        pass
    assert len(streams) == 0


def test_a_stream_that_is_never_opened_makes_room():
    streams = Streams(1)
    slot = streams.enter("a")
    del slot
    gc.collect()
    assert len(streams) == 0
