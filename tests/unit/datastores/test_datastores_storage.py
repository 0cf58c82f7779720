"""Files: what is saved comes back, and anything wrong with a file is said in one line."""

import json
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from datastores import Datastore, DatastoreError, InputTrie, retrieve
from datastores.storage import MAGIC

VOCAB = 49_152


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, VOCAB, rng.integers(1, 900)) for _ in range(40)]
    store = Datastore.build(documents, VOCAB, tokenizer_fingerprint="tok-1")
    store.add_corpus("law", [[1, 2, 3], [4, 5]])
    path = tmp_path / "store.tokens"
    store.save(path)
    return path


@pytest.mark.parametrize("vocab_size", [300, 65_535, 65_536, 200_000])
def test_round_trip(tmp_path: Path, vocab_size: int) -> None:
    rng = np.random.default_rng(1)
    documents = [rng.integers(0, vocab_size, 100) for _ in range(30)]
    store = Datastore.build(documents, vocab_size, tokenizer_fingerprint="tök", max_tokens=8_000)
    store.add_corpus("wörter", [[7, 8, 9]])
    path = tmp_path / "a b.tokens"
    store.save(path)
    with Datastore.load(path, vocab_size=vocab_size, tokenizer_fingerprint="tök") as again:
        assert len(again.snapshot().segments) > 2
        pairs = zip(again.snapshot().segments, store.snapshot().segments, strict=True)
        for ours, theirs in pairs:
            np.testing.assert_array_equal(ours.tokens, theirs.tokens)
            np.testing.assert_array_equal(ours.suffixes, theirs.suffixes)
            assert ours.documents == theirs.documents
        assert again.list_corpora() == {"wörter": 3}
        assert again.info().tokenizer_fingerprint == "tök"
        # It goes on learning, and can be saved over the file it is mapped from.
        again.add([7, 8, 11])
        again.flush(20)
        again.save(path)
        trie = InputTrie()
        trie.extend([7, 8])
        with Datastore.load(path) as third:
            assert set(retrieve([trie], third, 2)[0].tokens.tolist()) == {9, 11}
    assert [p.name for p in tmp_path.iterdir()] == ["a b.tokens"]


def test_empty_datastore_round_trips(tmp_path: Path) -> None:
    Datastore(5).save(tmp_path / "empty")
    assert len(Datastore.load(tmp_path / "empty", vocab_size=5)) == 0


def message(path: Path, **expected: object) -> str:
    with pytest.raises(DatastoreError) as caught:
        Datastore.load(path, **expected)  # type: ignore[arg-type]
    text = str(caught.value)
    assert str(path) in text
    assert "\n" not in text
    return text


def test_missing_and_foreign_files(tmp_path: Path, saved: Path) -> None:
    assert "no datastore file" in message(tmp_path / "missing")
    assert "cannot read" in message(tmp_path)
    (tmp_path / "empty").touch()
    assert "truncated" in message(tmp_path / "empty")
    (tmp_path / "text").write_text("Not a datastore, but a text of some length.")
    assert "not a datastore" in message(tmp_path / "text")
    assert "49152" in message(saved, vocab_size=32_000)
    assert "'tok-1'" in message(saved, tokenizer_fingerprint="tok-2")
    Datastore.load(saved, vocab_size=VOCAB, tokenizer_fingerprint="tok-1").close()
    Datastore.load(saved).close()


def test_other_version_is_named(saved: Path) -> None:
    raw = bytearray(saved.read_bytes())
    raw[8:12] = struct.pack("<I", 9)
    saved.write_bytes(raw)
    assert "version 9" in message(saved)


def test_every_truncation_is_found(saved: Path) -> None:
    raw = saved.read_bytes()
    for size in [1, 7, 19, 20, 100, 4095, 4096, len(raw) // 2, len(raw) - 4096, len(raw) - 1]:
        saved.write_bytes(raw[:size])
        assert "truncated" in message(saved)
    saved.write_bytes(raw + b"\0")
    assert "has grown" in message(saved)


def test_a_flipped_bit_anywhere_is_found(saved: Path) -> None:
    raw = bytearray(saved.read_bytes())
    rng = np.random.default_rng(3)
    # Every byte of the preamble, then one in each block: header, sections and their padding.
    places = [*range(20), *(int(rng.integers(b, min(b + 512, len(raw))))
                            for b in range(20, len(raw), 512))]  # fmt: skip
    for place in places:
        bit = 1 << int(rng.integers(8))
        raw[place] ^= bit
        saved.write_bytes(raw)
        message(saved)
        raw[place] ^= bit
    saved.write_bytes(raw)
    Datastore.load(saved).close()


def test_indices_out_of_range_are_refused_even_with_right_checksums(saved: Path) -> None:
    """Compiled code would read beyond the array."""
    raw = bytearray(saved.read_bytes())
    _, version, size, _ = struct.unpack("<8sIII", raw[:20])
    header = json.loads(raw[20 : 20 + size])
    section = header["segments"][0]["suffixes"]
    first = 20 + size + section["offset"]
    raw[first : first + 4] = struct.pack("<i", 1 << 30)
    nbytes = section["count"] * 4
    padded = raw[first : first + nbytes + -nbytes % 4096]
    section["crc32"] = zlib.crc32(padded)
    encoded = json.dumps(header).encode().ljust(size)
    raw[: 20 + size] = struct.pack("<8sIII", MAGIC, version, size, zlib.crc32(encoded)) + encoded
    saved.write_bytes(raw)
    assert "inconsistent" in message(saved)


def test_a_failed_save_leaves_the_old_file(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DatastoreError, match="No space left on device"):
        Datastore.build([[1, 2]], 10).save(saved)
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


def test_unwritable_places_are_named(tmp_path: Path) -> None:
    with pytest.raises(DatastoreError, match="cannot write"):
        Datastore(10).save(tmp_path / "no such folder" / "x")
    with pytest.raises(DatastoreError, match="cannot write"):
        Datastore(10).save(tmp_path)
