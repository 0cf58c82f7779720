"""Grammars that come to an end where no token is right: the request is wrong, not the server.

`root ::= root` has no sentence, and `root ::= "a" b`, `b ::= b` none behind its first letter. With
no token left SGLang 0.5.23 samples from nothing: torch refuses that and the scheduler ends
(layers/sampler.py), or a token comes that the grammar does not accept, which is a 500
(managers/scheduler_components/batch_result_processor.py). Here any token may come, and its
refusal, which ends the request, is told as the client's error. For xgrammar, SGLang's default.
"""

from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import torch

from sglang_ext import sglang_points
from sglang_ext.sglang_points.hooking import hook

DEAD_END = (
    "the grammar (ebnf, regex, json_schema or structural_tag) allows no token after what is "
    "written so far: give each of its rules an end that can be reached"
)


def register(is_ours: Callable[[], bool]) -> None:
    """Hook this into SGLang.

    Args:
        is_ours: whether this server speculates with our algorithm; others are left as they are.
    """

    def apply(original: Any, grammar: Any, logits: Any, vocab_mask: Any) -> Any:
        if is_ours():
            allow_all_at_dead_ends(vocab_mask)
        return original(grammar, logits, vocab_mask)

    def accept(original: Any, grammar: Any, token: int) -> Any:
        try:
            return original(grammar, token)
        except ValueError:
            if is_ours() and is_dead_end(grammar):
                raise ValueError(DEAD_END) from None
            raise

    def abort(original: Any, reason: Any, message: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(message, str) and message.endswith(DEAD_END):
            return original(reason, DEAD_END, HTTPStatus.BAD_REQUEST, "BadRequestError")
        return original(reason, message, *args, **kwargs)

    hook(sglang_points.VOCAB_MASK, apply)
    hook(sglang_points.ACCEPT_TOKEN, accept)
    hook(sglang_points.ABORT, abort)


def allow_all_at_dead_ends(vocab_mask: torch.Tensor) -> None:
    """Allow every token in rows that allow none.

    Args:
        vocab_mask: int32[rows, ceil(vocab / 32)], a bit for each allowed token; changed. On a
            device nothing waits for it.
    """
    dead = (vocab_mask == 0).all(dim=-1, keepdim=True)
    vocab_mask.masked_fill_(dead, -1)


def is_dead_end(grammar: Any) -> bool:
    """Whether an XGrammarGrammar, as it stands, allows no token at all."""
    if grammar.is_terminated():
        return False
    mask = grammar.allocate_vocab_mask(grammar.vocab_size, 1, "cpu")
    grammar.fill_vocab_mask(mask, 0)
    return not mask.any()
