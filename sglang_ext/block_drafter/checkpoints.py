"""What a training leaves on the disk, so that it goes on after a kill and ends in an average.

training/state.safetensors      weights, the optimizer's moments, the step (metadata)
training/weights-N.safetensors  weights after N steps; the last few, which are averaged
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save

from sglang_ext.block_drafter.drafter_files import write_file
from sglang_ext.block_drafter.drafter_manifest import BlockDrafterError

FOLDER = "training"
_STATE = "state.safetensors"
_WEIGHTS = re.compile(r"weights-([0-9]+)\.safetensors")
_META = "training"
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class TrainingState:
    """Where a training is.

    Attributes:
        model, first, second: weights and Adam's moments by the parameter's name.
        meta: whatever else is needed, as JSON.
    """

    model: Tensors
    first: Tensors
    second: Tensors
    meta: Mapping[str, Any]


class Checkpoints:
    """The training folder within a drafter's directory."""

    def __init__(self, drafter: Path) -> None:
        self.folder = drafter / FOLDER

    def save_state(self, state: TrainingState) -> None:
        """Replace the state in one step; BlockDrafterError if it cannot be written."""
        parts = {"model": state.model, "first": state.first, "second": state.second}
        tensors = {
            f"{part}/{name}": tensor.detach().cpu().contiguous()
            for part, group in parts.items()
            for name, tensor in group.items()
        }
        write_file(self.folder / _STATE, save(tensors, {_META: json.dumps(dict(state.meta))}))

    def load_state(self) -> TrainingState | None:
        """The last state; None: the training has not begun.

        Raises:
            BlockDrafterError: it is damaged.
        """
        path = self.folder / _STATE
        if not path.is_file():
            return None
        try:
            tensors = load_file(path)
            with safe_open(path, "pt") as file:
                meta = json.loads(file.metadata()[_META])
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise BlockDrafterError(
                f"{path} is damaged ({error}); remove {self.folder} to begin anew"
            ) from None
        parts: dict[str, Tensors] = {"model": {}, "first": {}, "second": {}}
        for key, tensor in tensors.items():
            part, _, name = key.partition("/")
            parts.setdefault(part, {})[name] = tensor
        return TrainingState(parts["model"], parts["first"], parts["second"], meta)

    def keep_weights(self, step: int, model: Tensors, most: int) -> None:
        """Add the weights after a step, and remove what is older than the last `most`."""
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.items()}
        write_file(self._path(step), save(tensors))
        for old in self._steps()[:-most]:
            self._path(old).unlink(missing_ok=True)

    def average(self, upto: int) -> Tensors:
        """The mean of the weights that are kept, those after step `upto` left out.

        Raises:
            BlockDrafterError: there are none, or one is damaged.
        """
        steps = [step for step in self._steps() if step <= upto]
        if not steps:
            raise BlockDrafterError(f"{self.folder} holds no weights to be averaged")
        total: Tensors = {}
        for step in steps:
            try:
                tensors = load_file(self._path(step))
            except (SafetensorError, OSError) as error:
                raise BlockDrafterError(
                    f"{self._path(step)} is damaged ({error}): remove it"
                ) from None
            for name, tensor in tensors.items():
                total[name] = total[name] + tensor if name in total else tensor
        return {name: tensor / len(steps) for name, tensor in total.items()}

    def forget_later(self, step: int) -> None:
        """Remove weights of steps that are to be run again."""
        for later in self._steps():
            if later > step:
                self._path(later).unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove all, once the training has ended."""
        for step in self._steps():
            self._path(step).unlink(missing_ok=True)
        (self.folder / _STATE).unlink(missing_ok=True)
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def _steps(self) -> list[int]:
        names = self.folder.glob("weights-*.safetensors") if self.folder.is_dir() else ()
        found = (_WEIGHTS.fullmatch(path.name) for path in names)
        return sorted(int(match[1]) for match in found if match)

    def _path(self, step: int) -> Path:
        return self.folder / f"weights-{step}.safetensors"
