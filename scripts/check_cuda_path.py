"""The CUDA path, checked on a machine without a GPU: each part in a process of its own.

    python -m scripts.check_cuda_path [--quick] [--parts overlap,server] [--json FILE]

What each part proves, and what it cannot, is in docs/cuda.md. Two parts run at a time, each with
one thread (the servers take 15 GB together), but those whose times are figures. Exit code 1 if a
figure is beyond its limit.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scripts.lib.figures import parser, report
from sglang_ext.servers.processes import run as start_and_wait

Figures = Mapping[str, float]
# Largest (or, where it says so, least) value of each figure.
AT_MOST = {
    "wrong_outputs": 0, "wrong_roots": 0, "wrong_learned": 0, "wrong_kv": 0, "wrong_marks": 0,
    "emulated_mismatches": 0, "emulated_mismatches_specasr": 0, "emulated_stuck": 0,
    "emulated_stuck_specasr": 0, "attention_max_error": 1e-5, "triton_max_error": 1e-5,
    "reach_flashinfer": 0, "device_mixes": 0, "syncs_per_step": 1,
    "penalty_host_ms_b48_v152k": 2.0, "host_ms_b64": 1.0, "carry_mib": 64,
}  # fmt: skip
AT_LEAST = {
    "schedules": 1000, "model_min_ratio_vs_plain": 0.97, "model_min_ratio_vs_best_fixed": 0.98,
    "kit_emulated_lines": 1, "emulated_retractions": 1,
    "known_tokens": 1000, "emulated_known_steps_specasr": 1,
}  # fmt: skip
EMULATED_PROMPTS = {False: 100, True: 20}


def host_costs(quick: bool) -> Figures:
    """Host time of a step."""
    from scripts.emulation.host_costs import penalty_host_ms
    from scripts.emulation.step_costs import step_host_ms

    # What other programs disturb is not the step's: the least of three medians.
    return {
        "host_ms_b64": min(step_host_ms(64) for _ in range(3)),
        "penalty_host_ms_b48_v152k": min(penalty_host_ms(48, 151_936) for _ in range(3)),
    }


def overlap(quick: bool) -> Figures:
    """The real worker in the order of SGLang's overlap loop."""
    from scripts.emulation.overlap_loop import overlap_figures

    return overlap_figures(1000, 30 if quick else 60)


def fake_cuda(quick: bool) -> Figures:
    """Steps over fake CUDA tensors."""
    from scripts.emulation.fake_cuda import fake_cuda_figures

    return fake_cuda_figures()


def flashinfer(quick: bool) -> Figures:
    """SGLang's FlashInfer backend over emulated wrappers, and who never gets there."""
    from scripts.emulation.flashinfer_checks import attention_errors
    from scripts.emulation.targets import wrong_targets

    errors = attention_errors()
    return {
        "attention_cases": len(errors),
        "attention_max_error": max(errors.values()),
        "reach_flashinfer": len(wrong_targets()),
    }


def triton(quick: bool) -> Figures:
    """SGLang's Triton kernels and our own in Triton's interpreter."""
    from scripts.emulation.triton_checks import triton_errors

    errors = triton_errors()
    return {"triton_cases": len(errors), "triton_max_error": max(errors.values())}


def server(quick: bool) -> Figures:
    """Real servers on the device path against plain SGLang."""
    from scripts.emulation.emulated_server import emulated_figures

    return emulated_figures(quick)


def whisper(quick: bool) -> Figures:
    """SpecASR on such a server against plain SGLang's Whisper."""
    from scripts.emulation.emulated_whisper import whisper_figures

    return whisper_figures(quick)


def budget(quick: bool) -> Figures:
    """The choice of widths under a roofline model of a GPU."""
    from scripts.bench_cuda_budget import budget_figures

    return budget_figures(quick)


def kit(quick: bool) -> Figures:
    """The GPU kit: what must be brought along, and every phase on the emulation."""
    from scripts.gpu_kit.check import kit_figures

    return kit_figures(quick)


PARTS: dict[str, Callable[[bool], Figures]] = {
    part.__name__: part
    for part in (host_costs, server, whisper, overlap, triton, budget, kit, flashinfer, fake_cuda)
}
# Alone: their times are figures.
ALONE = ("host_costs",)


def main() -> int:
    args = parser(__doc__, model=False)
    args.add_argument("--parts", default=",".join(PARTS), help="[%(default)s]")
    args.add_argument("--part", help="run this one here (what the others' processes do)")
    options = args.parse_args()
    if options.part is not None:
        figures = dict(PARTS[options.part](options.quick))
        options.json.write_text(json.dumps(figures))
        return 0
    names = options.parts.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        args.error(f"unknown part {unknown[0]!r}; known: {', '.join(PARTS)}")
    figures = {}
    for name, found, seconds in run(names, options.quick):
        print(f"{name}: {'failed' if found is None else 'done'} in {seconds:.0f} s", flush=True)
        figures |= found if found is not None else {f"failed_{name}": 1}
    report(figures, options.json)
    beyond = limits_broken(figures, options.quick)
    print("\n".join(beyond))
    return int(bool(beyond))


def run(names: Iterable[str], quick: bool) -> Iterable[tuple[str, Figures | None, float]]:
    """The parts' figures, None for one that failed, and seconds; those alone come first."""
    names = list(names)
    for name in names:
        if name in ALONE:
            yield run_part(name, quick)
    together = [name for name in names if name not in ALONE]
    with ThreadPoolExecutor(2) as threads:
        yield from threads.map(lambda name: run_part(name, quick), together)


def run_part(name: str, quick: bool) -> tuple[str, Figures | None, float]:
    """One part in a process of its own; what it prints is shown as it comes."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "scripts.check_cuda_path", "--part", name]
        command += ["--json", str(path), *(["--quick"] if quick else [])]
        code = start_and_wait(command, env=environment(name))
        found = json.loads(path.read_text()) if code == 0 else None
    return name, found, time.monotonic() - start


def environment(name: str) -> dict[str, str]:
    """A part's environment: one thread where two parts run, Triton's interpreter for its part."""
    made = dict(os.environ)
    if name not in ("server", "kit"):
        made["OMP_NUM_THREADS"] = "1"
    if name == "triton":
        made["TRITON_INTERPRET"] = "1"
    return made


def limits_broken(figures: Figures, quick: bool) -> list[str]:
    """A line for every figure that is missing its limit."""
    least = AT_LEAST | {"emulated_prompts": EMULATED_PROMPTS[quick]}
    least["kit_phases_passed"] = figures.get("kit_phases", 0)
    lines = [f"{name} did not run to its end" for name in figures if name.startswith("failed_")]
    for name, value in figures.items():
        if name in AT_MOST and not value <= AT_MOST[name]:
            lines.append(f"{name} is {value:.4g}, expected at most {AT_MOST[name]}")
        if name in least and not value >= least[name]:
            lines.append(f"{name} is {value:.4g}, expected at least {least[name]}")
    return lines


if __name__ == "__main__":
    from sglang_ext.cpu.install import install

    install()
    sys.exit(main())
