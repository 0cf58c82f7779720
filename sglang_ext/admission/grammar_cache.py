"""A bound on the compiled grammars that a scheduler keeps.

SGLang 0.5.23 keeps every grammar that any request has brought until /flush_cache
(constrained/base_grammar_backend.py, and the cache of xgrammar's compiler, which has no limit
there): clients with ever new schemas fill the memory. Past a bound all are forgotten at once, and
compiled again when they are asked for; requests under way keep their own.
"""

import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

# Of 64 KiB of text each at most (patterns.py), and wrong ones are kept as well.
MOST_GRAMMARS = 1024


def register(is_ours: Callable[[], bool], most_mib: Callable[[], int]) -> None:
    """Hook this into SGLang.

    Args:
        is_ours: whether this server speculates with our algorithm; others are left as they are.
        most_mib: what compiled grammars may take, in MiB.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def kept(_result: Any, backend: Any, *_args: Any, **_kwargs: Any) -> None:
        if is_ours():
            bound(backend, most_mib() << 20)

    HookRegistry.register(
        "sglang.srt.constrained.base_grammar_backend.BaseGrammarBackend.set_cache",
        kept,
        HookType.AFTER,
    )


def bound(backend: Any, most_bytes: int) -> None:
    """Forget all grammars of SGLang's `backend` if they are too many, or take too much.

    Args:
        most_bytes: of compiled grammars, by xgrammar's count; other compilers do not tell.
    """
    count, size = len(backend.cache), _compiled_bytes(backend)
    if count > MOST_GRAMMARS or size > most_bytes:
        backend.reset()
        logger.info(
            "%d grammars of %.1f MiB are forgotten, to be compiled again when asked for "
            "(--grammar-cache-mb)",
            count,
            size / (1 << 20),
        )


def _compiled_bytes(backend: Any) -> int:
    # With a reasoning parser the compiler is one level below.
    for owner in (backend, getattr(backend, "grammar_backend", None)):
        compiler: Any = getattr(owner, "grammar_compiler", None)
        if compiler is not None and hasattr(compiler, "get_cache_size_bytes"):
            return int(compiler.get_cache_size_bytes())
    return 0
