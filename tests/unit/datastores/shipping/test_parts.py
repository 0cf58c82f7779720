"""The files of a copy are read where they are, whoever else has them open."""

import os
from pathlib import Path

import pytest

from datastores.manifest import FileEntry
from datastores.shipping.cut import Cut
from datastores.shipping.parts import Part, parts_of
from tests.unit.datastores.shipping.stores import opened


def wanted(_entry: FileEntry) -> bool:
    return True


def read_while_others_seek(part: Part, start: int = 0) -> bytes:
    """All blocks, the file's position moved before each, as by the check that runs aside."""
    read = bytearray()
    part.file.seek(0, os.SEEK_END)
    for number, block in enumerate(part.blocks(256, start)):
        assert part.file.tell() == (part.size if number == 0 else number)
        read += block
        part.file.seek(number + 1)
    return bytes(read)


def test_a_part_is_read_whole_whatever_its_files_position_is(tmp_path: Path) -> None:
    with opened(tmp_path, fold_interval=1000) as made:
        made.add_corpus("c", [list(range(2, 402)) * 2])
        made.add([1, 101], "acme")  # in a log: a part of it is written for the copy
    with Cut(tmp_path) as cut:
        corpus, served = parts_of(cut, wanted)
        content = (tmp_path / corpus.entry.name).read_bytes()
        assert corpus.size == len(content) > 1024
        assert read_while_others_seek(corpus) == content
        assert read_while_others_seek(corpus, 700) == content[700:]
        assert len(read_while_others_seek(served)) == served.size


def test_blocks_are_full_where_a_read_gives_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, fold_interval=1000) as made:
        made.add_corpus("c", [list(range(2, 402)) * 2])
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, into, at: read(fd, [into[0][:100]], at))
    with Cut(tmp_path) as cut:
        (part,) = parts_of(cut, wanted)
        sizes = [len(block) for block in part.blocks(256)]
        assert sum(sizes) == part.size and set(sizes[:-1]) == {256}
