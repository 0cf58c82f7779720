"""A bound on the compiled grammars that a scheduler keeps.

SGLang 0.5.23 keeps every grammar that any request has brought until /flush_cache, twice: in its own
table (constrained/base_grammar_backend.py) and in xgrammar's compiler, which it gives no limit.
A schema of twelve fields takes 14 MiB, so that clients with ever new ones fill the memory. Past the
bound the oldest are forgotten, and compiled again when they are asked for; requests under way keep
their own.
"""

from collections.abc import Callable
from typing import Any

from sglang_ext import sglang_points
from sglang_ext.sglang_points.hooking import hook

# Of 64 KiB of text each at most (patterns.py), and wrong ones are kept as well.
MOST_GRAMMARS = 1024


def register(is_ours: Callable[[], bool], most_mib: Callable[[], int]) -> None:
    """Hook this into SGLang.

    Args:
        is_ours: whether this server speculates with our algorithm; others are left as they are.
        most_mib: what compiled grammars may take, in MiB.
    """

    def made(_result: None, backend: Any, *_args: Any, **_kwargs: Any) -> None:
        if is_ours():
            backend.grammar_compiler = limited(backend._tokenizer_info, most_mib() << 20)

    def kept(_result: None, backend: Any, *_args: Any, **_kwargs: Any) -> None:
        if is_ours():
            bound(backend.cache, most_mib() << 20)

    hook(sglang_points.COMPILER, made)
    hook(sglang_points.GRAMMAR_CACHE, kept)


def limited(tokenizer_info: Any, most_bytes: int) -> Any:
    """An xgrammar.GrammarCompiler for a tokenizer, whose cache has a limit."""
    from xgrammar import GrammarCompiler

    return GrammarCompiler(tokenizer_info, cache_limit_bytes=most_bytes)


def bound(cache: dict[Any, Any], most_bytes: int) -> None:
    """Drop the oldest of SGLang's grammars while they are more than 1024 or take too much.

    Args:
        cache: by what requests asked for; changed.
        most_bytes: of compiled grammars, by xgrammar's count; other compilers do not tell.
    """
    sizes = {key: _bytes_of(value) for key, value in cache.items()}
    total = sum(sizes.values())
    for key, size in sizes.items():
        if total <= most_bytes and len(cache) <= MOST_GRAMMARS:
            return
        del cache[key]
        total -= size


def _bytes_of(grammar: Any) -> int:
    # With a reasoning parser the grammar is one level below.
    compiled = getattr(getattr(grammar, "grammar", None) or grammar, "ctx", None)
    return int(getattr(compiled, "memory_size_bytes", 0))
