"""check_operators: the operations pack against a server, and our routes as /openapi.json says."""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from scripts.lib import ops_lint
from scripts.lib.http_client import HTTP
from scripts.lib.isolation_drafts import NothingShown
from scripts.lib.openapi_fuzz import fuzz
from scripts.lib.promql_series import Scraped, alert_queries, dashboard_queries, empty_queries
from scripts.lib.server import Server
from sglang_ext.commands import ops

_FLAGS = ["--speculative-algorithm", "SSSD", "--drafters", "ssbd", "--enable-metrics"]
_SESSIONS = "/v1/translation/sessions"
_EXAMPLES, _QUICK_EXAMPLES = 100, 10
# Gauges are set once a second, and series of a drafter when it has something to count.
_SHOWN_S = 30.0


def check(options: argparse.Namespace) -> dict[str, float]:
    """Figures of dashboard, alerts, /openapi.json and the files' linters.

    Raises:
        NothingShown: no route of ours took any request.
    """
    figures = linted()
    with Server(options.model, [*_FLAGS, "--max-total-tokens", "8192"], name="ops") as server:
        generate(server.base_url, options.model)
        figures |= shown(server.base_url)
        examples = _QUICK_EXAMPLES if options.quick else _EXAMPLES
        figures |= described(server.base_url, examples)
    return figures


def linted() -> dict[str, float]:
    """Problems of each kind of file; a kind whose tool this machine lacks has no figure."""
    checks: dict[str, Callable[[Path], Sequence[str] | None]] = {
        "dashboard_problems": ops_lint.dashboard_problems,
        "alert_problems": ops_lint.rule_problems,
        "dockerfile_problems": ops_lint.dockerfile_problems,
        "compose_problems": ops_lint.compose_problems,
        "kubernetes_problems": ops_lint.kubernetes_problems,
        "systemd_problems": ops_lint.systemd_problems,
    }
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="ops-") as folder:
        ops.write(Path(folder), [])
        for name, problems in checks.items():
            found = problems(Path(folder))
            if found is None:
                print(f"{name}: not checked, this machine has no systemd", file=sys.stderr)
                continue
            _tell(name, found)
            figures[name] = len(found)
    return figures


def generate(url: str, model: str) -> None:
    """Requests of the kinds that panels show: streamed and whole, with drafts that are accepted."""
    text = "one two three four five six seven eight nine ten " * 4
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"Repeat: {text}"}],
        "max_tokens": 48,
        "temperature": 0,
        "prediction": {"type": "content", "content": text},
    }
    for stream in (False, True, False, True):
        answer = HTTP.post(
            f"{url}/v1/chat/completions", json=body | {"stream": stream}, timeout=120
        )
        answer.raise_for_status()
    HTTP.post(f"{url}/datastore/flush", timeout=60).raise_for_status()


def shown(url: str) -> dict[str, float]:
    """Queries of the dashboard and the alerts, and those for which the server has no series."""
    until = time.monotonic() + _SHOWN_S
    while True:
        scraped = Scraped(HTTP.get(f"{url}/metrics", timeout=30).text)
        asked = list(dashboard_queries(ops.read("dashboard.json"), scraped))
        alerts = list(alert_queries(ops.read("alerts.yaml")))
        empty, silent = empty_queries(asked, scraped), empty_queries(alerts, scraped)
        if not (empty or silent) or time.monotonic() > until:
            break
        time.sleep(1)
    _tell("dashboard", empty)
    _tell("alerts", silent)
    return {
        "dashboard_queries": len(asked),
        "dashboard_queries_empty": len(empty),
        "alert_queries": len(alerts),
        "alert_queries_empty": len(silent),
    }


def described(url: str, examples: int) -> dict[str, float]:
    """What Schemathesis finds of the routes that /openapi.json has of ours.

    Raises:
        NothingShown: no request was taken.
    """
    import schemathesis

    body = {"source_language": "en", "target_language": "fr"}
    sessions = [HTTP.post(url + _SESSIONS, json=body).json()["id"] for _ in range(8)]
    known = {"session_id": sessions, "namespace": ["default"]}
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    found = list(fuzz(schema, examples, known))
    for answers in found:
        print(f"{answers.operation}: {dict(sorted(answers.statuses.items()))}")
        _tell(answers.operation, answers.errors + answers.unexpected)
    taken = sum(answers.statuses[200] for answers in found)
    if not taken:
        raise NothingShown("no request of /openapi.json was taken")
    return {
        "openapi_operations": len(found),
        "openapi_requests": sum(answers.statuses.total() for answers in found),
        "openapi_taken": taken,
        "openapi_5xx": sum(len(answers.errors) for answers in found),
        "openapi_undescribed": sum(len(answers.unexpected) for answers in found),
    }


def _tell(what: str, lines: Sequence[str]) -> None:
    for line in lines:
        print(f"{what}: {line}", file=sys.stderr)
