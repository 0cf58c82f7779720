"""SSSD's peers: each drafts by its own published rule, compared with the rule written plainly."""

import sys
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.drafters import Drafter, DrafterContext, DraftRequest
from sglang_ext.drafters.named_corpora import Corpora, documents_of
from sglang_ext.drafters.peers.pld import PromptLookupDrafter
from sglang_ext.drafters.peers.probes import RandomDrafter
from sglang_ext.drafters.peers.rest import RestDrafter, SuffixArray
from sglang_ext.drafters.sssd import RetrievalDrafter
from sglang_ext.options import Options
from sglang_ext.request_options import RequestOptions
from sglang_ext.tree import TokenTree

CONTEXT = DrafterContext(vocab_size=1000, options=Options())
# Few ids, so that n-grams repeat.
IDS = st.lists(st.integers(0, 3), max_size=40)


def request(prompt, output, rid: str = "r", **options) -> DraftRequest:
    return DraftRequest(rid, list(prompt), list(output), options=RequestOptions(**options))


def drafted(drafter: Drafter, asked: DraftRequest, max_nodes: int = 64) -> TokenTree:
    drafter.start(asked)
    (tree,) = drafter.propose([asked], max_nodes)
    tree.check(CONTEXT.vocab_size)
    return tree


def paths(tree: TokenTree) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def test_a_request_may_ask_for_drafts_from_its_own_tokens_alone():
    drafter = RetrievalDrafter(CONTEXT)
    drafter.add_corpus("c", [[5, 6, 7, 8, 9, 10]])
    both = [request([1, 2, 3, 5, 6], []), request([1, 5, 6, 7, 2, 5, 6], [], datastore=False)]
    for asked in both:
        drafter.start(asked)
    free, own = drafter.propose(both, 8)
    assert free.tokens.tolist()[:3] == [7, 8, 9]
    assert own.tokens.tolist() == [7, 2, 5, 6]


# -- PLD ------------------------------------------------------------------------------------------


def looked_up(text: list[int]) -> list[int]:
    """Its rule: n-grams of 3, 2, 1 tokens, the first place, 10 tokens."""
    for size in (3, 2, 1):
        for start in range(len(text) - size):
            if len(text) > size and text[start : start + size] == text[-size:]:
                return text[start + size : start + size + 10]
    return []


@given(IDS, st.lists(st.integers(0, 3), min_size=1, max_size=30))
def test_pld_drafts_what_followed_the_first_place(prompt, output):
    tree = drafted(PromptLookupDrafter(CONTEXT), request(prompt, output))
    assert tree.tokens.tolist() == looked_up([*prompt, *output])
    assert tree.parents.tolist() == list(range(-1, len(tree) - 1))


def test_pld_takes_in_what_is_written_between_drafts():
    drafter, asked = PromptLookupDrafter(CONTEXT), request([1, 2, 3], [9])
    drafter.start(asked)
    for token in [*range(500), 1, 2]:
        asked.output.append(token)
        drafter.observe(asked, [token])
    (tree,) = drafter.propose([asked], 4)
    assert tree.tokens.tolist() == [3, 9, 0, 1]


# -- REST -----------------------------------------------------------------------------------------


def rest_with(*documents) -> RestDrafter:
    drafter = RestDrafter(CONTEXT)
    assert drafter.add_corpus("c", documents) == sum(map(len, documents))
    return drafter


def continued(documents: list[list[int]], text: list[int]) -> Counter:
    """Its rule: every prefix of the 10 tokens behind each place of the longest suffix."""
    for size in range(min(16, len(text)), 1, -1):
        counts: Counter = Counter()
        places = 0
        for document in documents:
            for start in range(len(document) - size + 1):
                if document[start : start + size] == text[-size:]:
                    places += 1
                    behind = document[start + size : start + size + 10]
                    counts.update(tuple(behind[:n]) for n in range(1, len(behind) + 1))
        if places:
            return counts
    return Counter()


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), min_size=1), IDS, IDS)
def test_rest_drafts_the_most_frequent_continuations(documents, prompt, output):
    tree = drafted(rest_with(*documents), request(prompt, output), 8)
    counts = continued(documents, [*prompt, *output])
    found = paths(tree)
    assert len(set(found)) == len(found) == min(8, len(counts))
    got = [counts[path] for path in found]
    assert got == sorted(counts.values(), reverse=True)[:8]
    if got:
        assert np.allclose(tree.probs / tree.probs[0], np.array(got) / got[0])


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), min_size=1))
def test_rests_suffixes_are_sorted(documents):
    store = SuffixArray.of(documents)
    ends = [store.tokens[place : place + 26].tolist() for place in store.suffixes]
    assert ends == sorted(ends)
    assert len(ends) == sum(map(len, documents))


def test_rest_drafts_nothing_from_the_prompt_or_a_removed_corpus():
    asked = request([5, 6, 7, 5, 6], [5, 6])
    assert len(drafted(RestDrafter(CONTEXT), asked)) == 0
    drafter = rest_with([5, 6, 8])
    assert drafted(drafter, asked).tokens.tolist() == [8]
    with pytest.raises(ValueError, match="there already"):
        drafter.add_corpus("c", [[1]])
    drafter.remove_corpus("c")
    assert drafter.list_corpora() == {} and len(drafted(drafter, asked)) == 0


# -- suffix decoding ------------------------------------------------------------------------------


@pytest.fixture
def suffix():
    pytest.importorskip(
        "arctic_inference.suffix_decoding",
        reason="arctic-inference is not installed: docs/peers.md",
    )
    from sglang_ext.drafters.peers.suffix import SuffixDrafter

    return SuffixDrafter(CONTEXT)


def test_suffix_decoding_drafts_from_prompt_running_and_finished_outputs(suffix):
    running = request([1, 2, 3, 4, 1, 2], [3])
    assert drafted(suffix, running).tokens.tolist()[:1] == [4]
    running.output += [4, 50, 51, 52]
    suffix.observe(running, [4, 50, 51, 52])
    other = DraftRequest("o", [9], [50, 51])
    assert drafted(suffix, other).tokens.tolist() == [52]
    suffix.finish(running, True)
    (tree,) = suffix.propose([other], 8)
    assert tree.tokens.tolist() == [52]
    elsewhere = request([9], [50, 51], "e", namespace="b")
    assert len(drafted(suffix, elsewhere)) == 0


def test_suffix_decoding_keeps_no_output_that_is_not_to_be_ingested(suffix):
    for name, completed, ingest in (("a", True, False), ("b", False, True)):
        gone = request([1], [60, 61, 62], name, ingest=ingest)
        suffix.start(gone)
        suffix.finish(gone, completed)
        assert len(drafted(suffix, DraftRequest(f"after {name}", [9], [60, 61]))) == 0


def test_suffix_decoding_drafts_from_corpora_until_they_are_removed(suffix):
    assert suffix.add_corpus("c", [[70, 71, 72], [80, 81, 82]]) == 6
    assert drafted(suffix, DraftRequest("a", [9], [80, 81])).tokens.tolist() == [82]
    suffix.remove_corpus("c")
    assert len(drafted(suffix, DraftRequest("b", [9], [80, 81]))) == 0


class FakeSuffixCache:
    """As much of the package's cache as tells one from another."""

    def __init__(self, **_limits):
        self.responses: dict[str, list[int]] = {}

    def start_request(self, rid, prompt):
        self.responses[rid] = []

    def add_active_response(self, rid, tokens):
        self.responses[rid] += tokens.tolist()

    def stop_request(self, rid):
        pass


def test_suffix_decoding_forgets_a_deleted_namespace_and_keeps_the_others(monkeypatch):
    package = SimpleNamespace(SuffixDecodingCache=FakeSuffixCache)
    monkeypatch.setitem(sys.modules, "arctic_inference", package)
    monkeypatch.setitem(sys.modules, "arctic_inference.suffix_decoding", package)
    from sglang_ext.drafters.peers.suffix import SuffixDrafter

    drafter = SuffixDrafter(CONTEXT)

    def serve(rid, namespace):
        made = request([1], [60, 61], rid, namespace=namespace)
        drafter.start(made)
        known, made.state.cached_requests = made.state, ()
        drafter.finish(made, True)
        return known.responses

    for namespace in ("a", "b"):
        serve("one", namespace)
    drafter.forget("a")
    assert list(serve("two", "a")) == ["two"]
    assert list(serve("two", "b")) == ["one", "two"]
    drafter.forget(None, "one")
    assert list(serve("three", "b")) == ["three"]


# -- corpora --------------------------------------------------------------------------------------


class Keeper(RandomDrafter):
    def __init__(self, fails: bool = False):
        self.corpora: dict[str, list] = {}
        self._fails = fails

    def add_corpus(self, name, documents):
        if self._fails:
            raise ValueError("full")
        self.corpora[name] = documents
        return sum(map(len, documents))

    def remove_corpus(self, name):
        del self.corpora[name]

    def list_corpora(self):
        return {name: sum(map(len, documents)) for name, documents in self.corpora.items()}


def test_documents_run_through_the_chunks():
    assert documents_of([[1, 2], [3, -1, 4], [-1, -1, 5]]) == [[1, 2, 3], [4], [5]]


def test_every_drafter_that_keeps_corpora_gets_all():
    keepers = [Keeper(), Keeper()]
    corpora = Corpora([keepers[0], PromptLookupDrafter(CONTEXT), keepers[1]])
    assert corpora.add("c", [[1, 2], [3]]) == 3
    assert keepers[0].corpora == keepers[1].corpora == {"c": [[1, 2], [3]]}
    assert corpora.tokens_by_name() == {"c": 3}
    corpora.remove("c")
    assert not keepers[0].corpora and not keepers[1].corpora


def test_a_corpus_that_one_refuses_is_nobodys():
    first = Keeper()
    with pytest.raises(ValueError, match="full"):
        Corpora([first, Keeper(fails=True)]).add("c", [[1]])
    assert not first.corpora


def test_without_a_drafter_that_keeps_corpora_the_error_says_what_to_do():
    with pytest.raises(ValueError, match="--drafter sssd"):
        Corpora([PromptLookupDrafter(CONTEXT)]).add("c", [[1]])
