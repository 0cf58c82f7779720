"""What a datastore drafts, as a test looks at it."""

from datastores import Datastore, InputTrie, RetrievalConfig, retrieve


def drafted(store: Datastore, query: list[int], namespace: str = "default") -> set[int]:
    """The tokens of the draft behind a query."""
    trie = InputTrie()
    trie.extend(query)
    config = RetrievalConfig(max_input_samples=0)
    return set(retrieve([trie], store.snapshot(namespace), 50, config)[0].tokens.tolist())
