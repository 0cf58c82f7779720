"""A rule for the next token that a transformer's weights can hold: known outputs, wide gaps.

Random weights alone give logits of which the two best are within bfloat16's rounding of each other
every few tokens, so that two right implementations part soon and the rest of their outputs says
nothing. Here every token has one of a few symbols. The next token follows from the last token's
symbol and from those some positions back, through random tables:

    state_0 = symbol(token[i]); state_n = table_n[state_(n-1), symbol(token[i - lags[n-1]])]

The last table names four symbols, the likeliest first, each spoken as one token. checkpoint.py
writes weights that compute it by attention (the lags), gated products (the tables) and the head.
A mask, position or KV row that is wrong by one token gives another output.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

# Levels of the four candidates' logits, the first one's being 1. No ratio of two small numbers.
LEVELS = (1.0, 0.53, 0.31, 0.17)
LAGS = (1, 4)


class Rule:
    """The next token's four candidates, from the tokens before it.

    Args:
        symbols: how many there are; each is spoken as the token `first_spoken` + symbol.
    """

    def __init__(
        self, vocab_size: int, symbols: int, first_spoken: int, lags: Sequence[int] = LAGS,
        seed: int = 0,
    ):  # fmt: skip
        rng = np.random.default_rng([seed, vocab_size, symbols])
        self.vocab_size = vocab_size
        self.symbols = symbols
        self.lags = tuple(lags)
        self.spoken: npt.NDArray[np.int64] = first_spoken + np.arange(symbols)
        self.symbol_of: npt.NDArray[np.int64] = rng.integers(0, symbols, vocab_size)
        self.symbol_of[self.spoken] = np.arange(symbols)
        self.tables: list[npt.NDArray[np.int64]] = [
            rng.integers(0, symbols, (symbols, symbols)) for _ in self.lags[:-1]
        ]
        order = rng.permuted(np.tile(np.arange(symbols), (symbols * symbols, 1)), axis=1)
        self.last_table = order[:, : len(LEVELS)].reshape(symbols, symbols, len(LEVELS))

    def candidates(self, tokens: Sequence[int]) -> list[int]:
        """The four likeliest next tokens, best first; at least max(lags) + 1 tokens are needed."""
        state = self.symbol_of[tokens[-1]]
        for table, lag in zip(self.tables, self.lags[:-1], strict=True):
            state = table[state, self.symbol_of[tokens[-1 - lag]]]
        last = self.last_table[state, self.symbol_of[tokens[-1 - self.lags[-1]]]]
        return [int(token) for token in self.spoken[last]]

    def continuation(self, prompt: Sequence[int], count: int) -> list[int]:
        """What greedy decoding writes after `prompt`."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(self.candidates(tokens)[0])
        return tokens[len(prompt) :]

    def prompt(self, length: int, seed: int) -> list[int]:
        """A prompt of random tokens, those below `first_spoken` left out (special ones)."""
        rng = np.random.default_rng([seed, length])
        return [int(t) for t in rng.integers(self.spoken[0], self.vocab_size, length)]


def with_wrong_tokens(output: Sequence[int], right: float, vocab_size: int, seed: int) -> list[int]:
    """`output` with each token replaced by another with the chance 1 - `right`, independently."""
    rng = np.random.default_rng([seed, len(output)])
    wrong = rng.random(len(output)) >= right
    other = rng.integers(1, vocab_size, len(output))
    return [
        int((token + step) % vocab_size) if replaced else int(token)
        for token, step, replaced in zip(output, other, wrong, strict=True)
    ]
