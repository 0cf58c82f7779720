"""The exact acceptance rule keeps the target's distribution, whatever is drafted."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from sglang_ext.step.verify import accept_on_host
from sglang_ext.tree import TokenTree, pack

VOCAB = 6


@dataclass
class Sampling:
    """The fields of SGLang's SamplingBatchInfo that the rule reads."""

    temperatures: torch.Tensor
    is_all_greedy: bool = False
    top_ps: torch.Tensor | None = None
    top_ks: torch.Tensor | None = None
    min_ps: torch.Tensor | None = None
    sampling_seed: torch.Tensor | None = None


class Multinomial:
    """Draws from softmax(logits / temperature), the simplest case of SGLang's sampler.

    Like it, it leaves probabilities where it found logits.
    """

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, output, info, *_args):
        probs = torch.softmax(output.next_token_logits / info.temperatures, dim=-1)
        output.next_token_logits.copy_(probs)
        return torch.multinomial(probs, 1, generator=self.generator).squeeze(1)


def tree(tokens, parents):
    return TokenTree(np.array(tokens), np.array(parents, dtype=np.int32), np.ones(len(tokens)))


TREES = {
    "none": tree([], []),
    "every first token": tree([0, 1, 2, 3, 4, 5], [-1] * 6),
    "likeliest path": tree([0, 0, 0], [-1, 0, 1]),
    "unlikeliest path": tree([5, 5, 5], [-1, 0, 1]),
    "doubles": tree([0, 0, 1, 1], [-1, -1, 0, 1]),
}


def next_logits(path: tuple[int, ...]) -> torch.Tensor:
    """The toy target: a distribution for each prefix."""
    generator = torch.Generator().manual_seed(hash(path) % 1000)
    return torch.randn(VOCAB, generator=generator) - 0.5 * torch.arange(VOCAB)


def node_logits(packed, row: int) -> torch.Tensor:
    rows = []
    for node in range(packed.width):
        path, at = [], node
        while at > 0:
            path.append(int(packed.tokens[row, at]))
            at = int(packed.parents[row, at])
        rows.append(next_logits(tuple(reversed(path))))
    return torch.stack(rows)


@pytest.mark.parametrize("name", TREES)
def test_sampling_keeps_the_targets_distribution(name):
    copies, rounds, temperature = 500, 20, 0.8
    packed = pack([0] * copies, [TREES[name]] * copies, 8)
    logits = node_logits(packed, 0).repeat(copies, 1)
    info = Sampling(torch.full((copies, 1), temperature))
    sampler = Multinomial(seed=1)
    pairs = np.zeros((VOCAB, VOCAB))
    for _ in range(rounds):
        accepted = accept_on_host(
            logits.clone(), packed, info, torch.zeros(len(logits), dtype=torch.int64), sampler
        )
        predict = accepted.predict.numpy()
        for index, n in zip(accepted.accept_index.numpy(), accepted.accept_lens, strict=True):
            first = predict[index[0]]
            if n > 1:
                second = predict[index[1]]
            else:  # the next step's root is `first`: sample there
                after = Sampling(torch.full((1, 1), temperature))
                output = type("Output", (), {"next_token_logits": next_logits((first,))[None]})
                second = sampler(output, after)[0]
            pairs[first, second] += 1
    first_probs = torch.softmax(next_logits(()) / temperature, -1)
    expected = np.stack(
        [first_probs[t] * torch.softmax(next_logits((t,)) / temperature, -1) for t in range(VOCAB)]
    )
    n = copies * rounds
    chi_square = ((pairs - n * expected) ** 2 / (n * expected)).sum()
    # 35 degrees of freedom: 99.9% of true nulls are below 66.6.
    assert chi_square < 66.6


def test_greedy_rows_take_the_argmax():
    packed = pack([0], [TREES["likeliest path"]], 4)
    logits = torch.zeros(4, VOCAB)
    logits[0, 0] = logits[1, 0] = logits[2, 3] = 1.0
    info = Sampling(torch.ones(1, 1), is_all_greedy=True)
    accepted = accept_on_host(logits, packed, info, torch.zeros(4, dtype=torch.int64), None)
    assert accepted.accept_lens.tolist() == [3]
    assert accepted.predict[accepted.accept_index[0, :3].long()].tolist() == [0, 0, 3]
