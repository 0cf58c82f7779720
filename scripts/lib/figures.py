"""The options that every check and benchmark shares, and the file its figures go to."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

from sglang_ext.servers.cpu_watch import CpuUse, CpuWatch, Shares

# What the processors had done when this program asked for its options.
_begun: CpuUse | None = None


def parser(description: str | None, *, model: bool = True) -> argparse.ArgumentParser:
    """A parser with --json, --quick and, unless `model` is false, --model.

    From here on until `report`, it is watched who else uses the processors.
    """
    global _begun
    _begun = CpuUse.now()
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    made.add_argument("--quick", action="store_true", help="fewer prompts, under 5 minutes")
    if model:
        made.add_argument("--model", default="smollm2-135m-instruct", help="name, path or hub id")
    return made


def report(figures: Mapping[str, float], path: Path | None) -> dict[str, float]:
    """Print the figures, and write {"figures": {...}} to `path`.

    Where it is known, `foreign_cpu_percent` and `steal_percent` are added: what other programs and
    the host of a virtual machine took of the processors since `parser`.

    Returns:
        All of them.
    """
    others = _others()
    known = dict(figures) | (_percent(others) if others is not None else {})
    print()
    for name, value in known.items():
        print(f"{name:24} {value:.4g}" if isinstance(value, float) else f"{name:24} {value}")
    if others is not None and others.disturbed:
        print(f"disturbed: {others}; times of this run say as much about them")
    if path is not None:
        path.write_text(json.dumps({"figures": known}, indent=2) + "\n")
    return known


def _others() -> Shares | None:
    watch = CpuWatch()
    watch.add(_begun)
    return watch.shares


def _percent(others: Shares) -> dict[str, float]:
    return {
        "foreign_cpu_percent": 100.0 * (others.foreign or 0.0),
        "steal_percent": 100.0 * others.stolen,
    }
