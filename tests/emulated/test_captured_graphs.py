"""Graphs by width in SGLang's real runners; in a process of its own, which publishes a server."""

import json
import os
import subprocess
import sys

import pytest


def checked(path, *flags, **env):
    command = [sys.executable, "-m", "scripts.emulation.graph_checks", *flags]
    done = subprocess.run(
        [*command, "--json", str(path)],
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return checked(tmp_path_factory.mktemp("graphs") / "result.json", "--steps", "120")


def test_width_1_is_a_decode_graph_and_the_others_verify(result):
    assert result["widths"] == [1, 2, 4, 8]
    assert result["modes"] == {  # 8 is SGLang's own
        "1": ["DECODE", 1],
        "2": ["TARGET_VERIFY", 2],
        "4": ["TARGET_VERIFY", 4],
    }


def test_every_step_that_has_a_graph_runs_it(result):
    assert result["missed_graphs"] == 0
    for width, steps in result["steps"].items():
        assert 0 < result["graph_steps"][width] < steps  # larger batches have none


def test_a_step_computes_what_it_would_without_graphs(result):
    assert result["max_error"] < 1e-5
    assert result["max_logit"] > 1


def test_the_graph_of_a_batch_is_the_next_larger_one(result):
    assert result["padded_batches"] == [1, 2, 4, 4, 5, 6, 7]


def test_what_a_width_takes_is_known_before(result):
    for taken, estimated in result["bytes"].values():
        assert taken <= estimated * 1.01 and estimated <= taken * 1.05


def test_tritons_own_kernels_run_in_graphs_of_every_width(tmp_path):
    flags = "--backend", "triton", "--steps", "10"
    result = checked(tmp_path / "result.json", *flags, TRITON_INTERPRET="1")
    assert result["missed_graphs"] == 0 and sum(result["graph_steps"].values()) > 2
    assert result["max_error"] < 1e-5 and result["max_logit"] > 1
