"""The token channel: order, bounds, wake-ups, and what a peer's death or garbage can do."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from sglang_ext.mirror import messages
from sglang_ext.mirror.channel import Channel
from sglang_ext.mirror.shared_ring import PAYLOAD_BYTES, RECORD_BYTES, ChannelError, Record
from sglang_ext.servers import processes
from tests.eventually import eventually

# Echoes what it gets, in a process of its own; it ends with its standard input.
ECHO = """
import sys
from sglang_ext.mirror.channel import Channel
channel = Channel.open(sys.argv[1])
while True:
    channel.wait(60)
    for record in channel.receive():
        while not channel.send(record):
            pass
"""


@pytest.fixture
def channel():
    with_it = Channel.create(capacity=16)
    yield with_it
    with_it.close()


@pytest.fixture
def echo(channel):
    process = processes.start([sys.executable, "-c", ECHO, channel.path])
    yield process
    processes.kill_group(process)


def test_records_come_whole_and_in_order_in_both_directions(channel):
    other = Channel.open(channel.path)
    there = [Record(1, i, 2, 3, -4, 5, i, 0.5 * i, bytes([i]) * i) for i in range(10)]
    assert channel.send(*there) == 10
    assert other.wait(0) and other.receive() == there and not other.wait(0)
    assert other.send(there[3]) == 1
    assert channel.receive() == [there[3]] and other.receive() == []
    other.close()


def test_a_full_ring_takes_no_more_and_goes_on_when_it_was_read(channel):
    other = Channel.open(channel.path)
    records = [Record(1, i) for i in range(40)]
    assert channel.send(*records) == 16
    assert other.receive(5) == records[:5]
    assert channel.send(*records[16:]) == 5
    assert other.receive() == records[5:21]
    other.close()


def test_another_process_gets_everything_under_load_and_around_the_ring(channel, echo):
    rng = np.random.default_rng(0)
    sent = [
        Record(1 + i % 7, i, items=i, time=float(i), payload=rng.bytes(int(size)))
        for i, size in enumerate(rng.integers(0, PAYLOAD_BYTES + 1, 3000))
    ]
    got: list[Record] = []
    waiting = list(sent)
    deadline = time.monotonic() + 60
    while len(got) < len(sent) and time.monotonic() < deadline:
        del waiting[: channel.send(*waiting[:16])]
        channel.wait(1.0)
        got += channel.receive()
    assert got == sent


def test_a_wait_is_woken_by_the_other_process_and_costs_no_cpu(channel, echo):
    channel.send(Record(1))
    assert channel.wait(60)  # it is up
    channel.receive()
    cpu, begun = time.process_time(), time.monotonic()
    assert not channel.wait(0.4)
    assert time.monotonic() - begun >= 0.39
    assert time.process_time() - cpu < 0.1
    channel.send(Record(2))
    assert channel.wait(30)


def test_a_killed_peer_blocks_nothing(channel, echo):
    channel.send(Record(1))
    assert channel.wait(60)
    processes.signal_group(echo, signal.SIGSTOP)
    channel.send(*[Record(1, i) for i in range(8)])
    processes.kill_group(echo)
    begun = time.monotonic()
    channel.receive()
    for _ in range(100):
        channel.send(Record(3))  # until it is full
    assert not channel.wait(0.05)
    assert time.monotonic() - begun < 5


def test_memory_is_freed_with_its_processes():
    before = set(os.listdir("/dev/shm"))
    script = "from sglang_ext.mirror.channel import Channel; c = Channel.create(); print(c.path)"
    path = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert set(os.listdir("/dev/shm")) == before
    with pytest.raises(OSError):
        Channel.open(path)


def garbled(channel: Channel, at: int, value: bytes) -> None:
    os.pwrite(channel._descriptor, value, at)


# The preamble, then head, tail and bell of the creator's ring, 64 bytes each, then its records.
HEAD, TAIL, RECORDS = 64, 128, 256


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (HEAD, b"\xff" * 8),
        (HEAD, (17).to_bytes(8, "little")),
        (RECORDS, b"\0\0\0\0"),  # the checksum
        (RECORDS + 6, b"\xff\xff"),  # the payload's size
        (RECORDS + 8, b"\5"),  # the sequence number
        (RECORDS + RECORD_BYTES // 2, b"garbage"),
    ],
)
def test_garbage_is_an_error_and_never_a_record(channel, at, value):
    other = Channel.open(channel.path)
    channel.send(Record(1, payload=b"x" * PAYLOAD_BYTES))
    garbled(channel, at, value)
    with pytest.raises(ChannelError):
        other.receive()
    other.close()


def test_a_reader_that_moves_backwards_is_an_error(channel):
    garbled(channel, TAIL, b"\xff" * 8)
    with pytest.raises(ChannelError):
        channel.send(Record(1))


@pytest.mark.parametrize("content", [b"", b"x" * 8192])
def test_what_is_no_channel_is_refused(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ChannelError, match="no channel of version"):
        Channel.open(str(tmp_path / "file"))


def test_texts_views_and_nodes_come_as_they_went(channel):
    other = Channel.open(channel.path)
    tokens = list(range(500))
    channel.send(*messages.text_records(7, tokens, 20))
    texts = other.receive()
    assert [r.first for r in texts] == [20, 20 + texts[0].items, 20 + 2 * texts[0].items]
    assert np.concatenate([messages.tokens_of(r) for r in texts]).tolist() == tokens
    ids = np.arange(40, dtype=np.int32)
    candidates = np.arange(320, dtype=np.int32).reshape(40, 8)
    logprobs = -candidates.astype(np.float32)
    channel.send(*messages.view_records(7, 99, ids, ids - 1, candidates, logprobs, 1.5))
    views = other.receive()
    nodes = np.concatenate([messages.view_of(r) for r in views])
    assert views[0].length == 99 and views[0].time == 1.5 and views[-1].total == 40
    assert np.array_equal(nodes["candidates"], candidates)
    assert np.array_equal(nodes["logprobs"], logprobs)
    drafted = [(1 << 63, 5, 6, 0.5), (3, 6, 7, 0.25)] * 60
    channel.send(*messages.node_records(7, drafted))
    got = np.concatenate([messages.nodes_of(r) for r in other.receive()])
    assert [tuple(node) for node in got.tolist()] == drafted
    other.close()


@pytest.mark.parametrize(
    "record",
    [
        Record(messages.Kind.VIEW, 1, 5, 4, 0, 8, 1, payload=b"x" * 72),
        Record(messages.Kind.VIEW, 1, 0, 4, 0, 1000, 1, payload=b""),
        Record(messages.Kind.VIEW, 1, 0, 1 << 30, 0, 8, 1, payload=b"x" * 72),
        Record(messages.Kind.VIEW, 1, 0, 4, 0, 8, 2, payload=b"x" * 72),
    ],
)
def test_a_view_that_contradicts_itself_is_refused(record):
    with pytest.raises(ChannelError):
        messages.view_of(record)


def test_an_echo_wakes_each_wait_soon(channel, echo):
    channel.send(Record(1))
    assert eventually(lambda: channel.wait(1.0), 60)
    channel.receive()
    trips = []
    for i in range(50):
        begun = time.perf_counter()
        channel.send(Record(1, i))
        while not (got := channel.receive()):
            assert channel.wait(30), "slept until the time was up"
        trips.append(time.perf_counter() - begun)
        assert got[0].request == i
    assert sorted(trips)[25] < 0.05
