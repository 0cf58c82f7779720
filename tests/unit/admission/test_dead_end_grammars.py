"""Grammars without a sentence: xgrammar's own matchers, SGLang's own classes, our hooks on them."""

from http import HTTPStatus

import pytest
import torch
import xgrammar
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.plugins import hook_registry

from sglang_ext.admission import grammars

# The last token ends an output.
VOCAB = ["a", "b", "c", "</s>"]


def matcher(ebnf: str) -> XGrammarGrammar:
    info = xgrammar.TokenizerInfo(VOCAB, stop_token_ids=[3])
    compiled = xgrammar.GrammarCompiler(info).compile_grammar(ebnf)
    made = xgrammar.GrammarMatcher(compiled, max_rollback_tokens=200)
    return XGrammarGrammar(made, len(VOCAB), compiled, None, ebnf)


@pytest.fixture
def hooks(monkeypatch):
    """What is registered, by the last part of its target."""
    found = {}
    monkeypatch.setattr(
        hook_registry.HookRegistry,
        "register",
        lambda target, hook, kind: found.update({target.rsplit(".", 1)[1]: hook}),
    )
    grammars.register(lambda: True)
    return found


def test_a_grammar_without_a_sentence_is_a_dead_end_at_once():
    assert grammars.is_dead_end(matcher("root ::= root"))


def test_a_dead_end_may_come_later():
    grammar = matcher('root ::= "a" b\nb ::= b')
    assert not grammars.is_dead_end(grammar)
    grammar.accept_token(0)
    assert grammars.is_dead_end(grammar)


def test_the_end_of_a_sentence_is_no_dead_end():
    grammar = matcher('root ::= "a"')
    grammar.accept_token(0)
    assert not grammars.is_dead_end(grammar)
    grammar.accept_token(3)
    assert not grammars.is_dead_end(grammar)


def test_rows_that_allow_nothing_allow_all():
    mask = torch.tensor([[0, 0], [0, 4], [-1, -1]], dtype=torch.int32)
    grammars.allow_all_at_dead_ends(mask)
    assert mask.tolist() == [[-1, -1], [0, 4], [-1, -1]]


def test_masked_logits_can_be_sampled_at_a_dead_end(hooks):
    grammar = matcher("root ::= root")
    mask = grammar.allocate_vocab_mask(len(VOCAB), 1, "cpu")
    grammar.fill_vocab_mask(mask, 0)
    logits = torch.zeros(1, len(VOCAB))
    hooks["apply_vocab_mask"](XGrammarGrammar.apply_vocab_mask, grammar, logits, mask)
    assert torch.multinomial(torch.softmax(logits, -1), 1).numel() == 1


def test_a_dead_end_is_the_clients_error(hooks):
    grammar = matcher("root ::= root")
    with pytest.raises(ValueError, match="allows no token") as error:
        hooks["accept_token"](XGrammarGrammar.accept_token, grammar, 0)
    reason = FINISH_ABORT.__new__(FINISH_ABORT)
    told = f"Grammar accept_token failed: {error.value}", HTTPStatus.INTERNAL_SERVER_ERROR, "Error"
    hooks["__init__"](FINISH_ABORT.__init__, reason, *told)
    assert reason.to_json()["status_code"] == HTTPStatus.BAD_REQUEST
    assert reason.to_json()["message"] == grammars.DEAD_END


def test_a_wrong_token_elsewhere_stays_the_servers_error(hooks):
    with pytest.raises(ValueError, match="not accepted"):
        hooks["accept_token"](XGrammarGrammar.accept_token, matcher('root ::= "a"'), 1)
    reason = FINISH_ABORT.__new__(FINISH_ABORT)
    hooks["__init__"](FINISH_ABORT.__init__, reason, "lost", 500, "InternalServerError")
    assert reason.to_json()["status_code"] == 500
