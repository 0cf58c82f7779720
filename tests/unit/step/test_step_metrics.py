"""Prometheus series and the log line, in a process of their own (prometheus_client is global)."""

import logging
import os
import subprocess
import sys
import textwrap

import numpy as np

from sglang_ext.step import metrics
from sglang_ext.step.metrics import BudgetLog

SCRIPT = """
from types import SimpleNamespace
import numpy as np
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from sglang_ext.step.metrics import SpeculationMetrics
from sglang_ext.tree import TokenTree

m = SpeculationMetrics({"model_name": "m"})
tree = TokenTree(np.arange(4), np.arange(-1, 3, dtype=np.int32), np.ones(4, np.float32),
                 np.array([1, 3 + 64, 4, 8], np.int8))
m.note_verified([tree, TokenTree.chain([1])], [np.array([True, True, False]), np.array([False])])
m.note_width(2.5)
m.note_relaxed(3)
m.note_relaxed(0)
m.note_drafting(0.0003)
m.set_choices({"sssd": 2}, {})
m.set_choices({"sssd": 5, "specdec+sssd": 1}, {"sssd": 1.5})
m.set_budget(40, 8)
info = SimpleNamespace(namespaces={"a": 5, "b": 6}, corpora={"c": 7}, nbytes=90, disk_bytes=80,
                       ingest_lag=0.5, dropped_documents=3, background_failures=1,
                       pending_deletions=2, role="member", folded_logs=0, elections=0)
m.set_datastore(info)
info.dropped_documents, info.background_failures = 4, 3
info.role, info.folded_logs, info.elections = "writer", 5, 1
m.set_datastore(info)
assert m.gauges_due() and not m.gauges_due()
m.write()
m.write()
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def test_series_in_multiprocess_mode(tmp_path):
    env = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)], env=env, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    values = dict(line.rsplit(" ", 1) for line in run.stdout.split("\n") if line and line[0] != "#")

    def value(name: str, **labels: str) -> float:
        pairs = ",".join(f'{k}="{v}"' for k, v in sorted(({"model_name": "m"} | labels).items()))
        return float(values[f"sglang_ext:{name}{{{pairs}}}"])

    proposed = [value("proposed_tokens_total", source=s) for s in metrics.SOURCES.values()]
    accepted = [value("accepted_tokens_total", source=s) for s in metrics.SOURCES.values()]
    assert proposed == [2, 1, 1, 0, 0, 0, 1] and accepted == [2, 1, 0, 0, 0, 0, 1]
    named = {n: value(f"spec_decode_num_{n}_total") for n in ("drafts", "draft_tokens")}
    assert named == {"drafts": 2, "draft_tokens": 4}
    assert value("spec_decode_num_accepted_tokens_total") == 2
    per_pos = "spec_decode_num_accepted_tokens_per_pos_total"
    assert [value(per_pos, position=str(i)) for i in range(2)] == [1, 1]
    assert value("accept_length_count") == 2 and value("accept_length_sum") == 4
    assert value("accept_length_bucket", le="1.0") == 1
    assert value("verify_width_sum") == 2.5
    assert value("relaxed_tokens_total") == 3
    assert value("drafter_choices_total", drafter="sssd") == 5
    assert value("drafter_choices_total", drafter="specdec+sssd") == 1
    assert value("drafter_gain", drafter="sssd") == 1.5
    assert value("retrieval_seconds_bucket", le="0.0005") == 1
    assert value("budget_cap") == 5 and value("budget_knee_tokens") == 40
    assert value("datastore_tokens", kind="live") == 11
    assert value("datastore_tokens", kind="static") == 7
    assert value("datastore_bytes", kind="index") == 90
    assert value("datastore_bytes", kind="disk") == 80
    assert value("datastore_namespaces") == 2
    assert value("datastore_ingest_lag_seconds") == 0.5
    assert value("datastore_dropped_documents_total") == 4
    assert value("datastore_background_failures_total") == 3
    assert value("datastore_pending_deletions") == 2
    roles = {role: value("datastore_role", kind=role) for role in ("alone", "writer", "member")}
    assert roles == {"alone": 0, "writer": 1, "member": 0}
    assert value("datastore_folded_logs_total") == 5
    assert value("datastore_elections_total") == 1


def test_the_budget_is_logged_now_and_then(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    log = BudgetLog()
    log.note_step([3, 0], 40)
    log.note_accepted(2)
    assert not caplog.text
    monkeypatch.setattr(metrics, "LOG_EVERY_S", 0.0)
    log.note_step([0, 0], 40)
    assert (
        "2 steps, mean batch 2.0, s_q 1.75 (50% of steps plain), accept length 3.00 where "
        "verified, I_knee 40"
    ) in caplog.text
    monkeypatch.setattr(metrics, "LOG_EVERY_S", 60.0)
    caplog.clear()
    log.note_step(np.array([1]).tolist(), None)
    assert not caplog.text
