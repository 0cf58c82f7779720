"""A Whisper encoder's layers in bfloat16, where a CPU is fast at that: float32 between them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from speech.bf16_attention import attend

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
        seen = attend(q, k, v, self.scale).transpose(-3, -2).flatten(-2)
        x = x + self.out(seen)
        return x + self.fc2(self.fc1(self.final_norm(x).to(torch.bfloat16), gelu=True))


def embedded(
    features: torch.Tensor, convolutions: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> torch.Tensor:
    """What a layer's first states are made of, positions aside.

    Args:
        features: [batch, mels, T], log-mel.
        convolutions: weight and bias of both, of width 3; the second has every other frame.

    Returns:
        float32[batch, T / 2, size].
    """
    x = features.to(torch.bfloat16)
    for stride, (weight, bias) in enumerate(convolutions, 1):
        weight, bias = weight.to(torch.bfloat16), bias.to(torch.bfloat16)
        x = F.gelu(F.conv1d(x, weight, bias, stride=stride, padding=1))
    return x.mT.float()
