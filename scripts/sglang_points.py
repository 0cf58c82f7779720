"""docs/sglang-points.md, written from the list in `sglang_ext/sglang_points`.

    python -m scripts.sglang_points --write            # the tables between the page's markers
    python -m scripts.sglang_points --check            # exit code 1 where the page differs
    python -m scripts.sglang_points --against FOLDER   # exit code 1 where another SGLang differs

FOLDER holds `sglang/` as an unpacked wheel has it; nothing of it is imported:

    pip download --no-deps --dest DIR sglang==VERSION && unzip -q DIR/sglang-*.whl -d FOLDER
"""

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from scripts.lib.import_layers import ROOT
from sglang_ext.sglang_points import POINTS, How, Point, unresolved

PAGE = ROOT / "docs" / "sglang-points.md"
_HOW = {
    How.BEFORE: "registry, before",
    How.AFTER: "registry, after",
    How.AROUND: "registry, around",
    How.ASSIGNED: "assigned",
    How.CALLED: "called",
    How.SUBCLASSED: "subclassed",
    How.OVERRIDDEN: "overridden",
    How.INSTANCE: "set on the instance",
    How.TORCH: "torch's forward hook",
}


def main(argv: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = made.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true", help="write the tables into the page")
    what.add_argument("--check", action="store_true", help="say whether the page differs")
    what.add_argument("--against", type=Path, metavar="FOLDER", help="look the points up there")
    options = made.parse_args(argv)
    if options.against:
        return _against(options.against)
    text = PAGE.read_text()
    wanted = with_tables(text)
    if text == wanted:
        return 0
    print(f"{PAGE.relative_to(ROOT)} " + ("was written" if options.write else "differs"))
    if options.write:
        PAGE.write_text(wanted)
    return 1 if options.check else 0


def _against(folder: Path) -> int:
    if not (folder / "sglang").is_dir():
        print(f"{folder} holds no sglang/", file=sys.stderr)
        return 2
    wrong = unresolved(folder)
    print(
        *wrong, f"{len(POINTS) - len(wrong)} of {len(POINTS)} points are as we need them", sep="\n"
    )
    return 1 if wrong else 0


def with_tables(text: str) -> str:
    """The page's text with both tables as they should be.

    Raises:
        ValueError: it does not have the markers of each table once.
    """
    for name, points in (
        ("all", (p for p in POINTS if not p.cpu)),
        ("cpu", (p for p in POINTS if p.cpu)),
    ):
        parts = re.split(
            rf"(<!-- points:begin {name} -->\n).*?(<!-- points:end -->)", text, flags=re.S
        )
        if len(parts) != 4:
            raise ValueError(f"docs/sglang-points.md must have the markers of {name} once")
        before, begin, end, after = parts
        text = f"{before}{begin}{_table(points)}{end}{after}"
    return text


def _table(points: Iterable[Point]) -> str:
    head = ["| point | how | takes | from | why |", "| --- | --- | --- | --- | --- |"]
    return "\n".join([*head, *map(_row, points), ""])


def _row(point: Point) -> str:
    takes = f"`{point.takes}`" if point.takes else ""
    cells = (f"`{point.target}`", _HOW[point.how], takes, f"`{point.by}`", point.why)
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


if __name__ == "__main__":
    sys.exit(main())
