"""Where a sweep was measured: versions, machine, commit."""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from sglang_ext.cpu.install import accelerator_present, usable_cores
from sglang_ext.models.store import default_cache_dir

_PACKAGES = (
    "torch", "sglang", "sglang-ext", "transformers", "numpy", "numba", "flashinfer-python",
    "arctic-inference",
)  # fmt: skip
# What servers run of this project.
_FOLDERS = ("sglang_ext", "datastores", "speech")
# What must be the same for runs to be comparable; a commit may change no more than a text.
_COMPARED = ("versions", "cpu", "cores", "threads", "memory_gb", "gpus", "package")


def collect() -> dict[str, Any]:
    """All of it, to be written as JSON. `versions` leaves out what is not installed."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "versions": {"python": platform.python_version()} | _versions(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cores": psutil.cpu_count(logical=False) or os.cpu_count(),
        "threads": int(os.environ.get("OMP_NUM_THREADS") or usable_cores()),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "gpus": _gpus(),
    } | checked_out(*(Path(__file__).parents[2] / name for name in _FOLDERS))


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What makes runs of two environments hard to compare, by name."""
    return [
        f"{name}: {before[name]} before, {now[name]} now"
        for name in _COMPARED
        if name in before and before[name] != now[name]
    ]


def machine(environment: Mapping[str, Any]) -> str:
    """What `collect` gave, as "AMD EPYC, 2 cores (2 threads), 24 GB"."""
    names = [*(environment.get("gpus") or []), environment.get("cpu") or "an unknown CPU"]
    text = ", ".join(names)
    if "cores" in environment:
        text += f", {environment['cores']} cores"
    if "threads" in environment:
        text += f" ({environment['threads']} threads)"
    return text + (f", {environment['memory_gb']:g} GB" if "memory_gb" in environment else "")


def forward_costs(model_path: str) -> list[dict[str, Any]]:
    """What forward passes cost by their tokens, as servers of this model measured it here.

    Returns:
        The files of sglang_ext.budget.cost_sweep ("for", "I_knee", "seconds" by token count),
        newest last.
    """
    found: list[tuple[float, dict[str, Any]]] = []
    for path in (default_cache_dir() / "knee").glob("*.json"):
        try:
            costs = json.loads(path.read_text(encoding="utf-8"))
            if costs["for"]["model"] == model_path:
                found.append((path.stat().st_mtime, costs))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # one that is being written, or of another version
    return [costs for _, costs in sorted(found, key=lambda pair: pair[0])]


def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package.replace("-", "_")] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if name.strip() == "model name":
                    return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _gpus() -> list[str]:
    if not accelerator_present():
        return []
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return _output(command, Path.cwd()).splitlines()


def checked_out(*folders: Path) -> dict[str, str | None]:
    """Git's names for the folders' commit and, as "package", for what each folder holds in it.

    With "+" where files differ; None outside of a checkout.
    """
    held = [name for folder in folders if (name := _git_name(folder, "HEAD:./", "."))]
    return {"commit": _git_name(folders[0], "HEAD", ":/"), "package": " ".join(held) or None}


def _git_name(folder: Path, revision: str, scope: str) -> str | None:
    name = _output(["git", "rev-parse", revision], folder)
    edited = name and _output(["git", "status", "--porcelain", "-uno", "--", scope], folder)
    return (name + "+" if edited else name) or None


def _output(command: list[str], folder: Path) -> str:
    """What a command prints; "" where it fails."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
