"""The options that every check and benchmark shares, and the file its figures go to."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path


def parser(description: str | None, *, model: bool = True) -> argparse.ArgumentParser:
    """A parser with --json, --quick and, unless `model` is false, --model."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    made.add_argument("--quick", action="store_true", help="fewer prompts, under 5 minutes")
    if model:
        made.add_argument("--model", default="smollm2-135m-instruct", help="name, path or hub id")
    return made


def report(figures: Mapping[str, float], path: Path | None) -> None:
    """Print the figures, and write {"figures": {...}} to `path`."""
    print()
    for name, value in figures.items():
        print(f"{name:24} {value:.4g}" if isinstance(value, float) else f"{name:24} {value}")
    if path is not None:
        path.write_text(json.dumps({"figures": dict(figures)}, indent=2) + "\n")
