"""The report of a results folder: all of its files, and an HTML page that needs no other."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from sglang_ext.sweep.report import write_report
from sglang_ext.sweep.results import ResultsError
from tests.unit.sweep.finished_sweep import PLAN, failed, write_sweep

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """What a page loads, and whether its elements are closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.loads, self.names = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.names.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        self.loads += [
            value
            for name, value in attributes
            if name in ("src", "href", "xlink:href") and not value.startswith("#")
        ]

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = write_sweep(tmp_path_factory.mktemp("sweep"))
    write_report(folder)
    return folder


def test_a_report_has_all_its_files(report):
    names = {path.name for path in report.iterdir()}
    assert {"summary.md", "summary.csv", "figures.json", "report.html", "plots"} <= names
    figures = json.loads((report / "figures.json").read_text())["figures"]
    assert figures["min_ratio_sssd_vs_ar"] == pytest.approx(1.5)
    assert figures["methods"] == list(PLAN.methods)


def test_the_page_is_whole_and_loads_nothing(report):
    text = (report / "report.html").read_text()
    page = Page(text)
    assert page.open == []
    assert page.loads == []
    assert "url(http" not in text
    assert page.names.count("svg") == 4
    assert "script" not in page.names
    assert "660.0 ±9.1% (1.50x)" in text
    for part in ("A CPU", "0.5.23", "--drafters pld", "abc", "/models/tiny"):
        assert part in text


def test_texts_of_the_results_are_escaped(tmp_path):
    def hostile(result, requests):
        if result.method == "ngram":
            return failed(result, requests, "<script>alert(1)</script>")
        return result, [replace(r, category=f"<b>{r.category}") for r in requests]

    write_report(write_sweep(tmp_path, change=hostile))
    text = (tmp_path / "report.html").read_text()
    assert "<script>" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert "<b>math" not in re.sub(r"<svg.*?</svg>", "", text, flags=re.DOTALL)
    assert Page(text).open == []


def test_a_report_is_made_again_over_an_old_one(tmp_path, report):
    write_report(write_sweep(tmp_path, keep=lambda repeat, point: repeat == 0))
    before = json.loads((tmp_path / "figures.json").read_text())["figures"]
    write_report(write_sweep(tmp_path, keep=lambda repeat, point: repeat > 0))
    after = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert (before["runs"], after["runs"]) == (16, 48)
    # The same results, in another order and made at another time.
    for name in ("report.html", "summary.md", "summary.csv", "figures.json"):
        assert (tmp_path / name).read_bytes() == (report / name).read_bytes()


def test_a_folder_without_a_sweep_is_refused(tmp_path):
    with pytest.raises(ResultsError, match="holds no sweep"):
        write_report(tmp_path)
