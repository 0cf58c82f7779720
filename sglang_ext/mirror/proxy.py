"""What a target's state at its early exit says of the next token."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sglang_ext.mirror.lens import Lens
from sglang_ext.mirror.target_parts import TargetParts

# float[T, d] -> float[T, n], a product with n rows.
Product = Callable[[torch.Tensor], torch.Tensor]
# Makes one of float[n, d] rows and a bias, float[n], or none.
Pack = Callable[[torch.Tensor, torch.Tensor | None], Product]


def plain_product(rows: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """A product with these rows as torch has it."""
    return lambda states: torch.nn.functional.linear(states, rows, bias)


@dataclass(frozen=True)
class Proxy:
    """Top-kappa of the next token's distribution, from states at the exit.

    Without a lens it is the paper's: softmax(W_LM norm(h)). With one, the LM head reads the final
    state that the lens predicts from norm(h).

    Attributes:
        parts: the target's.
        kappa: candidates given of each state.
        lens: fitted; None: the head reads the state as it is.
        tokens: int64[n], token ids that are asked about; None: all.
        product: their logits before scale and softcap, from normalised states, lens included.
    """

    parts: TargetParts
    kappa: int
    lens: Lens | None = None
    tokens: torch.Tensor | None = None
    product: Product | None = None

    def normalised(self, states: torch.Tensor) -> torch.Tensor:
        """float[T, d]: states at the exit as the final norm leaves them."""
        normed = self.parts.norm(states)
        return normed[0] if isinstance(normed, tuple) else normed

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """float32[T, n] of the tokens that are asked about, of states at the exit, float[T, d]."""
        normed = self.normalised(states)
        if self.product is not None:
            return self.parts.finished(self.product(normed).float())
        return self.parts.logits(normed if self.lens is None else self.lens(normed))

    @torch.inference_mode()
    def candidates(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """int64[T, kappa] and float32[T, kappa]: the likeliest tokens, and their log-probabilities.

        Among the tokens that are asked about: where these are not all, their probabilities sum
        to 1 without the others.
        """
        logits = self.logits(states)
        best, index = torch.topk(logits, self.kappa, dim=-1)
        logprobs = best - torch.logsumexp(logits, dim=-1, keepdim=True)
        return (index if self.tokens is None else self.tokens[index]), logprobs


def narrowed(proxy: Proxy, tokens: torch.Tensor, pack: Pack = plain_product) -> Proxy:
    """The same proxy, asked about these tokens alone (int64[n]): one product of n rows.

    The lens is multiplied into the rows.

    Args:
        pack: makes the product.

    Raises:
        ValueError: fewer tokens than candidates.
    """
    if len(tokens) < proxy.kappa:
        raise ValueError(f"{proxy.kappa} candidates need as many tokens, got {len(tokens)}")
    rows, bias = proxy.parts.head_rows(tokens), None
    if proxy.lens is not None:
        exact = rows.float()
        bias = (exact @ proxy.lens.bias.float()).to(rows.dtype)
        rows = (exact @ proxy.lens.weight.float().T).to(rows.dtype)
    return Proxy(proxy.parts, proxy.kappa, proxy.lens, tokens, pack(rows.contiguous(), bias))
