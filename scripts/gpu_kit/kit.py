"""What a part of a phase works with: where, on what, until when, and how it reports."""

import contextlib
import json
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scripts.gpu_kit.checkpoint import SHAPES, Shape, write
from scripts.gpu_kit.lines import FAILED, NOT_RUN, PASSED, Lines
from scripts.gpu_kit.planted import Rule

# Of an exception that is written down.
LAST_LINES = 12


@dataclass(frozen=True)
class Kit:
    """The run's settings; the same in every process.

    Attributes:
        out: where the results go.
        work: where the checkpoint and notes between parts lie.
        emulated: the dry run, on a CPU; no figure of it says anything about a GPU.
        parts: of the phases, to run alone; none: all.
        memory_fraction: of the GPU's memory, for a server.
    """

    out: str
    work: str
    shape_name: str
    seed: int
    emulated: bool
    device_name: str
    parts: tuple[str, ...] = ()
    memory_fraction: float = 0.7

    @property
    def shape(self) -> Shape:
        return SHAPES[self.shape_name]

    @property
    def rule(self) -> Rule:
        return self.shape.rule(self.seed)

    @property
    def device(self) -> str:
        """torch's name of where tensors go."""
        return "cpu" if self.emulated else "cuda"

    @property
    def model(self) -> Path:
        """The checkpoint's folder; made by `make_model`."""
        return Path(self.work) / f"model-{self.shape_name}-{self.seed}"

    def make_model(self) -> None:
        """Write the checkpoint, if it is not there."""
        write(self.model, self.shape, self.seed, self.device)

    def lines(self) -> Lines:
        """The file of results."""
        stamp = {"emulated": self.emulated, "device": self.device_name, "shape": self.shape_name}
        return Lines(Path(self.out), stamp)

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Kit":
        found = json.loads(text)
        return cls(**found | {"parts": tuple(found["parts"])})

    def keep(self, name: str, value: Any) -> None:
        """Leave a value (JSON) for the parts to come."""
        (Path(self.work) / f"{name}.json").write_text(json.dumps(value))

    def kept(self, name: str) -> Any:
        """What an earlier part left; None: nothing."""
        path = Path(self.work) / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else None


class Part:
    """One part of a phase, running in a process of its own.

    Args:
        deadline: of time.monotonic(), when the process is killed.
    """

    def __init__(self, kit: Kit, phase: str, deadline: float):
        self.kit = kit
        self.phase = phase
        self._deadline = deadline
        self._lines = kit.lines()
        self._done = self._lines.cases(phase)
        self.failed = False

    def remaining(self) -> float:
        """Seconds until the part is killed."""
        return self._deadline - time.monotonic()

    def result(self, case: str, passed: bool, **figures: Any) -> None:
        """Write a case's figures."""
        self._lines.case(self.phase, case, PASSED if passed else FAILED, **figures)
        self.failed |= not passed

    def not_run(self, case: str, why: str) -> None:
        """Write that a case was not run here."""
        if case not in self._done:
            self._lines.case(self.phase, case, NOT_RUN, not_run=why)

    @contextlib.contextmanager
    def attempt(self, case: str) -> Iterator[None]:
        """A case whose exception becomes a failed line, after which the part goes on."""
        try:
            yield
        except Exception:
            self.result(case, False, error=last_lines())

    def is_done(self, case: str) -> bool:
        """Whether an earlier run of this folder has the case."""
        return case in self._done


def last_lines(count: int = LAST_LINES) -> list[str]:
    """The end of the current exception's traceback."""
    return traceback.format_exc().strip().splitlines()[-count:]
