"""The pictures of a sweep: what is drawn, what is in them, and that they can be made again."""

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from sglang_ext.sweep.plan import BATCH
from sglang_ext.sweep.plots import (
    _accept_length_by_width,
    _latency_throughput,
    _speedup_by_batch,
    _speedup_by_category,
    write_plots,
)
from sglang_ext.sweep.results import Results
from sglang_ext.sweep.summary import summarize
from tests.unit.sweep.finished_sweep import PLAN, write_sweep


@pytest.fixture
def summary(tmp_path):
    return summarize(Results.read(write_sweep(tmp_path / "sweep")))


def texts(path):
    root = ElementTree.parse(path).getroot()
    return {"".join(e.itertext()).strip() for e in root.iter() if e.tag.endswith("}text")}


def lines(axis):
    """By label, the points of each line."""
    return {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in axis.lines}


def test_all_plots_as_png_and_svg(summary, tmp_path):
    names = [plot.name for plot in write_plots(summary, tmp_path / "plots")]
    assert names == [
        "latency-throughput", "speedup-by-batch", "speedup-by-category", "accept-length"
    ]  # fmt: skip
    files = {path.name for path in (tmp_path / "plots").iterdir()}
    assert files == {f"{name}.{ending}" for name in names for ending in ("png", "svg")}
    for name in names:
        assert (tmp_path / "plots" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert {"SSSD live", "Suffix decoding"} <= texts(tmp_path / "plots" / f"{name}.svg")


def test_the_same_results_give_the_same_svg(summary, tmp_path):
    for folder in ("a", "b"):
        write_plots(summary, tmp_path / folder)
    for path in (tmp_path / "a").glob("*.svg"):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_latency_against_throughput(summary):
    figure = _latency_throughput(BATCH)(summary)
    latency, between = figure.axes[0], figure.axes[2]
    assert latency.get_title() == "mt-bench"
    assert lines(latency)["AR"] == [
        pytest.approx((110, 1.65 / 1.1)), pytest.approx((440, 1.65 / 1.1))
    ]  # fmt: skip
    assert lines(between)["SSSD live"][0] == pytest.approx((220, 100 / 2.2))


def test_speedup_by_batch(summary):
    axis = _speedup_by_batch(summary).axes[0]
    drawn = {bars.get_label(): bars.lines[0].get_xydata().tolist() for bars in axis.containers}
    assert drawn["SSSD live"] == [pytest.approx([1, 2]), pytest.approx([4, 1.5])]
    assert "AR" not in drawn


def test_speedup_by_category(summary):
    axis = _speedup_by_category(summary).axes[0]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["writing", "math"]
    widths = {
        bars.get_label(): [bar.get_width() for bar in bars.patches] for bars in axis.containers
    }
    assert widths["NGRAM"] == pytest.approx([1.2, 1.2])


def test_accept_length_against_width(summary):
    axis = _accept_length_by_width(summary).axes[0]
    assert lines(axis)["NGRAM"] == [pytest.approx((8, 2.2)), pytest.approx((2, 2.2))]
    assert "AR" not in lines(axis)


def test_poisson_arrivals_have_a_plot_of_their_own(tmp_path):
    plan = replace(PLAN, batches=(), rates=(0.5, 1.0), repeats=1)
    plots = write_plots(summarize(Results.read(write_sweep(tmp_path / "s", plan))), tmp_path)
    assert [plot.name for plot in plots] == ["latency-throughput-rate"]


def test_without_ar_there_are_no_speedups(tmp_path):
    plan = replace(PLAN, methods=("ngram", "sssd-live"))
    plots = write_plots(summarize(Results.read(write_sweep(tmp_path / "s", plan))), tmp_path)
    assert [plot.name for plot in plots] == ["latency-throughput", "accept-length"]


def test_nothing_measured_draws_nothing(tmp_path):
    sweep = write_sweep(tmp_path / "sweep", keep=lambda repeat, point: False)
    assert write_plots(summarize(Results.read(sweep)), tmp_path) == []
