"""Tokens in, continuations out: SSSD's input tries and datastore, without torch or SGLang."""

from .config import DatastoreError, RetrievalConfig
from .datastore import Datastore, DatastoreInfo
from .input_trie import InputTrie
from .retrieval import Draft, retrieve
from .warmup import warm_up

__all__ = [
    "Datastore",
    "DatastoreError",
    "DatastoreInfo",
    "Draft",
    "InputTrie",
    "RetrievalConfig",
    "retrieve",
    "warm_up",
]
