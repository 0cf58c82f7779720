"""The base class of drafters, and what is refused for one."""

from types import SimpleNamespace

import pytest

from sglang_ext import drafters
from sglang_ext.drafters import (
    Drafter,
    DrafterContext,
    DrafterError,
    DraftRequest,
    load,
    load_all,
    load_class,
    overrides,
)
from sglang_ext.drafters.named_corpora import Corpora
from sglang_ext.options import Options
from sglang_ext.request_options import RequestOptions
from sglang_ext.tree import TokenTree

CONTEXT = DrafterContext(vocab_size=100, options=Options())


class Least(Drafter):
    """As little as a drafter may have."""

    def propose(self, requests, max_nodes):
        return [TokenTree.empty()] * len(requests)


def test_a_drafter_needs_propose_alone():
    drafter, request = Least(CONTEXT), DraftRequest("r", [1], [])
    drafter.prefill([request])
    drafter.prepare([request])
    assert [len(chain) for chain in drafter.prefill_draft([request], 4)] == [0]
    drafter.start(request)
    drafter.verified(request, TokenTree.empty(), [5])
    drafter.observe(request, [5])
    assert drafter.bias(request) is None
    drafter.finish(request, True)
    drafter.check({})
    drafter.forget(None)
    assert drafter.add_corpus("c", [[1]]) == 0 and drafter.list_corpora() == {}
    assert drafter.add_bound_corpus("n", "c", [[1]]) == 0
    assert drafter.counters == {} and drafter.datastore is None


def test_a_hook_counts_as_had_where_the_class_or_one_between_defines_it():
    class Biasing(Least):
        def bias(self, request):
            return None

    class Heir(Biasing):
        pass

    hooks = (Drafter.bias, Drafter.check, Drafter.prefill)
    assert [overrides(Heir(CONTEXT), hook) for hook in hooks] == [True, False, False]
    assert [overrides(Least, hook) for hook in (Drafter.propose, Drafter.bias)] == [True, False]


def test_prompts_read_elsewhere_are_prefilled_where_nothing_else_is_said():
    class Reader(Least):
        def prefill(self, requests):
            for request in requests:
                request.state = "read"

    request = DraftRequest("r", [1], [])
    Reader(CONTEXT).prepare([request])
    assert request.state == "read"


@pytest.fixture
def installed(monkeypatch):
    """Installs an object as the drafter `theirs`."""

    def install(made):
        point = SimpleNamespace(name="theirs", value="their_package:Theirs", load=lambda: made)
        monkeypatch.setattr(drafters, "entry_points", lambda group: [point])

    return install


class Duck:
    """Has all the methods, and no base class."""

    def __init__(self, context):
        pass

    def start(self, request):
        pass

    def propose(self, requests, max_nodes):
        return []

    observe = finish = start


@pytest.mark.parametrize("made", [Duck, Duck(None), lambda context: Duck(context), 7])
def test_what_does_not_inherit_is_refused_with_what_to_do(made, installed):
    installed(made)
    with pytest.raises(
        DrafterError,
        match=r"^drafter 'theirs' \(their_package:Theirs\) is no drafter: it must be a class that "
        r"inherits from sglang_ext\.drafters\.Drafter$",
    ):
        load("theirs", DrafterContext(vocab_size=5, options=Options()))


def test_a_drafter_without_propose_is_refused(installed):
    class Silent(Drafter):
        pass

    installed(Silent)
    with pytest.raises(DrafterError, match="has no method `propose`"):
        load_class("theirs")


def test_a_servers_drafters_are_made_once_each(installed):
    installed(Least)
    context = DrafterContext(vocab_size=5, options=Options(drafter="theirs"))
    made = load_all(context)
    assert list(made) == ["theirs"] and load("theirs", context) is made["theirs"]


def test_an_output_can_be_deleted_by_its_name_or_its_requests_id():
    assert DraftRequest("r", [1], []).deletion_name == "r"
    named = DraftRequest("r", [1], [], options=RequestOptions(ingest_name="job"))
    assert named.deletion_name == "job"


class Keeper(Least):
    """Keeps corpora of everybody."""

    def __init__(self, context):
        self.kept = {}

    def add_corpus(self, name, documents):
        self.kept[name] = len(documents)
        return len(documents)

    def remove_corpus(self, name):
        del self.kept[name]

    def list_corpora(self):
        return self.kept


class BindingKeeper(Keeper):
    def add_bound_corpus(self, namespace, name, documents):
        return self.add_corpus(f"{namespace}/{name}", documents)


def test_a_namespaces_corpus_goes_only_to_drafters_that_can_keep_it_to_it():
    simple, binding = Keeper(CONTEXT), BindingKeeper(CONTEXT)
    corpora = Corpora([Least(CONTEXT), simple, binding])
    assert corpora.add("all", [[1]]) == 1 and corpora.add("own", [[1], [2]], "acme") == 2
    assert simple.kept == {"all": 1} and binding.kept == {"all": 1, "acme/own": 2}
    assert corpora.tokens_by_name() == binding.kept
    corpora.remove("acme/own")
    assert simple.kept == binding.kept == {"all": 1}
    with pytest.raises(ValueError, match="corpora of one namespace"):
        Corpora([simple]).add("own", [[1]], "acme")
