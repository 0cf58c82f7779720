"""Work grows with the number of namespaces, and not with its square."""

import numpy as np
import pytest

import datastores.live
from datastores import Datastore
from datastores.live import LiveCollection
from datastores.segment import Document, build_segments, document_digest
from datastores.wal import Deletion

VOCAB = 500
NAMESPACES = 40


def batch(first: int = 0) -> list[tuple[str, Document]]:
    """A document of each namespace n0, n1, ..., named r0, r1, ..., with numbers from first on."""
    return [
        (
            f"n{i}",
            Document(np.arange(i, i + 30, dtype=np.int32), first + i, document_digest(f"r{i}")),
        )
        for i in range(NAMESPACES)
    ]


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[object]:
    """What a function of live.py is called with first, call by call."""
    calls: list[object] = []
    real = getattr(datastores.live, name)

    def count(first, *args):
        calls.append(first)
        return real(first, *args)

    monkeypatch.setattr(datastores.live, name, count)
    return calls


def test_a_batch_over_many_namespaces_is_published_once() -> None:
    changes: list[int] = []
    live = LiveCollection(VOCAB, None, 1 << 20, 60, lambda: changes.append(1))
    live._ingest_batch(batch())
    assert len(changes) == 1
    before = live.segments
    seen = dict(before)
    live._ingest_batch(batch(NAMESPACES))
    assert len(changes) == 2
    assert before == seen  # what a reader holds has not changed
    assert {len(s.documents) for (s,) in live.segments.values()} == {2}


def test_making_room_for_many_namespaces_counts_each_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    live = LiveCollection(VOCAB, NAMESPACES * 30, 1 << 20, 60, lambda: None)
    monkeypatch.setattr(live, "_absorb_small", lambda elders, new: elders)
    live._ingest_batch(batch())
    counts = counted(monkeypatch, "_total_tokens")
    live._ingest_batch(batch(NAMESPACES))
    assert live.evicted_tokens == NAMESPACES * 30
    assert {int(s.documents["number"][0]) for (s,) in live.segments.values()} == set(
        range(NAMESPACES, 2 * NAMESPACES)
    )
    assert len(counts) <= 2 * NAMESPACES


def test_deleting_one_request_looks_closely_at_its_own_part_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Datastore(VOCAB, live_interval=0.0) as store:
        for namespace, document in batch():
            store.add(document.tokens, namespace=namespace, name=f"r{namespace[1:]}")
        store.flush(20)
        live = store._served._live  # type: ignore[attr-defined]
        before = dict(live.segments)
        lengths = counted(monkeypatch, "document_lengths")
        assert store.delete_document("r7") == 30
        assert lengths == [before["n7"][0]]
        assert "n7" not in live.segments
        assert all(live.segments[name] == before[name] for name in before if name != "n7")


def test_only_what_a_deletion_takes_of_a_batch_is_sorted_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The deletion comes when all of the batch is sorted and nothing of it is published."""
    live = LiveCollection(VOCAB, None, 1 << 20, 60, lambda: None)
    live._ingest_batch(batch())
    sort = live._sorted

    def sort_then_delete(namespace, documents):
        found = sort(namespace, documents)
        if namespace == f"n{NAMESPACES - 1}":
            live.delete(Deletion(1000, None, document_digest("r3")))
        return found

    monkeypatch.setattr(live, "_sorted", sort_then_delete)
    built = counted(monkeypatch, "build_segments")
    live._ingest_batch(batch(NAMESPACES))
    assert len(built) == NAMESPACES + 1
    assert "n3" not in live.segments
    assert {s.num_tokens for n in live.segments for s in live.segments[n]} == {60}


def test_what_is_appended_while_a_batch_is_sorted_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A follower's backlog comes from another thread than the batch."""
    live = LiveCollection(VOCAB, None, 1 << 20, 60, lambda: None)
    live._ingest_batch(batch())
    appended = list(build_segments([Document(np.arange(5, dtype=np.int32), 500)], VOCAB, 100))
    sort = live._sorted

    def sort_then_append(namespace, documents):
        found = sort(namespace, documents)
        if namespace == "n1":
            live.append({"n1": appended})
        return found

    monkeypatch.setattr(live, "_sorted", sort_then_append)
    live._ingest_batch(batch(NAMESPACES))
    assert appended[0] in live.segments["n1"]
    assert sum(len(s.documents) for s in live.segments["n1"]) == 3
