"""The target's states of training examples, in a file: read example by example, never mapped.

A mapped file counts as memory of the training, which a file of several gigabytes would fill.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

States = npt.NDArray[np.float16]


class StatesOnDisk:
    """float16 states of width `width`, those of each example behind each other's.

    Attributes:
        source_lengths: int64[examples], states of each source.
        seconds: that the target took to read the examples.

    Args:
        sources, outputs: int64[examples], states of each source, and behind them of its output.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(
        self,
        path: Path,
        sources: Sequence[int],
        outputs: Sequence[int],
        width: int,
        seconds: float = 0.0,
    ) -> None:
        self.seconds = seconds
        self.source_lengths = np.asarray(sources, dtype=np.int64)
        self._width = width
        self._ends = np.cumsum(self.source_lengths + np.asarray(outputs, dtype=np.int64))
        self._file = os.open(path, os.O_RDONLY)

    def __len__(self) -> int:
        return len(self._ends)

    def read(self, example: int) -> tuple[States, States]:
        """float16[s, width] of a source, float16[m, width] of its output."""
        first = int(self._ends[example - 1]) if example else 0
        count = int(self._ends[example]) - first
        row = 2 * self._width
        found = bytearray(os.pread(self._file, row * count, row * first))  # can be written to
        states = np.frombuffer(found, np.float16).reshape(count, self._width)
        source, output = np.split(states, [int(self.source_lengths[example])])
        return source, output

    def close(self) -> None:
        """No state is read any more."""
        os.close(self._file)
