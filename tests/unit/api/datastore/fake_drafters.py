"""Drafters that draft nothing, for tests of what is told and asked of a server's drafters."""

from sglang_ext.drafters import Drafter
from sglang_ext.tree import TokenTree


class Plain(Drafter):
    """Drafts nothing."""

    def __init__(self):
        pass

    def propose(self, requests, max_nodes):
        return [TokenTree.empty()] * len(requests)


class Owner(Plain):
    """Has the datastore."""

    def __init__(self, store):
        self._store = store

    @property
    def datastore(self):
        return self._store
