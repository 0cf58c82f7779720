"""Corpora over HTTP: what is read, what is refused, and with which words."""

import asyncio
import json
import threading
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

from sglang_ext.api.datastore import corpora, protocol
from sglang_ext.api.datastore.control import serve
from tests.unit.api.datastore.fake_drafters import Owner, Plain


class Tokenizer:
    """A token per character."""

    def encode(self, text, add_special_tokens):
        return [ord(c) % 100 for c in text]


@dataclass
class Info:
    corpora: dict[str, int]


class FakeDatastore:
    def __init__(self):
        self.added = {}
        self.peers = {}

    def info(self):
        return Info({name: 1 for name in self.added} | {"taken": 1})

    def add_for_peer(self, name, documents):
        self.peers[name] = [d.tolist() for d in documents]
        return 0

    def add_corpus(self, name, documents):
        self.added[name] = [d.tolist() for d in documents]
        return sum(map(len, documents))


class Keeper(Owner):
    """Keeps named corpora in its datastore."""

    def add_corpus(self, name, documents):
        return self._store.add_corpus(name, documents)


class Peer(Plain):
    def __init__(self, store):
        self._store = store

    def add_corpus(self, name, documents):
        return self._store.add_for_peer(name, documents)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("s")
        patch.setenv(protocol.FOLDER_VARIABLE, str(folder))
        store = FakeDatastore()
        server = serve([Keeper(store), Peer(store)])
        yield store
        server.shutdown()
        server.server_close()
        assert not list(folder.glob("*.npz"))


@pytest.fixture
def datastore(served):
    served.added.clear()
    served.peers.clear()
    return served


def add(max_tokens=1000, **fields):
    fields = {"corpus_id": "c", "file_path": None, "documents": None} | fields
    request = SimpleNamespace(**fields)
    return asyncio.run(corpora.add_external_corpus(Tokenizer(), request, max_tokens))


def test_documents_arrive_whole_and_empty_ones_are_left_out(datastore):
    result = add(documents=["ab", "", "cde"])
    assert result.success and result.loaded_token_count == 5 and result.corpus_id == "c"
    assert datastore.added["c"] == [[97, 98], [99, 0, 1]]
    assert datastore.peers == datastore.added  # so does another drafter that keeps corpora


def test_a_file_of_strings_and_objects(datastore, tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text('"ab"\n\n{"text": "cd", "id": 4}\n{"content": "e"}\n')
    assert add(file_path=str(path)).loaded_token_count == 5


def test_documents_past_the_limit_are_cut_off(datastore):
    result = add(documents=["ab", "cde"], max_tokens=4)
    assert result.success and "(truncated: exceeded 4 token limit)" in result.message
    assert datastore.added["c"] == [[97, 98]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "expected either file_path or documents"),
        ({"documents": "text"}, "documents must be a list of strings, got 'text'"),
        ({"documents": ["a", 5]}, "documents[1] must be a string, got 5"),
        ({"documents": ["", ""]}, "corpus 'c' holds no text"),
        ({"documents": []}, "corpus 'c' holds no text"),
        ({"documents": ["a"], "corpus_id": "taken"}, "corpus 'taken' exists already"),
        ({"documents": ["a"], "corpus_id": 7}, "corpus_id must be a string"),
        ({"file_path": "/nowhere/c.jsonl"}, "there is no file '/nowhere/c.jsonl'"),
        ({"file_path": 5}, "there is no file 5"),
        ({"file_path": "a" * 5000}, "File name too long"),
    ],
)
def test_bad_requests_are_named(fields, message, datastore):
    result = add(**fields)
    assert not result.success and message in result.message
    assert not datastore.added


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'"a"\n{"txt": "b"}\n', "line 2: no field text or content; fields: ['txt']"),
        (b'{"text": 5}\n', "line 1: expected a JSON string, or an object with a string"),
        (b"[1]\n", "line 1: expected a JSON string"),
        (b'"a"\n"b\n', "line 2: not JSON"),
        (b'"a"\n\xff\xfe\n', "line 2: not UTF-8"),
        (b'"' + b"x" * 50 + b'"\n', "more than 40 tokens"),
        (b"", "corpus 'c' holds no text"),
    ],
)
def test_bad_files_are_named_with_their_line(content, message, datastore, tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_bytes(content)
    result = add(file_path=str(path), max_tokens=40)
    assert not result.success and message in result.message


def test_a_huge_line_is_refused_before_it_is_read(datastore, tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "MAX_LINE_BYTES", 1 << 20)
    path = tmp_path / "c.jsonl"
    with path.open("wb") as file:
        file.write(json.dumps("first").encode() + b"\n")
        file.truncate(1 << 30)  # sparse: a line of 1 GiB
    result = add(file_path=str(path))
    assert not result.success and "line 2: longer than 1 MiB" in result.message


def test_one_corpus_at_a_time(datastore):
    with corpora._loading:
        assert "another corpus is being loaded" in add(documents=["a"]).message
    assert add(documents=["a"]).success


def test_one_thread_tokenizes_whoever_asks(datastore):
    """malloc keeps tens of MiB for each thread that has copied a tokenizer."""
    seen = []

    class Noting(Tokenizer):
        def encode(self, text, add_special_tokens):
            seen.append(threading.get_ident())
            return super().encode(text, add_special_tokens)

        def __deepcopy__(self, memo):
            seen.append(threading.get_ident())
            return self

    for name in "abc":
        request = SimpleNamespace(corpus_id=name, file_path=None, documents=["x"])
        thread = threading.Thread(target=corpora.load, args=(Noting(), request, 10))
        thread.start()
        thread.join()
    assert sorted(datastore.added) == ["a", "b", "c"]
    assert len(seen) == 6 and len(set(seen)) == 1


def test_tokens_are_int32(datastore):
    documents, _ = corpora._tokenized(Tokenizer(), [("x", "ab")], 10, refuse=True)
    assert documents[0].dtype == np.int32
