"""The kit's results: one JSON object a line, on disk before the next thing starts."""

import json
import os
from pathlib import Path
from typing import Any

_REPOSITORY = Path(__file__).resolve().parents[2]

NAME = "gpu_kit.jsonl"
PASSED, FAILED, NOT_RUN, TIMEOUT = "passed", "failed", "not_run", "timeout"
# A part's settings travel in this variable (Kit as JSON); its exit code where a case failed.
KIT_VARIABLE = "GPU_KIT"
FAILED_CASES = 3
# What a phase's own line may say; a case's line says one of the first three.
ENDED = (PASSED, FAILED, NOT_RUN)


class Lines:
    """Results in `folder`/gpu_kit.jsonl, from earlier runs of the same folder too.

    Args:
        stamp: fields that every line carries (emulated, device).
    """

    def __init__(self, folder: Path, stamp: dict[str, Any]):
        self._path = folder / NAME
        self._stamp = stamp
        folder.mkdir(parents=True, exist_ok=True)

    def case(self, phase: str, case: str, status: str, **figures: Any) -> None:
        """Write a result within a phase."""
        self._write({"phase": phase, "case": case, "status": status, **figures})

    def phase(self, phase: str, status: str, **figures: Any) -> None:
        """Write a phase's own line, which ends it."""
        self._write({"phase": phase, "status": status, **figures})

    def note(self, **figures: Any) -> None:
        """Write a line that belongs to no phase."""
        self._write(figures)

    def _write(self, line: dict[str, Any]) -> None:
        with open(self._path, "ab") as file:
            if file.tell() and not _ends_with_newline(self._path):
                file.write(b"\n")  # an earlier run was killed while it wrote
            # Tracebacks name files by where the repository lies, which says nothing elsewhere.
            text = json.dumps(line | self._stamp).replace(f"{_REPOSITORY}/", "")
            file.write(text.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[dict[str, Any]]:
        """Every whole line; one that a kill cut short is left out."""
        if not self._path.exists():
            return []
        found = []
        for text in self._path.read_bytes().splitlines():
            try:
                found.append(json.loads(text))
            except ValueError:
                continue
        return [line for line in found if isinstance(line, dict)]

    def ended(self) -> dict[str, str]:
        """Status by phase, of those that came to their end; a later line counts."""
        return {
            line["phase"]: line["status"]
            for line in self.read()
            if "phase" in line and "case" not in line and line["status"] in ENDED
        }

    def cases(self, phase: str) -> dict[str, str]:
        """Status by case of a phase, so that a second run does not do them again."""
        return {
            line["case"]: line["status"]
            for line in self.read()
            if line.get("phase") == phase and "case" in line
        }


def _ends_with_newline(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
