"""What bench_mirror has seen: rates by row and task, ratios, where a step's time goes, figures."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from scripts.lib.mirror_rows import (
    AR,
    AR_BOTH,
    MIRROR,
    SD,
    SD_BOTH,
    SD_RETRIEVAL,
    SD_STREAMING,
    Split,
)
from scripts.lib.mirror_runs import Answer, Kills
from sglang_ext.sweep.result_tables import Table

TOPS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Steps:
    """A row's decode steps by themselves, batch 1: totals over its answers.

    Attributes:
        tokens: that were committed behind the first of each answer.
        seconds: in which.
        counts: growth of mirror_runs.COUNTED.
    """

    tokens: int
    seconds: float
    counts: Mapping[str, float]

    @classmethod
    def of(cls, answers: Iterable[Answer]) -> "Steps":
        """Those of some answers."""
        answers = list(answers)
        names = answers[0].counts
        counts = {name: sum(a.counts[name] for a in answers) for name in names}
        tokens = sum(len(a.token_ids) - 1 for a in answers)
        return cls(tokens, sum(a.decode_seconds for a in answers), counts)

    @property
    def steps(self) -> float:
        """Passes of the target, those that verified nothing included."""
        return self.counts["plain_steps_total"] + self.counts["verify_steps_total"]

    @property
    def accept_length(self) -> float:
        """Tokens that a step commits."""
        return self.tokens / self.steps

    @property
    def step_ms(self) -> float:
        """Wall time of a step."""
        return 1e3 * self.seconds / self.steps

    @property
    def nodes(self) -> float:
        """Drafted nodes that a step verifies."""
        return self.counts["spec_decode_num_draft_tokens_total"] / self.steps

    def part_ms(self, *series: str) -> float:
        """What the seconds of these series make of a step."""
        return 1e3 * sum(self.counts[name] for name in series) / self.steps

    @property
    def law_ms(self) -> float | None:
        """A step by Eq. 10, from its parts as measured in these steps; None: no exit was seen.

        T_target(1..l_e) + T_rv(ee) + max(T_target(l_e+1..N), T_draft) + T_rv(fv): the pass, its
        exit included, and what drafting kept it waiting, which is T_rv(fv) and the part of T_draft
        that the suffix did not hide.
        """
        if not self.counts["early_exit_steps_total"]:
            return None
        return self.part_ms("plain_seconds_total", "verify_seconds_total", "draft_seconds_total")

    @property
    def hidden_share(self) -> float | None:
        """Of the draft model's seconds those that no step waited; None: it did not draft."""
        drafted = self.counts["drafter.draft_seconds"] - self.counts["drafter.reading_seconds"]
        if drafted <= 0:
            return None
        return max(0.0, 1.0 - self.counts["drafter.waited_seconds"] / drafted)

    @property
    def fallback_share(self) -> float | None:
        """Of the drafts that were asked for, those that were not there; None: none was."""
        return _share(self.counts["drafter.fallbacks"], self.counts["drafter.hits"])

    def unforeseen(self, top: int) -> float | None:
        """Of the outcomes of passes with an exit, those not among its first `top` candidates."""
        outcomes = self.counts["drafter.outcomes"]
        return 1.0 - self.counts[f"drafter.foreseen_top{top}"] / outcomes if outcomes else None

    def passes_a_window(self, window: int) -> float | None:
        """Passes of the draft model for a window that a step waits for; None: none did."""
        tokens = self.counts["drafter.asked_tokens"]
        return window * self.counts["drafter.asked_steps"] / tokens if tokens else None


def _share(part: float, rest: float) -> float | None:
    return part / (part + rest) if part + rest else None


class Results:
    """The answers of a run.

    Args:
        layers: of the target.
        window: gamma.
    """

    def __init__(
        self, splits: Sequence[Split], answers: Sequence[Answer], layers: int, window: int
    ) -> None:
        self.splits = splits
        self.answers = list(answers)
        self.window = window
        self._layers = layers
        self.kills: Kills | None = None

    def alone(self, split: Split, row: str) -> list[Answer]:
        """Greedy answers of a row of a split that ran by themselves."""
        return [
            a for a in self.answers
            if (a.split, a.row, a.batch, a.temperature) == (split.name, row, 1, 0.0)
        ]  # fmt: skip

    def mismatches(self) -> tuple[int, int]:
        """Greedy outputs that are not their server's base row's, and how many were compared."""
        expected = {
            (a.split, a.task, a.prompt): a.token_ids
            for a in self.answers
            if a.row in (AR.name, AR_BOTH.name) and a.batch == 1 and a.temperature == 0
        }
        others = [
            a for a in self.answers
            if a.temperature == 0 and not (a.row in (AR.name, AR_BOTH.name) and a.batch == 1)
        ]  # fmt: skip
        wrong = sum(a.token_ids != expected[a.split, a.task, a.prompt] for a in others)
        return wrong, len(others)

    def speedup(self, split: Split, row: str, task: str | None = None) -> float | None:
        """Tokens/s of a row by those of its split's base, the mean over tasks or of one task."""
        tasks = {a.task for a in self.alone(split, row)} if task is None else {task}
        ratios = []
        for one in tasks:
            mine = [a for a in self.alone(split, row) if a.task == one]
            base = [a for a in self.alone(split, split.base.name) if a.task == one]
            if mine and base:
                ratios.append(_rate(mine) / _rate(base))
        return fmean(ratios) if ratios else None

    def figures(self) -> dict[str, float]:
        """By the names of issue 29."""
        wrong, compared = self.mismatches()
        made: dict[str, float | None] = {"mismatches": wrong, "outputs_compared": compared}
        for split in self.splits:
            made |= self._of_split(split)
        made |= self._speedups() | self._of_mirror() | self._of_drafting()
        for layer, shares in self.fallbacks().items():
            made |= {f"fallback_exit{layer}_kappa{k}": share for k, share in shares.items()}
        if self.kills is not None:
            made |= {
                "executor_kills": self.kills.kills, "answers_under_kills": self.kills.asked,
                "wrong_after_kills": self.kills.wrong, "hangs_after_kills": self.kills.hangs,
            }  # fmt: skip
        return {name: value for name, value in made.items() if value is not None}

    def _speedups(self) -> dict[str, float | None]:
        first = self.splits[0]
        mirror, vanilla = (self.speedup(first, row.name) for row in (MIRROR, SD))
        both = [_rate(found) for s in self.splits if (found := self.alone(s, SD_BOTH.name))]
        mine = self.alone(first, MIRROR.name)
        return {
            "speedup_mirror_vs_ar": mirror,
            "speedup_mirror_vs_vanilla": _ratio(mirror, vanilla),
            "speedup_mirror_vs_vanilla_both": _ratio(_rate(mine), both[0])
            if mine and both
            else None,
        }

    def _of_mirror(self) -> dict[str, float | None]:
        answers = self.alone(self.splits[0], MIRROR.name)
        if not answers:
            return {}
        steps = Steps.of(answers)
        made = {"hidden_share": steps.hidden_share, "fallback_share": steps.fallback_share}
        if steps.law_ms is not None:
            made["latency_law_error"] = abs(steps.law_ms - steps.step_ms) / steps.step_ms
        return made

    def _of_drafting(self) -> dict[str, float | None]:
        passes = {
            kind: Steps.of(answers).passes_a_window(self.window)
            for kind, row in (("", SD), ("retrieval", SD_RETRIEVAL), ("streaming", SD_STREAMING))
            if (answers := self.alone(self.splits[0], row.name))
        }
        made = {"draft_steps_per_window": passes.get("")}
        for kind in ("retrieval", "streaming"):
            made[f"draft_steps_per_window_{kind}"] = passes.get(kind)
            made[f"draft_steps_ratio_{kind}"] = _ratio(passes.get(kind), passes.get(""))
        return made

    def fallbacks(self) -> dict[int, dict[int, float]]:
        """By exit layer and kappa: how often the outcome was not among the exit's candidates."""
        found: dict[int, dict[int, float]] = {}
        for split in self.splits:
            answers = self.alone(split, MIRROR.name) if split.lens == "auto" else []
            if answers:
                shares = {top: Steps.of(answers).unforeseen(top) for top in TOPS}
                found[self._layers * split.exit_part // 4] = {
                    top: share for top, share in shares.items() if share is not None
                }
        return found

    def _of_split(self, split: Split) -> dict[str, float | None]:
        made: dict[str, float | None] = {}
        for row in (split.base, *split.rows):
            answers = self.alone(split, row.name)
            if not answers or f"tokens_s_{row.key}" in made:
                continue
            suffix = row.key if split.exit_part == 2 else f"{row.key}_exit{split.exit_part}"
            if row is AR and split is not self.splits[0]:
                continue
            steps = Steps.of(answers)
            made |= {
                f"tokens_s_{suffix}": _rate(answers),
                f"accept_length_{suffix}": steps.accept_length,
                f"step_ms_{suffix}": steps.step_ms,
                f"speedup_{suffix}": self.speedup(split, row.name),
            }
        return made


def tables(results: Results) -> list[Table]:
    """Each split's rows; where their steps' time goes; speedups by task; batches and T = 1."""
    return [
        table
        for split in results.splits
        for table in (_rows(results, split), _parts(results, split), _tasks(results, split))
    ] + [_batches(results)]


def _rows(results: Results, split: Split) -> Table:
    made = []
    for row in (split.base, *split.rows):
        answers = results.alone(split, row.name)
        if answers:
            steps = Steps.of(answers)
            made.append([
                row.name, f"{_rate(answers):.2f}", _shown(results.speedup(split, row.name)),
                f"{steps.accept_length:.2f}", f"{steps.step_ms:.0f}", _shown(steps.hidden_share),
                _shown(steps.fallback_share), _shown(steps.passes_a_window(results.window)),
            ])  # fmt: skip
    header = ["row", "tok/s", f"by {split.base.name}", "accept length", "step ms", "hidden",
              "fallbacks", "draft passes a window"]  # fmt: skip
    return Table(f"{split.name}: batch 1, T = 0", header, made)


def _parts(results: Results, split: Split) -> Table:
    made = []
    for row in (split.base, *split.rows):
        answers = results.alone(split, row.name)
        if answers:
            steps = Steps.of(answers)
            made.append([
                row.name, f"{steps.nodes:.1f}",
                f"{steps.part_ms('plain_seconds_total', 'verify_seconds_total'):.0f}",
                f"{steps.part_ms('before_exit_seconds_total'):.0f}",
                f"{steps.part_ms('early_exit_seconds_total'):.1f}",
                f"{steps.part_ms('draft_seconds_total'):.1f}",
                f"{steps.part_ms('drafter.draft_seconds'):.0f}",
                "-" if steps.law_ms is None else f"{steps.law_ms:.0f}", f"{steps.step_ms:.0f}",
            ])  # fmt: skip
    header = ["row", "nodes", "pass", "until exit", "exit", "waited", "draft model", "Eq. 10",
              "step"]  # fmt: skip
    return Table(f"{split.name}: where a step's time goes, ms", header, made)


def _tasks(results: Results, split: Split) -> Table:
    names = sorted({a.task for a in results.answers})
    rows = [
        [row.name, *(_shown(results.speedup(split, row.name, task)) for task in names)]
        for row in split.rows
    ]
    return Table(f"{split.name}: speed by {split.base.name}, by task", ["row", *names], rows)


def _batches(results: Results) -> Table:
    keys = sorted({
        (a.split, a.batch, a.temperature) for a in results.answers if a.batch > 1 or a.temperature
    })  # fmt: skip
    rows = []
    for split, batch, temperature in keys:
        of_key = [
            a for a in results.answers
            if (a.split, a.batch, a.temperature) == (split, batch, temperature)
        ]  # fmt: skip
        for name in dict.fromkeys(a.row for a in of_key):
            answers = [a for a in of_key if a.row == name]
            rows.append(
                [split, str(batch), f"{temperature:g}", name, f"{batch * _rate(answers):.2f}"]
            )
    return Table("Batches and T = 1", ["server", "batch", "T", "row", "tok/s"], rows)


def _rate(answers: Sequence[Answer]) -> float:
    """Tokens/s of a request, behind its first token."""
    return sum(len(a.token_ids) - 1 for a in answers) / sum(a.decode_seconds for a in answers)


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None


def _shown(value: float | None, text: Callable[[float], str] = "{:.2f}".format) -> str:
    return "-" if value is None else text(value)
