"""The operations pack's files, as the tools that read them judge them; nothing is started.

Each check gives a line for each problem.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from scripts.lib.promql_series import QueryError, Scraped, alert_queries, empty_parts

COMPOSE = ("compose.yaml", "compose.gpu.yaml")
_SECONDS = 60.0


def hadolint() -> str | None:
    """The command of hadolint; None: it is not installed."""
    beside = Path(sys.executable).with_name("hadolint")
    return str(beside) if beside.exists() else shutil.which("hadolint")


def dockerfile_problems(folder: Path) -> list[str]:
    """What hadolint says of the Dockerfile."""
    tool = hadolint()
    if tool is None:
        return ["hadolint is not installed: pip install 'sglang-ext[dev]'"]
    return _lines([tool, "--no-color", str(folder / "Dockerfile")])


def compose_problems(folder: Path) -> list[str]:
    """Where the compose files differ from compose's schema, and files that they mount and lack."""
    schema = ["--builtin-schema", "vendor.compose-spec"]
    paths = [str(folder / name) for name in COMPOSE]
    found = _lines([sys.executable, "-m", "check_jsonschema", *schema, *paths])
    services = _yaml(folder / COMPOSE[0])[0]["services"]
    for name, service in services.items():
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            if source.startswith(".") and not (folder / source).is_file():
                found.append(f"{COMPOSE[0]}: {name} mounts {source}, which the pack lacks")
    return found


def kubernetes_problems(folder: Path) -> list[str]:
    """Where the manifests differ from Kubernetes' schemas; unknown fields count."""
    import kubernetes_validate

    found = []
    for manifest in _yaml(folder / "kubernetes.yaml"):
        try:
            version = kubernetes_validate.latest_version()
            kubernetes_validate.validate(manifest, version, strict=True)
        except (
            kubernetes_validate.ValidationError,
            kubernetes_validate.SchemaNotFoundError,
            kubernetes_validate.InvalidSchemaError,
        ) as error:
            found.append(f"kubernetes.yaml: {manifest.get('kind')}: {error}")
    return found


def systemd_problems(folder: Path) -> list[str] | None:
    """What systemd-analyze verify says of the unit; None: this machine has no systemd."""
    if shutil.which("systemd-analyze") is None:
        return None
    return _lines(["systemd-analyze", "verify", str(folder / "sglang-ext.service")])


def rule_problems(folder: Path) -> list[str]:
    """Alerts that are no PromQL or lack what Alertmanager shows; promtool's words where it is."""
    found = []
    for group in _yaml(folder / "alerts.yaml")[0]["groups"]:
        for rule in group["rules"]:
            if not rule.get("annotations", {}).get("summary"):
                found.append(f"alerts.yaml: {rule['alert']} has no summary")
            if rule.get("labels", {}).get("severity") not in ("info", "warning", "critical"):
                found.append(f"alerts.yaml: {rule['alert']} has no severity")
    for query in alert_queries((folder / "alerts.yaml").read_text()):
        try:
            empty_parts(query.expression, Scraped(""))
        except QueryError as error:
            found.append(f"alerts.yaml: {query.where}: {error}")
    if shutil.which("promtool") is not None:
        found += _lines(["promtool", "check", "config", str(folder / "prometheus.yaml")])
    return found


def dashboard_problems(folder: Path) -> list[str]:
    """Panels without a title or a query, equal ids, and panels that cover each other."""
    found: list[str] = []
    panels = json.loads((folder / "dashboard.json").read_text())["panels"]
    taken: dict[tuple[int, int], str] = {}
    ids = [panel["id"] for panel in panels]
    if len(set(ids)) < len(ids):
        found.append("dashboard.json: two panels have one id")
    for panel in panels:
        if not panel["title"] or (panel["type"] != "row" and not panel["targets"]):
            found.append(f"dashboard.json: panel {panel['id']} has no title or no query")
        at = panel["gridPos"]
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                if (x, y) in taken or x >= 24:
                    found.append(f"dashboard.json: {panel['title']} has no place at {x}, {y}")
                taken[x, y] = panel["title"]
    return found


def _yaml(path: Path) -> list[Any]:
    import yaml

    return list(yaml.safe_load_all(path.read_text()))


def _lines(command: list[str]) -> list[str]:
    """What a linter that found something printed; none where it found nothing."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    # systemd-analyze may warn and end well.
    if done.returncode == 0 and command[0] != "systemd-analyze":
        return []
    return said or ([f"{command[0]} ended with {done.returncode}"] if done.returncode else [])
