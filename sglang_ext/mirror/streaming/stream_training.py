"""Training streams: each learns to say what its draft model's text says so many tokens later.

The objective is Speculative Streaming's: the next token by the main stream, and future n-grams by
the others. The draft model stays as it is, so that the main stream's part of it is constant and is
left out; what is learned are the streams' embeddings and their low-rank changes.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from sglang_ext.block_drafter.checkpoints import Checkpoints, TrainingState
from sglang_ext.mirror.causal_lm import CausalLM
from sglang_ext.mirror.streaming.lookahead_streams import MATRICES, LookaheadStreams
from sglang_ext.mirror.streaming.stream_pass import said_ahead
from sglang_ext.mirror.streaming.stream_passages import Passage, future_of, places_of

# What a training that goes on need not agree in.
_CHANGEABLE = ("steps", "minutes", "patience", "checkpoint_s", "bf16")


@dataclass(frozen=True)
class StreamRecipe:
    """How to train.

    Attributes:
        steps: most updates.
        batch: passages in an update.
        learning_rate: the highest, reached after `warmup` steps; it falls to 0 as a cosine.
        evaluate: steps between evaluations.
        patience: evaluations without a better one after which training ends.
        minutes: most minutes, those before a kill included; 0: no limit.
        checkpoint_s: seconds between states on the disk.
        bf16: products are in bfloat16 (torch.autocast), weights and their updates in float32.
    """

    steps: int = 1000
    batch: int = 4
    learning_rate: float = 1e-3
    warmup: int = 50
    evaluate: int = 50
    patience: int = 10
    minutes: float = 0.0
    checkpoint_s: float = 45.0
    seed: int = 1
    bf16: bool = False


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


class StreamTrainer:
    """Teaches a draft model's streams; `run` begins, or goes on where it was killed.

    Args:
        model: in float32; it is not changed.
        streams: to begin with.
        learned, held_out: passages with an output of more tokens than there are streams.
        kept: where the best goes.
        tell: gets told after each step.

    Raises:
        ValueError: the checkpoints are another training's.
        BlockDrafterError: they are damaged.
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
        self._model, self._recipe, self._kept, self._tell = model, recipe, kept, tell
        self._learned, self._held_out = learned, held_out
        self._tensors = {name: t.clone().requires_grad_() for name, t in streams.tensors()}
        self._streams = LookaheadStreams.of(self._tensors, len(streams.changes))
        self._optimizer = torch.optim.Adam(self._tensors.values(), lr=recipe.learning_rate)
        self.step = 0
        self._seconds, self._waited = 0.0, 0
        self._best: list[float] | None = None
        self._resume()

    def run(self) -> Sequence[float]:
        """Train; returns the shares of the best, which `kept` has got.

        Raises:
            ArithmeticError: it diverged.
        """
        recipe, started, before = self._recipe, time.monotonic(), self._seconds
        saved = started
        if self._best is None:
            self._best = self.evaluated()
        while not self._ended():
            loss = self._update()
            self.step += 1
            now = time.monotonic()
            self._seconds = before + now - started
            if self.step % recipe.evaluate == 0 or self._ended():
                self._judge()
                saved = -math.inf
            if now - saved >= recipe.checkpoint_s:
                self._save_state()
                saved = now
            self._tell(StreamProgress(self.step, loss, self._best))
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

    def _ended(self) -> bool:
        recipe = self._recipe
        late = bool(recipe.minutes) and self._seconds >= 60 * recipe.minutes
        return late or self.step >= recipe.steps or self._waited >= recipe.patience

    def _judge(self) -> None:
        """Keep the streams if they are the best so far."""
        found = self.evaluated()
        assert self._best is not None
        if sum(found) > sum(self._best):
            self._best, self._waited = found, 0
            self._kept.best(self._streams, found)
        else:
            self._waited += 1

    def _update(self) -> float:
        """One step of Adam, the same after a kill as without one; returns the loss."""
        recipe, streams = self._recipe, len(self._streams)
        rng = np.random.default_rng([recipe.seed, self.step])
        for group in self._optimizer.param_groups:
            group["lr"] = recipe.learning_rate * _rate(self.step, recipe)
        self._optimizer.zero_grad(set_to_none=True)
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
        if not math.isfinite(total):
            raise ArithmeticError(
                f"training diverged at step {self.step}: give a lower --learning-rate"
            )
        torch.nn.utils.clip_grad_norm_(self._tensors.values(), 1.0)
        self._optimizer.step()
        return total

    def _identity(self) -> dict[str, Any]:
        recipe = {k: v for k, v in asdict(self._recipe).items() if k not in _CHANGEABLE}
        return {**self._kept.identity, "recipe": recipe}

    def _save_state(self) -> None:
        if self._kept.checkpoints is None:
            return
        states = self._optimizer.state_dict()["state"]
        first, second = (
            {name: states[i][key] for i, name in enumerate(self._tensors)}
            for key in ("exp_avg", "exp_avg_sq")
        )
        tensors = {name: tensor.detach() for name, tensor in self._tensors.items()}
        meta = {
            "step": self.step, "seconds": self._seconds, "best": self._best,
            "waited": self._waited, "identity": self._identity(),
        }  # fmt: skip
        self._kept.checkpoints.save_state(TrainingState(tensors, first, second, meta))

    def _resume(self) -> None:
        checkpoints = self._kept.checkpoints
        state = None if checkpoints is None else checkpoints.load_state()
        if checkpoints is None or state is None:
            return
        if state.meta["identity"] != self._identity():
            raise ValueError(
                f"{checkpoints.folder} is of a training of other data, another draft model or "
                "recipe: name another --out, or remove it to begin anew"
            )
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                tensor.copy_(state.model[name])
        self.step = int(state.meta["step"])
        moments = {
            i: {
                "step": torch.tensor(float(self.step)),
                "exp_avg": state.first[name],
                "exp_avg_sq": state.second[name],
            }
            for i, name in enumerate(self._tensors)
        }
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": moments, "param_groups": groups})
        self._seconds, self._waited = float(state.meta["seconds"]), int(state.meta["waited"])
        self._best = list(state.meta["best"])


def fresh_streams(model: CausalLM, streams: int, rank: int, seed: int) -> LookaheadStreams:
    """Streams of a model that have learned nothing, on its device."""
    torch.manual_seed(seed)
    sizes = [{name: getattr(layer, name).shape for name in MATRICES} for layer in model.layers]
    sample = model.embedded(range(min(model.shape.vocab_size, 4096))).float().cpu()
    return LookaheadStreams.fresh(streams, rank, sample, sizes).to(model.device)


def _rate(step: int, recipe: StreamRecipe) -> float:
    rise = min(1.0, (step + 1) / max(recipe.warmup, 1))
    return rise * 0.5 * (1.0 + math.cos(math.pi * step / recipe.steps))
