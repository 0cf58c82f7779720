"""A small Whisper's inference, as fast per decoder step as torch's kernels allow.

The decoder runs the new tokens of several requests in one pass: linear layers over all of them,
attention request by request over its own cache (cache.py), so nothing is padded.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from speech.specasr.cache import DraftCache
from speech.specasr.draft_encoder import DraftEncoder
from speech.specasr.weights import Linear, Weights, WhisperShape

TOP_K = 4
# A draft model is surer to be right than it says; fitted on tiny.en drafting for base.
TEMPERATURE = 0.6
# Encoder frames (20 ms each) that the model sees behind the end of the audio. Whisper was trained
# on 30 s windows: with less silence than this it misses the end and repeats itself.
MARGIN_FRAMES = 500
# Passes of so few tokens run in one thread: waking others saves them little of their time, and
# waiting for one that the machine has just taken away costs many times that.
SINGLE_THREAD_TOKENS = 32


@dataclass(frozen=True)
class Prediction:
    """What the draft model says comes after one token: the likeliest tokens, best first.

    Attributes:
        tokens: TOP_K of them.
        probs: their probabilities, softmax of the logits.
        chances: the chances that the target says them: probs, sharpened by TEMPERATURE.
    """

    tokens: Sequence[int]
    probs: Sequence[float]
    chances: Sequence[float]


@dataclass(frozen=True)
class Feed:
    """Tokens to run through the decoder; parents are slots of the request's cache, -1 for none."""

    tokens: Sequence[int]
    parents: Sequence[int]

    @classmethod
    def chain(cls, tokens: Sequence[int], parent: int) -> "Feed":
        """`tokens`, one after the other, after slot `parent`, which is the cache's last."""
        return cls(tokens, range(parent, parent + len(tokens)))


@dataclass(frozen=True)
class _DecoderLayer:
    attention_norm: tuple[torch.Tensor, torch.Tensor]
    qkv: Linear
    out: Linear
    final_norm: tuple[torch.Tensor, torch.Tensor]
    fc1: Linear
    fc2: Linear
    cross_norm: tuple[torch.Tensor, torch.Tensor]
    cross_q: Linear
    cross_out: Linear


class DraftWhisper:
    """The draft model. Made by `load`; one object serves all requests, from one thread."""

    def __init__(self, shape: WhisperShape, weights: Weights) -> None:
        self.shape = shape
        self._encoder = DraftEncoder(shape, weights)
        self._decoder_layers = [
            _decoder_layer(weights, f"decoder.layers.{i}", shape)
            for i in range(shape.decoder_layers)
        ]
        self._cross_kv = weights.linear(
            *(
                f"decoder.layers.{i}.encoder_attn.{part}_proj"
                for i in range(shape.decoder_layers)
                for part in "kv"
            )
        )
        self._embeddings = weights.take("decoder.embed_tokens.weight")
        self._positions = weights.take("decoder.embed_positions.weight")
        self._norm = weights.norm("decoder.layer_norm")
        self._head = weights.head()

    @classmethod
    def load(
        cls, folder: Path | str, precision: str | None = None, device: str = "cpu"
    ) -> "DraftWhisper":
        """Load a Hugging Face Whisper folder.

        Args:
            folder: with config.json and *.safetensors.
            precision: of the linear layers: "int8" (on a CPU only), "float32" or "float16"; None:
                int8 on a CPU, float16 elsewhere.
            device: torch's name of where it computes; `encode` and `step` take and give what is
                on the host all the same.

        Raises:
            ValueError: the folder holds no Whisper.
        """
        folder = Path(folder)
        precision = precision or ("int8" if device == "cpu" else "float16")
        return cls(WhisperShape.read(folder), Weights(folder, precision, device))

    @property
    def max_positions(self) -> int:
        """Tokens of a sequence at most, the prompt included."""
        return self.shape.target_positions

    @torch.inference_mode()
    def encode(self, features: torch.Tensor, margin: int = MARGIN_FRAMES) -> DraftCache:
        """Run the encoder over one request's audio; an empty cache that attends to it.

        The encoder sees the audio and some of the padding behind it, not all 30 s.

        Args:
            margin: encoder frames of padding that are seen, at most.
            features: float32 [mel_bins, frames] on the host, log-mel, at most two frames per
                source position.

        Raises:
            ValueError: the shape is another.
        """
        bins, frames = features.shape
        if bins != self.shape.mel_bins or not 0 < frames <= 2 * self.shape.source_positions:
            raise ValueError(
                f"features are {bins} x {frames}; the draft model takes {self.shape.mel_bins} mel "
                f"bins x 1 to {2 * self.shape.source_positions} frames"
            )
        hidden = self._encoder(features[None, :, : audio_frames(features, 2 * margin)])
        shape = self.shape
        cross = self._cross_kv(hidden).view(
            len(hidden), shape.decoder_layers, 2, shape.decoder_heads, -1
        )
        # Read whole for each token: half the bytes are half of that.
        cross = cross.to(self._encoder.dtype)
        keys, values = cross.permute(2, 1, 3, 0, 4).contiguous()
        return DraftCache(keys, values, self._embeddings.dtype)

    @torch.inference_mode()
    def logits(self, caches: Sequence[DraftCache], feeds: Sequence[Feed]) -> torch.Tensor:
        """Run new tokens through the decoder; their K and V join the caches.

        Args:
            caches: of different requests.
            feeds: what to add to each.

        Returns:
            float [tokens of all feeds, vocab_size] on the model's device, in the feeds' order.
        """
        firsts, tokens, depths = [], [], []
        for cache, feed in zip(caches, feeds, strict=True):
            firsts.append(len(cache))
            cache.append(feed.tokens, feed.parents)
            tokens += cache.tokens[firsts[-1] :]
            depths += cache.depths[firsts[-1] :]
        masks = [
            None if mask is None else mask.to(self._embeddings.device, non_blocking=True)
            for mask in (cache.mask(first) for cache, first in zip(caches, firsts, strict=True))
        ]
        places = torch.tensor([tokens, depths])
        token, depth = places.to(self._embeddings.device, non_blocking=True)
        x = self._embeddings[token] + self._positions[depth]
        for index, layer in enumerate(self._decoder_layers):
            x = x + self._self_attention(x, layer, index, caches, firsts, masks)
            x = x + self._cross_attention(x, layer, index, caches, firsts)
            x = x + _mlp(x, layer)
        return self._head(_norm(x, self._norm))

    @torch.inference_mode()
    def step(self, caches: Sequence[DraftCache], feeds: Sequence[Feed]) -> list[list[Prediction]]:
        """`logits`, as the TOP_K likeliest tokens after each token fed, one list per feed."""
        with _threads(1 if sum(len(f.tokens) for f in feeds) <= SINGLE_THREAD_TOKENS else None):
            logits = self.logits(caches, feeds).float()
            probs, tokens = logits.softmax(dim=-1).topk(TOP_K)
            # One readback; every token id is a float32.
            found = torch.stack((tokens.float(), probs, sharpened(probs))).tolist()
        rows = [
            Prediction(list(map(int, ids)), likely, chances)
            for ids, likely, chances in zip(*found, strict=True)
        ]
        predictions, row = [], 0
        for feed in feeds:
            predictions.append(rows[row : row + len(feed.tokens)])
            row += len(feed.tokens)
        return predictions

    def _self_attention(
        self,
        x: torch.Tensor,
        layer: _DecoderLayer,
        index: int,
        caches: Sequence[DraftCache],
        firsts: Sequence[int],
        masks: Sequence[torch.Tensor | None],
    ) -> torch.Tensor:
        q, k, v = _heads(layer.qkv(_norm(x, layer.attention_norm)), 3, self.shape.decoder_heads)
        out, row = [], 0
        for cache, first, mask in zip(caches, firsts, masks, strict=True):
            length = len(cache)
            rows = slice(row, row + length - first)
            row = rows.stop
            keys, values = cache.keys[index], cache.values[index]
            keys[:, first:length] = k[:, rows]
            values[:, first:length] = v[:, rows]
            out.append(
                F.scaled_dot_product_attention(
                    q[None, :, rows],
                    keys[None, :, :length],
                    values[None, :, :length],
                    attn_mask=mask,
                    scale=1.0,
                )[0]
            )
        return layer.out(_merge(out[0] if len(out) == 1 else torch.cat(out, dim=1)))

    def _cross_attention(
        self,
        x: torch.Tensor,
        layer: _DecoderLayer,
        index: int,
        caches: Sequence[DraftCache],
        firsts: Sequence[int],
    ) -> torch.Tensor:
        (q,) = _heads(layer.cross_q(_norm(x, layer.cross_norm)), 1, self.shape.decoder_heads)
        out, row = [], 0
        for cache, first in zip(caches, firsts, strict=True):
            rows = slice(row, row + len(cache) - first)
            row = rows.stop
            out.append(
                F.scaled_dot_product_attention(
                    q[None, :, rows].to(cache.cross_keys.dtype),
                    cache.cross_keys[index][None],
                    cache.cross_values[index][None],
                    scale=1.0,
                )[0].to(x.dtype)
            )
        return layer.cross_out(_merge(out[0] if len(out) == 1 else torch.cat(out, dim=1)))


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """torch on `count` threads; None: as many as it has."""
    before = torch.get_num_threads()
    if count is None or count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def sharpened(probs: torch.Tensor) -> torch.Tensor:
    """Probabilities at a temperature of TEMPERATURE, what is left of 1 taken for one token's.

    Args:
        probs: float32 [..., k], of a distribution's likeliest.
    """
    left = (1 - probs.sum(-1, keepdim=True)).clamp_min(0)
    powers = torch.cat((probs, left), -1) ** (1 / TEMPERATURE)
    return (powers / powers.sum(-1, keepdim=True))[..., :-1]


def audio_frames(features: torch.Tensor, margin: int) -> int:
    """Frames up to the end of the audio and `margin` more: behind it all is the floor's value.

    Args:
        features: float32 [mel_bins, frames]; Whisper pads audio with silence to 30 s, and silence
            is the lowest value of all bins.
    """
    heard = (features > features.min() + 1e-4).any(dim=0).nonzero()
    end = int(heard[-1]) + 1 if len(heard) else 0
    # Even, for the encoder halves the frames.
    return min(features.shape[1], -(-(end + margin) // 2) * 2)


def _decoder_layer(weights: Weights, name: str, shape: WhisperShape) -> _DecoderLayer:
    # The scale of the scores is folded into the queries.
    scale = (shape.d_model // shape.decoder_heads) ** -0.5
    own, cross = f"{name}.self_attn", f"{name}.encoder_attn"
    return _DecoderLayer(
        attention_norm=weights.norm(f"{own}_layer_norm"),
        qkv=weights.linear(*(f"{own}.{part}_proj" for part in "qkv"), scale_first=scale),
        out=weights.linear(f"{own}.out_proj"),
        final_norm=weights.norm(f"{name}.final_layer_norm"),
        fc1=weights.linear(f"{name}.fc1"),
        fc2=weights.linear(f"{name}.fc2"),
        cross_norm=weights.norm(f"{cross}_layer_norm"),
        cross_q=weights.linear(f"{cross}.q_proj", scale_first=scale),
        cross_out=weights.linear(f"{cross}.out_proj"),
    )


def _norm(x: torch.Tensor, parts: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return torch.layer_norm(x, x.shape[-1:], *parts)


def _mlp(x: torch.Tensor, layer: _DecoderLayer) -> torch.Tensor:
    return layer.fc2(F.gelu(layer.fc1(_norm(x, layer.final_norm))))


def _heads(x: torch.Tensor, parts: int, heads: int) -> torch.Tensor:
    """[n, parts * d] -> [parts, heads, n, head_dim]."""
    return x.view(len(x), parts, heads, -1).permute(1, 2, 0, 3)


def _merge(x: torch.Tensor) -> torch.Tensor:
    """[heads, n, head_dim] or [1, heads, n, head_dim] -> [n, d]."""
    if x.dim() == 4:
        x = x[0]
    return x.transpose(0, 1).reshape(x.shape[1], -1)
