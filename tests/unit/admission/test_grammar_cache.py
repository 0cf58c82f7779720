"""Compiled grammars are bounded: SGLang's own backend class, xgrammar's own compiler."""

import pytest
import xgrammar
from sglang.srt.constrained.base_grammar_backend import BaseGrammarBackend
from sglang.srt.plugins import hook_registry

from sglang_ext.admission import grammar_cache

MIB = 1 << 20


class Backend(BaseGrammarBackend):
    """A small vocabulary's backend, without threads."""

    def __init__(self):
        self.cache = {}
        info = xgrammar.TokenizerInfo([*"abcdefgh", "</s>"], stop_token_ids=[8])
        self.grammar_compiler = xgrammar.GrammarCompiler(info)

    def reset(self):
        super().reset()
        self.grammar_compiler.clear_cache()

    def compile(self, number: int) -> None:
        text = f'root ::= "{"ab" * number}"'
        self.set_cache(("ebnf", text), self.grammar_compiler.compile_grammar(text))


def test_grammars_within_the_bounds_are_kept():
    backend = Backend()
    backend.compile(1)
    grammar_cache.bound(backend, MIB)
    assert len(backend.cache) == 1


def test_grammars_that_take_too_much_are_forgotten():
    backend = Backend()
    for number in range(1, 20):
        backend.compile(number)
    size = backend.grammar_compiler.get_cache_size_bytes()
    grammar_cache.bound(backend, size)
    assert len(backend.cache) == 19
    grammar_cache.bound(backend, size - 1)
    assert not backend.cache
    assert backend.grammar_compiler.get_cache_size_bytes() < size


def test_too_many_grammars_are_forgotten_whatever_they_take():
    backend = Backend()
    del backend.grammar_compiler  # not every backend has xgrammar's
    backend.reset = backend.cache.clear
    backend.cache.update((("regex", str(n)), None) for n in range(grammar_cache.MOST_GRAMMARS))
    grammar_cache.bound(backend, 1)
    assert len(backend.cache) == grammar_cache.MOST_GRAMMARS
    backend.cache["regex", "one more"] = None
    grammar_cache.bound(backend, 1)
    assert not backend.cache


@pytest.mark.parametrize("ours", [True, False])
def test_every_grammar_that_is_kept_is_counted(monkeypatch, ours):
    hooks = []
    monkeypatch.setattr(
        hook_registry.HookRegistry, "register", lambda target, hook, kind: hooks.append(hook)
    )
    grammar_cache.register(lambda: ours, lambda: 1)
    backend = Backend()
    backend.cache.update((("regex", str(n)), None) for n in range(2000))
    hooks[0](None, backend, ("regex", "x"), None)
    assert bool(backend.cache) is not ours
