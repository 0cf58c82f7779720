"""Runs the phases' parts one after another, each in a process that can be killed."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from scripts.gpu_kit.kit import Kit
from scripts.gpu_kit.lines import FAILED, FAILED_CASES, KIT_VARIABLE, NOT_RUN, PASSED, TIMEOUT
from scripts.gpu_kit.schedule import LEAST_S, allowance
from sglang_ext.servers.processes import kill_group, start

# phase -> its parts, in order: PARTS of phases/PHASE.py, known without importing it.
PARTS = {
    "environment": ["look"],
    "kernels": ["attention", "acceptance"],
    "lossless": ["plain", "speculative", "without_overlap", "without_graphs", "plain_again"],
    "sampling": ["nodes"],
    "latency": ["plain", "plain_flashinfer", "ngram", "adaptive", "width_16", "width_8", "width_4"],
    "trace": ["steps", "plain_steps"],
}
_NEEDS_GPU = "needs a GPU"
_ADDS_NOTHING = "left out of the dry run for its time: other parts run the same code on a CPU"
# What the dry run leaves out, and why.
NOT_ON_CPU = {
    "lossless": {"without_overlap": _ADDS_NOTHING, "without_graphs": _NEEDS_GPU},
    "latency": {
        "plain_flashinfer": _NEEDS_GPU,
        "ngram": _NEEDS_GPU,
        "width_8": _ADDS_NOTHING,
        "width_4": _ADDS_NOTHING,
    },
}
_LOG_LINES = 12
# The part that others of its phase compare with may take this share of the phase's time.
REFERENCE, REFERENCE_SHARE = {"lossless": "plain"}, 0.6


def run(kit: Kit, phases: Sequence[str], seconds: float) -> bool:
    """Run `phases` within `seconds`; returns whether all passed.

    Raises:
        ValueError: a phase has none of the kit's chosen parts.
    """
    _check_parts(kit, phases)
    end = time.monotonic() + seconds
    lines = kit.lines()
    before = lines.ended()
    todo = [phase for phase in phases if before.get(phase) != PASSED]
    following = _Started(kit, *_parts(kit, todo[0])[0]) if todo else None
    for number, phase in enumerate(todo):
        start = time.monotonic()
        limit = start + allowance(end - start, todo[number:])
        statuses = []
        parts = _parts(kit, phase)
        for n, part in enumerate(parts):
            started = following or _Started(kit, *part)
            more = parts[n + 1 :] or (_parts(kit, todo[number + 1]) if todo[number + 1 :] else [])
            left = limit - time.monotonic()
            # What one part saves, those behind it have; what is left for it is theirs as well.
            share = left / (len(parts) - n) if n + 1 < len(parts) else left
            following = None
            if left < LEAST_S:
                started.drop()
                lines.case(phase, part[1], NOT_RUN, not_run="no time was left for it")
                statuses.append(TIMEOUT)
                continue
            if REFERENCE.get(phase) == part[1]:
                share = REFERENCE_SHARE * left
            started.go(max(share, min(left, 2 * share)))
            following = _Started(kit, *more[0]) if more else None
            status, error = started.wait()
            if error:
                lines.case(phase, part[1], FAILED, error=error)
            statuses.append(status)
        for name in NOT_ON_CPU.get(phase, {}) if kit.emulated else {}:
            lines.case(phase, name, NOT_RUN, not_run=NOT_ON_CPU[phase][name])
        worst = next((s for s in (FAILED, TIMEOUT) if s in statuses), PASSED)
        lines.phase(
            phase,
            worst,
            seconds=round(time.monotonic() - start, 1),
            allowed_seconds=round(limit - start, 1),
        )
    if following is not None:
        following.drop()
    ended = lines.ended()
    return all(ended.get(phase) == PASSED for phase in phases)


def _check_parts(kit: Kit, phases: Sequence[str]) -> None:
    for phase in phases:
        if not _parts(kit, phase):
            raise ValueError(f"--parts: phase {phase} has none of them, but {PARTS[phase]}")


def _parts(kit: Kit, phase: str) -> list[tuple[str, str]]:
    left_out = NOT_ON_CPU.get(phase, {}) if kit.emulated else {}
    chosen = kit.parts or PARTS[phase]
    return [(phase, part) for part in PARTS[phase] if part in chosen and part not in left_out]


class _Started:
    """A part's process: it imports at once and works when told."""

    def __init__(self, kit: Kit, phase: str, part: str):
        self.log = Path(kit.out) / f"{phase}-{part}.log"
        self._seconds = 0.0
        with self.log.open("wb") as log:
            self._process = start(
                [sys.executable, "-m", "scripts.gpu_kit.part", phase, part],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {KIT_VARIABLE: kit.as_json(), "PYTHONUNBUFFERED": "1"},
            )

    def go(self, seconds: float) -> None:
        """Let it work for so long."""
        self._seconds = seconds
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{seconds}\n".encode())
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # it has ended, which wait() tells

    def wait(self) -> tuple[str, list[str]]:
        """Status, and what there is to say where the part could not say it itself."""
        try:
            code = self._process.wait(self._seconds)
        except subprocess.TimeoutExpired:
            self.drop()
            return TIMEOUT, [f"killed after {self._seconds:.0f} s", *self._tail()]
        kill_group(self._process)  # what SGLang may have left
        if code == 0:
            self.log.unlink()
            return PASSED, []
        return FAILED, [] if code == FAILED_CASES else [f"exit code {code}", *self._tail()]

    def drop(self) -> None:
        """End it and what it started."""
        kill_group(self._process)

    def _tail(self) -> list[str]:
        return self.log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
