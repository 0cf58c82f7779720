"""Formula 5 of SSBD, wherever a step's tokens come from."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sglang_ext.drafters import Bias
from sglang_ext.step.bias import BiasedRows, Expected, coins_of, prefer, prefer_next_tokens
from sglang_ext.step.verify import accept_on_host
from sglang_ext.tree import TokenTree, pack
from tests.unit.step.test_verify import Multinomial, Sampling


def logits_of(*rows: list[float]) -> torch.Tensor:
    """Logits whose softmax is `rows`."""
    return torch.tensor(rows).log()


def rows_of(expected: list[int], beta: float) -> BiasedRows:
    biases = [Bias([token], beta) if token >= 0 else None for token in expected]
    rows = BiasedRows.of(Expected.of_next_tokens(biases))
    assert rows is not None
    return rows


@pytest.mark.parametrize(
    ("probs", "beta", "expected", "token"),
    [
        # (1 - b) 0.3 + b >= (1 - b) 0.5 from b = 1/6 on
        ([0.2, 0.5, 0.3], 0.16, 2, 1),
        ([0.2, 0.5, 0.3], 0.17, 2, 2),
        ([0.0, 1.0, 0.0], 0.99, 2, 1),  # forbidden: never
        ([0.0, 1.0 - 1e-6, 1e-6], 0.49, 2, 1),
        ([0.0, 1.0 - 1e-6, 1e-6], 0.51, 2, 2),
        ([0.2, 0.5, 0.3], 1.0, 0, 0),
    ],
)
def test_greedy_rule(probs, beta, expected, token):
    chosen = prefer(
        torch.tensor([1]),
        torch.tensor([probs]),
        rows_of([expected], beta),
        torch.tensor([True]),
        torch.zeros(1),
    )
    assert chosen.tolist() == [token]


def test_sampled_tokens_follow_the_mixture():
    probs, beta, n = torch.tensor([0.6, 0.3, 0.1]), 0.25, 40_000
    generator = torch.Generator().manual_seed(0)
    sampled = torch.multinomial(probs, n, replacement=True, generator=generator)
    coins = torch.rand(n, generator=generator)
    biased = rows_of([2] * n, beta)
    tokens = prefer(sampled, probs.expand(n, 3), biased, torch.zeros(n, dtype=torch.bool), coins)
    share = torch.bincount(tokens, minlength=3) / n
    torch.testing.assert_close(share, 0.75 * probs + torch.tensor([0, 0, 0.25]), atol=0.01, rtol=0)


def test_coins_are_uniform_and_depend_on_seed_and_position_alone():
    seeds, positions = torch.arange(20_000) // 100, torch.arange(20_000) % 100
    coins = coins_of(seeds, positions)
    assert torch.equal(coins, coins_of(seeds, positions))
    assert len(coins.unique()) == len(coins)
    assert coins.min() >= 0 and coins.max() < 1
    counts = torch.histc(coins.float(), 20, 0, 1)
    assert (counts - 1000).abs().max() < 150
    # Neighbours do not go together.
    pairs = torch.stack([coins[:-1], coins[1:]])
    assert abs(torch.corrcoef(pairs)[0, 1]) < 0.03


def test_every_node_on_the_expected_path_is_biased_the_last_one_too():
    tree = TokenTree(
        np.array([5, 9, 6, 7]), np.array([-1, -1, 0, 1], np.int32), np.ones(4, np.float32)
    )
    # 5, 6 are on the path: root expects 5, node 5 expects 6, node 6 expects 8.
    assert Bias([5, 6, 8], 0.2).at_nodes(tree).tolist() == [5, 6, -1, 8, -1]
    assert Bias([5, 6], 0.2).at_nodes(tree).tolist() == [5, 6, -1, -1, -1]
    assert Bias([4], 0.2).at_nodes(tree).tolist() == [4, -1, -1, -1, -1]
    assert Bias([4], 0.2).at_nodes(TokenTree.empty()).tolist() == [4]


def accept(logits, trees, biases, **sampling):
    packed = pack([0] * len(trees), trees, 1 + max(map(len, trees)))
    biased = BiasedRows.of(Expected.of_trees(biases, trees, packed))
    info = Sampling(temperatures=torch.ones(len(trees), 1), **sampling)
    positions = torch.arange(packed.tokens.size)
    nodes = sampling.get("is_all_greedy") and packed.nodes()
    rows = logits if nodes is False or nodes is None else logits[torch.from_numpy(nodes)]
    return accept_on_host(
        rows, packed, info, positions, Multinomial(0), nodes if rows is not logits else None, biased
    )


def test_biased_walk_goes_on_where_the_target_is_nearly_sure():
    logits = logits_of(
        [0.1, 0.5, 0.4, 0.0],  # the target says 1, the draft 2: near enough
        [0.1, 0.45, 0.4, 0.05],  # the same again
        [0.1, 0.2, 0.1, 0.6],  # behind the draft's last node: 1 is expected, 3 is too likely
        [0.25, 0.3, 0.25, 0.2],  # the other request has no bias: 1
        [1.0, 0.0, 0.0, 0.0],
        [1.0, 0.0, 0.0, 0.0],
    )
    trees = [TokenTree.chain([2, 2]), TokenTree.chain([2])]
    accepted = accept(logits, trees, [Bias([2, 2, 1], 0.2), None], is_all_greedy=True)
    assert accepted.accept_lens.tolist() == [3, 1]
    assert accepted.predict.tolist()[:4] == [2, 2, 3, 1]


def test_bias_of_zero_and_no_bias_are_the_exact_rule():
    torch.manual_seed(0)
    logits = torch.randn(8, 4)
    trees = [TokenTree.chain([1, 2, 3]), TokenTree.chain([3, 3])]
    exact = accept(logits, trees, [None, None], is_all_greedy=True)
    packed = pack([0, 0], trees, 4)
    assert Expected.of_trees([None, None], trees, packed) is None
    assert exact.predict[packed.nodes()].tolist() == logits.argmax(-1)[packed.nodes()].tolist()


def test_sampled_walk_is_biased_and_greedy_requests_beside_it_follow_their_rule():
    n = 4000
    logits = logits_of([0.5, 0.3, 0.2], [0.1, 0.2, 0.7]).repeat(n, 1)
    trees = [TokenTree.chain([2])] * n
    greedy = torch.arange(n) % 2  # every other one
    accepted = accept(
        logits, trees, [Bias([2, 1], 0.25)] * n, top_ks=torch.where(greedy == 1, 1, 1 << 30)
    )
    first = accepted.predict.view(n, 2)[:, 0]
    sampled = torch.bincount(first[greedy == 0], minlength=3) / (n / 2)
    expected = 0.75 * torch.tensor([0.5, 0.3, 0.2]) + torch.tensor([0, 0, 0.25])
    torch.testing.assert_close(sampled, expected, atol=0.04, rtol=0)
    # Greedily: 0.75 * 0.2 + 0.25 = 0.4 >= 0.75 * 0.5, and 0.75 * 0.2 + 0.25 < 0.75 * 0.7.
    assert set(first[greedy == 1].tolist()) == {2}
    second = accepted.predict.view(n, 2)[:, 1][greedy == 1]
    assert (second == 1).float().mean() < 0.35


def next_tokens(logits, greedy: bool, biases, logprob=False):
    info = SimpleNamespace(
        is_all_greedy=greedy,
        top_ks=torch.ones(len(logits), dtype=torch.int64),
        sampling_seed=None,
    )
    batch = SimpleNamespace(
        sampling_info=info,
        seq_lens=torch.tensor([7] * len(logits)),
        return_logprob=logprob,
        is_prefill_only=False,
    )
    output = SimpleNamespace(
        next_token_logits=logits if greedy else torch.softmax(logits, -1),
        next_token_logprobs=torch.full((len(logits),), -9.0),
    )
    result = SimpleNamespace(logits_output=output, next_token_ids=logits.argmax(-1))
    prefer_next_tokens(result, batch, Expected.of_next_tokens(biases))
    return result


@pytest.mark.parametrize("greedy", [True, False])
def test_tokens_of_sglangs_own_sampler_are_biased_afterwards(greedy):
    logits = logits_of([0.5, 0.3, 0.2], [0.5, 0.3, 0.2], [0.5, 0.3, 0.2])
    biases = [Bias([1, 2], 0.2), None, Bias([2], 0.1)]
    result = next_tokens(logits, greedy, biases, logprob=True)
    assert result.next_token_ids.tolist() == [1, 0, 0]
    logprobs = result.logits_output.next_token_logprobs
    torch.testing.assert_close(logprobs, torch.tensor([0.3, 1.0, 0.5]).log().where(
        torch.tensor([True, False, True]), torch.tensor(-9.0)
    ))  # fmt: skip


@pytest.mark.parametrize(("tokens", "beta"), [([3, 10], 0.2), ([-1], 0.2), ([1], 1.5)])
def test_biases_that_are_none_are_refused(tokens, beta):
    with pytest.raises(ValueError, match=r"^(tokens|beta) must be"):
        Bias(tokens, beta).check(10)


def test_requests_that_write_nothing_have_nothing_to_bias():
    output = SimpleNamespace(next_token_logits=None)
    result = SimpleNamespace(logits_output=output, next_token_ids=torch.zeros(1))
    expected = Expected.of_next_tokens([Bias([1], 0.2)])
    prefer_next_tokens(result, SimpleNamespace(is_prefill_only=True), expected)
    assert result.next_token_ids.tolist() == [0]
