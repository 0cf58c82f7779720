"""Live ingest, corpora, limits, and use from many threads."""

import threading

import numpy as np
import pytest

from datastores import Datastore, DatastoreError, InputTrie, RetrievalConfig, retrieve
from datastores.segment import document_digest
from datastores.wal import Deletion
from tests.eventually import eventually

VOCAB = 500


def drafted(
    store: Datastore, query: list[int], nodes: int = 50, namespace: str = "default"
) -> set[int]:
    trie = InputTrie()
    trie.extend(query)
    config = RetrievalConfig(max_input_samples=0)
    return set(retrieve([trie], store.snapshot(namespace), nodes, config)[0].tokens.tolist())


def documents_in(store: Datastore) -> int:
    return store.info().num_documents


def test_added_documents_become_searchable_by_themselves() -> None:
    with Datastore(VOCAB) as store:
        store.add([1, 2, 3])
        eventually(lambda: documents_in(store))
        assert drafted(store, [1]) == {2, 3}


def test_flush_makes_all_of_it_searchable_and_merges_keep_it() -> None:
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, VOCAB, rng.integers(1, 400)) for _ in range(300)]
    with Datastore(VOCAB, live_interval=0.0) as store:
        for i, document in enumerate(documents):
            store.add(document)
            if i % 10 == 0:
                store.flush(20)
                assert documents_in(store) == i + 1
        store.flush(20)
        assert documents_in(store) == len(documents)
        assert store.num_tokens == sum(d.size for d in documents)
        eventually(lambda: store.info().sub_indices <= 6)
        stored = np.concatenate([s.tokens for s in store.snapshot().segments])
        expected = np.concatenate([np.append(d, VOCAB) for d in documents])
        np.testing.assert_array_equal(stored, expected)


def test_merges_in_slices_while_documents_keep_coming() -> None:
    """Segments too large to be merged at once, so that ingest and merging alternate."""
    rng = np.random.default_rng(1)
    with Datastore(VOCAB, live_interval=0.0) as store:
        for _ in range(4):
            store.add(rng.integers(100, VOCAB, 150_000))
            store.flush(30)
        for i in range(30):
            store.add([i, i + 1, i + 2])
            store.flush(30)
            assert i + 1 in drafted(store, [i])
        eventually(lambda: store.info().sub_indices <= 2)
        assert documents_in(store) == 34


def test_a_flood_does_not_pile_up_segments() -> None:
    """Each batch is too large to be merged at once, and the next is there before a merge ends."""
    rng = np.random.default_rng(4)
    most = 0
    with Datastore(VOCAB, live_interval=0.0) as store:
        for _ in range(60):
            store.add(rng.integers(0, VOCAB, 70_000))
            store.flush(60)
            most = max(most, len(store.snapshot().segments))
        assert store.num_tokens == 60 * 70_000
    assert most <= 26


def test_oldest_is_dropped_beyond_max_tokens() -> None:
    with Datastore(VOCAB, max_tokens=800, live_interval=0.0) as store:
        for i in range(60):
            store.add([i] * 50)
            store.flush(20)
            assert store.num_tokens <= 800
        info = store.info()
        assert info.evicted_tokens == 60 * 50 - info.num_tokens
        assert info.num_tokens >= 600
        assert drafted(store, [0]) == set()
        assert drafted(store, [59]) == {59}


def test_a_document_longer_than_a_sub_index_is_kept_in_pieces() -> None:
    with Datastore(VOCAB, max_tokens=80) as store:
        store.add(list(range(45)))
        store.flush(20)
        assert store.num_tokens == 45
        assert max(s.num_tokens for s in store.snapshot().segments) <= 10
        assert 8 in drafted(store, [7])


def test_a_full_queue_drops_and_counts(may_sort: threading.Event) -> None:
    with Datastore(VOCAB, live_buffer_tokens=100, live_interval=60) as store:
        taken = [store.add([1] * 40) for _ in range(4)]
        info = store.info()
        may_sort.set()
        assert taken == [True, True, False, False]
        assert info.dropped_documents == 2
        assert info.queued_tokens == 80
        store.flush(20)  # does not wait for the interval
        assert documents_in(store) == 2


@pytest.mark.parametrize("bad", [[VOCAB], [-1], [1, 2, VOCAB + 7], ["a"], [[1]]])
def test_bad_documents_are_refused(bad: list) -> None:
    with Datastore(VOCAB) as store:
        with pytest.raises(DatastoreError):
            store.add(bad)
        assert store.list_corpora() == {}
        store.add([])
        store.flush(5)
        assert documents_in(store) == 0
        with pytest.raises(DatastoreError, match="document 1"):
            store.add_corpus("c", [[1], bad])


def test_corpora_come_and_go_as_a_whole() -> None:
    with Datastore(VOCAB) as store:
        store.add([1, 100])
        store.flush(20)
        assert store.add_corpus("a", iter([[1, 200, 201], [5]])) == 4
        assert store.add_corpus("b", [[1, 300]]) == 2
        assert store.list_corpora() == {"a": 4, "b": 2}
        assert drafted(store, [1]) == {100, 200, 201, 300}
        store.remove_corpus("a")
        assert drafted(store, [1]) == {100, 300}
        assert store.delete_namespace("default") == 2
        assert drafted(store, [1]) == {300}
        with pytest.raises(DatastoreError, match="'a'"):
            store.remove_corpus("a")
        with pytest.raises(DatastoreError, match="exists already"):
            store.add_corpus("b", [[1]])
        with pytest.raises(DatastoreError, match="no tokens"):
            store.add_corpus("c", [[], []])
        with pytest.raises(DatastoreError, match="corpus must be a text"):
            store.add_corpus("", [[1]])
        assert store.info().corpora == {"b": 2}


def test_corpora_have_a_limit() -> None:
    with Datastore(VOCAB, max_corpus_tokens=10) as store:
        store.add_corpus("a", [[1] * 8])
        with pytest.raises(DatastoreError, match="max_corpus_tokens is 10"):
            store.add_corpus("b", [[1] * 3])
        assert store.list_corpora() == {"a": 8}


def test_namespaces_do_not_see_each_other() -> None:
    with Datastore(VOCAB) as store:
        store.add_corpus("shared", [[1, 50]])
        store.add([1, 100], namespace="a")
        store.add([1, 200], namespace="b")
        store.flush(20)
        assert drafted(store, [1], namespace="a") == {50, 100}
        assert drafted(store, [1], namespace="b") == {50, 200}
        assert drafted(store, [1]) == {50}
        assert store.namespaces() == {"a": 2, "b": 2}
        assert store.delete_namespace("a") == 2
        assert drafted(store, [1], namespace="a") == {50}
        assert drafted(store, [1], namespace="b") == {50, 200}
        for bad in ("", "x" * 600, None):
            with pytest.raises(DatastoreError, match="namespace must be"):
                store.add([1], namespace=bad)  # type: ignore[arg-type]


def test_one_document_is_deleted_by_its_name() -> None:
    with Datastore(VOCAB) as store:
        store.add([1, 100, 101], name="r1", namespace="a")
        store.add([1, 200], name="r2", namespace="a")
        store.add([1, 300], name="r1", namespace="b")
        assert store.delete_document("r1", namespace="a") == 3
        assert drafted(store, [1], namespace="a") == {200}
        assert drafted(store, [1], namespace="b") == {300}
        assert store.delete_document("r1") == 2
        assert store.delete_document("unknown") == 0
        store.add([1, 400], name="r1", namespace="a")  # comes after the deletion
        store.flush(20)
        assert drafted(store, [1], namespace="a") == {200, 400}


def test_a_deletion_takes_what_is_being_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch is in the ingest thread's hands when the deletion comes."""
    with Datastore(VOCAB, live_interval=0.0) as store:
        live = store._served._live  # type: ignore[attr-defined]
        sorting, go_on = threading.Event(), threading.Event()
        absorb = live._absorb_small

        def wait(*args):
            sorting.set()
            go_on.wait(20)
            return absorb(*args)

        monkeypatch.setattr(live, "_absorb_small", wait)
        store.add([1, 100], name="r1")
        store.add([1, 200], name="r2")
        sorting.wait(20)
        live.delete(Deletion(10, None, document_digest("r1")))
        go_on.set()
        store.flush(20)
        assert drafted(store, [1]) == {200}


def test_close_ingests_what_is_left_and_refuses_more() -> None:
    store = Datastore(VOCAB, live_interval=60)
    store.add([1, 2])
    store.close()
    assert drafted(store, [1]) == {2}
    with pytest.raises(DatastoreError, match="closed"):
        store.add([1])
    store.close()


def test_flush_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with Datastore(VOCAB) as store:
        go_on = threading.Event()
        live = store._served._live  # type: ignore[attr-defined]
        ingest = live._ingest_batch
        monkeypatch.setattr(live, "_ingest_batch", lambda batch: (go_on.wait(20), ingest(batch)))
        store.add([1, 2])
        with pytest.raises(TimeoutError, match="1 documents"):
            store.flush(0.1)
        go_on.set()
        store.flush(20)
        assert documents_in(store) == 1


def test_a_failed_thread_is_told_to_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Datastore(VOCAB)

    def fail(batch: list) -> None:
        raise MemoryError("no room")

    live = store._served._live  # type: ignore[attr-defined]
    monkeypatch.setattr(live, "_ingest_batch", fail)
    store.add([1])
    with pytest.raises(DatastoreError, match="no room"):
        store.flush(20)
    with pytest.raises(DatastoreError, match="no room"):
        store.add([1])


@pytest.mark.parametrize(
    ("option", "value"),
    [("vocab_size", 0), ("vocab_size", 1.5), ("max_tokens", 0), ("live_buffer_tokens", -1),
     ("live_interval", -1), ("max_corpus_tokens", True)],
)  # fmt: skip
def test_bad_options_are_refused_by_name(option: str, value: object) -> None:
    with pytest.raises(DatastoreError, match=option):
        Datastore(**{"vocab_size": VOCAB, option: value})  # type: ignore[arg-type]


def test_searching_while_everything_changes() -> None:
    """Readers see whole documents only, whatever is added, merged, evicted, removed, cleared."""
    errors: list[BaseException] = []
    stop = threading.Event()
    drafts, managed = [0, 0], [0]
    store = Datastore(VOCAB, max_tokens=40_000, live_interval=0.0)

    def guarded(work) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                errors.append(error)
                stop.set()

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def write() -> None:
        rng = np.random.default_rng(2)
        while not stop.is_set():
            # Ascending by one: whatever follows a token in any document is its successor.
            starts = rng.integers(0, VOCAB - 60, 20)
            for start in starts:
                store.add(np.arange(start, start + rng.integers(2, 60)))
            store.flush(20)

    def manage() -> None:
        k = 0
        while not stop.is_set():
            store.add_corpus(f"c{k}", [np.arange(i, i + 30) for i in range(0, 400, 7)])
            if k:
                store.remove_corpus(f"c{k - 1}")
            if k % 10 == 9:
                store.delete_namespace("default")
            k += 1
            managed[0] = k

    def read(who: int) -> None:
        rng = np.random.default_rng(who)
        config = RetrievalConfig(max_input_samples=0)
        while not stop.is_set():
            tries = []
            lasts = rng.integers(0, VOCAB - 1, 4)
            for last in lasts:
                trie = InputTrie(config)
                trie.extend([last])
                tries.append(trie)
            for last, draft in zip(
                lasts, retrieve(tries, store.snapshot(), 8, config), strict=True
            ):
                np.testing.assert_array_equal(draft.tokens, last + 1 + np.arange(len(draft)))
                drafts[who] += len(draft)

    threads = [guarded(write), guarded(manage), guarded(lambda: read(0)), guarded(lambda: read(1))]
    try:
        eventually(
            lambda: errors or (min(drafts) > 100 and managed[0] > 20), 300,
            "100 drafted tokens for each reader while corpora come and go 20 times",
        )  # fmt: skip
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
        store.close()
    assert not errors, errors[0]
    assert not any(thread.is_alive() for thread in threads)


def test_retrieval_does_not_wait_for_building() -> None:
    """Searches take neither lock."""
    store = Datastore(VOCAB)
    store.add([1, 2, 3])
    store.flush(20)
    held = threading.Event()
    release = threading.Event()

    def hold() -> None:
        with store._served._live._changed, store._lock:  # type: ignore[attr-defined]
            held.set()
            release.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(20)
    assert drafted(store, [1]) == {2, 3}
    release.set()
    thread.join()
