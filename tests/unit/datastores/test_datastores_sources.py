"""Readers on real files: what they find, how they go on from a position, and what they refuse."""

import gzip
import json
import os
import tracemalloc
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from datastores import DatastoreError
from datastores.sources import (
    BEGINNING,
    ReadOptions,
    Record,
    SourceError,
    cut_point,
    find_sources,
    read_source,
)
from datastores.sources.arrays import TOKENS_PER_DOCUMENT
from datastores.sources.texts import TEXT_PIECE_BYTES

OPTIONS = ReadOptions(vocab_size=1000)
POEM = "Der Mond ist aufgegangen,\ndie goldnen Sternlein prangen\nam Himmel hell und klär.\n\n"


def read(path: Path, options: ReadOptions = OPTIONS, **kwargs) -> list[Record]:
    (source,), _ = find_sources([str(path)], **kwargs)
    return list(read_source(source, options))


def contents(path: Path, options: ReadOptions = OPTIONS, **kwargs) -> list:
    found = [record.content for record in read(path, options, **kwargs)]
    return [item.tolist() if isinstance(item, np.ndarray) else item for item in found]


def refusal(path: Path, options: ReadOptions = OPTIONS, **kwargs) -> str:
    """The one line that says why a source, or its only bad record, is refused."""
    try:
        records = read(path, options, **kwargs)
    except DatastoreError as error:
        message = str(error)
    else:
        (message,) = [str(r.content) for r in records if isinstance(r.content, SourceError)]
    assert str(path) in message and "\n" not in message
    return message


def write_lines(path: Path, *rows) -> Path:
    lines = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    path.write_bytes(gzip.compress(lines.encode()) if path.suffix == ".gz" else lines.encode())
    return path


def write_parquet(path: Path, rows: int = 100, group: int = 30) -> Path:
    table = pyarrow.table(
        {
            "text": [f"row {i}" for i in range(rows)],
            "meta": [{"title": f"title {i}"} for i in range(rows)],
            "ids": [[i, i + 1] for i in range(rows)],
        }
    )
    pyarrow.parquet.write_table(table, path, row_group_size=group)
    return path


def write_hf(path: Path, rows: int = 100) -> Path:
    datasets.Dataset.from_dict({"text": [f"row {i}" for i in range(rows)]}).save_to_disk(path)
    return path


# -- finding -------------------------------------------------------------------------------


def test_folders_are_searched_in_a_fixed_order(tmp_path):
    for name in ("b.txt", "a/z.py", "a/c.jsonl.gz", ".git/x.txt", "p.bin", "empty.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"" if name == "empty.md" else b"x")
    sources, left_out = find_sources([str(tmp_path)])
    found = [(os.path.relpath(s.path, tmp_path), s.format) for s in sources]
    assert found == [("b.txt", "text"), ("a/c.jsonl.gz", "jsonl"), ("a/z.py", "text")]
    assert left_out == 2
    named, _ = find_sources([str(tmp_path / "b.txt"), str(tmp_path)])
    assert [s.path for s in named] == [s.path for s in sources], "each file once"


def test_glob_and_format_choose(tmp_path):
    for name in ("a.log", "b.txt", "sub/c.log", "d.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")

    def names(**kwargs) -> list[str]:
        return [
            os.path.relpath(s.path, tmp_path) for s in find_sources([str(tmp_path)], **kwargs)[0]
        ]

    assert names(glob="*.log") == ["a.log", "sub/c.log"]
    assert names(glob="sub/*") == ["sub/c.log"]
    assert names(format="jsonl") == ["d.jsonl"]
    with pytest.raises(SourceError, match="no files that match"):
        names(glob="*.rs")


def test_dataset_folders_are_sources_of_their_own(tmp_path):
    splits = {name: datasets.Dataset.from_dict({"text": [name]}) for name in ("train", "test")}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "set")
    sources, _ = find_sources([str(tmp_path)])
    assert [(os.path.basename(s.path), s.format) for s in sources] == [
        ("test", "hf"),
        ("train", "hf"),
    ]
    assert [r.content for s in sources for r in read_source(s, OPTIONS)] == ["test", "train"]


def test_identity_tells_changed_files(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one")
    before = find_sources([str(path)])[0][0].identity
    assert before == find_sources([os.path.relpath(path)])[0][0].identity
    path.write_text("three")
    assert len(before) == 8 and before != find_sources([str(path)])[0][0].identity


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("none.txt", None, "there is no file or folder"),
        ("empty.jsonl", b"", "is empty"),
        ("data.json", b"{}", "--format jsonl"),
        ("data.npz", b"PK", "cannot be read; expected text"),
        ("data.jsonl.zst", b"(\xb5/\xfd", "cannot be read; expected text"),
    ],
)
def test_files_that_are_no_sources(tmp_path, name, content, expected):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert expected in refusal(tmp_path / name)


def test_a_folder_without_files_is_refused(tmp_path):
    (tmp_path / "a.xyz").write_text("x")
    assert "--glob" in refusal(tmp_path)
    assert "save_to_disk" in refusal(tmp_path / "a.xyz", format="hf")


# -- positions -----------------------------------------------------------------------------


def make_source(kind: str, folder: Path) -> Path:
    path = folder / f"data.{kind}"
    rows = [{"text": f"line {i} ä"} for i in range(50)]
    if kind in ("jsonl", "jsonl.gz"):
        return write_lines(path, *rows)
    if kind in ("txt", "txt.gz"):
        data = (POEM * 12000).encode()
        path.write_bytes(gzip.compress(data, 1) if kind.endswith("gz") else data)
    elif kind == "parquet":
        write_parquet(path)
    elif kind == "hf":
        write_hf(path)
    elif kind == "npy":
        np.save(path, np.arange(60).reshape(20, 3))
    elif kind == "flat.npy":
        np.save(path, np.arange(TOKENS_PER_DOCUMENT * 2 + 5) % 1000)
    return path


@pytest.mark.parametrize(
    "kind", ["txt", "txt.gz", "jsonl", "jsonl.gz", "parquet", "hf", "npy", "flat.npy"]
)
def test_reading_goes_on_from_every_position(tmp_path, kind):
    (source,), _ = find_sources([str(make_source(kind, tmp_path))])
    records = list(read_source(source, OPTIONS))
    assert len(records) >= 3
    done = [r.done for r in records]
    assert done == sorted(done) and 0 < done[-1] <= source.size
    for i in {0, 1, len(records) // 2, 35 % len(records), len(records) - 1}:
        start = records[i - 1].position if i else BEGINNING
        again = list(read_source(source, OPTIONS, start))
        assert [r.position for r in again] == [r.position for r in records[i:]]
        for one, other in zip(again, records[i:], strict=True):
            assert np.array_equal(one.content, other.content)


def test_text_is_whole_and_cut_between_paragraphs(tmp_path):
    text = POEM * 12000
    (tmp_path / "a.txt").write_text("\ufeff" + text)
    pieces = contents(tmp_path / "a.txt")
    assert "".join(pieces) == text and len(pieces) >= 4
    assert all(piece.endswith("\n\n") for piece in pieces)
    assert max(len(piece.encode()) for piece in pieces) <= TEXT_PIECE_BYTES


@pytest.mark.parametrize("text", ["wörter ohne Ende " * 40000, "ä" * 400000, "𝛑x" * 150000])
def test_text_without_lines_is_whole_too(tmp_path, text):
    (tmp_path / "a.txt").write_text(text)
    pieces = contents(tmp_path / "a.txt")
    assert "".join(pieces) == text and len(pieces) >= 2


def test_cut_point_never_splits_a_character():
    data = ("aä€𝛑" * 20).encode()
    for size in range(10, len(data)):
        assert 0 < cut_point(data[:size]) <= size
        data[: cut_point(data[:size])].decode()


# -- what documents are --------------------------------------------------------------------


def test_values_of_json_lines(tmp_path):
    path = write_lines(
        tmp_path / "a.jsonl",
        {"text": "plain"},
        "",
        {"text": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]},
        {"text": [{"role": "user", "content": [{"type": "text", "text": "parts"}]}]},
        {"text": [3, 1, 999]},
        {"text": ""},
    )
    assert contents(path) == ["plain", "", "hi\n\nhello", "parts", [3, 1, 999], ""]


def test_fields_may_be_nested_and_several(tmp_path):
    path = write_lines(tmp_path / "a.jsonl.gz", {"a": {"b": "in"}, "q": "ask", "c.d": "dotted"})
    assert contents(path, ReadOptions(1000, ("a.b",))) == ["in"]
    assert contents(path, ReadOptions(1000, ("c.d",))) == ["dotted"]
    assert contents(path, ReadOptions(1000, ("q", "a.b"))) == ["ask\nin"]


def test_columns_of_tables(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", rows=5)
    assert contents(path) == [f"row {i}" for i in range(5)]
    assert contents(path, ReadOptions(1000, ("meta.title",)))[4] == "title 4"
    assert contents(path, ReadOptions(1000, ("ids",)))[2] == [2, 3]
    assert contents(write_hf(tmp_path / "set", rows=3)) == ["row 0", "row 1", "row 2"]


@pytest.mark.parametrize("dtype", ["<u2", ">u2", "<i4", ">i8", "u1"])
def test_arrays_of_ids(tmp_path, dtype):
    np.save(tmp_path / "a.npy", np.array([[1, 2], [200, 4]], dtype))
    assert contents(tmp_path / "a.npy") == [[1, 2], [200, 4]]


def test_object_arrays_need_consent(tmp_path):
    path = tmp_path / "a.npy"
    documents = np.empty(3, object)
    documents[:] = [[1, 2, 3], [], np.array([7])]
    np.save(path, documents, allow_pickle=True)
    assert "--allow-pickle" in refusal(path)
    assert contents(path, ReadOptions(1000, allow_pickle=True)) == [[1, 2, 3], [], [7]]


# -- what is refused -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{'text': 1}", "line 2: expected a JSON object, got \"{'text': 1}\""),
        ("[1, 2]", "line 2: expected a JSON object, got '[1, 2]'"),
        ('{"txt": "a", "id": 1}', "line 2: there is no field 'text'; there are: 'txt', 'id'"),
        ('{"text": 5}', "line 2: field 'text' is int, expected a text"),
        ('{"text": null}', "line 2: field 'text' is null, expected a text"),
        ('{"text": [{"role": "user"}]}', "line 2: field 'text' [0] is no message"),
        ('{"text": [1, 1000]}', "line 2: field 'text' is no list of tokens: token id 1000"),
        ('{"text": [1' + "0" * 30 + "]}", "outside 0..999"),
        ('{"text": "\\ud800"}', "half of a surrogate pair"),
        ("[" * 100_000, "nested too deeply"),
        ('{"text": "' + "x" * (2 << 20) + '"}', "line 2 is longer than 1 MB (--max-line-mb)"),
    ],
    ids=lambda value: value[:20],
)
def test_bad_lines_are_named_and_passed_over(tmp_path, line, expected):
    path = write_lines(tmp_path / "a.jsonl", {"text": "before"}, line, {"text": "after"})
    options = ReadOptions(1000, max_line_bytes=1 << 20)
    assert expected in refusal(path, options)
    records = read(path, options)
    assert [r.content for r in records if isinstance(r.content, str)] == ["before", "after"]
    assert records[-1].position == (path.stat().st_size, 3)


def test_a_huge_line_takes_no_memory(tmp_path):
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.write(b'{"text": "')
        for _ in range(100):
            file.write(b"x" * (1 << 20))
        file.write(b'"}\n{"text": "after"}\n')
    tracemalloc.start()
    records = read(path, ReadOptions(1000, max_line_bytes=4 << 20))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "longer than 4 MB" in str(records[0].content) and records[1].content == "after"
    assert peak < 16 << 20, f"{peak >> 20} MB"


def test_bytes_that_are_not_utf8(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "caf\xe9"}\n')
    assert "line 1: expected UTF-8, found byte 0xe9 at 13" in refusal(tmp_path / "a.jsonl")
    (tmp_path / "b.txt").write_bytes("é".encode("latin-1") * 10)
    assert "expected UTF-8" in refusal(tmp_path / "b.txt")
    (tmp_path / "c.txt").write_bytes(b"\x7fELF\0\0")
    assert "NUL" in refusal(tmp_path / "c.txt")


@pytest.mark.parametrize("damage", ["cut", "flipped", "foreign"])
def test_damaged_gzip(tmp_path, damage):
    path = write_lines(tmp_path / "a.jsonl.gz", *({"text": f"{i}"} for i in range(2000)))
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[len(data) // 2] ^= 0xFF
    path.write_bytes({"cut": data[:-100], "flipped": data, "foreign": b"{}\n"}[damage])
    with pytest.raises(SourceError, match="expected a whole gzip file") as caught:
        read(path)
    assert str(path) in str(caught.value)


def test_tables_without_the_column(tmp_path):
    options = ReadOptions(1000, ("body",))
    assert "no column 'body'; there are: 'text', 'meta', 'ids'" in refusal(
        write_parquet(tmp_path / "a.parquet"), options
    )
    assert "no column 'body'; there are: 'text'" in refusal(write_hf(tmp_path / "set"), options)
    assert "row 1: there is no field 'meta.none'" in refusal(
        write_parquet(tmp_path / "b.parquet", rows=1), ReadOptions(1000, ("meta.none",))
    )


def test_damaged_tables(tmp_path):
    path = write_parquet(tmp_path / "a.parquet")
    path.write_bytes(path.read_bytes()[:-50])
    assert "cannot read parquet file" in refusal(path)
    folder = write_hf(tmp_path / "set")
    arrow = next(folder.glob("*.arrow"))
    arrow.write_bytes(arrow.read_bytes()[:100])
    assert "cannot read dataset" in refusal(folder)


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (np.array([1.0, 2.0]), "holds float64 of shape (2,); expected token ids"),
        (np.zeros((2, 2, 2), np.int32), "holds int32 of shape (2, 2, 2); expected token ids"),
        (np.zeros(0, np.int32), "holds int32 of shape (0,)"),
        (np.array(["a"]), "holds <U1 of shape (1,)"),
        (np.array([[1, 2], [3, 1000]]), "row 2: token id 1000 is outside 0..999"),
        (np.array([[-1, 2]]), "row 1: token id -1 is outside 0..999"),
        (np.array([5, 70000]), "tokens 0 to 2: token id 70000 is outside 0..999"),
    ],
    ids=str,
)
def test_foreign_arrays(tmp_path, array, expected):
    np.save(tmp_path / "a.npy", array)
    assert expected in refusal(tmp_path / "a.npy")


def test_files_that_are_no_arrays(tmp_path):
    path = tmp_path / "a.npy"
    path.write_bytes(b"not an array")
    assert "no .npy file" in refusal(path)
    np.save(path, np.arange(1000))
    path.write_bytes(path.read_bytes()[:-100])
    assert "cannot read" in refusal(path)
    objects = np.empty(2, object)
    objects[:] = ["text", [1, 2]]
    np.save(path, objects, allow_pickle=True)
    assert "row 1: tokens must be" in refusal(path, ReadOptions(1000, allow_pickle=True))
