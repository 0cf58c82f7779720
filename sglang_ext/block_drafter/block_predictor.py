"""The block drafter as it is served: the source's keys and values kept, int8 on CPUs.

Computes what `BlockModel` computes, without dropout. What a request pays once is its encoder pass
and the decoder's keys and values of the source; a step is one decoder pass of all requests.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.functional import layer_norm, linear, scaled_dot_product_attention

from sglang_ext.block_drafter.kept_tokens import MASK, PADDING, UNKNOWN
from sglang_ext.block_drafter.nat_model import BlockModel

Rows = npt.NDArray[np.int64]
States = npt.NDArray[np.float16]
Source = Rows | States
_Apply = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class SourceMemory:
    """What is kept of a source.

    Attributes:
        keys_values: float32[decoder layers, 2, heads, s, width / heads].
    """

    keys_values: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.keys_values.nbytes


@dataclass(frozen=True)
class Block:
    """What one pass predicts for one request, the likeliest first at each place.

    Attributes:
        rows: int64[block, choices], rows of the embedding; UNKNOWN: none that can be drafted.
        logprobs: float32[block, choices], the drafter's log-probabilities of them.
    """

    rows: Rows
    logprobs: npt.NDArray[np.float32]

    def narrowed(self, choices: int) -> "Block":
        """With so many choices at each place at most."""
        return Block(self.rows[:, :choices], self.logprobs[:, :choices])


class BlockPredictor:
    """Encodes sources and predicts blocks."""

    @torch.inference_mode()
    def __init__(self, model: BlockModel, int8: bool) -> None:
        """int8: linear layers in 8-bit integers, which torch has on CPUs alone."""
        self._model = model.eval()
        self._shape = model.shape
        self._heads = model.shape.heads
        self._device = model.slots.device
        own = model.encoder.layers if model.states is None else ()
        self._encoder = [_EncoderLayer(layer, int8) for layer in own]
        self._decoder = [_DecoderLayer(layer, int8) for layer in model.decoder.layers]
        self._output = _linear(model.output_weight, model.output_bias, int8)

    @torch.inference_mode()
    def encode(self, sources: Sequence[Source]) -> list[SourceMemory]:
        """What is kept of each source.

        Args:
            sources: int64[s] rows of each, an empty one counts as one unknown token; of a drafter
                that reads the target's states, float[s, states.width] with s at least 1.
        """
        if self._model.states is not None:
            return [
                self.remember(torch.from_numpy(states), torch.arange(len(states)))
                for states in sources
            ]
        rows_of = [rows if len(rows) else np.array([UNKNOWN]) for rows in sources]
        tokens = torch.from_numpy(padded(rows_of)).to(self._device)
        seen = (tokens != PADDING)[:, None, None]
        places = torch.arange(tokens.shape[1], device=self._device).expand_as(tokens)
        hidden = self._model.embedded(tokens, places)
        for layer in self._encoder:
            hidden = layer.run(hidden, seen, self._heads)
        kept = self._keys_values(_normed(hidden, self._model.encoder.norm))
        return [
            SourceMemory(kept[i, :, :, :, : len(rows)].clone()) for i, rows in enumerate(rows_of)
        ]

    @torch.inference_mode()
    def remember(self, states: torch.Tensor, places: torch.Tensor) -> SourceMemory:
        """What is kept of a source whose states the target has.

        Args:
            states: float[s, states.width].
            places: int64[s], where in the source each lies.
        """
        memory = self._model.remembered(states.to(self._device)[None], places.to(self._device))
        return SourceMemory(self._keys_values(memory)[0])

    def _keys_values(self, memory: torch.Tensor) -> torch.Tensor:
        """float[n, decoder layers, 2, heads, s, width / heads] of float[n, s, width]."""
        return torch.stack([layer.keys_values(memory, self._heads) for layer in self._decoder], 1)

    @torch.inference_mode()
    def predict(
        self,
        memories: Sequence[SourceMemory],
        last: Sequence[Rows],
        committed: Sequence[int],
        choices: int,
    ) -> list[Block]:
        """The next tokens of each request.

        Args:
            last: int64[m], the last committed tokens of each as rows; `window` of them are read.
            committed: how many tokens each has committed.
            choices: how many of the likeliest are given at each place.
        """
        tokens = windows(last, self._shape.window, self._shape.block)
        rows = torch.from_numpy(tokens).to(self._device)
        places = self._model.places(torch.tensor(committed, device=self._device))
        hidden = self._model.embedded(rows, places) + self._model.slots
        seen = (rows != PADDING)[:, None, None]
        kept, in_source = _together([m.keys_values for m in memories])
        final = len(self._decoder) - 1
        for number, layer in enumerate(self._decoder):
            # Of the last layer nothing reads the window's places.
            wanted = self._shape.block if number == final else hidden.shape[1]
            hidden = layer.run(hidden, seen, kept[:, number], in_source, self._heads, wanted)
        hidden = _normed(hidden, self._model.decoder.norm)
        logits = self._output(hidden).float()
        best = logits.topk(min(choices, logits.shape[-1]))
        logprobs = (best.values - logits.logsumexp(-1, keepdim=True)).cpu().numpy()
        predicted = (best.indices + UNKNOWN).cpu().numpy()
        return [Block(predicted[i], logprobs[i]) for i in range(len(memories))]


def windows(last: Sequence[Rows], window: int, block: int) -> Rows:
    """int64[n, window + block], the decoder's inputs: last committed tokens, then the masks."""
    tokens = np.full((len(last), window + block), PADDING, dtype=np.int64)
    tokens[:, window:] = MASK
    for row, rows in zip(tokens, last, strict=True):
        rows = rows[-window:]
        row[window - len(rows) : window] = rows
    return tokens


def padded(sequences: Sequence[Source]) -> Rows:
    """int64[n, longest], PADDING behind each, of rows."""
    rows = np.full((len(sequences), max(map(len, sequences))), PADDING, dtype=np.int64)
    for row, sequence in zip(rows, sequences, strict=True):
        row[: len(sequence)] = sequence
    return rows


class _EncoderLayer:
    """An nn.TransformerEncoderLayer with its norms first."""

    def __init__(self, layer: nn.TransformerEncoderLayer, int8: bool) -> None:
        self._norms = layer.norm1, layer.norm2
        attention = layer.self_attn
        self._qkv = _linear(attention.in_proj_weight, attention.in_proj_bias, int8)
        self._out = _linear(attention.out_proj.weight, attention.out_proj.bias, int8)
        self._forward = _feedforward(layer, int8)

    def run(self, hidden: torch.Tensor, seen: torch.Tensor, heads: int) -> torch.Tensor:
        """float[n, m, width] of the same; seen: bool[n, 1, 1, m]."""
        parts = self._norms[0], self._qkv, self._out
        hidden = hidden + _attended(hidden, *parts, seen, heads, hidden.shape[1])
        return hidden + self._forward(_normed(hidden, self._norms[1]))


class _DecoderLayer:
    """An nn.TransformerDecoderLayer with its norms first; the source's keys and values given."""

    def __init__(self, layer: nn.TransformerDecoderLayer, int8: bool) -> None:
        self._norms = layer.norm1, layer.norm2, layer.norm3
        own, cross = layer.self_attn, layer.multihead_attn
        width = own.embed_dim
        self._qkv = _linear(own.in_proj_weight, own.in_proj_bias, int8)
        self._out = _linear(own.out_proj.weight, own.out_proj.bias, int8)
        self._query = _linear(cross.in_proj_weight[:width], cross.in_proj_bias[:width], int8)
        self._source = _linear(cross.in_proj_weight[width:], cross.in_proj_bias[width:], int8)
        self._cross_out = _linear(cross.out_proj.weight, cross.out_proj.bias, int8)
        self._forward = _feedforward(layer, int8)

    def keys_values(self, memory: torch.Tensor, heads: int) -> torch.Tensor:
        """float[n, 2, heads, s, width / heads] of float[n, s, width]."""
        return _by_head(self._source(memory), 2, heads)

    def run(
        self,
        hidden: torch.Tensor,
        seen: torch.Tensor,
        source: torch.Tensor,
        in_source: torch.Tensor | None,
        heads: int,
        wanted: int,
    ) -> torch.Tensor:
        """float[n, wanted, width], the last places of float[n, m, width].

        Args:
            source: of `keys_values`.
            in_source: bool[n, 1, 1, s]; None: everywhere.
        """
        own = _attended(hidden, self._norms[0], self._qkv, self._out, seen, heads, wanted)
        hidden = hidden[:, -wanted:] + own
        query = _by_head(self._query(_normed(hidden, self._norms[1])), 1, heads)[:, 0]
        found = scaled_dot_product_attention(query, source[:, 0], source[:, 1], in_source)
        hidden = hidden + self._cross_out(_joined(found))
        return hidden + self._forward(_normed(hidden, self._norms[2]))


def _attended(
    hidden: torch.Tensor,
    norm: nn.LayerNorm,
    qkv: _Apply,
    out: _Apply,
    seen: torch.Tensor,
    heads: int,
    wanted: int,
) -> torch.Tensor:
    """float[n, wanted, width], what the last places find in all."""
    query, key, value = _by_head(qkv(_normed(hidden, norm)), 3, heads).unbind(1)
    found = scaled_dot_product_attention(query[:, :, -wanted:], key, value, seen)
    return out(_joined(found))


def _by_head(projected: torch.Tensor, parts: int, heads: int) -> torch.Tensor:
    """float[n, parts, heads, m, width / heads] of float[n, m, parts * width]."""
    n, m, wide = projected.shape
    return projected.view(n, m, parts, heads, wide // parts // heads).permute(0, 2, 3, 1, 4)


def _joined(by_head: torch.Tensor) -> torch.Tensor:
    """float[n, m, width] of float[n, heads, m, width / heads]."""
    return by_head.transpose(1, 2).flatten(2)


def _together(kept: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sources of different lengths as one tensor, and where each has tokens (None: everywhere)."""
    lengths = [memory.shape[3] for memory in kept]
    longest = max(lengths)
    if min(lengths) == longest:
        return torch.stack(list(kept)), None
    shape = (len(kept), *kept[0].shape[:3], longest, kept[0].shape[4])
    joined = kept[0].new_zeros(shape)
    for row, memory in zip(joined, kept, strict=True):
        row[..., : memory.shape[3], :] = memory
    ends = torch.tensor(lengths, device=joined.device)
    present = torch.arange(longest, device=joined.device) < ends[:, None]
    return joined, present[:, None, None]


def _normed(hidden: torch.Tensor, norm: nn.LayerNorm) -> torch.Tensor:
    return layer_norm(hidden, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


def _feedforward(layer: nn.Module, int8: bool) -> _Apply:
    first = _linear(layer.linear1.weight, layer.linear1.bias, int8)
    second = _linear(layer.linear2.weight, layer.linear2.bias, int8)
    return lambda hidden: second(first(hidden).relu_())


def _linear(weight: torch.Tensor, bias: torch.Tensor, int8: bool) -> _Apply:
    """x -> x W^T + b; in int8 weights have a scale a row, inputs one a call (torch's dynamic)."""
    if not int8:
        kept, added = weight.detach(), bias.detach()
        return lambda x: linear(x, kept, added)
    weight = weight.detach().float()
    scales = weight.abs().amax(1).clamp(min=1e-8) / 127
    with warnings.catch_warnings():  # it is to move to another package; SGLang pins this torch
        warnings.simplefilter("ignore")
        quantized = torch.quantize_per_channel(
            weight, scales.double(), torch.zeros(len(weight), dtype=torch.long), 0, torch.qint8
        )
        packed = torch.ops.quantized.linear_prepack(quantized, bias.detach().float())
    run = torch.ops.quantized.linear_dynamic
    return lambda x: run(x, packed, True)
