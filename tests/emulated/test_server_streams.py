"""The emulated streams: what is copied to the host without waiting is not there before a wait."""

import pytest
import torch

from scripts.emulation.fake_streams import (
    Event,
    Stream,
    StreamContext,
    async_d2h,
    current_stream,
    pinned_empty,
)


def copied(value: torch.Tensor) -> tuple[torch.Tensor, Event, Stream]:
    """A copy on a stream of its own, and an event behind it."""
    stream, done = Stream(), Event()
    with StreamContext(stream):
        host = async_d2h(value)
        done.record()
    return host, done, stream


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool, torch.float32])
def test_a_copy_is_poison_until_its_event_is_waited_for(dtype):
    value = torch.tensor([0, 1, 1]).to(dtype)
    host, done, _ = copied(value)
    assert not torch.eq(host, value).any()
    done.synchronize()
    assert torch.equal(host.as_subclass(torch.Tensor), value)


def test_a_copy_has_the_values_of_when_it_was_issued():
    value = torch.tensor([3])
    host, done, _ = copied(value)
    value[0] = 4
    done.synchronize()
    assert host.tolist() == [3]


def test_an_event_from_before_a_copy_does_not_wait_for_it():
    stream, before = Stream(), Event()
    with StreamContext(stream):
        before.record()
        host = async_d2h(torch.tensor([3]))
    before.synchronize()
    assert host.tolist() == [-1]
    stream.synchronize()
    assert host.tolist() == [3]


def test_a_stream_that_waits_for_another_takes_over_its_copies():
    host, _, stream = copied(torch.tensor([3]))
    behind, done = Stream(), Event()
    behind.wait_stream(stream)
    assert host.tolist() == [-1]  # the device waits, not the host
    done.record(behind)
    done.synchronize()
    assert host.tolist() == [3]


def test_the_first_query_says_no_and_leaves_the_copy_open():
    host, done, _ = copied(torch.tensor([3]))
    assert not done.query() and host.tolist() == [-1]
    assert done.query() and host.tolist() == [3]


def test_a_blocking_copy_to_pinned_memory_is_there_at_once():
    host = pinned_empty(1, dtype=torch.int64, pin_memory=True)
    host.copy_(torch.tensor([3]))
    assert host.tolist() == [3]


def test_a_later_copy_to_the_same_place_lands_later():
    stream = Stream()
    host = pinned_empty(1, dtype=torch.int64, pin_memory=True)
    with StreamContext(stream):
        host.copy_(torch.tensor([3]), non_blocking=True)
        host.copy_(torch.tensor([4]), non_blocking=True)
    stream.synchronize()
    assert host.tolist() == [4]


def test_contexts_nest():
    outer, inner, before = Stream(), Stream(), current_stream()
    with StreamContext(outer):
        with StreamContext(inner):
            assert current_stream() is inner
        assert current_stream() is outer
    assert current_stream() is before


def test_only_timed_events_tell_time():
    begun, ended = Event(enable_timing=True), Event(enable_timing=True)
    begun.record()
    ended.record()
    assert begun.elapsed_time(ended) >= 0
    with pytest.raises(ValueError, match="enable_timing"):
        begun.elapsed_time(Event())
