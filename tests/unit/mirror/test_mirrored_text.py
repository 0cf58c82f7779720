"""A request at the drafter's end of the channel: nothing is told twice, nothing is left out."""

from collections.abc import Iterator

import numpy as np
import pytest

from sglang_ext.mirror import messages, text_keys
from sglang_ext.mirror.channel import Channel
from sglang_ext.mirror.executor_client import Connection
from sglang_ext.mirror.mirrored_text import MirroredText

PROMPT = list(range(1000))


@pytest.fixture
def connection() -> Iterator[Connection]:
    channel = Channel.create(capacity=2)
    yield Connection(channel, 2000)
    channel.close()


def heard(connection: Connection) -> list[int]:
    other = Channel.open(connection.channel.path)
    parts = [messages.tokens_of(record) for record in other.receive()]
    other.close()
    return np.concatenate(parts).tolist() if parts else []


def test_a_text_longer_than_the_ring_is_told_bit_by_bit(connection):
    text, output, got = MirroredText(PROMPT), [], []
    while not text.follows:
        text.tell(connection, output)
        got += heard(connection)
        output.append(5000 + len(output))
        text.extend(output[-1:])
        if len(output) > 2:
            text.tell(connection, output)
    got += heard(connection)
    assert got == PROMPT + output
    text.tell(connection, output)
    assert not heard(connection), "it was told all"


def test_one_who_was_forgotten_is_told_again_but_not_for_ever(connection):
    text = MirroredText(PROMPT[:20])
    for _ in range(8):
        text.tell(connection, [])
        assert heard(connection) == PROMPT[:20]
        text.lost(forever=False)
    text.tell(connection, [])
    assert not heard(connection) and not text.follows
    other = MirroredText(PROMPT[:20])
    other.lost(forever=True)
    other.tell(connection, [])
    assert not heard(connection)


def test_a_new_executor_is_told_everything_and_what_the_last_one_said_is_dropped(connection):
    text, new = MirroredText(PROMPT[:20]), Connection(Channel.create(2), 2000)
    text.tell(connection, [])
    text.take(text_keys.of_text(PROMPT[:20]), 20, 7, 0.5)
    text.ask, text.heard = 3, False
    assert text.chain(5)[0] == [7] and text.waits_for(connection)
    text.tell(new, [])
    assert heard(new) == PROMPT[:20]
    assert not text.chain(5)[0] and not text.ask and text.heard and not text.waits_for(new)
    new.channel.close()


def test_only_what_continues_the_committed_text_is_drafted():
    text = MirroredText([1, 2])
    branches = {(): 3, (3,): 4, (3, 4): 5, (9,): 6, (9, 6): 7}
    for path, token in branches.items():
        text.take(text_keys.of_text([1, 2, *path]), 2 + len(path), token, 0.5)
    assert text.chain(9) == ([3, 4, 5], [0.5, 0.25, 0.125])
    assert text.chain(2)[0] == [3, 4]
    text.extend([9])
    assert text.chain(9)[0] == [6, 7]
    text.take(text_keys.of_text([1, 2]), 2, 3, 0.5)  # late, and of no more use
    text.extend([6, 1])
    assert text.chain(9) == ([], [])


def test_a_draft_is_compared_with_what_was_committed():
    text = MirroredText([1])
    for proposed, committed, right, wrong in (
        ([3, 4, 5], [3, 4, 9], 2, 1),
        ([3, 4, 5], [3, 4, 5, 6], 3, 0),
        ([3, 4, 5], [3], 1, 0),
        ([], [3], 0, 0),
    ):
        text.proposed = proposed
        assert text.agreed(committed) == (right, wrong)
        assert text.agreed(committed) == (0, 0), "a draft is compared once"
