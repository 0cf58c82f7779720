"""The docs' tables of options are those of the code, and no option is without docs."""

from dataclasses import fields

import pytest

from scripts.flag_tables import ASIDES, PAGES, TABLES, shown, table_of, with_table
from scripts.lib.import_layers import ROOT
from sglang_ext.options import Options


@pytest.mark.parametrize("name", TABLES)
def test_a_page_has_the_table_that_the_options_give(name: str):
    text = (ROOT / TABLES[name].page).read_text()
    assert text == with_table(text, name), "run: python -m scripts.flag_tables --write"


@pytest.mark.parametrize("option", [option.name for option in fields(Options)])
def test_every_option_is_in_a_table_or_among_the_limits(option: str):
    security = (ROOT / "docs" / "security.md").read_text()
    in_table = any(table.has(option) for table in TABLES.values())
    assert in_table or f"`--{option.replace('_', '-')}`" in security


def test_what_pages_add_is_of_options_that_exist():
    names = {option.name for option in fields(Options)}
    assert {*PAGES, *ASIDES} <= names
    assert all((ROOT / page).is_file() for page in PAGES.values())


def test_a_row_has_flag_default_meaning_and_where_more_is_said():
    assert "| `--live-ingest` | `1` | let finished outputs join the datastore |" in table_of(
        "serve"
    )
    assert "| `--draft-model` | | SpecASR: " in table_of("serve")
    assert "([docs/ssbd.md](docs/ssbd.md))" in table_of("serve")
    assert "(docs/ssbd.md)" not in table_of("ssbd") and "16.8 million" in table_of("ssbd")


def test_only_the_text_between_the_markers_changes():
    page = "a\n<!-- flags:begin ssbd -->\nwas there\n<!-- flags:end -->\nb\n"
    made = with_table(page, "ssbd")
    assert made.startswith("a\n<!-- flags:begin ssbd -->\n| flag |")
    assert made.endswith("|\n<!-- flags:end -->\nb\n") and "was there" not in made
    assert with_table(made, "ssbd") == made


def test_a_page_without_markers_is_an_error():
    with pytest.raises(ValueError, match=r"docs/ssbd\.md must have the markers"):
        with_table("nothing", "ssbd")


@pytest.mark.parametrize(
    ("default", "text"), [(True, "1"), (False, "0"), (15.0, "15"), (0.5, "0.5"), (8, "8"), ("", "")]
)
def test_defaults_are_shown_as_they_are_given(default: object, text: str):
    assert shown(default) == text
