"""Where a draft executor runs: cores of this machine, or a GPU of its own."""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class DraftDevice:
    """A device by its name.

    Attributes:
        torch_name: what torch calls it.
        cores: those that the process is bound to; empty: any that its server may use.
    """

    torch_name: str
    cores: frozenset[int]

    @classmethod
    def parse(cls, name: str) -> "DraftDevice":
        """The device of a name as the option `mirror_device` takes it.

        Raises:
            ValueError: a range of cores runs backwards.
        """
        kind, _, listed = name.partition(":")
        if kind != "cpu":
            return cls(name, frozenset())
        cores: set[int] = set()
        for part in filter(None, listed.split(",")):
            first, _, last = part.partition("-")
            if int(last or first) < int(first):
                raise ValueError(f"{name!r}: {part} runs backwards")
            cores.update(range(int(first), int(last or first) + 1))
        return cls("cpu", frozenset(cores))

    @property
    def threads(self) -> int:
        """Threads of a product there: as many as cores were named, else one."""
        return max(1, len(self.cores))

    def bind(self) -> None:
        """Have this process run on its cores alone.

        Raises:
            ValueError: the machine lacks one of them, or does not give it to this process.
        """
        if not self.cores:
            return
        try:
            os.sched_setaffinity(0, self.cores)
            bound = os.sched_getaffinity(0)
        except OSError:
            bound = set()
        if missing := sorted(self.cores - bound):
            raise ValueError(f"there are no cores {missing} for the draft model here")
