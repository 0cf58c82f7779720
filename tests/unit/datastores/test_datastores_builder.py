"""Building corpora in steps, joining and checking folders."""

from pathlib import Path

import numpy as np
import pytest

from datastores import (
    CorpusBuilder,
    Datastore,
    DatastoreError,
    check_folder,
    merge_folders,
    verify_folder,
)
from datastores.container import Container, read_container, write_container
from datastores.segment import Document, build_segment

VOCAB = 500


def builder(folder: Path, corpus: str = "c", **options) -> CorpusBuilder:
    options = {"vocab_size": VOCAB, "tokenizer_fingerprint": "t", **options}
    return CorpusBuilder(folder, corpus, **options)


def tokens_of(folder: Path) -> list[int]:
    with Datastore.open(folder, read_only=True) as store:
        return [int(t) for s in store.snapshot().static for t in s.tokens if t != VOCAB]


def test_a_build_that_is_cut_short_goes_on(tmp_path: Path) -> None:
    with builder(tmp_path / "d") as building:
        assert building.progress is None
        building.add([1, 2])
        building.commit({"document": 1})
        building.add([9, 9])  # lost: not committed
    with Datastore.open(tmp_path / "d", read_only=True) as store:
        assert store.list_corpora() == {}
        assert store.info().building == ("c",)
    with builder(tmp_path / "d") as building:
        assert building.progress == {"document": 1}
        assert building.committed_tokens == 2
        building.add(np.array([3, 4]))
        building.commit({"document": 2})
        building.add([5])
        assert building.finish() == 5
    assert tokens_of(tmp_path / "d") == [1, 2, 3, 4, 5]
    assert verify_folder(tmp_path / "d") == []
    assert len(list((tmp_path / "d").glob("sub-*"))) == 1


def test_a_build_can_begin_anew(tmp_path: Path) -> None:
    with builder(tmp_path / "d") as building:
        building.add([1])
        building.commit({"document": 1})
    with builder(tmp_path / "d", resume=False) as building:
        assert building.progress is None
        building.add([2])
        building.finish()
    assert tokens_of(tmp_path / "d") == [2]


def test_sub_indices_keep_to_their_size(tmp_path: Path) -> None:
    with builder(tmp_path / "d", segment_tokens=10) as building:
        for k in range(7):
            building.add([k] * 4)
            building.commit({})
        assert building.finish() == 28
    with Datastore.open(tmp_path / "d", read_only=True) as store:
        assert [s.num_tokens for s in store.snapshot().static] == [8, 8, 8, 4]


def test_builders_refuse_what_cannot_be(tmp_path: Path) -> None:
    with builder(tmp_path / "d") as building:
        with pytest.raises(DatastoreError, match="holds no tokens"):
            building.finish()
        with pytest.raises(DatastoreError, match=r"outside 0\.\.499"):
            building.add([VOCAB])
        with pytest.raises(DatastoreError, match="in use by process"):
            builder(tmp_path / "d")
        building.add([1])
        building.finish()
    with pytest.raises(DatastoreError, match="exists already"):
        builder(tmp_path / "d")
    with pytest.raises(DatastoreError, match="built with tokenizer"):
        builder(tmp_path / "d", "e", tokenizer_fingerprint="u")


def test_folders_are_joined(tmp_path: Path) -> None:
    for name, corpus, token in (("a", "x", 10), ("b", "y", 20)):
        with Datastore.open(tmp_path / name, vocab_size=VOCAB, tokenizer_fingerprint="t") as store:
            store.add([token, 1], namespace="n", name=f"r-{name}")
            store.add_corpus(corpus, [[token, 2, 3]])
    copied = merge_folders([tmp_path / "a", tmp_path / "b"], tmp_path / "c")
    assert list(copied.values()) == [5, 5]
    with Datastore.open(tmp_path / "c") as store:
        assert store.list_corpora() == {"x": 3, "y": 3}
        assert store.namespaces() == {"n": 4}
        assert store.delete_document("r-b") == 2
    assert verify_folder(tmp_path / "c") == []
    with pytest.raises(DatastoreError, match="corpus 'x' is in"):
        merge_folders([tmp_path / "a"], tmp_path / "c")
    with Datastore.open(tmp_path / "z", vocab_size=VOCAB, tokenizer_fingerprint="u"):
        pass
    with pytest.raises(DatastoreError, match="built with tokenizer"):
        merge_folders([tmp_path / "z"], tmp_path / "c")


def test_verify_finds_a_wrong_order_that_checksums_do_not(tmp_path: Path) -> None:
    with builder(tmp_path / "d") as building:
        building.add(np.arange(200) % 7)
        building.finish()
    (path,) = (tmp_path / "d").glob("sub-*")
    content = read_container(str(path))
    ((owner, segment),) = content.segments
    suffixes = segment.suffixes.copy()
    suffixes[[3, 150]] = suffixes[[150, 3]]
    wrong = build_segment([Document(np.arange(200, dtype=np.int32) % 7)], VOCAB)
    wrong = type(wrong)(segment.tokens, suffixes, segment.landmarks, segment.documents)
    write_container(str(path), Container(VOCAB, "t", ((owner, wrong),)))
    (problem,) = verify_folder(tmp_path / "d")
    assert "out of order" in problem


def test_check_folder_says_what_a_server_would_meet(tmp_path: Path) -> None:
    check_folder(tmp_path / "new")
    store = Datastore.open(tmp_path / "d", vocab_size=VOCAB, tokenizer_fingerprint="t")
    with store, pytest.raises(DatastoreError, match="in use"):
        check_folder(tmp_path / "d")
    check_folder(tmp_path / "d", "t")
    with pytest.raises(DatastoreError, match="built with tokenizer"):
        check_folder(tmp_path / "d", "u")
    (tmp_path / "file").write_text("x")
    with pytest.raises(DatastoreError, match="must be a folder"):
        check_folder(tmp_path / "file")
    with pytest.raises(DatastoreError, match="not writable"):
        check_folder(tmp_path / "none" / "d")
