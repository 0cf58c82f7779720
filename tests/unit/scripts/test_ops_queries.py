"""What dashboard and alerts ask for is named as SGLang's sources and our own series name it.

Whether a running server shows all of it is what `scripts.check_operators --parts ops` asks.
"""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("promql_parser", reason="promql-parser is not installed")

from scripts.lib.promql_series import Scraped, alert_queries, dashboard_queries, series_asked
from sglang_ext.commands import ops

COLLECTOR = "srt/observability/metrics_collector.py"
OURS = """
from types import SimpleNamespace
import numpy as np
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from sglang_ext.step.metrics import SpeculationMetrics
from sglang_ext.tree import TokenTree

m = SpeculationMetrics({"model_name": "m"})
m.note_verified([TokenTree.chain([1])], [np.array([True])])
m.set_budget(40, 8)
m.set_datastore(SimpleNamespace(namespaces={"a": 5}, corpora={}, nbytes=9, disk_bytes=8,
                                ingest_lag=0, dropped_documents=0, background_failures=0,
                                pending_deletions=0, role="alone", folded_logs=0, elections=0))
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""
# What the dashboard's variables are made of.
SGLANG = 'sglang:num_running_reqs{model_name="m"} 0\n'


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """Our series as a server's /metrics has them, from a process of their own."""
    env = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path_factory.mktemp("metrics"))}
    done = subprocess.run(
        [sys.executable, "-c", OURS], env=env, capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.fixture(scope="module")
def queries(ours):
    asked = list(dashboard_queries(ops.read("dashboard.json"), Scraped(SGLANG + ours)))
    return asked + list(alert_queries(ops.read("alerts.yaml")))


def test_each_series_of_ours_is_there_with_its_labels(ours, queries):
    scraped = Scraped(ours)
    asked = [s for q in queries for s in series_asked(q.expression) if "sglang_ext:" in s.name]
    assert len(asked) > 30
    assert [s.prettify() for s in asked if not scraped.matching(s)] == []


def test_each_series_of_sglang_is_one_that_its_sources_name(queries):
    source = Path(find_spec("sglang").origin).with_name(COLLECTOR.partition("/")[0])
    text = (source / COLLECTOR.partition("/")[2]).read_text()
    named = set(re.findall(r'name="(sglang:\w+)"', text))
    asked = {s.name for q in queries for s in series_asked(q.expression)}
    sglangs = {name for name in asked if name.startswith("sglang:")}
    assert len(sglangs) > 8
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in sglangs} <= named
    assert asked - sglangs - {"up"} == {name for name in asked if name.startswith("sglang_ext:")}
