"""The target's states of training examples, in files: read example by example, never mapped.

A mapped file counts as memory of the training, which a file of several gigabytes would fill.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sglang_ext.block_drafter.shapes import TargetStates

States = npt.NDArray[np.float16]


@dataclass(frozen=True)
class StatesAt:
    """Where the target's states of an example lie.

    Attributes:
        path: the file of float16 rows.
        kind: what these are.
        begin: the token of the prompt with which they begin.
        first, count: the row of that token, and how many rows there are.
    """

    path: Path
    kind: TargetStates
    begin: int
    first: int
    count: int


class StatesOnDisk:
    """float16 states of width `width`.

    Attributes:
        source_lengths: int64[examples], states of each source.
        seconds: that the target took to read the examples.

    Args:
        paths: of each example, the file that holds its states.
        firsts: int64[examples], the row of that file with which they begin.
        sources, outputs: int64[examples], states of each source, and behind them of its output.

    Raises:
        OSError: a file cannot be opened.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        firsts: npt.ArrayLike,
        sources: npt.ArrayLike,
        outputs: npt.ArrayLike,
        width: int,
        seconds: float = 0.0,
    ) -> None:
        self.seconds = seconds
        self.source_lengths = np.asarray(sources, dtype=np.int64)
        self._firsts = np.asarray(firsts, dtype=np.int64)
        self._counts = self.source_lengths + np.asarray(outputs, dtype=np.int64)
        self._width = width
        names = list(dict.fromkeys(paths))
        numbers = {name: number for number, name in enumerate(names)}
        self._which = np.array([numbers[path] for path in paths], dtype=np.int32)
        self._files = [os.open(name, os.O_RDONLY) for name in names]

    def __len__(self) -> int:
        return len(self._firsts)

    def read(self, example: int) -> tuple[States, States]:
        """float16[s, width] of a source, float16[m, width] of its output."""
        first, count = int(self._firsts[example]), int(self._counts[example])
        row, file = 2 * self._width, self._files[self._which[example]]
        found = bytearray(os.pread(file, row * count, row * first))  # can be written to
        states = np.frombuffer(found, np.float16).reshape(count, self._width)
        source, output = np.split(states, [int(self.source_lengths[example])])
        return source, output

    def close(self) -> None:
        """No state is read any more."""
        for file in self._files:
            os.close(file)
