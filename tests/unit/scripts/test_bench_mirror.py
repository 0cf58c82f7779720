"""bench_mirror: what its rows ask for, where their processes run, and what its figures mean."""

import os
import subprocess
import sys

import pytest

from scripts.lib.mirror_plots import write_plots
from scripts.lib.mirror_results import Results, Steps, tables
from scripts.lib.mirror_rows import (
    AR,
    AR_BOTH,
    KAPPA,
    LENS_RETRIEVAL,
    LENS_STREAMING,
    MIRROR,
    NAMED,
    SD,
    SD_BOTH,
    SD_RETRIEVAL,
    SD_STREAMING,
    of_tasks,
    splits,
)
from scripts.lib.mirror_runs import COUNTED, Answer, Kills, on_cores
from scripts.lib.spec_bench import Prompt
from sglang_ext.drafters.mirror import MirrorDrafter
from sglang_ext.request_options import RequestOptions

WINDOW, LAYERS = 6, 28


def answer(split: str, row: str, task: str, seconds: float, ids=range(11), **counts: float):
    grown = dict.fromkeys(COUNTED, 0.0) | {
        name if name in COUNTED else f"drafter.{name}": value for name, value in counts.items()
    }
    assert set(grown) == set(COUNTED)
    return Answer(split, row, task, 1, 0.0, 0, tuple(ids), seconds, grown)


def mirror(split: str, task: str, seconds: float, **more: float) -> Answer:
    counts = {
        "plain_steps_total": 1, "verify_steps_total": 4, "plain_seconds_total": 0.2,
        "verify_seconds_total": 1.2, "draft_seconds_total": 0.1, "early_exit_steps_total": 5,
        "draft_seconds": 1.1, "reading_seconds": 0.1, "waited_seconds": 0.05, "hits": 3,
        "fallbacks": 1, "outcomes": 10, "foreseen_top1": 4, "foreseen_top2": 5,
        "foreseen_top4": 6, "foreseen_top8": 7, "foreseen_top16": 8,
    }  # fmt: skip
    return answer(split, MIRROR.name, task, seconds, **(counts | more))


@pytest.fixture
def results() -> Results:
    made = splits([0, 1], quick=False)
    steps = {"plain_steps_total": 10.0}
    answers = [
        answer("lens", AR.name, "qa", 10.0, **steps),
        answer("lens", AR.name, "code", 10.0, **steps),
        answer("lens", SD.name, "qa", 5.0, asked_steps=12, asked_tokens=12, **steps),
        answer("lens", SD.name, "code", 5.0, asked_steps=6, asked_tokens=6, **steps),
        answer("lens", SD_RETRIEVAL.name, "qa", 5.0, asked_steps=8, asked_tokens=16, **steps),
        answer("lens", SD_STREAMING.name, "qa", 5.0, asked_steps=4, asked_tokens=10, **steps),
        mirror("lens", "qa", 5.0),
        mirror("lens", "code", 2.5),
        answer("both cores", AR_BOTH.name, "qa", 8.0, **steps),
        answer("both cores", SD_BOTH.name, "qa", 3.0, **steps),
        answer("exit at 1/4", AR.name, "qa", 8.0, **steps),
        mirror("exit at 1/4", "qa", 8.0, foreseen_top8=2),
    ]
    return Results(made, answers, LAYERS, WINDOW)


def test_what_rows_ask_for_is_what_a_server_takes():
    for split in splits([0, 1], quick=False):
        for row in (split.base, *split.rows):
            options = RequestOptions.parse(row.params, ["mirror", "sssd"])
            assert not options.ingest
            MirrorDrafter.check(row.params)
    wanted = {"exit": True, "retrieval": True, "streams": False, "kappa": KAPPA}
    assert LENS_RETRIEVAL.params["mirror"] == wanted
    with_streams = splits([0, 1], quick=True, streaming=True)[0]
    assert {SD_STREAMING, LENS_STREAMING} <= set(with_streams.rows)
    assert "--mirror-streams" in with_streams.flags("small", LAYERS, WINDOW, 4, "streams")
    assert not SD.mirrors and LENS_RETRIEVAL.mirrors and not AR.mirrors


def test_the_cores_are_divided_but_for_the_rows_that_have_both():
    flags = {s.name: s.flags("small", LAYERS, WINDOW, 4) for s in splits([4, 6, 7], quick=False)}
    for split in splits([4, 6, 7], quick=False):
        shared = split.target_cores & split.draft_cores
        assert bool(shared) == (split.base is AR_BOTH)

    def given(name: str, flag: str) -> str:
        return flags[name][flags[name].index(flag) + 1]

    assert given("lens", "--mirror-device") == "cpu:6"
    assert given("both cores", "--mirror-device") == "cpu:4,6"
    layers = [given(n, "--mirror-exit-layer") for n in ("lens", "exit at 1/4", "exit at 3/4")]
    assert layers == ["14", "7", "21"] and given("head", "--mirror-lens") == "head"
    assert given("lens", "--mirror-kappa") == str(NAMED)


def test_processes_started_within_run_on_those_cores_alone():
    mine = os.sched_getaffinity(0)
    one = {min(mine)}
    with on_cores(one):
        said = subprocess.run(
            [sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
    assert said.strip() == str(one) and os.sched_getaffinity(0) == mine


def test_tasks_are_spec_benchs_six_and_code():
    kinds = ["coding", "writing", "math", "translation", "rag", "math_reasoning", "rag"]
    prompts = [Prompt(kind, str(n), (n,)) for n, kind in enumerate(kinds)]
    found = of_tasks(prompts, 1)
    assert {task: [p.text for p in ps] for task, ps in found.items()} == {
        "code": ["0"], "mt-bench": ["1"], "translation": ["3"], "rag": ["4"], "math": ["5"],
    }  # fmt: skip


def test_speedups_are_means_over_tasks_by_the_same_servers_base(results):
    figures = results.figures()
    assert figures["speedup_mirror_vs_ar"] == pytest.approx((2 + 4) / 2)
    assert figures["speedup_mirror_vs_vanilla"] == pytest.approx(3 / 2)
    # Rates of two servers: 20 tokens in 7.5 s by 10 tokens in 3 s.
    assert figures["speedup_mirror_vs_vanilla_both"] == pytest.approx((20 / 7.5) / (10 / 3))
    assert figures["speedup_mirror_lens_retrieval_exit1"] == pytest.approx(1.0)
    assert figures["tokens_s_ar"] == pytest.approx(1.0)
    assert figures["accept_length_mirror_lens_retrieval"] == 2.0


def test_parts_of_a_step_and_of_drafting(results):
    figures = results.figures()
    # A step took 7.5 s / 10 and by its parts (0.2 + 1.2 + 0.1) / 5.
    assert figures["step_ms_mirror_lens_retrieval"] == pytest.approx(750.0)
    assert figures["latency_law_error"] == pytest.approx((750 - 300) / 750)
    assert figures["hidden_share"] == pytest.approx(1 - 0.05)
    assert figures["fallback_share"] == 0.25
    assert figures["draft_steps_per_window"] == WINDOW
    assert figures["draft_steps_per_window_retrieval"] == WINDOW / 2
    assert figures["draft_steps_ratio_retrieval"] == 0.5
    assert figures["draft_steps_ratio_streaming"] == pytest.approx(0.4)


def test_fallbacks_by_kappa_and_depth(results, tmp_path):
    found = results.fallbacks()
    assert {layer: list(shares) for layer, shares in found.items()} == {
        7: [1, 2, 4, 8, 16], 14: [1, 2, 4, 8, 16],
    }  # fmt: skip
    assert found[7][8] == pytest.approx(0.8) and found[14][8] == pytest.approx(0.3)
    assert results.figures()["fallback_exit14_kappa1"] == pytest.approx(0.6)
    write_plots(tmp_path, results)
    assert {path.suffix for path in tmp_path.iterdir()} == {".png", ".svg"}


def test_an_output_that_differs_and_one_that_is_missing_count(results):
    assert results.mismatches() == (0, 8)
    results.answers.append(answer("lens", SD.name, "code", 5.0, ids=range(1, 12)))
    results.kills = Kills(3, 6, 1, 2)
    figures = results.figures()
    assert figures["mismatches"] == 1 and figures["outputs_compared"] == 9
    assert (figures["executor_kills"], figures["wrong_after_kills"]) == (3, 1)
    assert figures["hangs_after_kills"] == 2


def test_tables_have_a_line_for_each_row_that_ran(results):
    made = {table.title: table for table in tables(results)}
    rows = made["lens: batch 1, T = 0"].rows
    assert [row[0] for row in rows] == ["AR", "SD", "SD, retrieval", "Mirror lens, retrieval"]
    assert all(len(row) == len(table.header) for table in made.values() for row in table.rows)
    assert made["lens: speed by AR, by task"].header == ["row", "code", "qa"]


def test_a_row_without_drafting_has_no_share_of_it():
    steps = Steps.of([answer("lens", AR.name, "qa", 1.0, plain_steps_total=10)])
    assert steps.hidden_share is steps.fallback_share is steps.law_ms is None
    assert steps.unforeseen(8) is None and steps.passes_a_window(7) is None
    assert steps.accept_length == 1.0 and steps.step_ms == pytest.approx(100.0)
