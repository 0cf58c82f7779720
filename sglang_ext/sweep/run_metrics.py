"""A run's columns, named and computed as in SGLang's bench_serving.

Source: sglang/benchmark/serving.py, calculate_metrics. What it does not have: verify_width,
cpu_s_per_1k_tokens, memory_mb, foreign_cpu_percent, steal_percent, and the columns of quality.py.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sglang_ext.sweep.quality import QUALITIES
from sglang_ext.sweep.results import PointResult, RequestResult

LATENCIES = ("e2e_latency", "ttft", "tpot", "itl")
STATISTICS = ("mean", "median", "p90", "p99")
COLUMNS = (
    "completed", "failed", "duration", "total_input_tokens", "total_output_tokens",
    "request_throughput", "input_throughput", "output_throughput", "total_throughput",
    *(f"{statistic}_{latency}_ms" for latency in LATENCIES for statistic in STATISTICS),
    "concurrency", "accept_length", "verify_width", "cpu_s_per_1k_tokens", "memory_mb",
    "foreign_cpu_percent", "steal_percent",
)  # fmt: skip


@dataclass(frozen=True)
class Answered:
    """What is kept of a request by its id.

    Attributes:
        tokens: of the output.
        verify_steps: 0 without speculation.
    """

    category: str
    e2e_s: float
    tokens: int
    verify_steps: int
    sha: str


@dataclass
class Run:
    """The requests of one run that did not fail.

    Attributes:
        answered: by the id of the workload's item.
    """

    answered: dict[str, Answered] = field(default_factory=dict)
    _seconds: dict[str, list[float]] = field(
        default_factory=lambda: {name: [] for name in LATENCIES}
    )
    _intervals: list[npt.NDArray[np.float32]] = field(default_factory=list)
    _ratios: dict[str, list[int]] = field(default_factory=dict)

    def add(self, request: RequestResult) -> None:
        """Take in one request; a failed one has no times."""
        if request.error is not None:
            return
        self.answered[request.id] = Answered(
            request.category, request.e2e_s, request.output_tokens, request.spec_verify_ct or 0,
            request.output_sha,
        )  # fmt: skip
        self._seconds["e2e_latency"].append(request.e2e_s)
        if request.ttft_s is not None:
            self._seconds["ttft"].append(request.ttft_s)
            if request.output_tokens > 1:
                rest = (request.e2e_s - request.ttft_s) / (request.output_tokens - 1)
                self._seconds["tpot"].append(rest)
        self._intervals.append(np.asarray(request.itl_s, dtype=np.float32))
        for name, (part, whole) in request.ratios.items():
            parts, wholes = self._ratios.get(name, (0, 0))
            self._ratios[name] = [parts + part, wholes + whole]

    def columns(self, point: PointResult) -> dict[str, float]:
        """By name, in the order of COLUMNS and QUALITIES; what is not known is left out.

        Args:
            point: the run's own line.
        """
        completed = point.requests - point.failed
        latencies = self._seconds["e2e_latency"]
        known: dict[str, float | None] = {
            "completed": completed,
            "failed": point.failed,
            "duration": point.duration_s,
            "total_input_tokens": point.prompt_tokens,
            "total_output_tokens": point.output_tokens,
            "accept_length": point.accept_length,
            "verify_width": point.verify_width,
            "memory_mb": point.memory_mb,
        }
        if point.duration_s:
            known |= {
                "request_throughput": completed / point.duration_s,
                "input_throughput": point.prompt_tokens / point.duration_s,
                "output_throughput": point.output_throughput,
                "total_throughput": (point.prompt_tokens + point.output_tokens) / point.duration_s,
                "concurrency": sum(latencies) / point.duration_s,
            }
        if point.cpu_s is not None and point.output_tokens:
            known["cpu_s_per_1k_tokens"] = 1e3 * point.cpu_s / point.output_tokens
        if (others := point.others) is not None:
            known["steal_percent"] = 100.0 * others.stolen
            known["foreign_cpu_percent"] = None if others.foreign is None else 100 * others.foreign
        for name in LATENCIES:
            known |= _statistics(name, self._intervals if name == "itl" else [self._seconds[name]])
        for name, scale in QUALITIES.items():
            part, whole = self._ratios.get(name, (0, 0))
            known[name] = scale * part / whole if whole else None
        names = (*COLUMNS, *QUALITIES)
        return {name: float(v) for name in names if (v := known.get(name)) is not None}


def _statistics(name: str, seconds: Iterable[npt.ArrayLike]) -> Mapping[str, float]:
    """Mean and percentiles in ms; none where there are no times."""
    arrays = [np.asarray(part, dtype=np.float64) for part in seconds]
    ms = 1e3 * np.concatenate(arrays) if arrays else np.empty(0)
    if not len(ms):
        return {}
    median, p90, p99 = np.percentile(ms, (50, 90, 99))
    values = (float(ms.mean()), float(median), float(p90), float(p99))
    return {f"{s}_{name}_ms": v for s, v in zip(STATISTICS, values, strict=True)}
