"""A sweep's folder: resumed, refused, and left by a process that was killed."""

import json
import subprocess
import sys
from dataclasses import asdict, replace

import pytest

from sglang_ext.sweep.plan import Plan, Point
from sglang_ext.sweep.results import PointResult, RequestResult, Results, ResultsError, ServedBefore

PLAN = Plan(
    model="m", methods=("ar",), workloads=("w",), batches=(1, 2), rates=(), repeats=1, prompts=3,
    max_tokens=5, seed=0, data="/d", server_flags=(),
)  # fmt: skip
POINT = PointResult(
    repeat=0, method="ar", workload="w", mode="batch", load=1.0, started=1.5, duration_s=2.0,
    requests=1, failed=0, output_tokens=5, prompt_tokens=7, cpu_s=None, memory_mb=3.0,
    verify_width=None, accept_length=None, error=None,
)  # fmt: skip
REQUEST = RequestResult(
    repeat=0, method="ar", workload="w", mode="batch", load=1.0, id="i", category="c", start_s=0.0,
    ttft_s=0.1, e2e_s=2.0, itl_s=[0.5, 0.5], prompt_tokens=7, output_tokens=3, spec_verify_ct=None,
    output_sha="0" * 16, error=None,
)  # fmt: skip


def test_what_was_written_is_read(tmp_path):
    folder = tmp_path / "new" / "folder"
    served = ServedBefore("w", "s", [1, 2], [3])
    with Results.create_or_resume(folder, PLAN) as results:
        results.write_environment({"cpu": "x"})
        results.add_served_before([served])
        results.add_run(POINT, [REQUEST])
    found = Results.read(folder)
    assert found.plan == PLAN
    assert found.environment == {"cpu": "x"}
    assert found.points == [POINT]
    assert list(found.requests) == [REQUEST]
    assert list(found.requests) == [REQUEST]  # each time anew
    assert found.served_before("w") == [served]
    assert found.served_before("v") == []
    assert POINT.output_throughput == 2.5
    assert found.is_finished(0, Point("ar", "w", "batch", 1))
    assert not found.is_finished(1, Point("ar", "w", "batch", 1))


def test_a_resumed_sweep_keeps_runs_and_drops_the_requests_of_an_unfinished_one(tmp_path):
    with Results.create_or_resume(tmp_path, PLAN) as results:
        results.add_run(POINT, [REQUEST, REQUEST])
    unfinished = replace(REQUEST, load=2.0)
    with (tmp_path / "requests.jsonl").open("a") as file:
        file.write(json.dumps(asdict(unfinished)) + "\n" + json.dumps(asdict(unfinished))[:40])
    with (tmp_path / "points.jsonl").open("a") as file:
        file.write('{"repeat": 0, "meth')
    assert list(Results.read(tmp_path).requests) == [REQUEST, REQUEST]
    with Results.create_or_resume(tmp_path, PLAN) as results:
        assert results.points == [POINT]
        results.add_run(replace(POINT, load=2.0), [unfinished])
    found = Results.read(tmp_path)
    assert [p.load for p in found.points] == [1.0, 2.0]
    assert list(found.requests) == [REQUEST, REQUEST, unfinished]
    assert len((tmp_path / "requests.jsonl").read_text().splitlines()) == 3


def test_a_run_with_an_error_is_kept_and_may_be_made_again(tmp_path):
    with Results.create_or_resume(tmp_path, PLAN) as results:
        results.add_run(replace(POINT, error="died"), [])
        assert not results.is_finished(0, POINT.point)
        results.add_run(POINT, [REQUEST])
        assert results.is_finished(0, POINT.point)
    assert [p.error for p in Results.read(tmp_path).points] == ["died", None]


def test_another_sweeps_folder_is_refused_by_what_differs(tmp_path):
    Results.create_or_resume(tmp_path, PLAN).close()
    with pytest.raises(ResultsError, match=r"batches 1,2, not 4; seed 0, not 1"):
        Results.create_or_resume(tmp_path, replace(PLAN, batches=(4,), seed=1))
    Results.create_or_resume(tmp_path, PLAN).close()  # nothing was changed, the lock is free


def test_a_folder_of_something_else_is_refused_and_not_touched(tmp_path):
    (tmp_path / "thesis.tex").write_text("...")
    with pytest.raises(ResultsError, match="not empty"):
        Results.create_or_resume(tmp_path, PLAN)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(ResultsError, match="cannot be written"):
        Results.create_or_resume(tmp_path / "thesis.tex", PLAN)
    with pytest.raises(ResultsError, match="holds no sweep"):
        Results.read(tmp_path)


def test_two_sweeps_do_not_write_to_one_folder(tmp_path):
    code = (
        "import json, sys; from pathlib import Path\n"
        "from sglang_ext.sweep.plan import Plan\n"
        "from sglang_ext.sweep.results import Results, ResultsError\n"
        "plan = Plan.from_json(json.loads(sys.argv[2]))\n"
        "try: Results.create_or_resume(Path(sys.argv[1]), plan)\n"
        "except ResultsError as error: print(error)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path), json.dumps(PLAN.to_json())]
    with Results.create_or_resume(tmp_path, PLAN):
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert "another sweep is writing" in said
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == ""


def test_damage_is_named_by_file_and_line(tmp_path):
    with Results.create_or_resume(tmp_path, PLAN) as results:
        results.add_run(POINT, [REQUEST])
    with (tmp_path / "points.jsonl").open("a") as file:
        file.write("{}\n")
    with pytest.raises(ResultsError, match=r"points\.jsonl, line 2"):
        Results.read(tmp_path)
    (tmp_path / "sweep.json").write_text("{")
    with pytest.raises(ResultsError, match=r"sweep\.json"):
        Results.read(tmp_path)
