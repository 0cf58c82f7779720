"""What a target's state at its early exit says of the next token."""

from dataclasses import dataclass

import torch

from sglang_ext.mirror.lens import Lens
from sglang_ext.mirror.target_parts import TargetParts


@dataclass(frozen=True)
class Proxy:
    """Top-kappa of the next token's distribution, from states at the exit.

    Without a lens it is the paper's: softmax(W_LM norm(h)). With one, the LM head reads the final
    state that the lens predicts from norm(h).

    Attributes:
        parts: the target's.
        kappa: candidates given of each state.
        lens: fitted; None: the head reads the state as it is.
        tokens: int64[n], token ids that are asked about, of the rows of `rows`; None: all.
        rows: float[n, d], the head's rows of these tokens.
    """

    parts: TargetParts
    kappa: int
    lens: Lens | None = None
    tokens: torch.Tensor | None = None
    rows: torch.Tensor | None = None

    def normalised(self, states: torch.Tensor) -> torch.Tensor:
        """float[T, d]: states at the exit as the final norm leaves them."""
        normed = self.parts.norm(states)
        return normed[0] if isinstance(normed, tuple) else normed

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """float32[T, n] of the tokens that are asked about, of states at the exit, float[T, d]."""
        normed = self.normalised(states)
        if self.lens is not None:
            normed = self.lens(normed)
        if self.rows is None:
            return self.parts.logits(normed)
        return self.parts.finished(torch.nn.functional.linear(normed, self.rows).float())

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


def narrowed(proxy: Proxy, tokens: torch.Tensor) -> Proxy:
    """The same proxy, asked about these tokens alone (int64[n]): a product of n rows, not of all.

    Raises:
        ValueError: fewer tokens than candidates, or a head whose rows cannot be taken.
    """
    weight = getattr(proxy.parts.head, "weight", None)
    if weight is None or weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError("the LM head's rows cannot be taken: its weight is no plain matrix")
    if len(tokens) < proxy.kappa:
        raise ValueError(f"{proxy.kappa} candidates need as many tokens, got {len(tokens)}")
    rows = weight.detach()[tokens].contiguous()
    return Proxy(proxy.parts, proxy.kappa, proxy.lens, tokens, rows)
