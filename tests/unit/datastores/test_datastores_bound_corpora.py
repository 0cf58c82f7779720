"""Corpora of one namespace, and those that a request chooses: who reads what, before and after."""

import numpy as np
import pytest

from datastores import Datastore, DatastoreError, InputTrie, RetrievalConfig, retrieve
from datastores.corpus_names import corpus_key, may_read, namespace_and_name, shown_name

VOCAB = 1000
CONTEXT = [1, 2, 3]
CORPORA = {("docs", None): 100, ("sql", None): 200, ("docs", "acme"): 300, ("own", "globex"): 400}


def store_of(folder=None) -> Datastore:
    if folder is None:
        return Datastore(VOCAB)
    return Datastore.open(folder, vocab_size=VOCAB)


@pytest.fixture(params=["memory", "folder"])
def store(request, tmp_path):
    with store_of(tmp_path / "store" if request.param == "folder" else None) as made:
        for (name, namespace), first in CORPORA.items():
            made.add_corpus(name, [[*CONTEXT, *range(first, first + 4)]], namespace)
        yield made


def firsts(store, namespace, corpora=None) -> set[int]:
    """The first token of each corpus that a draft is from."""
    trie = InputTrie(RetrievalConfig())
    trie.extend(np.array(CONTEXT))
    drafted = retrieve([trie], store.snapshot(namespace, corpora), 40)[0].tokens.tolist()
    return set(drafted) & set(CORPORA.values())


def test_a_key_says_whose_a_corpus_is():
    key = corpus_key("docs", "acme")
    assert namespace_and_name(key) == ("acme", "docs") and shown_name(key) == "acme/docs"
    assert namespace_and_name(corpus_key("a/b")) == (None, "a/b")
    assert may_read(key, "acme", {"docs"}) and not may_read(key, "globex", None)
    assert may_read("docs", "globex", None) and not may_read("docs", "globex", {"sql"})
    for wrong in (("a\x1fb", None), ("a", "b\x1fc")):
        with pytest.raises(ValueError, match="001F"):
            corpus_key(*wrong)


def test_a_namespace_reads_the_shared_corpora_and_its_own(store):
    assert firsts(store, "acme") == {100, 200, 300}
    assert firsts(store, "globex") == {100, 200, 400}
    assert firsts(store, "default") == {100, 200}


def test_a_request_reads_what_it_chooses_of_these(store):
    assert firsts(store, "acme", ["docs"]) == {100, 300}  # all of the name
    assert firsts(store, "globex", ["docs"]) == {100}
    assert firsts(store, "globex", ("own", "sql")) == {200, 400}
    assert firsts(store, "acme", ["own"]) == firsts(store, "acme", []) == set()
    assert store.snapshot("acme", ["sql", "docs"]) is store.snapshot("acme", ("docs", "sql"))


def test_names_are_listed_and_taken_once(store):
    assert store.list_corpora() == {n: 7 for n in ("docs", "sql", "acme/docs", "globex/own")}
    assert set(store.corpus_names()) == {(namespace, name) for name, namespace in CORPORA}
    for name, namespace in (("docs", None), ("docs", "acme"), ("acme/docs", None)):
        with pytest.raises(DatastoreError, match="exists already"):
            store.add_corpus(name, [[5]], namespace)
    with pytest.raises(DatastoreError, match="001F"):
        store.add_corpus("a\x1fb", [[5]])


def test_a_removed_corpus_is_gone_and_no_other(store):
    store.remove_corpus("acme/docs")
    assert firsts(store, "acme") == {100, 200}
    with pytest.raises(DatastoreError, match="'globex/own'"):
        store.remove_corpus("acme/docs")


def test_with_a_namespace_its_corpora_go(store):
    store.add([9, 8, 7], "acme")
    store.flush(10)
    assert store.delete_namespace("acme") == 10
    assert firsts(store, "acme") == firsts(store, "default") == {100, 200}
    assert firsts(store, "globex") == {100, 200, 400}


def test_whose_they_are_survives_a_restart(tmp_path):
    with store_of(tmp_path / "store") as made:
        made.add_corpus("own", [[*CONTEXT, 300]], "acme")
    with store_of(tmp_path / "store") as again:
        assert (firsts(again, "acme"), firsts(again, "globex")) == ({300}, set())
        again.delete_namespace("acme")
        assert again.list_corpora() == {}
    left = b"".join(p.read_bytes() for p in (tmp_path / "store").iterdir() if p.is_file())
    assert b"acme" not in left
