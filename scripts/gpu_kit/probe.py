"""What the kit looks at inside SGLang's scheduler process: steps, logits, syncs, traces.

`run_scheduler` stands in for SGLang's own process function (Engine.run_scheduler_process_func). It
gives the Scheduler one more method, `gpu_kit`, which Engine.collective_rpc reaches; until it is
called nothing is wrapped.
"""

import cProfile
import gzip
import json
import shutil
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

# Logits per row that `logits` keeps.
TOP = 16
# Of the scheduler's Python, functions that `host` keeps.
FUNCTIONS = 80
MAX_TRACE_BYTES = 15 << 20
# What may wait beside decode steps: our worker's prefills, and SGLang where this probe is asked.
_NO_STEP = frozenset({"_prefill", "handle_rpc_request"})
# Of a trace that is too large, what is left out first: Python's and torch's operators.
_KEPT_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime", "cuda_driver"})


def run_scheduler(*args: Any, **kwargs: Any) -> Any:
    """SGLang's scheduler process with the probe in it; same arguments."""
    from sglang.srt.managers.scheduler import Scheduler, run_scheduler_process

    Scheduler.gpu_kit = _command
    return run_scheduler_process(*args, **kwargs)


def _command(scheduler: Any, name: str, **parameters: Any) -> None:
    """One of Probe's methods, by name."""
    if not hasattr(scheduler, "_gpu_kit_probe"):
        scheduler._gpu_kit_probe = Probe(scheduler)
    getattr(scheduler._gpu_kit_probe, name)(**parameters)


class _Mark:
    """A point on the current CUDA stream, or in time where there is no CUDA."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if torch.cuda.is_available() else None
        if self._event is not None:
            self._event.record()
        self._at = time.perf_counter()

    def ms_until(self, later: "_Mark") -> float:
        """Milliseconds between two marks; waits for both."""
        if self._event is None or later._event is None:
            return 1e3 * (later._at - self._at)
        later._event.synchronize()
        return float(self._event.elapsed_time(later._event))


class Probe:
    """Wraps the worker's step and the target's forward pass of one scheduler."""

    def __init__(self, scheduler: Any):
        self._steps: list[dict[str, Any]] | None = None
        self._top: list[dict[str, float]] | None = None
        self._forward: tuple[_Mark, _Mark] | None = None
        self._profiler: Any = None
        self._trace: tuple[str, int] | None = None
        self._syncs: Counter[str] | None = None
        self._host: cProfile.Profile | None = None
        self._counted = 0
        worker, runner = scheduler.model_worker, scheduler.tp_worker.model_runner
        worker.forward_batch_generation = self._watched(worker.forward_batch_generation)
        runner.forward = self._forward_watched(runner.forward)

    # What can be asked for

    def steps(self, path: str = "") -> None:
        """Begin to note steps; with a path: write what was noted (JSON) and stop."""
        if not path:
            self._steps = []
            return
        noted = self._steps or []
        self._steps = None
        lines = []
        for step in noted:
            begin, end, forward = step.pop("begin"), step.pop("end"), step.pop("forward")
            step["device_ms"] = (forward[0] if forward else begin).ms_until(end)
            step["forward_ms"] = forward[0].ms_until(forward[1]) if forward else None
            lines.append(step)
        Path(path).write_text(json.dumps(lines))

    def logits(self, path: str = "") -> None:
        """Begin to keep the largest logits of each row; with a path: write them and stop."""
        if not path:
            self._top = []
            return
        Path(path).write_text(json.dumps(self._top or []))
        self._top = None

    def syncs(self, path: str = "") -> None:
        """Begin to count synchronizing calls by place; with a path: write them and stop."""
        if not path:
            self._syncs, self._counted = Counter(), 0
            warnings.simplefilter("always")
            self._shown = warnings.showwarning
            warnings.showwarning = self._on_warning
            if torch.cuda.is_available():
                torch.cuda.set_sync_debug_mode("warn")
            return
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")
        warnings.showwarning = self._shown
        found = {"steps": self._counted, "by_place": dict(self._syncs or {})}
        self._syncs = None
        Path(path).write_text(json.dumps(found))

    def host(self, path: str = "") -> None:
        """Begin to profile the scheduler's Python; with a path: write where its time went."""
        if not path:
            self._host, self._counted = cProfile.Profile(), 0
            self._host.enable()
            return
        profile, self._host = self._host, None
        assert profile is not None
        profile.disable()
        found = {"steps": self._counted, "functions": _slowest(profile, max(1, self._counted))}
        Path(path).write_text(json.dumps(found))

    def trace(self, path: str, steps: int) -> None:
        """Record the next `steps` decode steps with torch's profiler into `path` (.json.gz)."""
        self._trace = path, steps

    # How

    def _watched(self, step: Any) -> Any:
        def forward_batch_generation(batch: Any, *args: Any, **kwargs: Any) -> Any:
            decoding = batch.forward_mode.is_decode()
            self._begin_trace(decoding)
            noted = self._steps
            line: dict[str, Any] = {}
            if noted is not None:
                self._forward = None
                line = {
                    "decode": decoding,
                    "requests": len(batch.reqs),
                    "at": time.perf_counter(),
                    "begin": _Mark(),
                }
            result = step(batch, *args, **kwargs)
            if noted is not None:
                line |= {
                    "host_s": time.perf_counter() - line["at"],
                    "end": _Mark(),
                    "forward": self._forward,
                    "graph": bool(result.can_run_cuda_graph),
                    "width": len(batch.input_ids) // len(batch.reqs) if decoding else 0,
                }
                noted.append(line)
            if (self._syncs is not None or self._host is not None) and decoding:
                self._counted += 1
            if self._top is not None and not decoding:
                self._top += _largest(result.logits_output.next_token_logits)
            self._end_trace(decoding)
            return result

        return forward_batch_generation

    def _forward_watched(self, forward: Any) -> Any:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._steps is None:
                return forward(*args, **kwargs)
            begin = _Mark()
            output = forward(*args, **kwargs)
            self._forward = begin, _Mark()
            return output

        return watched

    def _on_warning(self, message: Any, category: type[Warning], *args: Any, **kwargs: Any) -> None:
        if self._syncs is None or "synchroniz" not in str(message):
            return self._shown(message, category, *args, **kwargs)
        own = [f for f in traceback.extract_stack() if "sglang" in f.filename]
        if any(f.name in _NO_STEP for f in own):
            return None
        frame = own[-1] if own else None
        place = f"{'/'.join(Path(frame.filename).parts[-3:])}:{frame.lineno}" if frame else "?"
        self._syncs[place] += 1

    def _begin_trace(self, decoding: bool) -> None:
        if self._trace is None or self._profiler is not None or not decoding:
            return
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=kinds)
        self._profiler.start()

    def _end_trace(self, decoding: bool) -> None:
        if self._trace is None or self._profiler is None or not decoding:
            return
        path, left = self._trace[0], self._trace[1] - 1
        self._trace = (path, left) if left else None
        if left:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        plain = Path(path).with_suffix("")
        profiler.export_chrome_trace(str(plain))
        compress_trace(plain, Path(path))


def _slowest(profile: cProfile.Profile, steps: int) -> list[dict[str, Any]]:
    """The FUNCTIONS functions that took longest by themselves, in milliseconds a step."""
    profile.create_stats()
    lines: list[dict[str, Any]] = [
        {
            "function": f"{'/'.join(Path(file).parts[-3:])}:{line} {name}",
            "calls": round(calls / steps, 2),
            "own_ms": round(1e3 * own / steps, 4),
            "with_callees_ms": round(1e3 * whole / steps, 4),
        }
        for (file, line, name), (_, calls, own, whole, _) in profile.stats.items()  # type: ignore[attr-defined]
    ]
    return sorted(lines, key=lambda found: -found["own_ms"])[:FUNCTIONS]


def _largest(logits: torch.Tensor) -> list[dict[str, float]]:
    """The TOP largest logits of each row by token (JSON has text keys)."""
    values, tokens = logits.float().topk(TOP, dim=-1)
    return [
        {str(token): value for token, value in zip(ids, row, strict=True)}
        for ids, row in zip(tokens.tolist(), values.tolist(), strict=True)
    ]


def compress_trace(plain: Path, packed: Path, limit: int = MAX_TRACE_BYTES) -> None:
    """gzip a Chrome trace, without its host operators where it would be larger than `limit`."""
    _gzip(plain, packed)
    if packed.stat().st_size > limit:
        trace = json.loads(plain.read_text())
        trace["traceEvents"] = [
            e for e in trace["traceEvents"] if e.get("cat") in _KEPT_CATEGORIES | {None}
        ]
        plain.write_text(json.dumps(trace))
        _gzip(plain, packed)
    plain.unlink()


def _gzip(plain: Path, packed: Path) -> None:
    with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=9) as target:
        shutil.copyfileobj(source, target)
