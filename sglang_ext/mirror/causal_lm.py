"""A causal language model of the Llama family, in plain torch, over tree-masked caches.

Llama, Mistral without a window, Qwen2 and Qwen3 are one model with parts left out. Rows of several
requests, text and nodes, go through the matrices together; attention runs request by request.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from sglang_ext.mirror.streaming.lookahead_streams import MATRICES, LookaheadStreams
from sglang_ext.mirror.tree_cache import TreeCache
from sglang_ext.mirror.weight_formats import Weight

# Next tokens that are named behind each row.
NAMED = 8


@dataclass(frozen=True)
class LMShape:
    """A model's sizes.

    Attributes:
        eps: of its RMS norms.
        max_positions: tokens that a sequence may have.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    eps: float
    max_positions: int


@dataclass(frozen=True)
class Layer:
    """A layer's weights.

    Attributes:
        attention_norm, mlp_norm: [hidden].
        qkv: the three projections, one above the other; `qkv_bias` their biases, or None.
        q_norm, k_norm: [head_dim], Qwen3's norms of each head; None: there are none.
        out, gate_up, down: further matrices; gate stands above up.
    """

    attention_norm: torch.Tensor
    qkv: Weight
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: Weight
    mlp_norm: torch.Tensor
    gate_up: Weight
    down: Weight


@dataclass(frozen=True)
class Feed:
    """Rows of one request: text that was not read yet, then nodes of its tree.

    Attributes:
        cache: the request's.
        text: tokens that follow its cached text.
        tokens, parents: the nodes, see TreeCache.take.
        predicted: how many of the last rows' predictions are wanted.
        ahead: rows, among text and nodes, behind which streams look ahead.
        streams: so many of the model's, the first ones.
    """

    cache: TreeCache
    text: Sequence[int]
    tokens: Sequence[int]
    parents: Sequence[int]
    predicted: int
    ahead: Sequence[int] = ()
    streams: int = 0

    @property
    def rows(self) -> int:
        """How many rows the model runs of its text and nodes."""
        return len(self.text) + len(self.tokens)

    @property
    def rows_ahead(self) -> int:
        """How many rows it runs of streams, behind the others."""
        return self.streams * len(self.ahead)


@dataclass(frozen=True)
class Predictions:
    """What the model says behind each wanted row, feed by feed.

    Of each feed the wanted rows come first, then the streams of its rows `ahead`, in their order.

    Attributes:
        tokens: int64[rows, NAMED], its likeliest next tokens, the best first.
        probs: float64[rows, NAMED], their probabilities.
    """

    tokens: npt.NDArray[np.int64]
    probs: npt.NDArray[np.float64]


class CausalLM:
    """A model and its weights.

    Args:
        embedding: [vocab, hidden]; activations have its device.
        inv_freq, rope_scale: of the rotary embedding, [head_dim / 2] and a factor.
        dtype: of activations outside of matrices, and of keys and values.

    Attributes:
        streams: that look ahead; None: it has none.
    """

    def __init__(
        self,
        shape: LMShape,
        embedding: torch.Tensor,
        layers: Sequence[Layer],
        norm: torch.Tensor,
        head: Weight,
        inv_freq: torch.Tensor,
        rope_scale: float,
        dtype: torch.dtype,
    ) -> None:
        self.shape = shape
        self.device = str(embedding.device)
        self._embedding = embedding
        self.layers = layers
        self._norm = norm
        self._head = head
        self._inv_freq = inv_freq
        self._rope_scale = rope_scale
        self._dtype = dtype
        self.streams: LookaheadStreams | None = None

    def use_streams(self, streams: LookaheadStreams) -> None:
        """Look ahead with these from now on.

        Raises:
            ValueError: they are of a model of other sizes.
        """
        sizes = [{name: getattr(layer, name).shape for name in MATRICES} for layer in self.layers]
        streams.check(self._embedding.shape[1], sizes)
        self.streams = streams.to(self.device)

    def new_cache(self) -> TreeCache:
        """An empty cache."""
        s = self.shape
        return TreeCache(s.layers, s.kv_heads, s.head_dim, self._dtype, self.device)

    @torch.inference_mode()
    def forward(self, feeds: Sequence[Feed]) -> Predictions:
        """Read rows into their caches, and predict what follows those that are asked."""
        segments = [_Segment(feed) for feed in feeds]
        x, ahead = self._embedded(feeds)
        turned = self.rotation([p for segment in segments for p in segment.positions])
        for number, layer in enumerate(self.layers):
            product = self._products(number, layer, ahead)
            h = rms_norm(x, layer.attention_norm, self.shape.eps)
            heads = self.turned_heads(product("qkv", h), layer, turned)
            x = x + product("out", self._attention(number, heads, segments))
            h = rms_norm(x, layer.mlp_norm, self.shape.eps)
            gate, up = product("gate_up", h).chunk(2, dim=-1)
            x = x + product("down", F.silu(gate) * up)
        rows = torch.tensor(_wanted_rows(feeds), dtype=torch.long, device=self.device)
        if not len(rows):
            return Predictions(np.empty((0, NAMED), np.int64), np.empty((0, NAMED)))
        logits = self.logits(x[rows])
        best = logits.topk(NAMED, dim=-1)
        probs = (best.values - logits.logsumexp(dim=-1, keepdim=True)).exp()
        return Predictions(best.indices.cpu().numpy(), probs.double().cpu().numpy())

    def embedded(self, tokens: Sequence[int]) -> torch.Tensor:
        """[n, hidden] of tokens."""
        return self._embedding[torch.tensor(tokens, device=self.device)].to(self._dtype)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """float32[n, vocab] of the states behind the last layer."""
        return self._head.product(rms_norm(states, self._norm, self.shape.eps)).float()

    def _embedded(self, feeds: Sequence[Feed]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What stands in each row, and which rows are streams'; None: none."""
        parts, ahead, first = list[torch.Tensor](), list[int](), 0
        for feed in feeds:
            parts.append(self.embedded([*feed.text, *feed.tokens]))
            first += feed.rows
            if self.streams is not None and feed.rows_ahead:
                streams = self.streams.embeddings[: feed.streams].to(self._dtype)
                parts.append(streams.repeat(len(feed.ahead), 1))
                ahead += range(first, first + feed.rows_ahead)
                first += feed.rows_ahead
        rows = torch.tensor(ahead, dtype=torch.long, device=self.device) if ahead else None
        return torch.cat(parts), rows

    def _products(
        self, number: int, layer: Layer, ahead: torch.Tensor | None
    ) -> Callable[[str, torch.Tensor], torch.Tensor]:
        """The products of a layer's matrices by name, changed in the rows that are streams'."""

        def product(name: str, x: torch.Tensor) -> torch.Tensor:
            made = getattr(layer, name).product(x)
            if ahead is not None and self.streams is not None:
                made[ahead] += self.streams.changes[number][name].product(x[ahead])
            return made

        return product

    def rotation(self, positions: Sequence[int]) -> Callable[[torch.Tensor], torch.Tensor]:
        """What turns heads [rows, heads, head_dim] to their positions."""
        places = torch.tensor(positions, dtype=torch.float32, device=self.device)
        angles = places[:, None] * self._inv_freq
        cos = (angles.cos() * self._rope_scale).to(self._dtype)[:, None]
        sin = (angles.sin() * self._rope_scale).to(self._dtype)[:, None]

        def turned(x: torch.Tensor) -> torch.Tensor:
            a, b = x.chunk(2, dim=-1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

        return turned

    def turned_heads(
        self,
        rows: torch.Tensor,
        layer: Layer,
        turned: Callable[[torch.Tensor], torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values, [n, heads, head_dim] each, of what `qkv` has made of n rows."""
        s = self.shape
        if layer.qkv_bias is not None:
            rows = rows + layer.qkv_bias
        heads = rows.view(len(rows), s.heads + 2 * s.kv_heads, s.head_dim)
        q, k, v = heads.split([s.heads, s.kv_heads, s.kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = rms_norm(q, layer.q_norm, s.eps), rms_norm(k, layer.k_norm, s.eps)
        return turned(q), turned(k), v

    def _attention(
        self,
        number: int,
        heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        segments: Sequence["_Segment"],
    ) -> torch.Tensor:
        """[rows, heads * head_dim] of a layer; keys and values go into the caches."""
        q, k, v = heads
        out = torch.empty(len(q), q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
        first = 0
        for segment in segments:
            part = slice(first, first + segment.rows)
            out[part] = segment.attend(number, q[part], k[part], v[part])
            first += segment.rows
        return out


class _Segment:
    """The rows of one request in a pass: their slots, their positions and what they see.

    Rows of streams stand behind the others, in slots that the next pass takes.
    """

    def __init__(self, feed: Feed) -> None:
        self.rows = feed.rows + feed.rows_ahead
        self._cache = feed.cache
        self._first = feed.cache.used
        self.positions, mask = feed.cache.take(len(feed.text), feed.parents)
        if feed.rows_ahead:
            more, mask = feed.cache.look_ahead(self.positions, mask, feed.ahead, feed.streams)
            self.positions += more
        self._mask = None if mask is None else mask.to(feed.cache.keys.device)
        self._group_masks: dict[int, torch.Tensor] = {}

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """[rows, heads, head_dim] -> [rows, heads * head_dim]."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        last = self._first + self.rows
        keys[:, self._first : last] = k.transpose(0, 1)
        values[:, self._first : last] = v.transpose(0, 1)
        kv_heads, head_dim = k.shape[1:]
        group = q.shape[1] // kv_heads
        # The heads that share a key are rows of one product, so that no key is copied.
        grouped = q.view(self.rows, kv_heads, group, head_dim).permute(1, 2, 0, 3)
        grouped = grouped.reshape(1, kv_heads, group * self.rows, head_dim)
        read = F.scaled_dot_product_attention(
            grouped, keys[None, :, :last], values[None, :, :last], attn_mask=self._mask_of(group)
        )
        read = read.view(kv_heads, group, self.rows, head_dim).permute(2, 0, 1, 3)
        return read.reshape(self.rows, -1)

    def _mask_of(self, group: int) -> torch.Tensor | None:
        if self._mask is None:
            return None
        if group not in self._group_masks:
            self._group_masks[group] = self._mask.repeat(group, 1)[None, None]
        return self._group_masks[group]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight along the last dimension, computed in float32."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (normed * weight).to(x.dtype)


def _wanted_rows(feeds: Sequence[Feed]) -> list[int]:
    rows: list[int] = []
    end = 0
    for feed in feeds:
        end += feed.rows
        rows.extend(range(end - feed.predicted, end))
        rows.extend(range(end, end + feed.rows_ahead))
        end += feed.rows_ahead
    return rows
