"""Tables of what bench_mirror has seen."""

from collections.abc import Callable

from scripts.lib.mirror_results import Results, rate
from scripts.lib.mirror_rows import LOSSLESS, Split
from scripts.lib.mirror_steps import Steps
from sglang_ext.sweep.result_tables import Table


def tables(results: Results) -> list[Table]:
    """Each split's rows; where their steps' time goes; speedups by task; batches and T = 1."""
    made = [
        table
        for split in results.splits.values()
        for table in (_rows(results, split), _parts(results, split), _tasks(results, split))
    ]
    return [table for table in [*made, _batches(results)] if table.rows]


def _rows(results: Results, split: Split) -> Table:
    made = []
    for row in (split.base, *split.rows):
        answers = results.alone(split.name, row.name)
        if answers:
            steps = Steps.of(answers)
            made.append([
                row.name, f"{rate(answers):.2f}", _shown(results.speedup(split, row.name)),
                f"{steps.accept_length:.2f}", f"{steps.step_ms:.0f}", _shown(steps.hidden_share),
                _shown(steps.fallback_share), _shown(steps.passes_a_window(results.window)),
            ])  # fmt: skip
    header = ["row", "tok/s", f"by {split.base.name}", "accept length", "step ms", "hidden",
              "fallbacks", "draft passes a window"]  # fmt: skip
    return Table(f"{split.name}: batch 1, T = 0", header, made)


def _parts(results: Results, split: Split) -> Table:
    made = []
    for row in (split.base, *split.rows):
        answers = results.alone(split.name, row.name)
        if answers:
            steps = Steps.of(answers)
            made.append([
                row.name, f"{steps.nodes:.1f}",
                f"{steps.pass_ms:.0f}",
                f"{steps.part_ms('before_exit_seconds_total'):.0f}",
                f"{steps.part_ms('early_exit_seconds_total'):.1f}",
                f"{steps.waited_ms:.1f}",
                f"{steps.part_ms('drafter.draft_seconds'):.0f}",
                "-" if steps.law_ms is None else f"{steps.law_ms:.0f}", f"{steps.step_ms:.0f}",
            ])  # fmt: skip
    header = ["row", "nodes", "pass", "until exit", "exit", "waited", "draft model", "Eq. 10",
              "step"]  # fmt: skip
    return Table(f"{split.name}: where a step's time goes, ms", header, made)


def _tasks(results: Results, split: Split) -> Table:
    names = sorted({a.task for a in results.answers if a.batch == 1} - {LOSSLESS})
    rows = [
        [row.name, *(_shown(results.speedup(split, row.name, task)) for task in names)]
        for row in split.rows
        if results.alone(split.name, row.name)
    ]
    return Table(f"{split.name}: speed by {split.base.name}, by task", ["row", *names], rows)


def _batches(results: Results) -> Table:
    rows = [
        [split, str(batch), f"{temperature:g}", row, f"{batch * rate(answers):.2f}"]
        for (split, row, batch, temperature), answers in results.loads().items()
    ]
    return Table("Batches and T = 1", ["server", "batch", "T", "row", "tok/s"], rows)


def _shown(value: float | None, text: Callable[[float], str] = "{:.2f}".format) -> str:
    return "-" if value is None else text(value)
