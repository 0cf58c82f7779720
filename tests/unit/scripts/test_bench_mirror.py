"""bench_mirror: what its rows ask for, where their processes run, and what its figures mean."""

import dataclasses
import os
import subprocess
import sys

import pytest

from scripts.lib import mirror_runs
from scripts.lib.mirror_plots import write_plots
from scripts.lib.mirror_results import Results, rises
from scripts.lib.mirror_rows import (
    AR,
    AR_BOTH,
    HEAD_STREAMING,
    KAPPA,
    LENS_RETRIEVAL,
    LENS_STREAMING,
    MIRROR,
    NAMED,
    SD,
    SD_AUTO,
    SD_BOTH,
    SD_RETRIEVAL,
    SD_STREAMING,
    of_tasks,
    splits,
)
from scripts.lib.mirror_runs import COUNTED, Answer, Settings, check_memory, needed_bytes, on_cores
from scripts.lib.mirror_steps import Steps
from scripts.lib.mirror_tables import tables
from scripts.lib.spec_bench import Prompt, unseen_texts
from sglang_ext.drafters.mirror import MirrorDrafter
from sglang_ext.request_options import RequestOptions

WINDOW, LAYERS = 6, 28


def answer(
    split: str, row: str, task: str, seconds: float, ids=range(11), batch: int = 1, **counts: float
) -> Answer:
    grown = dict.fromkeys(COUNTED, 0.0) | {
        name if name in COUNTED else f"drafter.{name}": value for name, value in counts.items()
    }
    assert set(grown) == set(COUNTED)
    return Answer(split, row, task, batch, 0.0, 0, tuple(ids), seconds, grown)


def mirror(split: str, task: str, seconds: float, **more: float) -> Answer:
    counts = {
        "plain_steps_total": 1, "verify_steps_total": 4, "plain_seconds_total": 0.2,
        "verify_seconds_total": 1.2, "draft_seconds_total": 0.1, "early_exit_steps_total": 5,
        "before_exit_seconds_total": 0.55, "early_exit_seconds_total": 0.05,
        "draft_seconds": 1.1, "reading_seconds": 0.1, "waited_seconds": 0.05, "hits": 3,
        "fallbacks": 1, "outcomes": 10, "foreseen_top1": 4, "foreseen_top2": 5,
        "foreseen_top4": 6, "foreseen_top8": 7, "foreseen_top16": 8,
    }  # fmt: skip
    return answer(split, MIRROR.name, task, seconds, **(counts | more))


@pytest.fixture
def results() -> Results:
    steps = {"plain_steps_total": 10.0}
    answers = [
        answer("lens", AR.name, "qa", 10.0, **steps),
        answer("lens", AR.name, "code", 10.0, **steps),
        answer("lens", SD.name, "qa", 5.0, asked_steps=12, asked_tokens=12,
               draft_seconds_total=1.0, **steps),
        answer("lens", SD.name, "code", 5.0, asked_steps=6, asked_tokens=6,
               draft_seconds_total=3.0, **steps),
        answer("lens", SD_RETRIEVAL.name, "qa", 5.0, asked_steps=8, asked_tokens=16, **steps),
        answer("lens", SD_STREAMING.name, "qa", 5.0, asked_steps=4, asked_tokens=10, **steps),
        mirror("lens", "qa", 5.0),
        mirror("lens", "code", 2.5, waited_seconds=0.5),
        answer("both", AR_BOTH.name, "qa", 8.0, **steps),
        answer("both", SD_BOTH.name, "qa", 3.0, **steps),
        mirror("exit1", "qa", 8.0, foreseen_top8=2),
        mirror("exit1", "math", 8.0, foreseen_top8=10),  # of no other exit
    ]  # fmt: skip
    return Results(splits([0, 1]), answers, LAYERS, WINDOW)


def test_what_rows_ask_for_is_what_a_server_takes():
    for split in splits([0, 1], streaming=True).values():
        for row in (split.base, *split.rows):
            options = RequestOptions.parse(row.params, ["mirror", "sssd"])
            assert not options.ingest
            MirrorDrafter.check(row.params)
    wanted = {"exit": True, "retrieval": True, "streams": False, "kappa": KAPPA}
    assert LENS_RETRIEVAL.params["mirror"] == wanted
    with_streams = splits([0, 1], streaming=True)
    assert {SD_STREAMING, LENS_STREAMING} <= set(with_streams["lens"].rows)
    assert HEAD_STREAMING in with_streams["head"].rows
    assert "--mirror-streams" in with_streams["lens"].flags("small", LAYERS, WINDOW, 9, "streams")
    assert not SD.mirrors and LENS_RETRIEVAL.mirrors and not AR.mirrors
    # SD is the published one; what a server does by itself is beside it, where Mirror does so.
    assert [row.params["budget"] for row in (SD, SD_BOTH)] == ["fixed"] * 2
    assert [row.params["budget"] for row in (SD_AUTO, MIRROR)] == ["auto"] * 2
    assert SD_AUTO in splits([0, 1])["lens"].rows and not SD_AUTO.mirrors


def test_the_cores_are_divided_but_for_the_rows_that_have_both():
    made = splits([4, 6, 7])
    flags = {name: split.flags("small", LAYERS, WINDOW, 60.0) for name, split in made.items()}
    for split in made.values():
        shared = split.target_cores & split.draft_cores
        assert bool(shared) == (split.base is AR_BOTH)

    def given(name: str, flag: str) -> str:
        return flags[name][flags[name].index(flag) + 1]

    assert given("lens", "--mirror-device") == "cpu:6"
    assert given("both", "--mirror-device") == "cpu:4,6"
    layers = [given(n, "--mirror-exit-layer") for n in ("lens", "exit1", "exit3")]
    assert layers == ["14", "7", "21"] and given("head", "--mirror-lens") == "head"
    assert given("lens", "--mirror-kappa") == str(NAMED)
    assert given("both", "--mirror-lens-seconds") == "60"
    assert "--drafter" not in flags["plain"]
    # The lens that the first server fits, on both cores, is the others'.
    assert next(iter(made)) == "both"


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
    kinds = ["coding", "writing", "math", "translation", "rag", "math_reasoning", "rag", "qa", "qa"]
    lengths = [1, 1, 1, 1, 9, 1, 8, 7, 2]
    made = zip(kinds, lengths, strict=True)
    prompts = [Prompt(kind, str(n), (n,) * length) for n, (kind, length) in enumerate(made)]
    found = of_tasks(prompts, 1, 4)
    assert {task: [p.text for p in ps] for task, ps in found.items()} == {
        "code": ["0"], "mt-bench": ["1"], "translation": ["3"], "math": ["5"],
        "rag": ["6"],  # all are longer: the shortest
        "qa": ["8"],
    }  # fmt: skip


def test_prompts_are_none_that_a_lens_is_fitted_on():
    from sglang_ext.mirror.fit_texts import carried_texts

    seen: list[str] = []

    class Reader:
        chat_template = None

        def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
            seen.append(text)
            return {"input_ids": [1] * 9}

        def encode(self, text: str, **_: object) -> list[int]:
            seen.append(text)
            return [1] * 9

    carried_texts(Reader())
    assert len(seen) > 200 and len(unseen_texts()) > 200
    assert not unseen_texts() & set(seen)


def test_speedups_are_means_over_tasks_by_the_same_servers_base(results):
    figures = results.figures()
    assert figures["speedup_mirror_vs_ar"] == pytest.approx((2 + 4) / 2)
    assert figures["speedup_mirror_vs_vanilla"] == pytest.approx(3 / 2)
    # Rates of two servers, on the prompts that both have answered.
    assert figures["speedup_mirror_vs_vanilla_both"] == pytest.approx((10 / 5) / (10 / 3))
    assert figures["tokens_s_ar"] == pytest.approx(1.0)
    assert figures["accept_length_mirror_lens_retrieval"] == 2.0


def test_parts_of_a_step_and_of_drafting(results):
    figures = results.figures()
    # A step took 7.5 s / 10 and by its parts (0.2 + 1.2 + 0.1) / 5.
    assert figures["step_ms_mirror_lens_retrieval"] == pytest.approx(750.0)
    assert figures["latency_law_error"] == pytest.approx((750 - 300) / 750)
    assert figures["fallback_share"] == 0.25
    assert figures["draft_steps_per_window"] == WINDOW
    assert figures["draft_steps_per_window_retrieval"] == WINDOW / 2
    assert figures["draft_steps_ratio_retrieval"] == 0.5
    assert figures["draft_steps_ratio_streaming"] == pytest.approx(0.4)


def test_eq_10_is_foretold_from_what_sd_waits_for_its_drafts(results):
    steps = Steps.of(results.alone("lens", MIRROR.name, "qa"))
    # A pass of 280 ms, 160 of them behind the exit; a quarter of the drafts is not there.
    assert (steps.pass_ms, steps.suffix_ms) == (pytest.approx(280), pytest.approx(160))
    assert steps.foretold_ms(100.0) == pytest.approx(280 + 0.25 * 100)
    assert steps.foretold_ms(200.0) == pytest.approx(280 + 0.75 * 40 + 0.25 * 200)
    figures = results.figures()
    assert figures["serial_draft_ms"] == pytest.approx(200.0)
    assert figures["latency_law_error_foretold"] == pytest.approx((750 - 360) / 750)


def test_drafting_is_to_be_hidden_where_it_fits_into_the_suffix(results):
    figures = results.figures()
    # SD waits 100 ms a step in qa and 300 ms in code; the suffix takes 160.
    assert figures["tasks_where_drafting_fits"] == 1
    assert figures["hidden_share"] == pytest.approx(1 - 0.05)
    assert figures["hidden_share_all"] == pytest.approx(1 - 0.55 / 2)


def test_fallbacks_by_kappa_and_depth(results, tmp_path):
    found = results.fallbacks()
    assert {layer: list(shares) for layer, shares in found.items()} == {
        7: [1, 2, 4, 8, 16], 14: [1, 2, 4, 8, 16],
    }  # fmt: skip
    # Of the prompt that both exits have seen.
    assert found[7][8] == pytest.approx(0.8) and found[14][8] == pytest.approx(0.3)
    assert results.figures()["fallback_exit14_kappa1"] == pytest.approx(0.6)
    write_plots(tmp_path, results)
    assert {path.suffix for path in tmp_path.iterdir()} == {".png", ".svg"}


def test_fallbacks_that_do_not_fall_are_counted(results):
    falling = {7: {1: 0.9, 2: 0.8, 4: 0.8, 8: 0.7, 16: 0.6}}
    deeper = {14: {top: share - 0.1 for top, share in falling[7].items()}}
    assert rises(falling) == rises(falling | deeper) == 0
    assert rises(falling | {14: falling[7]}) == 5, "no depth makes a difference"
    assert rises({7: dict.fromkeys((1, 2, 4, 8, 16), 0.5)}) == 1
    # The fixture's first exit foresees less with 8 candidates than with 4.
    assert results.figures()["fallback_rises"] > 0


def test_batches_and_t_1_have_figures_of_their_own(results):
    results.answers += [answer("lens", MIRROR.name, "mixed", 5.0, batch=4) for _ in range(4)]
    sampled = answer("lens", MIRROR.name, "qa", 2.0)
    results.answers.append(dataclasses.replace(sampled, temperature=1.0))
    figures = results.figures()
    # Each of the four has 10 tokens in 5 s.
    assert figures["tokens_s_mirror_lens_retrieval_batch4"] == pytest.approx(8.0)
    assert figures["tokens_s_mirror_lens_retrieval_t1"] == pytest.approx(5.0)
    assert figures["speedup_mirror_vs_ar"] == pytest.approx(3.0), "these are of single greedy ones"
    [table] = [t for t in tables(results) if t.title == "Batches and T = 1"]
    assert len(table.rows) == 2


def test_outputs_are_compared_with_those_of_the_same_server_and_batch(results):
    assert results.mismatches() == (0, 7)
    results.answers.append(answer("lens", SD.name, "code", 5.0, ids=range(1, 12)))
    results.answers.append(answer("lens", AR.name, "code", 5.0, ids=range(5), batch=4))
    results.answers.append(answer("lens", MIRROR.name, "code", 5.0, ids=range(5), batch=4))
    results.answers.append(answer("lens", MIRROR.name, "code", 5.0, ids=range(3), batch=2))
    figures = results.figures()
    assert figures["mismatches"] == 1 and figures["outputs_compared"] == 9
    assert "prompts_compared" not in figures
    results.answers.append(answer("lens", MIRROR.name, "lossless", 5.0, batch=4))
    assert results.figures()["prompts_compared"] == 1


def test_what_parts_have_found_stands_among_the_figures(results):
    found = {"mirrored_retrieval_critical_ms": 0.6, "unmirrored_retrieval_critical_ms": 3.0}
    made = Results(results.splits, results.answers, LAYERS, WINDOW, found | {"executor_kills": 20})
    figures = made.figures()
    assert figures["mirrored_retrieval_critical_ratio"] == pytest.approx(0.2)
    assert figures["executor_kills"] == 20
    assert "mirrored_retrieval_critical_ratio" not in results.figures()


def test_tables_have_a_line_for_each_row_that_ran(results):
    made = {table.title: table for table in tables(results)}
    rows = made["lens: batch 1, T = 0"].rows
    assert [row[0] for row in rows] == ["AR", "SD", "SD, retrieval", "Mirror lens, retrieval"]
    assert all(table.rows for table in made.values())
    assert all(len(row) == len(table.header) for table in made.values() for row in table.rows)
    assert made["lens: speed by AR, by task"].header == ["row", "code", "math", "qa"]


def test_a_row_without_drafting_has_no_share_of_it():
    steps = Steps.of([answer("lens", AR.name, "qa", 1.0, plain_steps_total=10)])
    assert steps.hidden_share is steps.fallback_share is steps.law_ms is None
    assert steps.unforeseen(8) is None and steps.passes_a_window(7) is None
    assert steps.accept_length == 1.0 and steps.step_ms == pytest.approx(100.0)


def test_a_server_that_does_not_fit_is_not_started(tmp_path, monkeypatch):
    target, draft = tmp_path / "target", tmp_path / "draft"
    for folder, dtype in ((target, "bfloat16"), (draft, "float32")):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"x" * 1000)
        (folder / "config.json").write_text(f'{{"dtype": "{dtype}", "num_hidden_layers": 4}}')
    beside = mirror_runs._BESIDE_BYTES
    assert needed_bytes(target, draft) == 2500 + 1000 + beside
    settings = Settings(str(target), str(draft), "", 8, 7, 1, 64, 10.0)
    monkeypatch.setattr(mirror_runs, "resolve", str)
    check_memory(settings)
    monkeypatch.setattr(mirror_runs, "_BESIDE_BYTES", 1 << 50)
    with pytest.raises(MemoryError, match="are free: end other programs"):
        check_memory(settings)
