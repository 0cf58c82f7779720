"""Drafts for what requests might go on with: as if they had, without a trace, and stoppable."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datastores import (
    Continuations,
    DatastoreError,
    InputTrie,
    RetrievalConfig,
    Stop,
    SupposedDrafts,
    retrieve,
)
from datastores.segment import Document, Snapshot, build_segments

VOCAB = 6
ids = st.integers(0, VOCAB - 1)
DOCUMENTS = [Document(np.arange(200, dtype=np.int32) * 7 % 5)]
TEXT = Snapshot((), tuple(build_segments(DOCUMENTS, VOCAB, 1 << 20)), VOCAB)


def trie_of(tokens, config: RetrievalConfig | None = None) -> InputTrie:
    trie = InputTrie(config)
    trie.extend(tokens)
    return trie


def continuations(*them: tuple[int, list[int]]) -> Continuations:
    """Of (request, tokens)."""
    tokens = np.zeros((len(them), max((len(t) for _, t in them), default=0)), np.int32)
    for row, (_, own) in zip(tokens, them, strict=True):
        row[: len(own)] = own
    whose, lengths = [r for r, _ in them], [len(t) for _, t in them]
    return Continuations(np.array(whose, np.int64), tokens, np.array(lengths, np.int64))


def kept(trie: InputTrie) -> list:
    """All that a trie has, up to what it has seen."""
    size = len(trie)
    links = trie._tokens[:size], trie._same_one[:size], trie._same_two[:size]
    tables = trie._last_one, trie._last_two
    return [array.tolist() for array in (*links, *tables, trie._row)]


@settings(max_examples=100, deadline=None)
@given(
    histories=st.lists(st.lists(ids, min_size=1, max_size=40), min_size=1, max_size=3),
    supposed=st.lists(st.tuples(st.integers(0, 2), st.lists(ids, max_size=9)), max_size=6),
    reads=st.booleans(),
)
def test_drafts_are_those_of_requests_that_have_gone_on_and_nothing_changes(
    histories: list[list[int]], supposed: list[tuple[int, list[int]]], reads: bool
) -> None:
    supposed = [(whose % len(histories), tokens) for whose, tokens in supposed]
    tries = [trie_of(history) for history in histories]
    before = [kept(trie) for trie in tries]
    snapshots = [TEXT if reads else None] * len(tries)
    drafts = SupposedDrafts(tries, snapshots, continuations(*supposed), 5)
    assert len(drafts) == 0
    drafts.make()
    assert len(drafts) == len(supposed)
    assert [kept(trie) for trie in tries] == before
    for (whose, tokens), draft in zip(supposed, drafts.drafts, strict=True):
        gone_on = trie_of(histories[whose])
        gone_on.extend(tokens)
        [wanted] = retrieve([gone_on], snapshots[:1], 5)
        for name in ("tokens", "parents", "probs", "sources"):
            np.testing.assert_array_equal(getattr(draft, name), getattr(wanted, name), name)
    for trie, history in zip(tries, histories, strict=True):
        trie.extend([1, 2])  # what was supposed leaves no trace
        again = trie_of(history)
        again.extend([1, 2])
        assert kept(trie)[:3] == kept(again)[:3]


def test_room_ends_where_the_older_half_would_be_forgotten_and_there_is_none_without_a_prompt():
    trie = InputTrie(RetrievalConfig(max_input_tokens=300))
    assert trie.room == 0
    trie.extend([1] * 290)
    assert trie.room == 10
    assert trie_of([1] * 200).room == 128
    for count, fits in ((10, True), (11, False)):
        if fits:
            SupposedDrafts([trie], [None], Continuations.one([2] * count), 5).make()
        else:
            with pytest.raises(DatastoreError, match="room"):
                SupposedDrafts([trie], [None], Continuations.one([2] * count), 5)


@pytest.mark.parametrize(
    ("them", "named"), [([(1, [2])], "of the 1 requests"), ([(0, [2, -1])], "at least 0")]
)
def test_what_is_no_continuation_is_refused(them, named):
    with pytest.raises(DatastoreError, match=named):
        SupposedDrafts([trie_of([1, 2])], [None], continuations(*them), 5)


def test_once_stopped_no_draft_is_begun():
    tries, stop = [trie_of([1, 2, 1, 2])], Stop()
    drafts = SupposedDrafts(tries, [None], continuations((0, [1]), (0, [1, 2])), 5)
    stop.set()
    drafts.make(stop)
    assert stop.is_set() and stop.wait(0) and len(drafts) == 0


def test_a_stop_ends_a_long_call_between_two_drafts():
    tries = [trie_of(np.arange(4000) * 7 % 5) for _ in range(4)]
    stop = Stop()
    many = continuations(*((i % 4, [i % 5] * 8) for i in range(200_000)))
    drafts = SupposedDrafts(tries, [TEXT] * 4, many, 5)
    worker = threading.Thread(target=drafts.make, args=(stop,))
    worker.start()
    while not len(drafts):
        pass
    stop.set()
    assert stop.wait(20)
    made = len(drafts)
    worker.join(20)
    assert not worker.is_alive() and 0 < made == len(drafts) < len(many)
    [wanted] = retrieve([tries[0]], [TEXT], 5)
    assert len(wanted) and drafts.drafts.sizes[:made].min() > 0


def test_who_holds_the_inputs_is_waited_for():
    stop = Stop()
    with stop.working() as wanted:
        assert wanted
        stop.set()
        assert not stop.wait(0)
        with stop.working() as wanted:
            assert not wanted
    assert stop.wait(0)
