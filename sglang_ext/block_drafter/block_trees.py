"""Drafted paths as a token tree: the chain, and other tokens where the block is unsure."""

from collections.abc import Container

import numpy as np

from sglang_ext.block_drafter.block_paths import Paths
from sglang_ext.block_drafter.kept_tokens import FIRST, KeptTokens
from sglang_ext.tree import NO_PARENT, TokenTree


def block_tree(paths: Paths, kept: KeptTokens, max_nodes: int, ends: Container[int]) -> TokenTree:
    """The likeliest `max_nodes` nodes of what may follow, best first.

    With one choice a place it is the chain of SpecDec (arXiv 2203.16487); branches are ours. No
    path goes through a token that was not kept.

    Args:
        ends: tokens that end an output: nothing lies behind them.
    """
    ids = kept.ids(paths.rows)
    number: dict[int, int] = {NO_PARENT: NO_PARENT}
    chosen: list[int] = []
    # Of equal ones the first: a parent stands before its children, and is as likely at least.
    for node in np.argsort(-paths.scores, kind="stable").tolist():
        parent = int(paths.parents[node])
        named = paths.rows[node] >= FIRST
        if not named or parent not in number or _ends(ids, parent, ends):
            continue
        number[node] = len(chosen)
        chosen.append(node)
        if len(chosen) == max_nodes:
            break
    if not chosen:
        return TokenTree.empty()
    return TokenTree(
        ids[chosen],
        np.array([number[int(paths.parents[node])] for node in chosen], dtype=np.int32),
        np.exp(paths.scores[chosen]),
        logprobs=np.minimum(paths.logprobs[chosen], np.float32(0)),
    )


def _ends(ids: np.ndarray, node: int, ends: Container[int]) -> bool:
    return node != NO_PARENT and int(ids[node]) in ends
