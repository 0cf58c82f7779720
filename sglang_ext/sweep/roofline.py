"""Why speculation pays, and at which batch: the cost of forward passes by their tokens, drawn."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sglang_ext.budget.cost_model import CostModel
from sglang_ext.sweep.methods import OURS
from sglang_ext.sweep.plan import BATCH
from sglang_ext.sweep.plots import panels
from sglang_ext.sweep.result_tables import Table, number
from sglang_ext.sweep.summary import Summary, title

WIDTHS = (2, 4, 8, 16)
_WIDEST = 16


@dataclass(frozen=True)
class Costs:
    """What forward passes cost, as a server has measured it (sglang_ext/budget/cost_sweep.py).

    Attributes:
        seconds: of the linear layers, by tokens in the pass.
        knee: I_knee, in tokens.
    """

    seconds: Mapping[int, float]
    knee: int

    def break_even(self, batch: int, width: int) -> float:
        """Tokens a verify step of `width` nodes a request must commit to be as fast as plain."""
        if width <= 1:
            return 1.0
        model = CostModel(self.seconds)
        return model.cost(batch * width, verify=True) / model.cost(batch)


def costs_of(environment: Mapping[str, Any]) -> Costs | None:
    """The newest costs that a results folder has, with its number of threads if there are such."""
    records = [r for r in environment.get("forward_costs") or [] if len(r.get("seconds", ())) > 1]
    threads = environment.get("threads")
    fitting = [r for r in records if r.get("for", {}).get("threads") == threads] or records
    if not fitting:
        return None
    seconds = {int(tokens): float(s) for tokens, s in fitting[-1]["seconds"].items()}
    return Costs(dict(sorted(seconds.items())), int(fitting[-1]["I_knee"]))


def break_even_table(costs: Costs, batches: Sequence[int]) -> Table:
    """The least accept length that pays, by batch and s_q."""
    return Table(
        "The accept length that a verify step must reach",
        ("batch", *(f"s_q = {width}" for width in WIDTHS)),
        [
            (str(batch), *(number(costs.break_even(batch, width)) for width in WIDTHS))
            for batch in batches
        ],
        "Its cost by that of a plain step. A step commits at most s_q tokens of a request.",
    )


def draw_roofline(costs: Costs, summary: Summary) -> Any:
    """Left: cost by tokens, and where the roofline bends. Right: what a step must reach to pay."""
    figure, ((left, right),) = panels(1, 2)
    tokens = np.array(list(costs.seconds))
    ms = 1e3 * np.array(list(costs.seconds.values()))
    left.plot(tokens, ms, marker="o", color="C0", label="measured")
    left.axhline(ms[0], color="C2", linestyle="--", label="reading the weights")
    left.plot(tokens, ms[0] * tokens / costs.knee, color="C3", linestyle="--", label="computing")
    left.axvline(costs.knee, color="0.45", linestyle=":", label=f"I_knee = {costs.knee}")
    left.set_xscale("log", base=2)
    left.set_yscale("log", base=2)
    left.set_xticks(tokens, [str(n) for n in tokens])
    left.set_xticks([], minor=True)
    left.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    left.set_ylim(bottom=ms.min() / 2)
    left.set(xlabel="tokens in the pass", ylabel="linear layers, ms", title="Forward pass")
    left.legend(frameon=False)

    widths = np.arange(1, _WIDEST + 1)
    rows = [row for row in summary.rows if row.point.method == OURS and row.point.mode == BATCH]
    for place, batch in enumerate(summary.plan.batches):
        color = f"C{place % 10}"
        needed = [costs.break_even(batch, int(width)) for width in widths]
        right.plot(widths, needed, color=color, label=f"batch {batch}")
        reached = [
            (width, length)
            for row in rows
            if row.point.load == batch
            and (width := row.median("verify_width")) is not None
            and (length := row.median("accept_length")) is not None
        ]
        if reached:
            x, y = zip(*reached, strict=True)
            right.plot(x, y, color=color, marker="*", markersize=9, linestyle="")
    right.plot(widths, widths, color="0.45", linestyle=":", label="all accepted")
    right.set_ylim(0.8, _WIDEST / 2)
    right.set(xlabel="s_q", ylabel="accept length")
    right.set_title(f"Needed to pay (lines), reached by {title(OURS)} (stars)")
    right.legend(frameon=False)
    return figure
