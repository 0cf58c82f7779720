"""The rules of the house, counted: where files lie, how long they are, what imports what, what the
docs promise.

    python -m scripts.check_house [--quick] [--pages docs/x.md ...] [--record FILE] [--test-minutes]
        [--json FILE]

Every violation is listed with its file and line; exit code 1 where a figure is beyond its limit.

root_files: modules directly in sglang_ext/. duplicate_file_names: names that several Python files
outside tests/ bear. getattr_hooks: lookups by getattr or hasattr of what a drafter declares.
worker_lines: of sglang_ext/worker.py. functions_over_50_lines: in the packages and scripts.
import_circles: modules that import each other. upward_imports: what docs/architecture.md forbids.
unresolved_hook_targets: places where SGLang is touched that the installed one does not have.
docs_commands_run, _skipped, _failed: commands of README.md, CONTRIBUTING.md and docs/ that ended
well, were left out for the reason that is printed, and did not; with --quick none is run. All take
hours: --record keeps what ended well, for a later run of the same code.
test_minutes: of `make test`, with --test-minutes only; a test that fails is beyond every limit.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from scripts.lib import house_figures
from scripts.lib.docs_code import checked_out
from scripts.lib.docs_commands import Command, commands_of, pages
from scripts.lib.docs_record import DocsRecord
from scripts.lib.docs_runner import DocsRunner, Outcome
from scripts.lib.figures import parser, report
from scripts.lib.house_figures import Place
from scripts.lib.import_layers import ROOT

# Figure -> most that it may be; a figure without a limit is only reported.
LIMITS = {
    "root_files": 10,
    "duplicate_file_names": 3,
    "getattr_hooks": 0,
    "worker_lines": 420,
    "functions_over_50_lines": 12,
    "import_circles": 0,
    "upward_imports": 0,
    "unresolved_hook_targets": 0,
    "docs_commands_failed": 0,
}
_SHOWN_CHARACTERS = 200  # of a line that a failed command printed
PLACES: tuple[Callable[[], list[Place]], ...] = (
    house_figures.root_files,
    house_figures.duplicate_file_names,
    house_figures.getattr_hooks,
    house_figures.functions_over_50_lines,
    house_figures.import_circles,
    house_figures.upward_imports,
    house_figures.unresolved_hook_targets,
)


def main() -> int:
    options = _options()
    figures: dict[str, float] = {}
    for count in PLACES:
        found = count()
        figures[count.__name__] = len(found)
        _list(count.__name__, found)
    figures["worker_lines"] = lines = house_figures.worker_lines()
    print(f"\nsglang_ext/worker.py:{lines}: its last line, at most {LIMITS['worker_lines']}")
    if options.quick:
        print("\nthe docs' commands are not run: --quick")
    else:
        code = options.code.fingerprint if options.code else lambda _: ""
        figures |= docs_figures(options.pages, DocsRecord(options.record, code))
    if options.test_minutes:
        figures["test_minutes"], passed = test_minutes()
        print("\nmake test " + ("passed" if passed else "FAILED"))
    else:
        passed = True
        print("\ntest_minutes is left out: --test-minutes runs `make test`")
    report(figures, options.json)
    wrong = beyond(figures)
    for name in wrong:
        print(f"{name} is {figures[name]}, and may be {LIMITS[name]}")
    return 1 if wrong or not passed else 0


def _options() -> argparse.Namespace:
    made = parser(__doc__, model=False)
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    made.add_argument(
        "--pages", nargs="+", type=Path, metavar="PAGE", help="whose commands are run [all]"
    )
    made.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="keeps what ended well with this code",
    )
    made.add_argument("--test-minutes", action="store_true", help="time `make test`")
    options = made.parse_args()
    options.pages = [path.resolve() for path in options.pages] if options.pages else pages()
    if unknown := [str(path) for path in options.pages if path not in pages()]:
        made.error(f"--pages: not among the docs: {', '.join(unknown)}")
    options.code = checked_out() if options.record else None
    if options.record and options.code is None:
        made.error("--record: what differs from the commit must be committed first: git status")
    return options


def beyond(figures: dict[str, float]) -> list[str]:
    """The figures that are above their limits."""
    return [name for name, limit in LIMITS.items() if figures.get(name, 0) > limit]


def docs_figures(chosen: Sequence[Path], record: DocsRecord) -> dict[str, float]:
    """Run the commands of the pages, but those that are on record, and say what came of each."""
    states = {"ok": 0, "failed": 0, "skipped": 0}
    for page in chosen:
        commands, name = commands_of(page), str(page.relative_to(ROOT))
        if not commands:
            continue
        known = record.page(name, commands)
        print(f"\n{name}" + (", on record" if known else ""))
        outcomes = []
        for outcome in known or _outcomes(commands, record):
            states[outcome.state] += 1
            _show(outcome)
            outcomes.append(outcome)
        if not known:
            record.add_page(name, outcomes)
    return {
        "docs_commands_run": states["ok"] + states["failed"],
        "docs_commands_skipped": states["skipped"],
        "docs_commands_failed": states["failed"],
    }


def _outcomes(commands: Sequence[Command], record: DocsRecord) -> Iterator[Outcome]:
    with tempfile.TemporaryDirectory(prefix="docs-") as work:
        yield from DocsRunner(
            Path(work), commands, Path("/dev/nvidia0").exists(), record
        ).outcomes()


def test_minutes() -> tuple[float, bool]:
    """How long `make test` takes, and whether all passed."""
    begun = time.monotonic()
    passed = subprocess.run(["make", "test"], cwd=ROOT, check=False).returncode == 0
    return (time.monotonic() - begun) / 60, passed


def _list(name: str, places: Sequence[Place]) -> None:
    limit = LIMITS[name]
    print(f"\n{name}: {len(places)}, at most {limit}")
    for place in places:
        print(f"  {place.where}: {place.what}")


def _show(outcome: Outcome) -> None:
    command = outcome.command
    took = f" ({outcome.seconds:.0f} s)" if outcome.seconds else ""
    print(f"  {command.page}:{command.line} {outcome.state}{took}: {command.text}", flush=True)
    for line in outcome.detail.splitlines():
        print(f"      {line[:_SHOWN_CHARACTERS]}")


if __name__ == "__main__":
    sys.exit(main())
