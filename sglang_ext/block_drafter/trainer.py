"""Training a block drafter: from data to a drafter's directory, on after any kill."""

import logging
import math
import resource
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sglang_ext.block_drafter.accepted_tokens import replay
from sglang_ext.block_drafter.block_predictor import BlockPredictor
from sglang_ext.block_drafter.checkpoints import Checkpoints
from sglang_ext.block_drafter.drafter_files import save_drafter
from sglang_ext.block_drafter.drafter_manifest import Manifest
from sglang_ext.block_drafter.fast_dropout import with_fast_dropout
from sglang_ext.block_drafter.glancing import block_loss, make_batch
from sglang_ext.block_drafter.nat_model import BlockModel
from sglang_ext.block_drafter.recipes import Recipe
from sglang_ext.block_drafter.training_loop import TrainingLoop
from sglang_ext.block_drafter.training_set import TrainingSet

logger = logging.getLogger(__name__)

# Held-out outputs that are replayed each time; all of them at the end.
_REPLAYED = 200
# So many batches are drawn at once, of which one is taken.
_DRAWN = 16
# What is shown at the end, as part of what is shown at the start (GLAT, section 4.1: 0.3 and 0.5).
_GLANCING_AT_END = 0.6


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


class Trainer(TrainingLoop):
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
        self._recipe, self._device, self._listener = recipe, device, tell
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
        self._score, self._best = 0.0, -1.0
        parameters = dict(self._model.named_parameters())
        super().__init__(parameters, recipe, self._checkpoints, _identity(manifest))
        self.resume()

    def run(self) -> Manifest:
        """Train until it no longer gets better, and write the best average.

        Raises:
            BlockDrafterError: the disk is full; the same command goes on later.
        """
        self.train()
        return self._finish()

    def _learn(self, rng: np.random.Generator) -> float:
        recipe, learned = self._recipe, self._data.learned
        generator = torch.Generator().manual_seed(self.step)
        pairs = learned.read(alike(self._lengths, recipe.batch, rng))
        batch = make_batch(
            pairs.sources,
            pairs.outputs,
            self._manifest.shape,
            recipe.prefixes,
            rng,
            pairs.written,
        ).to(self._device)
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
        loss.backward()
        return float(loss.detach())

    def _rate(self) -> float:
        """The inverse square root schedule."""
        step, warmup = self.step + 1, self._recipe.warmup
        rise = min(step / warmup, math.sqrt(warmup / step)) if warmup else 1.0
        return self._recipe.learning_rate * rise

    def _judge(self) -> bool:
        """Replay held-out outputs with the average, and keep it if it is the best so far."""
        self._checkpoints.keep_weights(self.step, self._model.state_dict(), self._recipe.average)
        model = self._averaged()
        self._score = self._replayed(model, self._manifest.shape.block, _REPLAYED)
        better = self._score > self._best
        if self._score >= self._best:  # of equal ones the one that has learned longer
            self._best = self._score
            scores = {"accepted_per_step": {str(self._manifest.shape.block): self._score}}
            self._write(model, scores)
        return better

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
            "seconds": round(self.seconds, 1),
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

    def _tell(self, loss: float, steps_per_s: float) -> None:
        recipe = self._recipe
        left = (recipe.steps - self.step) / steps_per_s
        if recipe.minutes:
            left = min(left, 60 * recipe.minutes - self.seconds)
        self._listener(
            Progress(self.step, loss, self._score, self._best, steps_per_s, max(left, 0.0))
        )

    def _found(self) -> dict[str, Any]:
        return {"score": self._score, "best": self._best}

    def _go_on(self, found: Mapping[str, Any]) -> None:
        self._score, self._best = float(found["score"]), float(found["best"])
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


def _identity(manifest: Manifest) -> dict[str, Any]:
    """What a training that goes on must agree in."""
    found = {"data": manifest.data.get("digest"), "shape": asdict(manifest.shape)}
    return found if manifest.states is None else found | {"states": asdict(manifest.states)}


def _most_memory() -> int:
    """Bytes that this process has held at most."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
