"""docs/performance.md from a results folder: its figures, its pictures, its command."""

import argparse
import json
import re
import shlex
import shutil
from dataclasses import asdict, replace

import pytest

from sglang_ext.commands.sweep import add_commands, plan_of
from sglang_ext.sweep.performance import page, write_performance
from sglang_ext.sweep.results import Results
from sglang_ext.sweep.roofline import break_even_table, costs_of
from sglang_ext.sweep.summary import summarize
from tests.unit.sweep.finished_sweep import COSTS, ENVIRONMENT, PLAN, batch, failed, write_sweep


@pytest.fixture(scope="module")
def docs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("performance")
    write_performance(write_sweep(folder / "sweep"), folder / "docs")
    return folder / "docs"


def page_of(folder, *args, **options):
    return page(summarize(Results.read(write_sweep(folder, *args, **options))), [], None)


def test_the_page_says_what_was_found_and_where(docs):
    text = (docs / "performance.md").read_text()
    for part in (
        "tiny, A CPU, 2 cores (2 threads), 24 GB.",
        "SSSD live by AR, output tokens/s: 1.50 at the least.",
        "best n-gram peer, on MT-Bench and GSM8K: 1.15 at the least.",
        "| SSSD live | 220.0 ±9.1% (2.00x) | 660.0 ±9.1% (1.50x) |",
        "Here I_knee is 16 tokens: 1 token takes 10.0 ms in the linear layers, 64 take 50 ms.",
        "- `mt-bench`: MT-Bench's first turns.",
        "4 prompts of 20 tokens in the mean, outputs of 11.",
        "are the corpus of: Suffix decoding, SSSD live.",
        "- server `sssd`: `--drafters pld`",
    ):
        assert part in text
    assert "went wrong" not in text


def test_pictures_and_csv_are_there_and_linked(docs):
    text = (docs / "performance.md").read_text()
    linked = set(re.findall(r"\((performance/[^)]+)\)", text))
    assert "performance/roofline.svg" in linked
    assert linked == {f"performance/{p.name}" for p in (docs / "performance").glob("*.svg")} | {
        "performance/summary.csv"
    }
    for name in linked:
        assert (docs / name).stat().st_size > 100


def test_pictures_of_an_earlier_sweep_are_gone(tmp_path, docs):
    shutil.copytree(docs, tmp_path / "docs")
    plan = replace(PLAN, methods=("ngram", "sssd-live"), workloads=("long",), repeats=1)
    write_performance(write_sweep(tmp_path / "other", plan), tmp_path / "docs")
    assert not (tmp_path / "docs" / "performance" / "speedup-by-batch.svg").exists()
    assert "speedup-by-batch" not in (tmp_path / "docs" / "performance.md").read_text()


def test_no_path_of_this_machine_is_in_the_page(docs):
    for path in (docs / "performance.md", docs / "performance" / "summary.csv"):
        text = path.read_text()
        assert str(docs.parent) not in text
        assert PLAN.data not in text
        assert PLAN.model not in text


@pytest.mark.parametrize(
    "plan",
    [
        PLAN,
        replace(PLAN, batches=(), rates=(0.5, 2.0), server_flags=("--context-length", "4096")),
    ],
)
def test_the_command_in_the_page_makes_the_same_sweep(tmp_path, plan):
    block = re.search(r"```sh\n(.*?)\n```", page_of(tmp_path, plan), re.DOTALL)[1]
    sweep, report = block.replace("\\\n", " ").splitlines()
    parser = argparse.ArgumentParser()
    add_commands(parser.add_subparsers())
    made = plan_of(parser.parse_args(shlex.split(sweep)[1:]))
    mine = {"data": "", "model": ""}
    assert asdict(made) | mine == asdict(plan) | mine
    assert parser.parse_args(shlex.split(report)[1:]).performance.name == "docs"


def test_without_costs_there_is_no_roofline(tmp_path):
    sweep = write_sweep(tmp_path / "sweep", keep=lambda repeat, point: repeat == 0)
    with Results.create_or_resume(sweep, PLAN) as results:
        results.write_environment({})
    write_performance(sweep, tmp_path / "docs")
    assert "I_knee" not in (tmp_path / "docs" / "performance.md").read_text().split("## Results")[1]
    assert not (tmp_path / "docs" / "performance" / "roofline.svg").exists()


def test_problems_are_told(tmp_path):
    def dies(result, requests):
        return failed(result, requests) if result.point == batch("ngram", 1) else (result, requests)

    text = page_of(tmp_path, change=dies)
    assert "- mt-bench/batch-1/ngram, repeat 1: the server died" in text


def test_a_verify_step_must_commit_what_it_costs():
    costs = costs_of(ENVIRONMENT)
    assert costs.knee == 16
    assert costs.break_even(1, 1) == 1
    # One request, four nodes: 11 ms, and 4% of a one-token pass for verifying, against 10 ms.
    assert costs.break_even(1, 4) == pytest.approx((11 + 0.4) / 10)
    # Sixteen requests, four nodes: 50 ms and that against 20 ms.
    assert costs.break_even(16, 4) == pytest.approx((50 + 0.4) / 20)
    table = break_even_table(costs, (1, 16))
    assert table.rows[0][:3] == ("1", "1.04", "1.14")


def test_costs_are_the_newest_of_the_same_threads():
    def record(threads, knee):
        return json.loads(json.dumps(COSTS)) | {"for": {"threads": threads}, "I_knee": knee}

    records = [record(2, 1), record(2, 2), record(1, 3)]
    assert costs_of({"threads": 2, "forward_costs": records}).knee == 2
    assert costs_of({"threads": 8, "forward_costs": records}).knee == 3
    assert costs_of({"threads": 2, "forward_costs": []}) is None
    assert costs_of({}) is None
