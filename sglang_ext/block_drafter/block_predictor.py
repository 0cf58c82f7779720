"""The block drafter as it is served: the source's keys and values kept, int8 on CPUs.

Computes what `BlockModel` computes, without dropout. What a request pays once is its encoder pass
and the decoder's keys and values of the source; a step is one decoder pass of all requests, and
keys and values of the last tokens that they have written.
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
from sglang_ext.block_drafter.nat_model import OF_SOURCE, BlockModel
from sglang_ext.block_drafter.states_on_disk import States

Rows = npt.NDArray[np.int64]
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
class Written:
    """The output of a request so far.

    Attributes:
        committed: its tokens.
        last: row of the last of them; PADDING: there is none.
        read: of some of the tokens before that one the rows, int64[m], or float16[m, states.width]
            where the drafter reads the target's states; the last `window` of them are enough.
        places: int64[m], where in the output they are.
    """

    committed: int
    last: int
    read: Source
    places: Rows

    @classmethod
    def of_rows(cls, rows: Rows, committed: int) -> "Written":
        """Of a request whose last tokens are these rows, int64[m]."""
        before = rows[:-1]
        places = committed - 1 - len(before) + np.arange(len(before))
        return cls(committed, int(rows[-1]) if len(rows) else PADDING, before, places)


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
        encoded = _normed(hidden, self._model.encoder.norm) + self._model.kinds[OF_SOURCE]
        kept = self._keys_values(encoded)
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
        written: Sequence[Written],
        choices: int,
    ) -> list[Block]:
        """The next tokens of each request.

        Args:
            choices: how many of the likeliest are given at each place.
        """
        tokens = block_inputs([each.last for each in written], self._shape.block)
        rows = torch.from_numpy(tokens).to(self._device)
        committed = torch.tensor([each.committed for each in written], device=self._device)
        hidden = self._model.embedded(rows, self._model.places(committed)) + self._model.slots
        kept, read = _together(
            [
                torch.cat([memory.keys_values, own], dim=3)
                for memory, own in zip(memories, self._of_written(written), strict=True)
            ]
        )
        for number, layer in enumerate(self._decoder):
            hidden = layer.run(hidden, kept[:, number], read, self._heads)
        hidden = _normed(hidden[:, 1:], self._model.decoder.norm)
        logits = self._output(hidden).float()
        best = logits.topk(min(choices, logits.shape[-1]))
        logprobs = (best.values - logits.logsumexp(-1, keepdim=True)).cpu().numpy()
        predicted = (best.indices + UNKNOWN).cpu().numpy()
        return [Block(predicted[i], logprobs[i]) for i in range(len(memories))]

    def _of_written(self, written: Sequence[Written]) -> list[torch.Tensor]:
        """float[decoder layers, 2, heads, m, width / heads], keys and values of each output."""
        window = self._shape.window
        read = [each.read[-window:] for each in written]
        if not any(map(len, read)):
            shape = self._shape
            sizes = (shape.decoder_layers, 2, self._heads, 0, shape.width // self._heads)
            return [torch.empty(sizes, device=self._device)] * len(read)
        places = [each.places[-window:] for each in written]
        memory = self._model.remembered(
            torch.from_numpy(padded(read)).to(self._device),
            torch.from_numpy(padded(places)).to(self._device),
            written=True,
        )
        kept = self._keys_values(memory)
        return [each[:, :, :, : len(own)] for each, own in zip(kept, read, strict=True)]


def block_inputs(last: Sequence[int], block: int) -> Rows:
    """int64[n, 1 + block], the decoder's inputs: the last committed tokens' rows, then masks."""
    tokens = np.full((len(last), 1 + block), MASK, dtype=np.int64)
    tokens[:, 0] = last
    return tokens


def padded(sequences: Sequence[Source], multiple: int = 1) -> Rows | npt.NDArray[np.float32]:
    """Sequences as one array: int64[n, longest], PADDING behind each's rows.

    Of states float32[n, longest, width], zeros behind each's.

    Args:
        multiple: of which `longest` is one.
    """
    first = sequences[0]
    kind = np.float32 if first.ndim == 2 else np.int64
    longest = -(-max(map(len, sequences)) // multiple) * multiple
    joined = np.full((len(sequences), longest, *first.shape[1:]), PADDING, dtype=kind)
    for row, sequence in zip(joined, sequences, strict=True):
        row[: len(sequence)] = sequence
    return joined


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
        hidden = hidden + _attended(hidden, *parts, seen, heads)
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
        """float[n, 2, heads, m, width / heads] of float[n, m, width]."""
        return _by_head(self._source(memory), 2, heads)

    def run(
        self,
        hidden: torch.Tensor,
        memory: torch.Tensor,
        read: torch.Tensor | None,
        heads: int,
    ) -> torch.Tensor:
        """float[n, k, width] of the same.

        Args:
            memory: of `keys_values`.
            read: bool[n, 1, 1, m], which entries of it are; None: all.
        """
        hidden = hidden + _attended(hidden, self._norms[0], self._qkv, self._out, None, heads)
        query = _by_head(self._query(_normed(hidden, self._norms[1])), 1, heads)[:, 0]
        found = scaled_dot_product_attention(query, memory[:, 0], memory[:, 1], read)
        hidden = hidden + self._cross_out(_joined(found))
        return hidden + self._forward(_normed(hidden, self._norms[2]))


def _attended(
    hidden: torch.Tensor,
    norm: nn.LayerNorm,
    qkv: _Apply,
    out: _Apply,
    seen: torch.Tensor | None,
    heads: int,
) -> torch.Tensor:
    """float[n, m, width], what each place finds in all; seen: bool[n, 1, 1, m], None: all."""
    query, key, value = _by_head(qkv(_normed(hidden, norm)), 3, heads).unbind(1)
    found = scaled_dot_product_attention(query, key, value, seen)
    return out(_joined(found))


def _by_head(projected: torch.Tensor, parts: int, heads: int) -> torch.Tensor:
    """float[n, parts, heads, m, width / heads] of float[n, m, parts * width]."""
    n, m, wide = projected.shape
    return projected.view(n, m, parts, heads, wide // parts // heads).permute(0, 2, 3, 1, 4)


def _joined(by_head: torch.Tensor) -> torch.Tensor:
    """float[n, m, width] of float[n, heads, m, width / heads]."""
    return by_head.transpose(1, 2).flatten(2)


def _together(kept: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Memories of different lengths as one tensor, and where each has entries (None: all)."""
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
