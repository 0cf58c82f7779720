"""Training streams: each learns to say what its draft model's text says so many tokens later.

The objective is Speculative Streaming's: the next token by the main stream, and future n-grams by
the others. The draft model stays as it is, so that the main stream's part of it is constant and is
left out; what is learned are the streams' embeddings and their low-rank changes.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from sglang_ext.mirror.causal_lm import CausalLM, rms_norm
from sglang_ext.mirror.streaming.lookahead_streams import MATRICES, LookaheadStreams

# Places of a text from which streams look ahead in a step; more cost more than they teach.
_PLACES = 64
_LONGEST = 512


@dataclass(frozen=True)
class Passage:
    """A text to learn from.

    Attributes:
        tokens: prompt and output.
        first: where the output begins; only what it says is learned.
    """

    tokens: Sequence[int]
    first: int


@dataclass(frozen=True)
class StreamRecipe:
    """How to train.

    Attributes:
        steps: most updates.
        batch: passages in an update.
        learning_rate: the highest, reached after `warmup` steps; it falls to 0 as a cosine.
        evaluate: steps between evaluations.
        minutes: most minutes; 0: no limit.
    """

    steps: int = 1000
    batch: int = 4
    learning_rate: float = 1e-3
    warmup: int = 50
    evaluate: int = 50
    minutes: float = 0.0
    seed: int = 1


@dataclass(frozen=True)
class StreamProgress:
    """Told after each step.

    Attributes:
        foreseen: of the last evaluation, the share of tokens that each stream foresees.
    """

    step: int
    loss: float
    foreseen: Sequence[float]


class StreamTrainer:
    """Teaches a draft model's streams.

    Args:
        model: in float32; it is not changed.
        streams: to begin with.
        learned, held_out: passages with an output of more tokens than there are streams.
        keep: gets what is best so far, and its shares (StreamProgress.foreseen).
        tell: gets told after each step.
    """

    def __init__(
        self,
        model: CausalLM,
        streams: LookaheadStreams,
        learned: Sequence[Passage],
        held_out: Sequence[Passage],
        recipe: StreamRecipe,
        keep: Callable[[LookaheadStreams, Sequence[float]], None],
        tell: Callable[[StreamProgress], None] = lambda progress: None,
    ) -> None:
        self._model, self._recipe, self._keep, self._tell = model, recipe, keep, tell
        self._learned, self._held_out = learned, held_out
        tensors = {name: t.clone().requires_grad_() for name, t in streams.tensors()}
        self._streams = LookaheadStreams.of(tensors, len(streams.changes))
        self._optimizer = torch.optim.Adam(tensors.values(), lr=recipe.learning_rate)

    def run(self) -> Sequence[float]:
        """Train; returns the shares of the best, which `keep` has got.

        Raises:
            ArithmeticError: it diverged.
        """
        recipe, started = self._recipe, time.monotonic()
        best = self.evaluated()
        for step in range(recipe.steps):
            loss = self._update(step)
            late = recipe.minutes and time.monotonic() - started > 60 * recipe.minutes
            if late or (step + 1) % recipe.evaluate == 0 or step + 1 == recipe.steps:
                found = self.evaluated()
                if sum(found) > sum(best):
                    best = found
                    self._keep(self._streams, best)
            self._tell(StreamProgress(step + 1, loss, best))
            if late:
                break
        return best

    def evaluated(self) -> list[float]:
        """Of held-out outputs, the share of tokens that each stream foresees."""
        hits, places = np.zeros(len(self._streams)), 0
        with torch.no_grad():
            for passage in self._held_out:
                at = _places(passage, len(self._streams))
                said = self._said(passage, at).argmax(dim=-1)
                hits += (said == _future(passage, at, len(self._streams))).sum(dim=0).numpy()
                places += len(at)
        return (hits / max(places, 1)).tolist()

    def _update(self, step: int) -> float:
        recipe = self._recipe
        rng = np.random.default_rng([recipe.seed, step])
        for group in self._optimizer.param_groups:
            group["lr"] = recipe.learning_rate * _rate(step, recipe)
        self._optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for row in rng.integers(len(self._learned), size=recipe.batch):
            passage = self._learned[row]
            at = _places(passage, len(self._streams), rng)
            future = _future(passage, at, len(self._streams))
            loss = F.cross_entropy(self._said(passage, at).flatten(0, 1), future.flatten())
            (loss / recipe.batch).backward()
            total += float(loss.detach()) / recipe.batch
        if not math.isfinite(total):
            raise ArithmeticError(f"training diverged at step {step}")
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        self._optimizer.step()
        return total

    def _said(self, passage: Passage, at: Sequence[int]) -> torch.Tensor:
        """float32[places, streams, vocab]: what each stream says behind each place of a text."""
        model, streams = self._model, self._streams
        count, eps = len(streams), model.shape.eps
        tokens = passage.tokens[: at[-1] + 1]
        with torch.no_grad():
            keys, values = _read(model, tokens)
        x = streams.embeddings.repeat(len(at), 1)
        turned = model.rotation([place + 1 + j for place in at for j in range(count)])
        sees = _mask(at, len(tokens), count)
        for number, layer in enumerate(model.layers):
            changes = streams.changes[number]

            def product(name: str, rows: torch.Tensor, of=layer, by=changes) -> torch.Tensor:
                return getattr(of, name).product(rows) + by[name].product(rows)

            h = rms_norm(x, layer.attention_norm, eps)
            q, k, v = model.turned_heads(product("qkv", h), layer, turned)
            all_k, all_v = torch.cat([keys[number], k]), torch.cat([values[number], v])
            x = x + product("out", _attended(q, all_k, all_v, sees))
            h = rms_norm(x, layer.mlp_norm, eps)
            gate, up = product("gate_up", h).chunk(2, dim=-1)
            x = x + product("down", F.silu(gate) * up)
        return model.logits(x).view(len(at), count, -1)


def fresh_streams(model: CausalLM, streams: int, rank: int, seed: int) -> LookaheadStreams:
    """Streams of a model in float32 that have learned nothing."""
    torch.manual_seed(seed)
    sizes = [
        {name: list(getattr(layer, name).shape) for name in MATRICES} for layer in model.layers
    ]
    sample = model.embedded(range(min(model.shape.vocab_size, 4096)))
    return LookaheadStreams.fresh(streams, rank, sample, sizes)


def passages_of(
    texts: Sequence[tuple[Sequence[int], Sequence[int]]], streams: int
) -> list[Passage]:
    """Passages of (prompt, output) pairs, as far as they fit; short outputs are left out."""
    made = []
    for prompt, output in texts:
        kept = list(prompt)[-(_LONGEST // 2) :]
        passage = Passage([*kept, *output][:_LONGEST], max(len(kept), 1))
        if len(passage.tokens) - passage.first > streams:
            made.append(passage)
    return made


def _places(passage: Passage, streams: int, rng: np.random.Generator | None = None) -> list[int]:
    """Places, in rising order, behind which all that the streams are to say is in the output."""
    every = np.arange(passage.first - 1, len(passage.tokens) - streams - 1)
    if len(every) > _PLACES:
        step = len(every) / _PLACES
        evenly = (np.arange(_PLACES) * step).astype(int)
        every = np.sort(rng.choice(every, _PLACES, replace=False)) if rng else every[evenly]
    return [int(place) for place in every]


def _future(passage: Passage, at: Sequence[int], streams: int) -> torch.Tensor:
    """int64[places, streams]: stream j says the token that stands j + 1 behind its place."""
    return torch.tensor([list(passage.tokens[p + 2 : p + 2 + streams]) for p in at])


def _mask(at: Sequence[int], tokens: int, streams: int) -> torch.Tensor:
    """bool[rows, tokens + rows]: a stream sees the text up to its place, and those before it."""
    rows = len(at) * streams
    text = torch.arange(tokens)[None] <= torch.tensor(at)[:, None]
    own = torch.block_diag(*[torch.ones(streams, streams).tril()] * len(at)).bool()
    assert own.shape == (rows, rows)
    return torch.cat([text.repeat_interleave(streams, dim=0), own], dim=1)


def _read(model: CausalLM, tokens: Sequence[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Keys and values of a text, [tokens, kv_heads, head_dim] for each layer."""
    x, eps = model.embedded(tokens), model.shape.eps
    turned = model.rotation(range(len(tokens)))
    sees = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
    keys, values = list[torch.Tensor](), list[torch.Tensor]()
    for layer in model.layers:
        h = rms_norm(x, layer.attention_norm, eps)
        q, k, v = model.turned_heads(layer.qkv.product(h), layer, turned)
        keys.append(k)
        values.append(v)
        x = x + layer.out.product(_attended(q, k, v, sees))
        gate, up = layer.gate_up.product(rms_norm(x, layer.mlp_norm, eps)).chunk(2, dim=-1)
        x = x + layer.down.product(F.silu(gate) * up)
    return keys, values


def _attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sees: torch.Tensor
) -> torch.Tensor:
    """[rows, heads, d], [slots, kv_heads, d] twice and bool[rows, slots] -> [rows, heads * d]."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1).transpose(0, 1) for x in (k, v))
    read = F.scaled_dot_product_attention(q.transpose(0, 1), k, v, attn_mask=sees)
    return read.transpose(0, 1).reshape(len(q), -1)


def _rate(step: int, recipe: StreamRecipe) -> float:
    rise = min(1.0, (step + 1) / max(recipe.warmup, 1))
    return rise * 0.5 * (1.0 + math.cos(math.pi * step / recipe.steps))
