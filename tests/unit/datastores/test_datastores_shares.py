"""No namespace pushes out what others have less of, nor fills what is for all."""

import threading
from pathlib import Path

import numpy as np
import pytest

from datastores import Datastore, DatastoreError
from datastores.datastore import _MOST_SNAPSHOTS
from datastores.live import LiveCollection
from datastores.room import Room
from datastores.segment import Document
from datastores.wal import Deletion

VOCABULARY = 1000


def test_a_namespace_that_fills_the_datastore_pushes_out_its_own():
    rng = np.random.default_rng(0)
    with Datastore(vocab_size=1000, max_tokens=20_000) as store:
        store.add(rng.integers(0, 1000, 500), namespace="small", name="s")
        store.flush(60)
        for number in range(120):
            store.add(rng.integers(0, 1000, 500), namespace="greedy", name=str(number))
            store.flush(60)
        held = store.namespaces()
        assert held["small"] == 500
        assert 5_000 < held["greedy"] <= 19_500
        for number in range(120):  # who comes later gets as much as there is for each
            store.add(rng.integers(0, 1000, 500), namespace="late", name=str(number))
            store.flush(60)
        held = store.namespaces()
        assert held["small"] == 500 and sum(held.values()) <= 20_000
        assert min(held["late"], held["greedy"]) > 4_000, held


def opened(folder: Path | None, **options) -> Datastore:
    if folder is None:
        return Datastore(VOCABULARY, live_interval=60, **options)
    return Datastore.open(folder, vocab_size=VOCABULARY, live_interval=60, **options)


def taken(store: Datastore, namespace: str, documents: int) -> int:
    """How many of so many documents of 40 tokens it takes."""
    return sum(store.add([1] * 40, namespace=namespace) for _ in range(documents))


@pytest.mark.parametrize("durable", [False, True], ids=["in memory", "in a folder"])
def test_a_namespace_that_floods_the_queue_leaves_room_for_others(
    tmp_path: Path, may_sort: threading.Event, durable: bool
) -> None:
    folder = tmp_path / "d" if durable else None
    with opened(folder, live_buffer_tokens=1000, live_share=0.5) as store:
        try:
            assert taken(store, "greedy", 100) == 12  # 480 of 500 tokens
            assert taken(store, "late", 100) == 6  # 240 of half of what is left, 260
            assert taken(store, "small", 3) == 3
            assert taken(store, "greedy", 10) == 0
            assert store.info().dropped_documents == 192
        finally:
            may_sort.set()
        store.flush(60)
        assert taken(store, "greedy", 1) == 1  # the queue is empty again
        assert store.namespaces()["small"] == 120


def test_what_is_given_back_can_be_taken_again() -> None:
    room = Room(1000, 0.5)
    room.take("a", 480)
    assert not room.fits("a", 40) and room.fits("a", 20)
    room.give_back("a", 40)
    assert room.fits("a", 40) and room.tokens == 440
    room.clear()
    assert room.tokens == 0 and room.fits("a", 1000) and not room.fits("a", 1001)


def test_a_deletion_empties_a_namespace_s_part_of_the_queue(may_sort: threading.Event) -> None:
    live = LiveCollection(VOCABULARY, None, 1000, 60, lambda: None, share=0.5)
    document = Document(np.ones(240, np.int64), 0, b"")
    try:
        assert live.add("a", document) and live.add("a", document) and live.add("b", document)
        assert not live.has_room("a", 240)
        live.delete(Deletion(1, "a", None))
        assert live.queued_tokens == 240 and live.has_room("a", 240)
    finally:
        may_sort.set()
        live.close()


def test_a_namespace_that_floods_the_log_leaves_room_for_others(tmp_path: Path) -> None:
    options = {"live_share": 0.5, "fold_tokens": 1 << 30, "fold_interval": 86400}
    with Datastore.open(tmp_path / "d", vocab_size=VOCABULARY, **options) as store:
        logs = store._served._logs
        logs._unfolded = Room(1000, 0.5)
        assert taken(store, "greedy", 100) == 12
        assert taken(store, "small", 3) == 3
        assert store.info().unfolded_tokens == 600
    with Datastore.open(tmp_path / "d", vocab_size=VOCABULARY, **options) as store:
        assert store.info().unfolded_tokens == 600  # counted again by namespace
        logs = store._served._logs
        assert logs._unfolded._held == {"greedy": 480, "small": 120}
        store.fold(60)
        assert store.info().unfolded_tokens == 0 and not logs._unfolded._held


def test_searches_of_ever_new_namespaces_are_not_kept() -> None:
    with Datastore(VOCABULARY) as store:
        store.add([1, 2, 3], namespace="known")
        store.flush(60)
        for number in range(3 * _MOST_SNAPSHOTS):
            assert store.snapshot(f"new-{number}").live == ()
        assert len(store._snapshots) <= _MOST_SNAPSHOTS
        kept = store.snapshot("known")
        assert kept.live and store.snapshot("known") is kept


@pytest.mark.parametrize("share", [0, -1, 1.5, float("nan")])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(DatastoreError, match="live_share must be above 0"):
        Datastore(VOCABULARY, live_share=share)
