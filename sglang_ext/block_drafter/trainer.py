"""Training a block drafter: from data to a drafter's directory, on after any kill."""

import logging
import math
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sglang_ext.block_drafter.accepted_tokens import replay
from sglang_ext.block_drafter.block_predictor import BlockPredictor
from sglang_ext.block_drafter.checkpoints import Checkpoints, TrainingState
from sglang_ext.block_drafter.drafter_files import save_drafter
from sglang_ext.block_drafter.drafter_manifest import BlockDrafterError, Manifest
from sglang_ext.block_drafter.fast_dropout import with_fast_dropout
from sglang_ext.block_drafter.glancing import block_loss, make_batch
from sglang_ext.block_drafter.nat_model import BlockModel
from sglang_ext.block_drafter.training_set import TrainingSet

logger = logging.getLogger(__name__)

# Held-out outputs that are replayed each time; all of them at the end.
_REPLAYED = 200
# So many batches are drawn at once, of which one is taken.
_DRAWN = 16
# What is shown at the end, as part of what is shown at the start (GLAT, section 4.1: 0.3 and 0.5).
_GLANCING_AT_END = 0.6


@dataclass(frozen=True)
class Recipe:
    """How to train. Where the paper's differs, it is for 300k steps on GPUs.

    Attributes:
        steps: most updates.
        sources, prefixes: examples in a batch, and blocks of each.
        fading: of a place's tokens so many are learned from, as part of those of the place before.
        glancing: of the tokens that a first pass gets wrong, so many are shown at the start, as
            part of them; 0: there is no first pass.
        learning_rate: the highest, reached after `warmup` steps; then 1 / sqrt(step).
        smoothing, dropout, clip: of labels, of layers, of the gradient's norm.
        average: how many of the last evaluations' weights are averaged.
        evaluate: steps between evaluations on held-out outputs.
        patience: evaluations without a better one after which training ends.
        minutes: most minutes of training, 0 for no limit; those before a kill count.
        checkpoint_s: seconds between states on the disk.
        bf16: products are in bfloat16 (torch.autocast), weights and their updates in float32.
    """

    steps: int = 20_000
    sources: int = 32
    prefixes: int = 8
    fading: float = 0.8
    glancing: float = 0.0
    learning_rate: float = 2e-3
    warmup: int = 400
    smoothing: float = 0.1
    dropout: float = 0.1
    clip: float = 5.0
    average: int = 10
    evaluate: int = 250
    patience: int = 10
    minutes: float = 0.0
    checkpoint_s: float = 45.0
    seed: int = 0
    bf16: bool = False


@dataclass(frozen=True)
class Progress:
    """Told after each step.

    Attributes:
        score: accepted tokens a step of the last evaluation; 0.0 before the first.
        left_s: seconds left at most, by the rate so far.
    """

    step: int
    loss: float
    score: float
    best: float
    steps_per_s: float
    left_s: float


class Trainer:
    """One training; `run` begins it or goes on with it."""

    def __init__(
        self,
        folder: Path,
        data: TrainingSet,
        manifest: Manifest,
        recipe: Recipe,
        device: str,
        tell: Callable[[Progress], None] = lambda progress: None,
        embeddings: torch.Tensor | None = None,
    ) -> None:
        """A training of a folder.

        Args:
            manifest: all but weights and scores; its `data.digest` says what is trained on.
            embeddings: of the kept tokens, as `embedding_start` gives them; None: random ones.

        Raises:
            BlockDrafterError: the folder holds a training of other data or of another shape.
        """
        self._folder, self._data, self._manifest = folder, data, manifest
        self._recipe, self._device, self._tell = recipe, device, tell
        self._checkpoints = Checkpoints(folder)
        self._lengths = data.learned.source_lengths()
        torch.manual_seed(recipe.seed)
        self._model = BlockModel(
            manifest.shape,
            data.kept.num_rows,
            data.kept.num_classes,
            recipe.dropout,
            manifest.states,
        ).to(device)
        if embeddings is not None:
            self._model.begin_with(embeddings.to(device))
        if device == "cpu":
            with_fast_dropout(self._model)
        self._optimizer = torch.optim.Adam(
            self._model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.999), fused=True
        )
        self.step = 0
        self._seconds = 0.0
        self._score, self._best = 0.0, -1.0
        self._waited = 0
        self._resume()

    def run(self) -> Manifest:
        """Train until it no longer gets better, and write the best average.

        Raises:
            BlockDrafterError: the disk is full; the same command goes on later.
        """
        started, before = time.monotonic(), self._seconds
        first, saved = self.step, started
        while not self._ended():
            loss = self._update()
            self.step += 1
            now = time.monotonic()
            self._seconds = before + now - started
            if self.step % self._recipe.evaluate == 0 or self.step == self._recipe.steps:
                self._evaluate()
            if now - saved >= self._recipe.checkpoint_s or self._evaluated():
                self._save_state()
                saved = time.monotonic()
            self._report(loss, (self.step - first) / max(now - started, 1e-9))
        if not self._evaluated():
            self._evaluate()
            self._save_state()
        return self._finish()

    def _evaluated(self) -> bool:
        return self.step % self._recipe.evaluate == 0 or self.step == self._recipe.steps

    def _ended(self) -> bool:
        recipe = self._recipe
        out_of_time = bool(recipe.minutes) and self._seconds >= 60 * recipe.minutes
        return self.step >= recipe.steps or self._waited >= recipe.patience or out_of_time

    def _update(self) -> float:
        """One step of Adam; the same after a kill as without one. Returns the loss."""
        recipe, learned = self._recipe, self._data.learned
        # Of the step's number alone, so that nothing else needs to be kept.
        rng = np.random.default_rng([recipe.seed, self.step])
        torch.manual_seed((recipe.seed << 32) + self.step)
        generator = torch.Generator().manual_seed(self.step)
        pairs = learned.read(alike(self._lengths, recipe.sources, rng))
        batch = make_batch(
            pairs.sources,
            pairs.outputs,
            self._manifest.shape,
            recipe.prefixes,
            rng,
            pairs.written,
        ).to(self._device)
        for group in self._optimizer.param_groups:
            group["lr"] = _rate(recipe, self.step + 1)
        self._model.train()
        shown = recipe.glancing * (1 - (1 - _GLANCING_AT_END) * self.step / recipe.steps)
        with torch.autocast(self._device, torch.bfloat16, enabled=recipe.bf16):
            loss = block_loss(
                self._model,
                batch,
                glancing=shown,
                fading=recipe.fading,
                smoothing=recipe.smoothing,
                generator=generator,
            )
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), recipe.clip)
        self._optimizer.step()
        value = float(loss.detach())
        if not math.isfinite(value):
            raise BlockDrafterError(
                f"training diverged at step {self.step}: give a lower --learning-rate"
            )
        return value

    def _evaluate(self) -> None:
        """Replay held-out outputs with the average, and keep it if it is the best so far."""
        recipe = self._recipe
        self._checkpoints.keep_weights(self.step, self._model.state_dict(), recipe.average)
        model = self._averaged()
        self._score = self._replayed(model, self._manifest.shape.block, _REPLAYED)
        self._waited = 0 if self._score > self._best else self._waited + 1
        if self._score >= self._best:  # of equal ones the one that has learned longer
            self._best = self._score
            scores = {"accepted_per_step": {str(self._manifest.shape.block): self._score}}
            self._write(model, scores)

    def _averaged(self) -> BlockModel:
        model = BlockModel(
            self._manifest.shape,
            self._data.kept.num_rows,
            self._data.kept.num_classes,
            states=self._manifest.states,
        )
        model.load_state_dict(self._checkpoints.average(self.step))
        return model.to(self._device).eval()

    def _replayed(self, model: BlockModel, block: int, most: int) -> float:
        ends = self._data.kept.rows(self._manifest.ends).tolist()
        predictor = BlockPredictor(model, self._device == "cpu", ends)
        return replay(predictor, self._data.held_out, block, most).per_step

    def _write(self, model: BlockModel, scores: dict[str, Any]) -> None:
        done = {
            "steps": self.step,
            "seconds": round(self._seconds, 1),
            "memory_gb": round(_most_memory() / 1e9, 2),
        }
        training = {**self._manifest.training, **asdict(self._recipe), **done}
        scores = {"held_out": len(self._data.held_out), **scores}
        manifest = replace(self._manifest, training=training, scores=scores)
        self._manifest = save_drafter(self._folder, manifest, model, self._data.kept)

    def _finish(self) -> Manifest:
        """Score the best average on all held-out outputs, by k, and remove the checkpoints."""
        from sglang_ext.block_drafter.drafter_files import load_drafter

        best = load_drafter(self._folder, self._device)
        block = best.manifest.shape.block
        scores = {
            str(k): round(self._replayed(best.model, k, len(self._data.held_out)), 3)
            for k in blocks_to_score(block)
        }
        self._manifest = best.manifest
        held = {"held_out": len(self._data.held_out), "accepted_per_step": scores}
        manifest = replace(best.manifest, scores=held)
        self._manifest = save_drafter(self._folder, manifest, best.model, self._data.kept)
        self._checkpoints.clear()
        return self._manifest

    def _report(self, loss: float, rate: float) -> None:
        recipe = self._recipe
        left = (recipe.steps - self.step) / rate
        if recipe.minutes:
            left = min(left, 60 * recipe.minutes - self._seconds)
        self._tell(Progress(self.step, loss, self._score, self._best, rate, max(left, 0.0)))

    # -- what is kept for after a kill -----------------------------------------------------

    def _identity(self) -> dict[str, Any]:
        """What a training that goes on must agree in; how long it may take can change."""
        changeable = ("steps", "minutes", "patience", "checkpoint_s", "bf16")
        recipe = {k: v for k, v in asdict(self._recipe).items() if k not in changeable}
        shape = asdict(self._manifest.shape)
        found = {"data": self._manifest.data.get("digest"), "shape": shape, "recipe": recipe}
        states = self._manifest.states
        return found if states is None else found | {"states": asdict(states)}

    def _save_state(self) -> None:
        names = [name for name, _ in self._model.named_parameters()]
        states = self._optimizer.state_dict()["state"]
        meta = {
            "step": self.step,
            "seconds": self._seconds,
            "score": self._score,
            "best": self._best,
            "waited": self._waited,
            "identity": self._identity(),
        }
        self._checkpoints.save_state(
            TrainingState(
                self._model.state_dict(),
                {name: states[i]["exp_avg"] for i, name in enumerate(names)},
                {name: states[i]["exp_avg_sq"] for i, name in enumerate(names)},
                meta,
            )
        )

    def _resume(self) -> None:
        state = self._checkpoints.load_state()
        if state is None:
            return
        if state.meta["identity"] != self._identity():
            raise BlockDrafterError(
                f"{self._folder} holds a training of other data, another shape or recipe: name "
                f"another folder, or remove {self._checkpoints.folder} to begin anew"
            )
        self._model.load_state_dict(state.model)
        self.step = int(state.meta["step"])
        moments = {
            i: {
                "step": torch.tensor(float(self.step)),
                "exp_avg": state.first[name],
                "exp_avg_sq": state.second[name],
            }
            for i, (name, _) in enumerate(self._model.named_parameters())
        }
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": moments, "param_groups": groups})
        self._seconds = float(state.meta["seconds"])
        self._score, self._best = float(state.meta["score"]), float(state.meta["best"])
        self._waited = int(state.meta["waited"])
        self._checkpoints.forget_later(self.step)


def blocks_to_score(block: int) -> list[int]:
    """The k for which a drafter of this block is scored."""
    return sorted({*(k for k in (2, 4, 5, 6, 8, 10, 15, 20, 25, 30) if k < block), block})


def alike(
    lengths: npt.NDArray[np.int64], count: int, rng: np.random.Generator
) -> npt.NDArray[np.int64]:
    """int64[count], random examples of about one length, so that little of a batch is padding.

    Every example is as likely as any other.
    """
    drawn = rng.integers(len(lengths), size=_DRAWN * count)
    by_length = drawn[np.argsort(lengths[drawn], kind="stable")]
    first = count * rng.integers(_DRAWN)
    return by_length[first : first + count]


def _rate(recipe: Recipe, step: int) -> float:
    """The inverse square root schedule; step counts from 1."""
    rise = min(step / recipe.warmup, math.sqrt(recipe.warmup / step)) if recipe.warmup else 1.0
    return recipe.learning_rate * rise


def _most_memory() -> int:
    """Bytes that this process has held at most."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
