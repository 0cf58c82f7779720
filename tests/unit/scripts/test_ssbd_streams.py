"""Streams from aligned files, and the file that keeps their outputs."""

import gzip

import pytest

from scripts.lib.ssbd_streams import (
    Settings,
    Stream,
    Update,
    by_stream,
    growing,
    read_lines,
    read_results,
    read_streams,
    write_line,
)

SETTINGS = Settings("m", "a.en", "English", "French", 3, "{source}", ("Un été",))


def update(stream: int, mode: str, batch: int, step: int, final: bool) -> Update:
    return Update(stream, mode, batch, step, final, "é", (1, 2), "Un", 3, 0.5)


def test_a_sentence_grows_by_k_words_and_is_whole_at_last():
    assert growing("A man  in a blue shirt.", 3) == ("A man  in", "A man  in a blue shirt.")
    assert growing("a b c d", 3) == ("a b c", "a b c d")
    assert growing("a b", 3) == ("a b",)
    assert growing(" a b ", 1) == ("a", "a b")
    assert growing("  ", 3) == ()


def test_a_sentence_without_spaces_grows_by_characters():
    assert growing("你好 世界", 2, by_character=True) == ("你好", "你好 世界")


def test_a_lag_below_one_is_refused():
    with pytest.raises(ValueError, match="at least 1 word, got 0"):
        growing("a", 0)


def test_plain_and_gzipped_files_are_read(tmp_path):
    plain, packed = tmp_path / "a.txt", tmp_path / "a.gz"
    plain.write_text("eins\n zwei \u2028drei\n", encoding="utf-8")
    packed.write_bytes(gzip.compress(b"eins\n"))
    assert read_lines(plain) == ["eins", "zwei \u2028drei"]
    assert read_lines(packed) == ["eins"]


def test_files_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "a.gz"
    path.write_text("not gzipped")
    with pytest.raises(ValueError, match="is not gzipped"):
        read_lines(path)
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is not UTF-8 text"):
        read_lines(path)


def test_streams_are_the_pairs_with_text_in_both(tmp_path):
    source, reference = tmp_path / "s", tmp_path / "r"
    source.write_text("a b\n\nc\nd e\n")
    reference.write_text("A B\nX\nC\nD E\n")
    assert read_streams(source, reference, lag=1, count=2) == [
        Stream(("a", "a b"), "A B"),
        Stream(("c",), "C"),
    ]


def test_files_that_are_not_aligned_are_refused(tmp_path):
    source, reference = tmp_path / "s", tmp_path / "r"
    source.write_text("a\nb\n")
    reference.write_text("A\n")
    with pytest.raises(ValueError, match=r"has 2 lines and .* has 1"):
        read_streams(source, reference, lag=3, count=5)
    source.write_text("\n")
    with pytest.raises(ValueError, match="no pair of lines"):
        read_streams(source, reference, lag=3, count=5)


def test_results_come_back_as_they_were_written(tmp_path):
    path = tmp_path / "r.jsonl"
    updates = [update(0, "AR", 1, 0, False), update(0, "AR", 1, 1, True)]
    with path.open("w", encoding="utf-8") as file:
        for line in (SETTINGS, *updates):
            write_line(file, line)
        file.write('{"stream": 1, "mode"')  # the run was killed here
    assert read_results(path) == (SETTINGS, updates)


@pytest.mark.parametrize("text", ["", "{}\n", "no JSON\n", '["a"]\n'])
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "r.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match="no results file of bench_ssbd"):
        read_results(path)


def test_updates_are_grouped_by_stream_and_unfinished_streams_left_out():
    updates = [
        update(1, "AR", 1, 1, True), update(1, "AR", 1, 0, False), update(0, "AR", 1, 0, True),
        update(0, "AR", 8, 0, True), update(0, "SSBD", 1, 0, True), update(2, "AR", 1, 0, False),
    ]  # fmt: skip
    found = by_stream(updates, "AR", 1)
    assert {stream: [u.step for u in own] for stream, own in found.items()} == {0: [0], 1: [0, 1]}
