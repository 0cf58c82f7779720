"""What a sweep came to: medians over its repeats with their spread, ratios, figures.

Ratios are taken repeat by repeat between runs that followed each other, so that a machine that
drifts moves both; their median is what is shown. Unfinished sweeps have what there is.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sglang_ext.servers.cpu_watch import Shares
from sglang_ext.sweep import disturbance
from sglang_ext.sweep.methods import BASELINE, METHODS, OURS, PEER_WORKLOADS
from sglang_ext.sweep.plan import BATCH, RATE, Plan, Point
from sglang_ext.sweep.repeatability import agreement_limit, ratio_error
from sglang_ext.sweep.results import PointResult, Results
from sglang_ext.sweep.run_metrics import Run
from sglang_ext.sweep.settling import runs_needed

# The methods of ours that figures speak of.
HEADLINES: Mapping[str, str] = {"sssd": OURS, "specasr": "specasr-tsp", "ssbd": "ssbd-plus"}
Columns = Mapping[str, float]


@dataclass(frozen=True)
class Spread:
    """Values of several repeats.

    Attributes:
        low, high: the least and the largest; of so few values, quartiles would promise too much.
        count: of values.
    """

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """At least one value."""
        return cls(float(np.median(values)), min(values), max(values), len(values))

    @property
    def percent(self) -> float:
        """Half of the range, by the median, in percent; 0 for a median of 0."""
        return 50.0 * (self.high - self.low) / abs(self.median) if self.median else 0.0


@dataclass(frozen=True)
class Row:
    """One point over its finished repeats.

    Attributes:
        category: only the requests of this category; "": all.
        by_repeat: columns by repeat; for a category `mean_e2e_latency_ms`, `accept_length`,
            `completed` alone.
        columns: their medians, and besides
            speedup: against AR at the same workload and load. Of output_throughput in mode
                "batch"; in mode "rate", where arrivals set the throughput, and of categories, of
                mean_e2e_latency_ms.
            equal_outputs_percent: requests whose output is that of AR's same run, token for token.
    """

    point: Point
    category: str
    by_repeat: Mapping[int, Columns]
    columns: Mapping[str, Spread]

    def median(self, name: str) -> float | None:
        """A column's median over repeats; None where the column is not known."""
        return self.columns[name].median if name in self.columns else None


@dataclass(frozen=True)
class Summary:
    """A sweep's results, rows in the plan's order.

    Attributes:
        runs: that are finished, of `planned`, those of settling.py included.
        others: what other programs and the host took of the processors over all runs; None: not
            known.
        disturbed_runs: runs of which they took too much, see cpu_watch.py.
        problems: runs without a result, failed requests, changes between resumptions, disturbed
            runs, and why no least ratio is given.
    """

    plan: Plan
    environment: Mapping[str, Any]
    rows: Sequence[Row]
    categories: Sequence[Row]
    runs: int
    planned: int
    others: Shares | None
    disturbed_runs: int
    problems: Sequence[str]

    def row(self, point: Point) -> Row | None:
        """The row of a point, if it has one."""
        return next((row for row in self.rows if row.point == point), None)

    def select(self, workload: str, mode: str, method: str | None = None) -> list[Row]:
        """Rows of a workload and mode, of one method or all."""
        return [
            row
            for row in self.rows
            if (row.point.workload, row.point.mode) == (workload, mode)
            and method in (None, row.point.method)
        ]

    def panels(self) -> list[tuple[str, str]]:
        """(workload, mode) of which there is something."""
        return list(dict.fromkeys((row.point.workload, row.point.mode) for row in self.rows))

    @property
    def methods(self) -> list[str]:
        """Those of which there is something."""
        there = {row.point.method for row in self.rows}
        return [name for name in self.plan.methods if name in there]

    @property
    def disturbed(self) -> bool:
        """Whether repeats differ so far that they bear out no least ratio."""
        return any(disturbance.is_disturbed(self._ratios(mode)) for mode in (BATCH, RATE))

    def doubts(self) -> list[str]:
        """Why a least ratio is not given, a line each."""
        found = (line for mode in (BATCH, RATE) for line in disturbance.doubts(self._ratios(mode)))
        return list(dict.fromkeys(found))

    def figures(self) -> dict[str, Any]:
        """The figures; what cannot be had, or is not borne out by the repeats, is left out.

        min_ratio_sssd_vs_ar: SSSD live's output tokens/s by AR's, the least over workloads and
            batch sizes; min_ratio_specasr_vs_ar, min_ratio_ssbd_vs_ar: likewise SpecASR TSP's and
            SSBD+'s.
        min_ratio_sssd_vs_best_ngram_peer: by those of the best n-gram peer at the same workload
            and batch size, the least over mt-bench and gsm8k.
        min_rate_ratio_sssd_vs_ar: AR's mean end-to-end latency by SSSD live's, over all rates;
            likewise of specasr and ssbd.
        spread_percent: Spread.percent of output_throughput, the worst of all points in mode
            "batch" with two repeats or more; spread_percent_median: their median;
            speedup_spread_percent: likewise the worst of speedup; speedup_agreement_percent: by how
            much those of another such sweep may differ, see repeatability.py.
        ratio_error_percent: how far off a point's median ratio may be, with 95% probability, see
            repeatability.py; the least ratios are given where it is at most
            disturbance.MOST_ERROR_PERCENT.
        foreign_cpu_percent, steal_percent: what other programs and the host took of the processors.
        disturbed: 1 where repeats differ too far for a least ratio; disturbed_runs: those of which
            others took too much.
        equal_outputs_percent: of the requests of all methods that are exact.
        """
        batch = [row for row in self.rows if row.point.mode == BATCH]
        spreads, of_speedup = (
            [c.percent for row in batch if (c := row.columns.get(name)) and c.count > 1]
            for name in ("output_throughput", "speedup")
        )
        known: dict[str, Any] = {
            **self._least_ratios(batch),
            "methods": self.methods,
            "batch_sizes": sorted({int(row.point.load) for row in batch}),
            "workloads": list(dict.fromkeys(row.point.workload for row in self.rows)),
            "spread_percent": max(spreads, default=None),
            "spread_percent_median": float(np.median(spreads)) if spreads else None,
            "speedup_spread_percent": max(of_speedup, default=None),
            "speedup_agreement_percent": agreement_limit(self._ratios(BATCH)),
            "ratio_error_percent": ratio_error(self._ratios(BATCH)),
            **self._quietness(),
            "equal_outputs_percent": self._equal_outputs(),
            "runs": self.runs,
            "runs_planned": self.planned,
        }
        return {name: value for name, value in known.items() if value is not None}

    def _vs_peers(self, batch: Sequence[Row]) -> Iterator[float]:
        """SSSD live's ratios to each n-gram peer where both ran on the peers' workloads."""
        peers = [name for name in self.methods if name in METHODS and METHODS[name].peer]
        for row in batch:
            if row.point.method == OURS and row.point.workload in PEER_WORKLOADS:
                ratios = (self._ratio(row, name) for name in peers)
                yield from (ratio for ratio in ratios if ratio is not None)

    def _ratios(self, mode: str) -> list[list[float]]:
        """Of each point of a mode that AR was measured at too, its speedups by repeat."""
        return [
            _speedups(row, base)
            for row in self.rows
            if row.point.mode == mode
            and row.point.method != BASELINE
            and (base := self.row(_with_method(row.point, BASELINE))) is not None
        ]

    def _least_ratios(self, batch: Sequence[Row]) -> dict[str, float | None]:
        """The least ratios, of the modes whose repeats bear one out."""
        found: dict[str, float | None] = {}
        if disturbance.supports(self._ratios(BATCH)):
            found |= self._vs_ar("min_ratio_{}_vs_ar", batch=True)
            found["min_ratio_sssd_vs_best_ngram_peer"] = _least(self._vs_peers(batch))
        if disturbance.supports(self._ratios(RATE)):
            found |= self._vs_ar("min_rate_ratio_{}_vs_ar", batch=False)
        return found

    def _quietness(self) -> dict[str, float | None]:
        known: dict[str, float | None] = {"disturbed": int(self.disturbed)}
        if self.others is not None:
            foreign = self.others.foreign
            known["foreign_cpu_percent"] = None if foreign is None else 100.0 * foreign
            known["steal_percent"] = 100.0 * self.others.stolen
            known["disturbed_runs"] = self.disturbed_runs
        return known

    def _vs_ar(self, name: str, batch: bool) -> dict[str, float | None]:
        """Our methods' least ratios to AR, over batch sizes or over rates."""
        rows = [row for row in self.rows if (row.point.mode == BATCH) == batch]
        return {
            name.format(ours): _least(
                ratio
                for row in rows
                if row.point.method == method and (ratio := self._ratio(row, BASELINE)) is not None
            )
            for ours, method in HEADLINES.items()
        }

    def _ratio(self, row: Row, method: str) -> float | None:
        other = self.row(_with_method(row.point, method))
        ratios = _speedups(row, other) if other else []
        return float(np.median(ratios)) if ratios else None

    def _equal_outputs(self) -> float | None:
        shares = [
            (columns["equal_outputs_percent"], columns["completed"])
            for row in self.rows
            if row.point.method not in METHODS or METHODS[row.point.method].exact
            for columns in row.by_repeat.values()
            if "equal_outputs_percent" in columns
        ]
        total = sum(completed for _, completed in shares)
        return sum(share * completed for share, completed in shares) / total if total else None


def summarize(results: Results) -> Summary:
    """The summary of a folder's finished runs.

    Raises:
        ResultsError: a file of it cannot be read.
    """
    finished = {(p.repeat, p.point): p for p in results.points if p.error is None}
    runs = {key: Run() for key in finished}
    for request in results.requests:
        runs[request.repeat, request.point].add(request)
    rows: list[Row] = []
    categories: list[Row] = []
    for point in dict.fromkeys(point for _, point in _in_order(results.plan)):
        repeats = {repeat: run for (repeat, at), run in runs.items() if at == point}
        if not repeats:
            continue
        base = {
            repeat: runs[key]
            for repeat in repeats
            if (key := (repeat, _with_method(point, BASELINE))) in runs
        }
        by_repeat = {
            repeat: run.columns(finished[repeat, point]) | _equality(point, run, base.get(repeat))
            for repeat, run in sorted(repeats.items())
        }
        rows.append(Row(point, "", by_repeat, _medians(by_repeat)))
        categories += _category_rows(point, repeats, base)
    made = list(finished.values())
    summary = Summary(
        results.plan,
        results.environment,
        _with_speedups(rows),
        _with_speedups(categories),
        len(finished),
        len({*finished, *runs_needed(results.plan, results.points)}),
        disturbance.shares_of(made),
        sum(run.others is not None and run.others.disturbed for run in made),
        [*_problems(results, finished), *disturbance.disturbed_runs(made)],
    )
    return replace(summary, problems=[*summary.problems, *summary.doubts()])


def title(method: str) -> str:
    """A method's name in tables and plots."""
    return METHODS[method].title if method in METHODS else method


def _in_order(plan: Plan) -> Iterator[tuple[int, Point]]:
    """The points by workload, mode and load, methods as in the plan."""
    methods = {name: place for place, name in enumerate(plan.methods)}
    workloads = {name: place for place, name in enumerate(plan.workloads)}
    return iter(
        sorted(
            plan.order(),
            key=lambda run: (
                workloads[run[1].workload], run[1].mode, run[1].load, methods[run[1].method],
            ),
        )
    )  # fmt: skip


def _with_method(point: Point, method: str) -> Point:
    return Point(method, point.workload, point.mode, point.load)


def _medians(by_repeat: Mapping[int, Columns]) -> dict[str, Spread]:
    names = dict.fromkeys(name for columns in by_repeat.values() for name in columns)
    return {
        name: Spread.of([columns[name] for columns in by_repeat.values() if name in columns])
        for name in names
    }


def _equality(point: Point, run: Run, base: Run | None) -> dict[str, float]:
    """Requests answered like AR's, in percent of those that both have answered."""
    if point.method == BASELINE or base is None:
        return {}
    both = run.answered.keys() & base.answered.keys()
    if not both:
        return {}
    same = sum(run.answered[name].sha == base.answered[name].sha for name in both)
    return {"equal_outputs_percent": 100.0 * same / len(both)}


def _category_rows(
    point: Point, repeats: Mapping[int, Run], base: Mapping[int, Run]
) -> Iterator[Row]:
    """A row by category, over the requests that AR has answered as well, where there is AR."""
    names = dict.fromkeys(a.category for run in repeats.values() for a in run.answered.values())
    for category in names:
        by_repeat = {}
        for repeat, run in sorted(repeats.items()):
            others = base.get(repeat, run).answered
            chosen = [
                answered
                for name, answered in run.answered.items()
                if name in others and answered.category == category
            ]
            if not chosen:
                continue
            steps = sum(a.verify_steps for a in chosen)
            tokens = sum(a.tokens for a in chosen if a.verify_steps)
            by_repeat[repeat] = {
                "completed": float(len(chosen)),
                "mean_e2e_latency_ms": 1e3 * sum(a.e2e_s for a in chosen) / len(chosen),
            } | ({"accept_length": tokens / steps} if steps else {})
        if by_repeat:
            yield Row(point, category, by_repeat, _medians(by_repeat))


def _with_speedups(rows: Sequence[Row]) -> list[Row]:
    by_place = {(row.point, row.category): row for row in rows}
    made = []
    for row in rows:
        base = by_place.get((_with_method(row.point, BASELINE), row.category))
        ratios = _speedups(row, base) if base else []
        more = {"speedup": Spread.of(ratios)} if ratios else {}
        made.append(Row(row.point, row.category, row.by_repeat, {**row.columns, **more}))
    return made


def _speedups(row: Row, base: Row) -> list[float]:
    """Ratios of the repeats that both have."""
    pairs = [
        (_speed(row, row.by_repeat[repeat]), _speed(base, base.by_repeat[repeat]))
        for repeat in row.by_repeat
        if repeat in base.by_repeat
    ]
    return [own / other for own, other in pairs if own and other]


def _speed(row: Row, columns: Columns) -> float:
    if row.point.mode == BATCH and not row.category:
        return columns.get("output_throughput", 0.0)
    latency = columns.get("mean_e2e_latency_ms", 0.0)
    return 1.0 / latency if latency else 0.0


def _problems(results: Results, finished: Mapping[tuple[int, Point], PointResult]) -> Iterator[str]:
    for resumed in results.environment.get("resumed", []):
        for change in resumed.get("changes", []):
            yield f"the sweep went on under other conditions: {change}"
    for run in results.points:
        name = f"{run.point.id}, repeat {run.repeat + 1}"
        if run.error is None and run.failed:
            yield f"{name}: {run.failed} of {run.requests} requests failed"
        elif run.error is not None and (run.repeat, run.point) not in finished:
            yield f"{name}: {(run.error.strip() or 'failed').splitlines()[0]}"


def _least(values: Iterable[float]) -> float | None:
    return min(values, default=None)
