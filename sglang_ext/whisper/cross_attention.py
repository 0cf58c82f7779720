"""Which frame of the audio each token of a pass attends to: Whisper's cross-attention, read.

Attention kernels give sums and no weights. Where a request asks, the weights of a few heads are
made again from what a pass has at hand: the queries of its tokens and the keys of the encoder's
frames, which lie in the KV pool. A pass in which nobody asks is as it was.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sglang_ext.servers.flag_names import ALGORITHM

_BACKEND = "tree_cpu"  # cpu/attention.py

Heads = Mapping[int, Sequence[int]]
"""Heads to read, by the layer id of their cross-attention in SGLang's model."""


def tells_frames(args: Any) -> bool:
    """Whether a server with these arguments (SGLang's ServerArgs) reads cross-attention."""
    return (
        (args.speculative_algorithm or "").upper() == ALGORITHM
        and args.attention_backend == _BACKEND
        and args.tp_size == 1
        and args.disaggregation_mode == "null"
    )


def heads_to_read(config: Any, alignment_heads: Sequence[Sequence[int]] | None) -> Heads:
    """The heads that tell where a token was said.

    Args:
        config: transformers' WhisperConfig.
        alignment_heads: pairs of layer and head, of the checkpoint's generation config; without
            them, all heads of the decoder's upper half, as openai-whisper does (model.py).

    Raises:
        ValueError: the model has no such head.
    """
    layers, count = config.decoder_layers, config.decoder_attention_heads
    pairs = alignment_heads or [
        (layer, head) for layer in range(layers // 2, layers) for head in range(count)
    ]
    heads: dict[int, list[int]] = {}
    for layer, head in pairs:
        if not (0 <= layer < layers and 0 <= head < count):
            raise ValueError(
                f"the generation config's alignment_heads name head {head} of layer {layer}; the "
                f"model has {layers} layers of {count} heads"
            )
        # models/whisper.py counts the encoder's layers, the decoder's, then these.
        heads.setdefault(config.encoder_layers + layers + layer, []).append(head)
    return heads


@dataclass
class FrameReader:
    """Reads the cross-attention of one pass after another, for requests that ask.

    Attributes:
        heads: whose weights are averaged.
        asking: of the next pass, by the request's row in SGLang's ReqToTokenPool: how many of the
            encoder's frames hold audio.
    """

    heads: Heads
    asking: Mapping[int, int] = field(default_factory=dict)
    _places: dict[int, torch.Tensor] = field(default_factory=dict)
    _weights: dict[int, torch.Tensor] = field(default_factory=dict)
    _tokens: int = 0

    def watch(self, asking: Mapping[int, int]) -> None:
        """A pass comes next, of which these requests ask; what was read before is forgotten."""
        self.asking, self._tokens = asking, 0
        self._places, self._weights = {}, {}

    def read(
        self,
        layer_id: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        table: torch.Tensor,
        rows: torch.Tensor,
        scale: float,
    ) -> None:
        """Take in a layer's cross-attention; layers without a head to read are passed over.

        Args:
            query: float32[T, heads, size].
            keys: [slots, heads, size], float32 or bfloat16, the layer's part of the KV pool.
            table: int[rows, columns], slots by request; the encoder's come first.
            rows: int64[T], the row of each token's request.
            scale: of the products.
        """
        heads = self.heads.get(layer_id)
        if heads is None:
            return
        self._tokens = len(query)
        for row, frames in self.asking.items():
            places = self._places.get(row)
            if places is None:
                places = self._places[row] = torch.nonzero(rows == row).flatten()
            slots = table[row, :frames].long()
            q = query[places][:, heads].transpose(0, 1)
            k = keys[slots][:, heads].permute(1, 2, 0).to(q.dtype)
            weights = torch.softmax(torch.bmm(q, k) * scale, dim=-1).sum(0)
            if row in self._weights:
                self._weights[row] += weights
            else:
                self._weights[row] = weights

    def frames(self) -> list[int]:
        """For each token of the pass, the frame that it attends to most; -1: nobody asked."""
        found = torch.full((self._tokens,), -1, dtype=torch.int64)
        for row, weights in self._weights.items():
            found[self._places[row]] = weights.argmax(-1)
        return found.tolist()
