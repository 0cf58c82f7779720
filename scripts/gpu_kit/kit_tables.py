"""Tables of what runs of the kit measured.

    python -m scripts.gpu_kit.kit_tables docs/measured/gpu_h200.jsonl

Reads lines of gpu_kit.jsonl, of one run or of several, one behind the other; where a case is there
twice the later one counts.
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Line = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.gpu_kit.kit_tables", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("files", type=Path, nargs="+", help="gpu_kit.jsonl of one or several runs")
    files = parser.parse_args().files
    print("\n".join(report([json.loads(text) for f in files for text in f.open()])))


def report(lines: Sequence[Line]) -> list[str]:
    """The tables as lines of Markdown."""
    cases = {(line["phase"], line["case"]): line for line in lines if "case" in line}
    devices = sorted({line["device"] for line in lines})
    return [
        f"Device: {', '.join(devices)}",
        "",
        *_table(("phase", "passed", "failed", "not run"), _counts(cases.values())),
        "",
        *_kernels([line for (phase, _), line in cases.items() if phase == "kernels"]),
        "",
        *_latency([line for (phase, _), line in cases.items() if phase == "latency"]),
    ]


def _counts(lines: Iterable[Line]) -> list[Sequence[object]]:
    found: dict[str, dict[str, int]] = {}
    for line in lines:
        of_phase = found.setdefault(line["phase"], {"passed": 0, "failed": 0, "not_run": 0})
        of_phase[line["status"]] += 1
    return [(phase, *counts.values()) for phase, counts in found.items()]


def _kernels(lines: Sequence[Line]) -> list[str]:
    """The largest error of each kernel against dense attention, over its cases."""
    kinds: dict[str, list[Line]] = {}
    for line in lines:
        if "relative_error" in line:
            kinds.setdefault(line["case"].partition(", requests")[0], []).append(line)
    rows = [
        (
            kind, len(of_kind), f"{max(line['relative_error'] for line in of_kind):.4f}",
            f"{min(line['one_wrong_bit_changes'] for line in of_kind):.4f}",
        )
        for kind, of_kind in kinds.items()
    ]  # fmt: skip
    return _table(("kernel", "cases", "largest error", "least change by a wrong bit"), rows)


def _latency(lines: Sequence[Line]) -> list[str]:
    """Step, host gap and speed by configuration, acceptance and batch."""
    names = ("step_ms", "device_ms", "host_gap_ms", "tokens_per_step", "speed_vs_flashinfer")
    measured = [line for line in lines if "step_ms" in line]
    measured.sort(key=lambda line: (_label(line), line["acceptance"] or 0, line["batch"]))
    rows = [
        (
            _label(line), "" if line["acceptance"] is None else line["acceptance"], line["batch"],
            *(line.get(name, "") for name in names), " ".join(map(str, line["widths"])),
        )
        for line in measured
    ]  # fmt: skip
    return _table(("configuration", "acceptance", "batch", *names, "widths"), rows)


def _label(line: Line) -> str:
    return str(line["case"]).partition(", batch")[0]


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    return [
        f"| {' | '.join(head)} |",
        "|" + "---|" * len(head),
        *(f"| {' | '.join(map(str, row))} |" for row in rows),
    ]


if __name__ == "__main__":
    main()
