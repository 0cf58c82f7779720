"""Tokens in, continuations out: SSSD's input tries and datastore, without torch or SGLang.

Compiled functions are kept in numba's cache, which notices a change of the file that a function
is in but not of those it calls into: after editing one, delete __pycache__/*.nb?.
"""

from .bigrams import Bigrams
from .builder import CorpusBuilder
from .config import DatastoreError, DatastoreInUse, DeletionPending, RetrievalConfig
from .datastore import DEFAULT_NAMESPACE, MEMORY_TOKENS, Datastore, DatastoreInfo
from .input_trie import InputTrie, extend_all
from .maintenance import check_folder, merge_folders, verify_folder
from .retrieval import Continuations, Draft, Drafts, retrieve
from .segment import Snapshot
from .supposed import Stop, SupposedDrafts
from .warmup import warm_up

__all__ = [
    "DEFAULT_NAMESPACE",
    "MEMORY_TOKENS",
    "Bigrams",
    "Continuations",
    "CorpusBuilder",
    "Datastore",
    "DatastoreError",
    "DatastoreInUse",
    "DatastoreInfo",
    "DeletionPending",
    "Draft",
    "Drafts",
    "InputTrie",
    "RetrievalConfig",
    "Snapshot",
    "Stop",
    "SupposedDrafts",
    "check_folder",
    "extend_all",
    "merge_folders",
    "retrieve",
    "verify_folder",
    "warm_up",
]
