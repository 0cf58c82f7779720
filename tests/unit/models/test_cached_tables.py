"""Files that are replaced whole, and tables that are kept for the next start."""

import json
import os

import pytest

from sglang_ext.models.cached_tables import CachedTable, replace_file


def test_a_file_keeps_its_content_until_the_new_one_is_whole(tmp_path):
    file = tmp_path / "f"
    file.write_text("old")
    with replace_file(file) as content:
        content.write(b"new")
        content.flush()
        assert file.read_text() == "old"
    assert file.read_text() == "new"
    assert os.listdir(tmp_path) == ["f"]


def test_what_fails_half_way_leaves_the_old_file_and_nothing_else(tmp_path):
    file = tmp_path / "f"
    file.write_text("old")
    with pytest.raises(ZeroDivisionError), replace_file(file) as content:
        content.write(b"ne")
        raise ZeroDivisionError
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["f"]


def test_others_may_read_a_replaced_file_as_they_may_read_any(tmp_path):
    plain, file = tmp_path / "plain", tmp_path / "f"
    plain.write_text("")
    with replace_file(file) as content:
        content.write(b"x")
    assert file.stat().st_mode == plain.stat().st_mode


def numbers(path):
    return [int(n) for n in json.loads(path.read_text())]


def test_a_table_is_found_again_for_what_it_was_kept_for_only(tmp_path):
    kept = CachedTable(tmp_path / "k", {"model": "m", "threads": 2}, ".json", "the table is")
    assert kept.read(numbers) is None
    kept.keep(lambda file: file.write(b"[1, 2]"))
    again = CachedTable(tmp_path / "k", {"threads": 2, "model": "m"}, ".json", "the table is")
    other = CachedTable(tmp_path / "k", {"threads": 1, "model": "m"}, ".json", "the table is")
    assert again.read(numbers) == [1, 2]
    assert other.read(numbers) is None


@pytest.mark.parametrize("content", ["", "[1, 2", '["x"]', "3"])
def test_a_damaged_table_is_none(tmp_path, content):
    kept = CachedTable(tmp_path, {}, ".json", "the table is")
    kept.path.write_text(content)
    assert kept.read(numbers) is None


def test_a_table_that_cannot_be_kept_is_a_warning(tmp_path, caplog):
    (tmp_path / "k").write_text("a file, no folder")
    CachedTable(tmp_path / "k", {}, ".json", "the table is").keep(lambda file: file.write(b"1"))
    assert "the table is not kept for the next start" in caplog.text
