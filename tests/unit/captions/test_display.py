"""What is drawn on a terminal, printed as lines, and logged."""

import io
import json
import re

import pytest

from sglang_ext.api.translation.sentence_translations import Translated
from sglang_ext.captions.display import DisplayError, JsonLines, Lines, Moment, Terminal
from sglang_ext.captions.session_summary import Summary
from speech.sentences import Sentence

NOW = Moment(63.27, 63.0)
SUMMARY = Summary(11.0, 22, 1.5, 2.0, 0.25, 20, 0.5, 0.1, 0.0, 0)


def screen(written: str) -> list[str]:
    """The rows that a terminal shows."""
    rows, at = [""], 0
    for part in re.findall(r"\x1b\[\d*[A-Za-z]|\n|\r|[^\x1b\n\r]+", written):
        if part == "\n":
            at += 1
            rows += [""] * (at + 1 - len(rows))
        elif part.endswith("F") and part[0] == "\x1b":
            at -= int(part[2:-1])
        elif part == "\x1b[0J":
            rows = [*rows[:at], ""]
        elif part not in ("\r", "\x1b[2m", "\x1b[22m"):
            rows[at] += part
    return rows


@pytest.fixture(autouse=True)
def width(monkeypatch):
    monkeypatch.setenv("COLUMNS", "41")


def test_the_terminal_redraws_what_changes_and_keeps_what_is_complete():
    out = io.StringIO()
    terminal = Terminal(out, translated=True)
    terminal.caption(Sentence(0, "Ask", " not wh"), NOW)
    assert screen(out.getvalue()) == ["Ask not wh", ""]
    assert "Ask\x1b[2m not wh\x1b[22m" in out.getvalue()
    terminal.translation(Translated(0, "Ne", " dema", False), NOW)
    terminal.caption(Sentence(0, "Ask not.", "", True), NOW)
    terminal.caption(Sentence(1, "", "And"), NOW)
    assert screen(out.getvalue()) == ["Ask not.", "  Ne dema", "And", ""]
    terminal.error("translation: gone", NOW)
    terminal.translation(Translated(0, "Ne demandez pas.", "", True), NOW)
    terminal.caption(Sentence(1, ""), NOW)
    expected = ["translation: gone", "Ask not.", "  Ne demandez pas.", ""]
    assert screen(out.getvalue()) == expected
    terminal.close(SUMMARY)
    assert screen(out.getvalue())[:5] == [*expected, "audio:                      11.0 s"]


def test_the_terminal_shows_the_end_of_long_texts():
    out = io.StringIO()
    Terminal(out, translated=False).caption(Sentence(0, "x" * 50, "y" * 5), NOW)
    assert screen(out.getvalue())[0] == "…" + "x" * 34 + "y" * 5
    out = io.StringIO()
    Terminal(out, translated=False).caption(Sentence(0, "字" * 30), NOW)
    assert screen(out.getvalue())[0] == "…" + "字" * 19


def test_no_control_characters_reach_a_terminal():
    out = io.StringIO()
    Terminal(out, translated=False).caption(Sentence(0, "a\x1b[2Jb\nc", "", True), NOW)
    assert screen(out.getvalue())[0] == "a [2Jb c"


def test_lines_are_printed_once_for_each_change():
    out, errors = io.StringIO(), io.StringIO()
    lines = Lines(out, errors)
    lines.caption(Sentence(0, "Ask", " not"), NOW)
    lines.caption(Sentence(0, "Ask", " not"), NOW)
    lines.translation(Translated(0, "", "Ne", False), NOW)
    lines.caption(Sentence(0, "Ask not.", "", True), NOW)
    lines.error("recognition: gone", NOW)
    assert out.getvalue().splitlines() == [
        "01:03.2 caption 1: Ask [not]",
        "01:03.2 translation 1: [Ne]",
        "01:03.2 caption 1: Ask not.",
    ]
    assert errors.getvalue() == "01:03.2 recognition: gone\n"


def test_json_lines_have_every_update(tmp_path):
    log = JsonLines(tmp_path / "log.jsonl")
    log.caption(Sentence(0, "Ask", " not"), NOW)
    log.translation(Translated(0, "Ne", "", True), NOW)
    log.error("gone", NOW)
    log.close(SUMMARY)
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [r["type"] for r in records] == ["caption", "translation", "error", "summary"]
    assert records[0] == {
        "type": "caption", "seconds": 63.27, "audio_s": 63.0, "sentence": 0,
        "committed": "Ask", "unstable": " not", "final": False,
    }  # fmt: skip
    assert records[3]["caption_ne"] == 0.25
    with pytest.raises(DisplayError, match="No such file"):
        JsonLines(tmp_path / "nowhere" / "log")
