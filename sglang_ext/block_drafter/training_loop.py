"""The loop of a training: updates of Adam, evaluations, states on the disk, on after any kill."""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from sglang_ext.block_drafter.checkpoints import Checkpoints, TrainingState
from sglang_ext.block_drafter.drafter_manifest import BlockDrafterError
from sglang_ext.block_drafter.recipes import LoopRecipe

# What a training that goes on need not agree in.
_CHANGEABLE = ("steps", "minutes", "patience", "checkpoint_s", "bf16")


class TrainingLoop(ABC):
    """One training of some parameters; `train` begins it or goes on with it.

    Args:
        parameters: float32, by name; changed in place.
        checkpoints: where its states are kept; None: it cannot go on after a kill.
        identity: what it must agree in to go on, beside the recipe.

    Attributes:
        step: updates so far, those before a kill included.
        seconds: that they took.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        recipe: LoopRecipe,
        checkpoints: Checkpoints | None,
        identity: Mapping[str, Any],
    ) -> None:
        self._parameters, self._loop_recipe = dict(parameters), recipe
        self._states, self._own_identity = checkpoints, identity
        self._optimizer = torch.optim.Adam(
            self._parameters.values(), lr=recipe.learning_rate, fused=True
        )
        self.step, self.seconds = 0, 0.0
        self._waited, self._judged = 0, -1

    @abstractmethod
    def _learn(self, rng: np.random.Generator) -> float:
        """Add the gradients of an update's batch; returns its loss."""

    @abstractmethod
    def _rate(self) -> float:
        """The learning rate of the next update."""

    @abstractmethod
    def _judge(self) -> bool:
        """Evaluate, and keep what was learned if it is the best; whether it is better."""

    @abstractmethod
    def _tell(self, loss: float, steps_per_s: float) -> None:
        """Told after each update, with the rate of this run."""

    @abstractmethod
    def _found(self) -> dict[str, Any]:
        """What else goes on after a kill, as JSON."""

    @abstractmethod
    def _go_on(self, found: Mapping[str, Any]) -> None:
        """Take up what `_found` gave."""

    def resume(self) -> None:
        """Take up the state that the checkpoints hold, if any.

        Raises:
            BlockDrafterError: it is damaged, or of another training.
        """
        state = None if self._states is None else self._states.load_state()
        if self._states is None or state is None:
            return
        if state.meta["identity"] != self._identity():
            raise BlockDrafterError(
                f"{self._states.folder} is of a training of other data, another model or recipe: "
                "name another --out, or remove it to begin anew"
            )
        with torch.no_grad():
            for name, tensor in self._parameters.items():
                tensor.copy_(state.model[name])
        self.step, self.seconds = int(state.meta["step"]), float(state.meta["seconds"])
        self._waited, self._judged = int(state.meta["waited"]), int(state.meta["judged"])
        moments = {
            i: {
                "step": torch.tensor(float(self.step)),
                "exp_avg": state.first[name],
                "exp_avg_sq": state.second[name],
            }
            for i, name in enumerate(self._parameters)
        }
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": moments, "param_groups": groups})
        self._go_on(state.meta["found"])

    def train(self) -> None:
        """Train until it no longer gets better, or its steps or minutes are over.

        Raises:
            BlockDrafterError: it diverged, or the disk is full: the same command goes on later.
        """
        started, before = time.monotonic(), self.seconds
        first, saved = self.step, started
        while not self._ended():
            loss = self._update()
            self.step += 1
            now = time.monotonic()
            self.seconds = before + now - started
            due = self.step % self._loop_recipe.evaluate == 0 or self._ended()
            if due:
                self._evaluate()
            if due or now - saved >= self._loop_recipe.checkpoint_s:
                self._save_state()
                saved = time.monotonic()
            self._tell(loss, (self.step - first) / max(now - started, 1e-9))
        if self._judged != self.step:  # its minutes were over before it went on
            self._evaluate()
            self._save_state()

    def _ended(self) -> bool:
        recipe = self._loop_recipe
        late = bool(recipe.minutes) and self.seconds >= 60 * recipe.minutes
        return late or self.step >= recipe.steps or self._waited >= recipe.patience

    def _update(self) -> float:
        """One step of Adam, the same after a kill as without one; returns the loss."""
        recipe = self._loop_recipe
        # Of the step's number alone, so that nothing else needs to be kept.
        rng = np.random.default_rng([recipe.seed, self.step])
        torch.manual_seed((recipe.seed << 32) + self.step)
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate()
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._learn(rng)
        if not math.isfinite(loss):
            raise BlockDrafterError(
                f"training diverged at step {self.step}: give a lower --learning-rate"
            )
        torch.nn.utils.clip_grad_norm_(self._parameters.values(), recipe.clip)
        self._optimizer.step()
        return loss

    def _evaluate(self) -> None:
        self._waited = 0 if self._judge() else self._waited + 1
        self._judged = self.step

    def _identity(self) -> dict[str, Any]:
        recipe = {k: v for k, v in asdict(self._loop_recipe).items() if k not in _CHANGEABLE}
        return {**self._own_identity, "recipe": recipe}

    def _save_state(self) -> None:
        if self._states is None:
            return
        states = self._optimizer.state_dict()["state"]
        first, second = (
            {name: states[i][moment] for i, name in enumerate(self._parameters)}
            for moment in ("exp_avg", "exp_avg_sq")
        )
        meta = {
            "step": self.step,
            "seconds": self.seconds,
            "waited": self._waited,
            "judged": self._judged,
            "identity": self._identity(),
            "found": self._found(),
        }
        model = {name: tensor.detach() for name, tensor in self._parameters.items()}
        self._states.save_state(TrainingState(model, first, second, meta))
