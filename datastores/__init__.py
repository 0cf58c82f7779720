"""Tokens in, continuations out: SSSD's input tries and datastore, without torch or SGLang.

Compiled functions are kept in numba's cache, which notices a change of the file that a function
is in but not of those it calls into: after editing one, delete __pycache__/*.nb?.
"""

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
