"""Pages of docs/measured/: what was measured is there, and what was not is left out."""

import pytest

from scripts.lib import pd_page
from scripts.lib.result_page import ResultPage, command_line
from sglang_ext.sweep.result_tables import Table

SPEEDS = {
    "prompts": 104, "mismatches": 0, "ratio_sssd_vs_ar_pd": 1.5, "ratio_sssd_vs_ar_single": 1.4,
    "decode_tokens_per_s_ar_pd": 20.0, "decode_tokens_per_s_sssd_pd": 30.0,
    "decode_tokens_per_s_ar_single": 25.0, "decode_tokens_per_s_sssd_single": 35.0,
}  # fmt: skip
KILLS = {"kills": 20, "requests": 300, "errors": 7, "wrong": 0, "hangs": 0}


@pytest.fixture
def command(monkeypatch) -> str:
    monkeypatch.setattr("sys.argv", ["/here/scripts/check_pd.py", "--docs", "docs"])
    return "python -m scripts.check_pd --docs docs"


def test_a_page_says_what_was_measured_where_and_how_to_do_it_again(tmp_path, command, capsys):
    table = Table("Speed", ("mode", "tok/s"), [("a|b", "3")])
    path = ResultPage("x", "Title", ["Found."], "Read me.", [table]).write(tmp_path)
    page = path.read_text()
    assert path == tmp_path / "measured" / "x.md"
    assert page.startswith(f"<!-- Made by `{command}`; not edited by hand. -->\n# Title\n")
    for part in ("- Found.", "Read me.", "### Speed", "| a\\|b | 3 |", f"```sh\n{command}\n```"):
        assert part in page
    assert "cores" in page and "SGLang 0." in page


def test_a_command_is_as_one_types_it():
    assert command_line(["/x/scripts/bench_a.py", "--out", "a b"]) == (
        "python -m scripts.bench_a --out 'a b'"
    )


def test_disaggregation_has_a_table_for_each_part_that_ran(tmp_path, command):
    pd_page.write_page(tmp_path, SPEEDS | KILLS, "some-model")
    page = (tmp_path / "measured" / "disaggregation.md").read_text()
    assert "| prefill and decode apart | 20.0 | 30.0 | 1.50x |" in page
    assert "ended with an error that the client sees | 7 |" in page
    assert "104 prompts in four ways each: 0 answers" in page
    assert "Drafting on decode servers" not in page and "Whisper" not in page


def test_parts_that_did_not_run_are_left_out(tmp_path, command):
    pd_page.write_page(tmp_path, {"whisper_equal": 2, "draft_lead_ms": 12.3}, "some-model")
    page = (tmp_path / "measured" / "disaggregation.md").read_text()
    assert "2 of 2 transcripts" in page and "| lead before the KV, ms | 12.30 |" in page
    assert "Decode tokens/s\n" not in page and "Kills" not in page
