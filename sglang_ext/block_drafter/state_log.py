"""The target's states, recorded by a server while it wrote outputs (`drafter distill --states`).

What a drafter with a shared encoder learns from is computed as outputs are written: kept then, it
need not be read by the target once more (`target_states`). A folder holds `states.f16`, rows of
float16 (`even_states`), and `index.jsonl`: a header {"format": 1, "layer": L, "width": W}, then a
record a line, {"number": N, "begin": B, "first": R, "count": C}: the states of C tokens of the
prompt and output of source N, from token B on, are the rows from R on.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sglang_ext.block_drafter.drafter_manifest import BlockDrafterError
from sglang_ext.block_drafter.shapes import TargetStates
from sglang_ext.block_drafter.states_on_disk import States, StatesAt

FORMAT = 1
_STATES, _INDEX = "states.f16", "index.jsonl"
_ROW = 2  # bytes a number


def folder_of(data: Path) -> Path:
    """Where the states lie that were recorded beside a file of `drafter distill`."""
    return data.with_name(f"{data.name}.states")


class StateLog:
    """Appends records to a folder, which is made, or gone on with behind its last whole record.

    Raises:
        OSError: the folder cannot be used.
        BlockDrafterError: it holds another layer's states.
    """

    def __init__(self, folder: Path, states: TargetStates) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._row = _ROW * states.width
        found = _read_index(folder)
        if found is not None and found.states != states:
            raise BlockDrafterError(
                f"{folder} holds states behind layer {found.states.layer} of width "
                f"{found.states.width}, not {states.layer} of {states.width}: name another folder"
            )
        self._index = (folder / _INDEX).open("ab")
        self._states = (folder / _STATES).open("ab")
        self._rows = 0
        if found is None:
            self._index.truncate(0)
            self._write_line({"format": FORMAT, "layer": states.layer, "width": states.width})
        else:
            self._rows = max((at.first + at.count for at in found.places.values()), default=0)
            self._index.truncate(found.size)
        self._states.truncate(self._row * self._rows)

    def add(self, number: int, begin: int, states: States) -> None:
        """Append a record; float16[count, width]. A later one of the same number replaces it.

        Raises:
            OSError: the disk is full.
        """
        self._states.write(np.ascontiguousarray(states).tobytes())
        self._states.flush()
        record = {"number": number, "begin": begin, "first": self._rows, "count": len(states)}
        self._write_line(record)
        self._rows += len(states)

    def close(self) -> None:
        """Nothing is appended any more."""
        self._index.close()
        self._states.close()

    def _write_line(self, content: dict[str, Any]) -> None:
        self._index.write(json.dumps(content).encode() + b"\n")
        self._index.flush()


@dataclass(frozen=True)
class Records:
    """An index, read.

    Attributes:
        states: what the rows are.
        places: where the states of each source are, by its number.
        size: bytes of the index up to its last whole record.
    """

    states: TargetStates
    places: dict[int, StatesAt]
    size: int


def read_records(folder: Path) -> Records | None:
    """What a folder holds; None: it is no such folder.

    Raises:
        BlockDrafterError: it is damaged.
    """
    try:
        return _read_index(folder)
    except OSError as error:
        raise BlockDrafterError(f"cannot read {folder}: {error.strerror or error}") from None


def _read_index(folder: Path) -> Records | None:
    path = folder / _INDEX
    if not path.is_file() or not (folder / _STATES).is_file():
        return None
    with open(path, "rb") as file:
        head = _parsed(file.readline())
        states = None if head is None else _states_of(head)
        if states is None:
            return None
        rows = (folder / _STATES).stat().st_size // (_ROW * states.width)
        places, end = {}, file.tell()
        for line in file:
            content = _parsed(line)
            if content is None:
                break
            try:
                place = content["begin"], content["first"], content["count"]
                at = StatesAt(folder / _STATES, states, *place)
                number = int(content["number"])
            except (KeyError, TypeError, ValueError):
                raise BlockDrafterError(f"{path} is damaged: {content} is no record") from None
            if at.first + at.count > rows:  # the index reached the disk, its rows did not
                break
            places[number] = at
            end += len(line)
    return Records(states, places, end)


def _parsed(line: bytes) -> dict[str, Any] | None:
    """A line; None: it is torn."""
    try:
        content = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def _states_of(head: dict[str, Any]) -> TargetStates | None:
    if head.get("format") != FORMAT:
        return None
    try:
        return TargetStates.of({"layer": head.get("layer"), "width": head.get("width")})
    except ValueError:
        return None
