"""Compiled grammars are bounded: SGLang's own backend class, xgrammar's own compiler."""

from types import SimpleNamespace

import pytest
import xgrammar
from sglang.srt.plugins import hook_registry

from sglang_ext.admission import grammar_cache

INFO = xgrammar.TokenizerInfo([*"abcdefgh", "</s>"], stop_token_ids=[8])


def compiled(compiler: xgrammar.GrammarCompiler, number: int) -> xgrammar.CompiledGrammar:
    return compiler.compile_grammar(f'root ::= "{"ab" * number}"')


def cache_of(count: int) -> dict:
    compiler = xgrammar.GrammarCompiler(INFO)
    return {n: SimpleNamespace(ctx=compiled(compiler, n)) for n in range(1, count + 1)}


def bytes_of(cache: dict) -> int:
    return sum(value.ctx.memory_size_bytes for value in cache.values())


def test_grammars_within_the_bound_are_kept():
    cache = cache_of(5)
    grammar_cache.bound(cache, bytes_of(cache))
    assert list(cache) == [1, 2, 3, 4, 5]


def test_the_oldest_are_dropped_where_all_take_too_much():
    cache = cache_of(5)
    most = bytes_of({n: cache[n] for n in (3, 4, 5)})
    grammar_cache.bound(cache, most)
    assert list(cache) == [3, 4, 5]


def test_grammars_behind_a_reasoning_parser_count():
    cache = {n: SimpleNamespace(grammar=value) for n, value in cache_of(5).items()}
    grammar_cache.bound(cache, 1)
    assert not cache


def test_too_many_are_dropped_whatever_they_take():
    cache = dict.fromkeys(range(grammar_cache.MOST_GRAMMARS + 3))
    grammar_cache.bound(cache, 1)
    assert next(iter(cache)) == 3 and len(cache) == grammar_cache.MOST_GRAMMARS


def test_the_compilers_own_cache_has_the_limit():
    compiler = grammar_cache.limited(INFO, 1 << 20)
    assert compiler.cache_limit_bytes == 1 << 20
    assert compiled(compiler, 2).tokenizer_info.vocab_size == 9


@pytest.mark.parametrize("ours", [True, False])
def test_both_hold_for_our_servers_alone(monkeypatch, ours):
    hooks = []
    monkeypatch.setattr(
        hook_registry.HookRegistry, "register", lambda target, hook, kind: hooks.append(hook)
    )
    grammar_cache.register(lambda: ours, lambda: 1)
    made, kept = hooks
    backend = SimpleNamespace(grammar_compiler=xgrammar.GrammarCompiler(INFO), _tokenizer_info=INFO)
    made(None, backend)
    assert backend.grammar_compiler.cache_limit_bytes == (1 << 20 if ours else -1)
    backend.cache = dict.fromkeys(range(2000))
    kept(None, backend, "key", None)
    assert len(backend.cache) == (grammar_cache.MOST_GRAMMARS if ours else 2000)
