"""Medians, spread, paired ratios and figures of sweeps whose numbers are known."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from sglang_ext.sweep.plan import RATE, Point
from sglang_ext.sweep.results import Results
from sglang_ext.sweep.run_metrics import COLUMNS
from sglang_ext.sweep.summary import Spread, summarize
from tests.unit.sweep.finished_sweep import PLAN, batch, failed, write_sweep

OWN_COLUMNS = {
    "failed", "verify_width", "cpu_s_per_1k_tokens", "memory_mb", "foreign_cpu_percent",
    "steal_percent",
}  # fmt: skip
# bench_serving computes these and does not write them.
UNWRITTEN = {"p90_e2e_latency_ms"}


def summary_of(folder, *args, **options):
    return summarize(Results.read(write_sweep(folder, *args, **options)))


def test_columns_are_named_as_in_bench_serving():
    package = Path(find_spec("sglang").origin).parent  # without importing it
    source = (package / "benchmark" / "serving.py").read_text()
    missing = {n for n in COLUMNS if f'"{n}"' not in source} - OWN_COLUMNS
    assert missing <= UNWRITTEN
    assert all(f"{name}=" in source for name in missing)


def test_medians_and_spread_over_repeats(tmp_path):
    row = summary_of(tmp_path).row(batch("ar", 1))
    throughput = row.columns["output_throughput"]
    assert (throughput.median, throughput.low, throughput.high) == pytest.approx((110, 100, 120))
    assert throughput.count == 3
    assert throughput.percent == pytest.approx(100 * 10 / 110)


def test_one_run_has_all_columns_but_those_of_speculation(tmp_path):
    summary = summary_of(tmp_path, replace(PLAN, repeats=1))
    columns = summary.row(batch("ar", 1)).by_repeat[0]
    assert columns == pytest.approx(
        {
            "completed": 4, "failed": 0, "duration": 0.44, "total_input_tokens": 80,
            "total_output_tokens": 44, "request_throughput": 4 / 0.44,
            "input_throughput": 80 / 0.44, "output_throughput": 100,
            "total_throughput": 124 / 0.44,
            "mean_e2e_latency_ms": 1650, "median_e2e_latency_ms": 1650,
            "p90_e2e_latency_ms": 2200, "p99_e2e_latency_ms": 2200,
            "mean_ttft_ms": 100, "median_ttft_ms": 100, "p90_ttft_ms": 100, "p99_ttft_ms": 100,
            # (1.1 - 0.1) / 10 and (2.2 - 0.1) / 10 seconds
            "mean_tpot_ms": 155, "median_tpot_ms": 155, "p90_tpot_ms": 210, "p99_tpot_ms": 210,
            "mean_itl_ms": 100, "median_itl_ms": 100, "p90_itl_ms": 100, "p99_itl_ms": 100,
            "concurrency": 15, "cpu_s_per_1k_tokens": 20, "memory_mb": 1500,
        }
    )  # fmt: skip
    live = summary.row(batch("sssd-live", 4)).by_repeat[0]
    known = {*COLUMNS} - {"foreign_cpu_percent", "steal_percent"}  # of folders of old
    assert set(live) == {*known, "equal_outputs_percent"}
    assert (live["accept_length"], live["verify_width"]) == (2.2, 2.0)


def test_speedups_are_paired_so_that_drift_does_not_show(tmp_path):
    # AR has no last repeat, in which the machine is fastest.
    summary = summary_of(tmp_path, keep=lambda repeat, point: (repeat, point.method) != (2, "ar"))
    speedup = summary.row(batch("sssd-live", 1)).columns["speedup"]
    assert (speedup.median, speedup.low, speedup.high, speedup.count) == pytest.approx((2, 2, 2, 2))
    assert summary.row(batch("sssd-live", 4)).median("speedup") == pytest.approx(1.5)
    assert summary.row(batch("ar", 1)).median("speedup") == pytest.approx(1)


def test_categories_are_compared_by_their_own_requests(tmp_path):
    def faster_at_math(result, requests):
        if result.method == "ar":
            return result, requests
        return result, [
            replace(r, e2e_s=r.e2e_s / 3, spec_verify_ct=2) if r.category == "math" else r
            for r in requests
        ]

    summary = summary_of(tmp_path, change=faster_at_math)
    rows = {r.category: r for r in summary.categories if r.point == batch("sssd-live", 1)}
    assert rows["math"].median("speedup") == pytest.approx(6)
    assert rows["writing"].median("speedup") == pytest.approx(2)
    assert rows["math"].median("accept_length") == pytest.approx(5.5)
    assert rows["writing"].median("accept_length") == pytest.approx(2.2)
    assert rows["math"].median("completed") == 2


def test_figures(tmp_path):
    assert summary_of(tmp_path).figures() == {
        "min_ratio_sssd_vs_ar": pytest.approx(1.5),  # at batch 4
        # At batch 4, where suffix decoding has 1.3; `long` does not count.
        "min_ratio_sssd_vs_best_ngram_peer": pytest.approx(1.5 / 1.3),
        "methods": ["ar", "ngram", "suffix", "sssd-live"],
        "batch_sizes": [1, 4],
        "workloads": ["mt-bench", "long"],
        "spread_percent": pytest.approx(100 * 10 / 110),
        "spread_percent_median": pytest.approx(100 * 10 / 110),
        "speedup_spread_percent": pytest.approx(0.0, abs=1e-9),
        "speedup_agreement_percent": pytest.approx(0.0, abs=1e-9),
        "ratio_error_percent": pytest.approx(0.0, abs=1e-9),
        "disturbed": 0,
        "equal_outputs_percent": 100.0,
        "runs": 48,
        "runs_planned": 48,
    }


def test_figures_that_cannot_be_had_are_left_out(tmp_path):
    plan = replace(PLAN, methods=("ngram", "sssd-live"), workloads=("long",), repeats=1)
    figures = summary_of(tmp_path, plan).figures()
    assert set(figures) == {
        "methods", "batch_sizes", "workloads", "disturbed", "runs", "runs_planned",
    }  # fmt: skip


def test_nothing_measured_yet(tmp_path):
    summary = summary_of(tmp_path, keep=lambda repeat, point: False)
    assert not summary.rows
    assert summary.figures()["runs"] == 0


def test_outputs_that_differ_from_those_of_ar(tmp_path):
    def one_differs(result, requests):
        if result.method == "suffix" and result.repeat == 1:
            requests = [replace(requests[0], output_sha="other"), *requests[1:]]
        return result, requests

    summary = summary_of(tmp_path, change=one_differs)
    row = summary.row(batch("suffix", 1))
    assert row.by_repeat[1]["equal_outputs_percent"] == 75.0
    assert row.median("equal_outputs_percent") == 100.0
    assert "equal_outputs_percent" not in summary.row(batch("ar", 1)).columns
    # 4 requests of 3 methods, 2 workloads, 2 batches, 3 repeats: 144, of which 4 differ.
    assert summary.figures()["equal_outputs_percent"] == pytest.approx(100 * 140 / 144)


def test_failed_runs_are_left_out_and_named(tmp_path):
    def dies(result, requests):
        bad = (result.repeat, result.point) == (1, batch("ngram", 4))
        return failed(result, requests) if bad else (result, requests)

    summary = summary_of(tmp_path, change=dies)
    assert summary.row(batch("ngram", 4)).columns["output_throughput"].count == 2
    assert summary.problems == ["mt-bench/batch-4/ngram, repeat 2: the server died"]
    assert summary.figures()["runs"] == 47


def test_a_run_that_was_made_again_is_no_problem(tmp_path):
    def dies(result, requests):
        return failed(result, requests)

    def first(repeat, point):
        return (repeat, point) == (0, batch("ar", 1))

    write_sweep(tmp_path, keep=first, change=dies)
    summary = summary_of(tmp_path)
    assert not summary.problems
    assert summary.figures()["runs"] == 48


def test_failed_requests_have_no_latency(tmp_path):
    def one_fails(result, requests):
        if (result.repeat, result.point) != (0, batch("ngram", 1)):
            return result, requests
        bad = replace(requests[3], error="HTTP 500", ttft_s=None, e2e_s=99.0, itl_s=[])
        return replace(result, failed=1), [*requests[:3], bad]

    summary = summary_of(tmp_path, change=one_fails)
    columns = summary.row(batch("ngram", 1)).by_repeat[0]
    assert columns["completed"] == 3
    assert columns["p99_e2e_latency_ms"] < 2000
    assert summary.problems == ["mt-bench/batch-1/ngram, repeat 1: 1 of 4 requests failed"]


def test_with_poisson_arrivals_speed_is_latency(tmp_path):
    def same_throughput(result, requests):
        return replace(result, duration_s=1.0), requests

    plan = replace(PLAN, batches=(), rates=(1.0,), repeats=2)
    summary = summary_of(tmp_path, plan, change=same_throughput)
    row = summary.row(Point("sssd-live", "mt-bench", RATE, 1.0))
    assert row.median("speedup") == pytest.approx(2)
    figures = summary.figures()
    assert figures["min_rate_ratio_sssd_vs_ar"] == pytest.approx(2)
    assert "min_ratio_sssd_vs_ar" not in figures


def test_a_sweep_that_went_on_elsewhere_says_so(tmp_path):
    with Results.create_or_resume(tmp_path, PLAN) as results:
        change = "cpu: one before, another now"
        results.write_environment({"resumed": [{"started": "x", "changes": [change]}]})
    problems = summarize(Results.read(tmp_path)).problems
    assert problems == [f"the sweep went on under other conditions: {change}"]


def test_spread_of_one_value_and_of_zero():
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0, 1)
    assert Spread.of([0.0, 0.0]).percent == 0.0


SPECIAL = replace(PLAN, methods=("ar", "ssbd", "ssbd-plus"), workloads=("retranslation",))


def special_factor(monkeypatch):
    factors = {"ar": 1.0, "ssbd": 1.5, "ssbd-plus": 2.0}
    monkeypatch.setattr("tests.unit.sweep.finished_sweep.FACTORS", factors)


def test_qualities_are_summed_over_requests_before_they_are_divided(tmp_path, monkeypatch):
    special_factor(monkeypatch)

    def with_ratios(result, requests):
        words = [[1, 10], [0, 2], [3, 4], [0, 0]]
        return result, [
            replace(r, ratios={"word_error_percent": w, "normalized_erasure": w})
            for r, w in zip(requests, words, strict=True)
        ]

    row = summary_of(tmp_path, SPECIAL, change=with_ratios).rows[0]
    assert row.median("word_error_percent") == pytest.approx(25.0)
    assert row.median("normalized_erasure") == pytest.approx(0.25)


def test_figures_of_ssbd_leave_out_outputs_that_are_biased(tmp_path, monkeypatch):
    special_factor(monkeypatch)

    def biased(result, requests):
        wrong = {"ssbd": requests[:1], "ssbd-plus": requests}.get(result.method, [])
        return result, [replace(r, output_sha="other") if r in wrong else r for r in requests]

    figures = summary_of(tmp_path, SPECIAL, change=biased).figures()
    assert figures["min_ratio_ssbd_vs_ar"] == pytest.approx(1.5)  # of ssbd-plus at batch 4
    assert figures["equal_outputs_percent"] == pytest.approx(75.0)  # of ssbd alone
    assert "min_ratio_sssd_vs_ar" not in figures


def scattered(by):
    """Runs of SSSD live that are `by` times as slow in every second repeat."""

    def change(result, requests):
        slow = by if result.method == "sssd-live" and result.repeat % 2 else 1.0
        return replace(result, duration_s=slow * result.duration_s), requests

    return change


def test_repeats_that_differ_too_far_bear_out_no_least_ratio(tmp_path):
    summary = summary_of(tmp_path, change=scattered(by=2.0))
    figures = summary.figures()
    assert summary.disturbed and figures["disturbed"] == 1
    assert figures["ratio_error_percent"] > 15
    assert not any(name.startswith("min_") for name in figures)
    (doubt,) = summary.doubts()
    assert doubt.startswith("disturbed: ") and doubt in summary.problems


def test_repeats_that_differ_little_do(tmp_path):
    summary = summary_of(tmp_path, change=scattered(by=1.05))
    assert not summary.disturbed and not summary.problems
    assert summary.figures()["min_ratio_sssd_vs_ar"] == pytest.approx(1.5)
    assert 0 < summary.figures()["ratio_error_percent"] < 15


def test_of_single_runs_no_least_ratio_is_given(tmp_path):
    summary = summary_of(tmp_path, replace(PLAN, repeats=1))
    assert not any(name.startswith("min_") for name in summary.figures())
    assert not summary.disturbed  # nothing is known, so nothing is said of the machine
    assert any("--repeats 2" in problem for problem in summary.problems)


def test_what_others_took_of_the_processors_is_told(tmp_path):
    def beside_another(result, requests):
        share = 0.5 if result.repeat == 2 else 0.01
        return replace(result, foreign_share=share, stolen_share=0.0), requests

    summary = summary_of(tmp_path, change=beside_another)
    figures = summary.figures()
    # The last repeat's runs are shorter: the machine gets faster.
    assert 10 < figures["foreign_cpu_percent"] < 100 * 0.51 / 3 + 1
    assert figures["steal_percent"] == 0.0
    assert figures["disturbed_runs"] == 16
    told = "disturbed: in 16 of 48 runs other programs took 50.0% of the processors"
    assert [problem[: len(told)] for problem in summary.problems] == [told]
    assert summary.row(batch("ar", 1)).median("foreign_cpu_percent") == pytest.approx(1.0)


def test_a_server_elsewhere_leaves_steal_alone_known(tmp_path):
    def elsewhere(result, requests):
        return replace(result, foreign_share=None, stolen_share=0.02), requests

    figures = summary_of(tmp_path, change=elsewhere).figures()
    assert figures["steal_percent"] == pytest.approx(2.0)
    assert "foreign_cpu_percent" not in figures
