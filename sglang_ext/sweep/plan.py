"""What a sweep measures, and in which order."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BATCH = "batch"
RATE = "rate"


class PlanError(ValueError):
    """A plan that cannot be read; the message names the field."""


@dataclass(frozen=True)
class Point:
    """One measurement, made once a repeat.

    Attributes:
        method: a name of methods.METHODS.
        workload: a name of workloads.WORKLOADS.
        mode: "batch": closed loop, `load` requests in flight, all prompts given at once; "rate":
            Poisson arrivals, `load` requests a second in the mean.
    """

    method: str
    workload: str
    mode: str
    load: float

    @property
    def id(self) -> str:
        """As "mt-bench/batch-8/sssd-live"."""
        return f"{self.workload}/{self.mode}-{self.load:g}/{self.method}"


@dataclass(frozen=True)
class Plan:
    """All that a results folder holds. Equal plans may be resumed.

    Attributes:
        model: as it was given: a path, a hub id or a name of `sglang-ext models list`.
        batches: requests in flight of the points in mode "batch".
        rates: requests a second of those in mode "rate".
        prompts: measured prompts of a workload, at most.
        max_tokens: of an output.
        data: folder or file of the data sets.
        server_flags: further flags of every server.
        most_repeats: of what `repeats` leave open, see settling.py; up to `repeats`: none.
        minutes: behind the first repeat of all, none is begun that would end later; 0: no limit.
    """

    model: str
    methods: tuple[str, ...]
    workloads: tuple[str, ...]
    batches: tuple[int, ...]
    rates: tuple[float, ...]
    repeats: int
    prompts: int
    max_tokens: int
    seed: int
    data: str
    server_flags: tuple[str, ...]
    most_repeats: int = 0
    minutes: float = 0.0

    def round_of(self, repeat: int) -> int:
        """Which runs share servers that were started for them: a repeat, or all that settle."""
        return min(repeat, self.repeats)

    def order(self) -> Iterator[tuple[int, Point]]:
        """(repeat, point), in the order of measurement.

        The methods take turns innermost, so that the machine's drift hits all alike. Another one
        begins each time, and every other repeat runs backwards, so that none always follows the
        same one.
        """
        loads = [(BATCH, float(n)) for n in self.batches] + [(RATE, r) for r in self.rates]
        for repeat in range(self.repeats):
            block = repeat
            for workload in self.workloads:
                for mode, load in loads:
                    for method in turned(self.methods, block, backwards=repeat % 2 == 1):
                        yield repeat, Point(method, workload, mode, load)
                    block += 1

    def differences(self, other: "Plan") -> list[str]:
        """What another plan has otherwise, field by field, for a message."""
        return [
            f"{field.name.replace('_', '-')} {_text(mine)}, not {_text(theirs)}"
            for field in dataclasses.fields(self)
            if (mine := getattr(self, field.name)) != (theirs := getattr(other, field.name))
        ]

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, content: Any) -> "Plan":
        """A plan from what `to_json` gave.

        Raises:
            PlanError: a field is missing, or unknown.
        """
        fields = dataclasses.fields(cls)
        names = [field.name for field in fields]
        needed = [field.name for field in fields if field.default is dataclasses.MISSING]
        if not isinstance(content, Mapping):
            raise PlanError("a plan must be an object")
        if missing := [name for name in needed if name not in content]:
            raise PlanError(f"a plan without {', '.join(missing)}")
        if unknown := sorted(set(content) - set(names)):
            raise PlanError(f"a plan of another version: it has {', '.join(unknown)}")
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in content.items()
        }
        return cls(**values)


def turned(methods: Sequence[str], by: int, backwards: bool = False) -> list[str]:
    """The methods, another one first each time."""
    start = by % len(methods) if methods else 0
    turned = [*methods[start:], *methods[:start]]
    return turned[::-1] if backwards else turned


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(f"{part:g}" if isinstance(part, float) else str(part) for part in value)
    return str(value)
