"""Training streams: each learns to say what its draft model's text says so many tokens later.

The objective is Speculative Streaming's: the next token by the main stream, and future n-grams by
the others. The draft model stays as it is, so that the main stream's part of it is constant and is
left out; what is learned are the streams' embeddings and their low-rank changes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from sglang_ext.block_drafter.checkpoints import Checkpoints
from sglang_ext.block_drafter.recipes import StreamRecipe
from sglang_ext.block_drafter.training_loop import TrainingLoop
from sglang_ext.mirror.causal_lm import CausalLM
from sglang_ext.mirror.streaming.lookahead_streams import MATRICES, LookaheadStreams
from sglang_ext.mirror.streaming.stream_pass import said_ahead
from sglang_ext.mirror.streaming.stream_passages import Passage, future_of, places_of


@dataclass(frozen=True)
class StreamProgress:
    """Told after each step.

    Attributes:
        step: updates so far, those before a kill included.
        foreseen: of the best evaluation, the share of tokens that each stream foresees.
    """

    step: int
    loss: float
    foreseen: Sequence[float]


@dataclass(frozen=True)
class Kept:
    """Where a training keeps what it has.

    Attributes:
        best: gets the streams that are best so far, and their shares (StreamProgress.foreseen).
        checkpoints: its states; None: it cannot go on after a kill.
        identity: what it must agree in to go on, beside the recipe.
    """

    best: Callable[[LookaheadStreams, Sequence[float]], None]
    checkpoints: Checkpoints | None = None
    identity: Mapping[str, Any] = field(default_factory=dict)


class StreamTrainer(TrainingLoop):
    """Teaches a draft model's streams; `run` begins, or goes on where it was killed.

    Args:
        model: in float32; it is not changed.
        streams: to begin with.
        learned, held_out: passages with an output of more tokens than there are streams.
        kept: where the best goes.
        tell: gets told after each step.

    Raises:
        BlockDrafterError: the checkpoints are damaged, or another training's.
    """

    def __init__(
        self,
        model: CausalLM,
        streams: LookaheadStreams,
        learned: Sequence[Passage],
        held_out: Sequence[Passage],
        recipe: StreamRecipe,
        kept: Kept,
        tell: Callable[[StreamProgress], None] = lambda progress: None,
    ) -> None:
        self._model, self._recipe, self._kept, self._listener = model, recipe, kept, tell
        self._learned, self._held_out = learned, held_out
        tensors = {name: t.clone().requires_grad_() for name, t in streams.tensors()}
        self._streams = LookaheadStreams.of(tensors, len(streams.changes))
        self._best: list[float] | None = None
        super().__init__(tensors, recipe, kept.checkpoints, kept.identity)
        self.resume()

    def run(self) -> Sequence[float]:
        """Train; returns the shares of the best, which `kept` has got.

        Raises:
            BlockDrafterError: it diverged.
        """
        if self._best is None:
            self._best = self.evaluated()
        self.train()
        if self._kept.checkpoints is not None:
            self._kept.checkpoints.clear()
        return self._best

    def evaluated(self) -> list[float]:
        """Of held-out outputs, the share of tokens that each stream foresees."""
        hits, places = np.zeros(len(self._streams)), 0
        with torch.no_grad():
            for passage in self._held_out:
                at = places_of(passage, len(self._streams))
                said = said_ahead(self._model, self._streams, passage.tokens, at).argmax(dim=-1)
                right = said.cpu() == future_of(passage, at, len(self._streams))
                hits += right.sum(dim=0).numpy()
                places += len(at)
        return (hits / max(places, 1)).tolist()

    def _judge(self) -> bool:
        """Keep the streams if they are the best so far."""
        found = self.evaluated()
        assert self._best is not None
        better = sum(found) > sum(self._best)
        if better:
            self._best = found
            self._kept.best(self._streams, found)
        return better

    def _learn(self, rng: np.random.Generator) -> float:
        recipe, streams = self._recipe, len(self._streams)
        total, kind = 0.0, torch.device(self._model.device).type
        for row in rng.integers(len(self._learned), size=recipe.batch):
            passage = self._learned[row]
            at = places_of(passage, streams, rng)
            future = future_of(passage, at, streams).to(self._model.device)
            with torch.autocast(kind, torch.bfloat16, enabled=recipe.bf16):
                said = said_ahead(self._model, self._streams, passage.tokens, at)
            loss = F.cross_entropy(said.float().flatten(0, 1), future.flatten())
            (loss / recipe.batch).backward()
            total += float(loss.detach()) / recipe.batch
        return total

    def _rate(self) -> float:
        recipe = self._recipe
        rise = min(1.0, (self.step + 1) / max(recipe.warmup, 1))
        fall = 0.5 * (1.0 + math.cos(math.pi * self.step / recipe.steps))
        return recipe.learning_rate * rise * fall

    def _tell(self, loss: float, steps_per_s: float) -> None:
        assert self._best is not None
        self._listener(StreamProgress(self.step, loss, self._best))

    def _found(self) -> dict[str, Any]:
        return {"best": self._best}

    def _go_on(self, found: Mapping[str, Any]) -> None:
        self._best = list(found["best"])


def fresh_streams(model: CausalLM, streams: int, rank: int, seed: int) -> LookaheadStreams:
    """Streams of a model that have learned nothing, on its device."""
    torch.manual_seed(seed)
    sizes = [{name: getattr(layer, name).shape for name in MATRICES} for layer in model.layers]
    sample = model.embedded(range(min(model.shape.vocab_size, 4096))).float().cpu()
    return LookaheadStreams.fresh(streams, rank, sample, sizes).to(model.device)
