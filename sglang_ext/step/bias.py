"""Biased acceptance: SSBD's Formula 5, P' = (1 - beta) P + beta onehot(expected token).

A drafter names the tokens that it expects after a request's output, and how much it prefers them.
The preference holds at every position that was written before, whatever step gives its token: the
prefill, a plain step, any node of a verify step, the one behind the last drafted token included.
So what is written depends neither on the verify width nor on the budget.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from sglang_ext.cuda.staging import to_device
from sglang_ext.drafters import Bias
from sglang_ext.tree import PackedTrees, TokenTree

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.utils import GenerationBatchResult

_NOTHING = -1
# SplitMix64's constants as signed 64-bit integers (Steele, Lea, Flood 2014).
_STEP, _MIX_1, _MIX_2 = -7046029254386353131, -4658895280553007687, -7723592293110705685


@dataclass(frozen=True)
class BiasedRows:
    """The positions of a forward pass whose token is biased.

    Attributes:
        rows: int64[n], the request of each.
        places: int64[n], where each position's token is (the flat index of a node, or the row).
        expected: int64[n], the token that it is biased to.
        betas: float32[n].
    """

    rows: torch.Tensor
    places: torch.Tensor
    expected: torch.Tensor
    betas: torch.Tensor

    def at(self, index: torch.Tensor) -> "BiasedRows":
        """Those of them at int64[m] `index`."""
        return BiasedRows(
            self.rows[index], self.places[index], self.expected[index], self.betas[index]
        )

    @classmethod
    def of(
        cls, expected: "Expected | None", device: str | torch.device = "cpu"
    ) -> "BiasedRows | None":
        """The positions that are biased, on `device`; None: none is."""
        if expected is None:
            return None
        arrays = expected.arrays()
        return cls(*to_device(arrays, device)) if len(arrays[0]) else None


@dataclass(frozen=True)
class Expected:
    """What a step's tokens are biased to, on the host.

    Attributes:
        tokens: int64[bs, width], the token expected at each place (after each node); -1: none.
        betas: float32[bs].
    """

    tokens: npt.NDArray[np.int64]
    betas: npt.NDArray[np.float32]

    def arrays(self) -> list[npt.NDArray[Any]]:
        """The fields of BiasedRows, as arrays."""
        places = np.flatnonzero(self.tokens >= 0)
        rows = places // self.tokens.shape[1]
        return [rows, places, self.tokens.reshape(-1)[places], self.betas[rows]]

    @classmethod
    def of_trees(
        cls, biases: Sequence[Bias | None], trees: Sequence[TokenTree], packed: PackedTrees
    ) -> "Expected | None":
        """Of the nodes of a verify step; None: nothing is biased."""
        if not any(biases):
            return None
        expected = np.full(packed.tokens.shape, _NOTHING, dtype=np.int64)
        for row, (bias, tree) in enumerate(zip(biases, trees, strict=True)):
            if bias is not None:
                size = packed.sizes[row]
                expected[row, :size] = bias.at_nodes(tree.first(int(size) - 1))
        return cls(expected, _betas(biases))

    @classmethod
    def of_next_tokens(cls, biases: Sequence[Bias | None]) -> "Expected | None":
        """Of a step that gives each request one token; None: nothing is biased."""
        if not any(biases):
            return None
        tokens = [b.tokens[0] if b is not None and len(b.tokens) else _NOTHING for b in biases]
        return cls(np.array(tokens, dtype=np.int64)[:, None], _betas(biases))


def _betas(biases: Sequence[Bias | None]) -> npt.NDArray[np.float32]:
    return np.array([b.beta if b is not None else 0.0 for b in biases], dtype=np.float32)


def prefer(
    chosen: torch.Tensor,
    probs: torch.Tensor,
    biased: BiasedRows,
    greedy: torch.Tensor,
    coins: torch.Tensor,
) -> torch.Tensor:
    """Formula 5 for n positions.

    Greedily the expected token wins where (1 - beta) p + beta >= (1 - beta) max p. A sampled
    token is one of the mixture: with probability beta the expected one, else what was sampled.
    A token of probability 0 (a grammar forbids it) is never taken.

    Args:
        chosen: int[n], the exact rule's tokens.
        probs: float[n, vocab], the target's distributions.
        greedy: bool[n].
        coins: float[n], uniform in [0, 1).

    Returns:
        int[n], the tokens.
    """
    likely = probs.gather(1, biased.expected[:, None])[:, 0]
    rest = 1.0 - biased.betas
    wins = rest * likely + biased.betas >= rest * probs.amax(dim=-1)
    taken = torch.where(greedy, wins, coins < biased.betas) & (likely > 0)
    return torch.where(taken, biased.expected.to(chosen.dtype), chosen)


def coins_of(seeds: torch.Tensor | None, positions: torch.Tensor) -> torch.Tensor:
    """float64[n], uniform in [0, 1): with seeds, a function of seed and position alone.

    Args:
        seeds: int[n], the requests' sampling seeds; None: they have none.
        positions: int[n], of the token that the coin is for.
    """
    if seeds is None:
        return torch.rand(len(positions), dtype=torch.float64, device=positions.device)
    state = (seeds.to(torch.int64) * _MIX_1 + positions.to(torch.int64) + 1) * _STEP
    state = (state ^ _shifted(state, 30)) * _MIX_1
    state = (state ^ _shifted(state, 27)) * _MIX_2
    state = state ^ _shifted(state, 31)
    return _shifted(state, 11).to(torch.float64) / (1 << 53)


def is_greedy(sampling_info: Any) -> torch.Tensor:
    """bool[bs], the requests that take the likeliest token (SGLang turns temperature 0 into a
    top-k of 1)."""
    return sampling_info.top_ks == 1


def prefer_next_tokens(
    result: "GenerationBatchResult", batch: "ScheduleBatch", expected: Expected | None
) -> None:
    """Bias the tokens that SGLang's own sampler has just chosen, in a prefill or a plain step."""
    if expected is None or batch.is_prefill_only:  # which has no token of its own
        return
    logits, info = result.logits_output.next_token_logits, batch.sampling_info
    biased = BiasedRows.of(expected, logits.device)
    if biased is None:
        return
    rows = biased.rows
    # The sampler leaves probabilities where it left logits, unless all are greedy.
    probs = logits[rows].float()
    if info.is_all_greedy:
        probs = torch.softmax(probs, dim=-1)
    seeds = info.sampling_seed[rows] if info.sampling_seed is not None else None
    coins = coins_of(seeds, batch.seq_lens[rows])
    tokens = prefer(result.next_token_ids[rows], probs, biased, is_greedy(info)[rows], coins)
    result.next_token_ids[rows] = tokens
    if batch.return_logprob:
        logprobs = probs.gather(1, tokens[:, None].long())[:, 0].log()
        result.logits_output.next_token_logprobs[rows] = logprobs


def _shifted(values: torch.Tensor, bits: int) -> torch.Tensor:
    """The logical right shift of int64 values; torch's is arithmetic."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)
