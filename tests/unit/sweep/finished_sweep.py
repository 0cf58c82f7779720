"""A results folder with known figures, on a machine that gets faster from repeat to repeat."""

from dataclasses import replace

from sglang_ext.sweep.plan import BATCH, Plan, Point
from sglang_ext.sweep.results import PointResult, RequestResult, Results

PLAN = Plan(
    model="/models/tiny", methods=("ar", "ngram", "suffix", "sssd-live"),
    workloads=("mt-bench", "long"), batches=(1, 4), rates=(), repeats=3, prompts=4, max_tokens=11,
    seed=0, data="/data/text", server_flags=(),
)  # fmt: skip
# Output tokens/s by those of AR; at batch 4 half of the gain is left.
FACTORS = {"ar": 1.0, "ngram": 1.2, "suffix": 1.6, "sssd-live": 2.0}
CATEGORIES = ("math", "writing")
TOKENS = 11
COSTS = {
    "for": {"model": "/models/tiny", "threads": 2},
    "I_knee": 16,
    "seconds": {"1": 0.010, "2": 0.010, "4": 0.011, "16": 0.020, "64": 0.050},
}
ENVIRONMENT = {
    "started": "2026-11-22T00:00:00+00:00", "cpu": "A CPU", "cores": 2, "threads": 2,
    "memory_gb": 24.0, "versions": {"python": "3.11.9", "sglang": "0.5.23"}, "commit": "abc",
    "gpus": [], "servers": {"sssd": {"url": None, "flags": ["--drafters", "pld"]}},
    "forward_costs": [COSTS],
}  # fmt: skip


def factor(point):
    gain = FACTORS[point.method] - 1.0
    return 1.0 + (gain if point.load == 1 else gain / 2)


def run_of(repeat, point):
    """(its row, its requests): AR has 100 tokens/s in the first repeat at batch 1."""
    speed = factor(point) * (1.0 + 0.1 * repeat)
    steps = None if point.method == "ar" else 5
    requests = [
        RequestResult(
            repeat=repeat, method=point.method, workload=point.workload, mode=point.mode,
            load=point.load, id=f"q{i}", category=CATEGORIES[i % 2], start_s=0.0,
            # Writing takes twice as long as math.
            ttft_s=0.1 / speed, e2e_s=(1.1 + i % 2 * 1.1) / speed, itl_s=[0.1 / speed] * 10,
            prompt_tokens=20, output_tokens=TOKENS, spec_verify_ct=steps, output_sha=f"sha {i}",
            error=None,
        )
        for i in range(4)
    ]  # fmt: skip
    result = PointResult(
        repeat=repeat, method=point.method, workload=point.workload, mode=point.mode,
        load=point.load, started=0.0, duration_s=0.44 / speed / point.load, requests=4, failed=0,
        output_tokens=44, prompt_tokens=80, cpu_s=0.88, memory_mb=1500.0,
        verify_width=None if steps is None else 8.0 / point.load,
        accept_length=None if steps is None else TOKENS / 5, error=None,
    )  # fmt: skip
    return result, requests


def write_sweep(folder, plan=PLAN, keep=lambda repeat, point: True, change=None):
    """Write a sweep.

    Args:
        keep: which runs are there.
        change: (row, requests) of a run to what they are instead.
    """
    with Results.create_or_resume(folder, plan) as results:
        results.write_environment(ENVIRONMENT)
        for repeat, point in plan.order():
            if keep(repeat, point):
                run = run_of(repeat, point)
                results.add_run(*(change(*run) if change else run))
    return folder


def failed(result, requests, reason="the server died"):
    return replace(result, error=reason, output_tokens=0), []


def batch(method, load, workload="mt-bench"):
    return Point(method, workload, BATCH, float(load))
