"""summary.md and summary.csv of a sweep whose numbers are known."""

import csv
from dataclasses import replace

import pytest

from sglang_ext.sweep.result_tables import (
    Table,
    categories,
    details,
    markdown,
    number,
    overview,
    write_tables,
)
from sglang_ext.sweep.results import Results
from sglang_ext.sweep.run_metrics import COLUMNS
from sglang_ext.sweep.summary import summarize
from tests.unit.sweep.finished_sweep import PLAN, batch, failed, write_sweep


@pytest.fixture
def summary(tmp_path):
    return summarize(Results.read(write_sweep(tmp_path)))


def cells(table):
    return {row[0]: dict(zip(table.header[1:], row[1:], strict=True)) for row in table.rows}


def test_overview_has_speed_spread_and_speedup(summary):
    first, second = overview(summary)
    assert (first.title, second.title) == ("mt-bench: output tokens/s", "long: output tokens/s")
    assert list(first.header) == ["method", "batch 1", "batch 4"]
    assert list(cells(first)) == ["AR", "NGRAM", "Suffix decoding", "SSSD live"]
    assert cells(first)["AR"]["batch 1"] == "110.0 ±9.1% (1.00x)"
    assert cells(first)["SSSD live"]["batch 4"] == "660.0 ±9.1% (1.50x)"


def test_overview_of_rates_has_latencies(tmp_path):
    plan = replace(PLAN, batches=(), rates=(0.5,), repeats=1)
    table = next(overview(summarize(Results.read(write_sweep(tmp_path, plan)))))
    assert table.title == "mt-bench: mean end-to-end latency, ms"
    # At rate 0.5 half of the gain: 1650 ms / 1.5.
    assert cells(table)["SSSD live"]["0.5 requests/s"] == "1,100 (1.50x)"


def test_categories_at_the_smallest_batch(summary):
    table = next(categories(summary))
    assert table.title == "mt-bench, batch 1: speedup by category"
    assert cells(table)["math"] == {
        "NGRAM": "1.20x", "Suffix decoding": "1.60x", "SSSD live": "2.00x"
    }  # fmt: skip
    assert list(cells(table)) == ["math", "writing"]


def test_details_name_columns_as_bench_serving_and_mark_what_is_unknown(summary):
    tables = {table.title: cells(table) for table in details(summary)}
    assert list(tables) == ["mt-bench, batch 1", "mt-bench, batch 4", "long, batch 1",
                            "long, batch 4"]  # fmt: skip
    plain, live = (tables["mt-bench, batch 1"][name] for name in ("AR", "SSSD live"))
    assert plain["accept_length"] == plain["verify_width"] == "-"
    assert live["accept_length"] == "2.20"
    assert live["verify_width"] == "8.00"
    assert live["median_ttft_ms"] == "45.45"
    assert live["equal_outputs_percent"] == "100.0"


def test_csv_has_every_column(summary, tmp_path):
    write_tables(summary, tmp_path)
    with (tmp_path / "summary.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 16
    row = next(r for r in rows if (r["method"], r["max_concurrency"]) == ("sssd-live", "4"))
    assert set(COLUMNS) | {"speedup", "equal_outputs_percent"} < set(row)
    assert (row["workload"], row["request_rate"], row["repeats"]) == ("mt-bench", "", "3")
    assert float(row["output_throughput"]) == pytest.approx(660)
    assert float(row["output_throughput_spread_percent"]) == pytest.approx(9.09)
    assert rows[0]["accept_length"] == rows[0]["accept_length_spread_percent"] == ""


def test_markdown_of_an_unfinished_sweep_says_what_is_missing(tmp_path):
    write_sweep(
        tmp_path,
        keep=lambda repeat, point: repeat == 0 and point.load == 1,
        change=lambda result, requests: (
            failed(result, requests, "gone")
            if result.point == batch("suffix", 1)
            else (result, requests)
        ),
    )
    text = markdown(summarize(Results.read(tmp_path)))
    assert "medians of up to 3 repeats. Unfinished: 7 of 48 runs." in text
    assert "- mt-bench/batch-1/suffix, repeat 1: gone" in text
    table = next(overview(summarize(Results.read(tmp_path))))
    assert cells(table)["Suffix decoding"] == {"batch 1": "-"}
    assert cells(table)["SSSD live"] == {"batch 1": "200.0 (2.00x)"}  # no spread of one run


def test_a_table_in_markdown():
    table = Table("T", ("a", "b"), [("x|y", "1")], "A note.")
    assert table.markdown() == "### T\n\nA note.\n\n| a | b |\n| --- | ---: |\n| x\\|y | 1 |\n"


@pytest.mark.parametrize(
    ("value", "text"), [(0.1234, "0.12"), (12.345, "12.35"), (123.45, "123.5"), (12345.6, "12,346")]
)
def test_numbers_are_readable(value, text):
    assert number(value) == text
