"""A small sweep over real servers, one of which is killed in the middle."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from sglang_ext.servers.processes import start, stop_group
from sglang_ext.sweep.results import Results
from sglang_ext.sweep.summary import summarize
from tests.eventually import eventually

METHODS = ("ar", "pld", "sssd-live")
LIMIT_S = 900


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Of a sweep that ended well although its SSSD server was killed at its second batch size."""
    folder = tmp_path_factory.mktemp("sweep") / "results"
    command = [
        sys.executable, "-m", "sglang_ext.cli", "sweep", "--out", str(folder),
        "--methods", ",".join(METHODS), "--workloads", "mt-bench", "--batches", "1,2",
        "--repeats", "1", "--prompts", "4", "--max-tokens", "24",
    ]  # fmt: skip
    process = start(command)
    try:
        wait_for_lines(folder / "points.jsonl", len(METHODS), process)
        (sweep,) = psutil.Process(process.pid).children()
        (server,) = (child for child in sweep.children() if "SSSD" in child.cmdline())
        server.kill()
        assert process.wait(LIMIT_S) == 0
    finally:
        stop_group(process)
    return folder


def wait_for_lines(file: Path, count: int, process: subprocess.Popen) -> None:
    def is_there() -> bool:
        assert process.poll() is None, "the sweep ended"
        return file.exists() and len(file.read_text().splitlines()) >= count

    eventually(is_there, LIMIT_S, f"{count} lines in {file.name}")


def test_all_is_measured_although_a_server_died(folder):
    figures = json.loads((folder / "figures.json").read_text())["figures"]
    assert figures["runs"] == figures["runs_planned"] == 6
    assert figures["batch_sizes"] == [1, 2] and figures["methods"] == list(METHODS)
    # Single runs bear out no least ratio, and say nothing of the machine.
    assert not [name for name in figures if name.startswith("min_")] and not figures["disturbed"]
    rows = summarize(Results.read(folder)).rows
    assert all(row.median("speedup") > 0 for row in rows)
    assert all(row.median("foreign_cpu_percent") is not None for row in rows)
    errors = [point.error for point in Results.read(folder).points if point.error]
    assert errors and all("the server 'sssd' died" in error for error in errors)


def test_speculation_answers_like_plain_decoding(folder):
    figures = json.loads((folder / "figures.json").read_text())["figures"]
    assert figures["equal_outputs_percent"] == 100
    requests = Results.read(folder).requests
    assert {r.method for r in requests if r.spec_verify_ct} == {"pld", "sssd-live"}


def test_logs_and_report_are_kept(folder):
    assert (folder / "server-sssd.log").read_text().count("Uvicorn running") == 2
    assert (folder / "server-plain.log").read_text().count("Uvicorn running") == 1
    for name in ("report.html", "summary.md", "summary.csv", "environment.json"):
        assert (folder / name).stat().st_size > 0
