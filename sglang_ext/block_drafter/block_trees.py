"""A drafted block as a token tree: the chain, and other tokens where the block is unsure."""

import heapq
from collections.abc import Container

import numpy as np

from sglang_ext.block_drafter.block_predictor import Block
from sglang_ext.block_drafter.kept_tokens import FIRST, KeptTokens
from sglang_ext.tree import NO_PARENT, TokenTree


def block_tree(
    block: Block, kept: KeptTokens, max_nodes: int, ends: Container[int], sure: float = 1.0
) -> TokenTree:
    """The likeliest `max_nodes` nodes of what a block may say, best first.

    The drafter predicts each place by itself, so a path's probability is the product of its
    places'. With one choice a place it is the chain of SpecDec (arXiv 2203.16487); branches are
    ours. No path goes through a token that was not kept.

    Args:
        ends: tokens that end an output: nothing lies behind them.
        sure: a place whose likeliest token has this probability has no side branch.
    """
    ids = kept.ids(block.rows)
    usable = block.rows >= FIRST
    usable[:, 1:] &= block.logprobs[:, :1] < np.log(sure)
    # A path ends where the drafter's own choice is a token that it cannot name.
    unnamed = np.flatnonzero(~usable[:, 0])
    depth = int(unnamed[0]) + 1 if len(unnamed) else len(ids)
    options = [
        [(float(block.logprobs[at, i]), int(ids[at, i])) for i in np.flatnonzero(usable[at])]
        for at in range(depth)
    ]
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    logprobs: list[float] = []
    waiting: list[tuple[float, int, int, int, float]] = []  # -score, depth, parent, token, logprob

    def offer(at: int, parent: int, score: float) -> None:
        for logprob, token in options[at] if at < depth else ():
            heapq.heappush(waiting, (-(score + logprob), at, parent, token, logprob))

    offer(0, NO_PARENT, 0.0)
    while waiting and len(tokens) < max_nodes:
        negative, at, parent, token, logprob = heapq.heappop(waiting)
        tokens.append(token)
        parents.append(parent)
        scores.append(-negative)
        logprobs.append(min(logprob, 0.0))
        if token not in ends:
            offer(at + 1, len(tokens) - 1, -negative)
    if not tokens:
        return TokenTree.empty()
    return TokenTree(
        np.array(tokens, dtype=np.int64),
        np.array(parents, dtype=np.int32),
        np.exp(np.array(scores, dtype=np.float32)),
        logprobs=np.array(logprobs, dtype=np.float32),
    )
