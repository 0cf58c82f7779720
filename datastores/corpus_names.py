"""Names of corpora: shared ones, and those of one namespace, which no other one reads.

In memory and in files a corpus is known by its key. That of a shared corpus is its name; that of a
namespace's is NAMESPACE, U+001F, NAME, so that files are as they were and older programs read them
(to these it is a shared corpus of an odd name).
"""

from collections.abc import Collection

_MARK = "\x1f"


def corpus_key(name: str, namespace: str | None = None) -> str:
    """The key of a corpus; namespace: whose it is, None: everybody's.

    Raises ValueError if a part holds U+001F.
    """
    if _MARK in name or _MARK in (namespace or ""):
        raise ValueError("the name of a corpus or a namespace cannot hold U+001F")
    return name if namespace is None else f"{namespace}{_MARK}{name}"


def namespace_and_name(key: str) -> tuple[str | None, str]:
    """Whose a corpus is (None: everybody's), and its name."""
    namespace, mark, name = key.partition(_MARK)
    return (namespace, name) if mark else (None, key)


def shown_name(key: str) -> str:
    """What a corpus is called by who looks after all of them: its name, or NAMESPACE/NAME."""
    return key.replace(_MARK, "/")


def may_read(key: str, namespace: str, chosen: Collection[str] | None) -> bool:
    """Whether a request of a namespace drafts from a corpus; chosen: the names that it wants,
    None: all that it may have."""
    owner, name = namespace_and_name(key)
    return owner in (None, namespace) and (chosen is None or name in chosen)
