"""A datastore that keeps names and counts, for tests of the routes over it."""

from datastores import DatastoreInfo
from tests.unit.api.datastore.fake_drafters import Owner


class Store:
    """Two namespaces, and corpora that are added."""

    follows = False

    def __init__(self):
        self.tokens = {"a": 5, "b": 7}
        self.corpora = {"c": 3}
        self.num_tokens = 12

    def info(self):
        named = "num_documents sub_indices nbytes disk_bytes queued_documents queued_tokens"
        counts = dict.fromkeys(
            [*named.split(), "unfolded_tokens", "dropped_documents", "evicted_tokens"], 0
        )
        return DatastoreInfo(
            path=None,
            follows=False,
            vocab_size=10,
            tokenizer_fingerprint="f",
            max_tokens=100,
            num_tokens=self.num_tokens,
            corpora=dict(self.corpora),
            namespaces=dict(self.tokens),
            building=(),
            bytes_per_token=6.0,
            ingest_lag=0.0,
            problems=(),
            **counts,
        )

    def namespaces(self):
        return self.tokens

    def corpus_names(self):
        return [(None, name) for name in self.corpora]

    def flush(self, timeout):
        pass

    def delete_namespace(self, namespace):
        return self.tokens.pop(namespace, 0)

    def delete_document(self, name, namespace):
        return 3 if name == "r" else 0

    def add_corpus(self, name, documents):
        self.corpora[name] = sum(map(len, documents))
        return self.corpora[name]

    def add_bound_corpus(self, namespace, name, documents):
        return self.add_corpus(f"{namespace}/{name}", documents)

    def remove_corpus(self, name):
        self.corpora.pop(name, None)


class Keeper(Owner):
    """Keeps named corpora in its datastore."""

    def add_corpus(self, name, documents):
        return self._store.add_corpus(name, documents)

    def add_bound_corpus(self, namespace, name, documents):
        return self._store.add_bound_corpus(namespace, name, documents)

    def remove_corpus(self, name):
        self._store.remove_corpus(name)
