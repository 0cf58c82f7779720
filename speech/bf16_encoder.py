"""A Whisper encoder's layers in bfloat16, where a CPU is fast at that: float32 between them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from speech.bf16_products import Bf16Product

Norm = Callable[[torch.Tensor], torch.Tensor]
Product = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Bf16Layer:
    """A layer's parts: norms of float32 rows, and products (bf16_products.py).

    Attributes:
        qkv: to queries, keys and values, beside each other; out: behind the attention.
        fc1, fc2: of the MLP, GELU between them.
        heads: of the attention; scale: of its scores.
    """

    attention_norm: Norm
    qkv: Product
    out: Product
    final_norm: Norm
    fc1: Product
    fc2: Product
    heads: int
    scale: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """States float32 [..., frames, size] -> what they are behind the layer."""
        qkv = self.qkv(self.attention_norm(x).to(torch.bfloat16))
        parts = qkv.unflatten(-1, (3, self.heads, -1)).movedim(-3, 0)
        q, k, v = parts.transpose(-3, -2)
        seen = attended(q, k, v, self.scale)
        x = x + self.out(seen.transpose(-3, -2).flatten(-2))
        return x + self.fc2(self.fc1(self.final_norm(x).to(torch.bfloat16), gelu=True))


def attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, fused: bool | None = None
) -> torch.Tensor:
    """Attention of bfloat16 [..., heads, frames, size], every frame of every other one.

    Without AMX torch multiplies in float32 here, and takes more than a layer's products: of a
    window of Whisper base 26 ms on two cores. Some hundred frames' scores at a time, in bfloat16
    too, take 11; the encoder's states are as near to float32's as with it.

    Args:
        fused: by torch's; None: where the CPU has AMX.
    """
    if torch.cpu._is_amx_tile_supported() if fused is None else fused:
        return F.scaled_dot_product_attention(q, k, v, scale=scale)
    heads = [x.flatten(0, -3) for x in (q * scale, k.mT, v)]
    out = torch.empty_like(heads[0])
    for query, keys, values, to in zip(*heads, out, strict=True):
        for some, there in zip(query.split(_FRAMES), to.split(_FRAMES), strict=True):
            torch.mm((some @ keys).softmax(-1), values, out=there)
    return out.view(q.shape)


class Bf16Stem:
    """What a Whisper's first states are made by, positions aside: two convolutions, each with GELU.

    A frame's inputs lie beside each other, so that a convolution is one product.

    Args:
        convolutions: weight [out, in, 3] and bias [out] of both; the second has every other frame.
    """

    def __init__(self, convolutions: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._products = [
            Bf16Product(weight.detach().transpose(1, 2).flatten(1), bias)
            for weight, bias in convolutions
        ]

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        """Log-mel [batch, mels, T] -> float32 [batch, T / 2, size]."""
        x = features.to(torch.bfloat16).mT
        for stride, product in enumerate(self._products, 1):
            frames = F.pad(x, (0, 0, 1, 1)).unfold(1, _WIDTH, stride)  # [batch, T', in, 3]
            x = product(frames.transpose(2, 3).flatten(2), gelu=True)
        return x.float()


_WIDTH = 3  # of a convolution, in frames
_FRAMES = 500  # whose scores fit the cache
