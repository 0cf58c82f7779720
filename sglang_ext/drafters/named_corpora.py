"""Named corpora (SGLang's /add_external_corpus): every loaded drafter that keeps them gets all."""

from collections.abc import Iterable, Sequence
from itertools import chain

from sglang_ext.drafters import Drafter, overrides


class Corpora:
    """The corpora of a server's drafters: of those that have `Drafter.add_corpus`."""

    def __init__(self, drafters: Iterable[Drafter]) -> None:
        self._keepers = [d for d in drafters if overrides(d, Drafter.add_corpus)]

    def add(
        self, name: str, documents: Sequence[Sequence[int]], namespace: str | None = None
    ) -> int:
        """Give a corpus to all of them, or to none if one refuses it; returns its tokens.

        Args:
            namespace: whose requests alone draft from it: then drafters that cannot tell them
                apart do not get it. None: all requests.

        Raises:
            ValueError: no loaded drafter keeps such corpora.
        """
        keepers = self._all()
        if namespace is not None:
            keepers = [d for d in keepers if overrides(d, Drafter.add_bound_corpus)]
            if not keepers:
                raise ValueError(
                    "no loaded drafter keeps corpora of one namespace; start the server with "
                    "--drafter sssd"
                )
        taken: list[Drafter] = []
        tokens = []
        try:
            for keeper in keepers:
                tokens.append(_give(keeper, name, documents, namespace))
                taken.append(keeper)
        except Exception:
            for keeper in taken:
                keeper.remove_corpus(name if namespace is None else f"{namespace}/{name}")
            raise
        return tokens[0]

    def remove(self, name: str) -> None:
        """Take a corpus from all of them that have it; one of a namespace is NAMESPACE/NAME."""
        keepers = self._all()
        for keeper in [k for k in keepers if name in k.list_corpora()] or keepers[:1]:
            keeper.remove_corpus(name)

    def tokens_by_name(self) -> dict[str, int]:
        """Tokens of each corpus."""
        found: dict[str, int] = {}
        for keeper in self._all():
            found = keeper.list_corpora() | found
        return found

    def _all(self) -> list[Drafter]:
        if not self._keepers:
            raise ValueError(
                "no loaded drafter keeps corpora; start the server with --drafter sssd"
            )
        return self._keepers


def _give(
    keeper: Drafter, name: str, documents: Sequence[Sequence[int]], namespace: str | None
) -> int:
    if namespace is None:
        return keeper.add_corpus(name, documents)
    return keeper.add_bound_corpus(namespace, name, documents)


def documents_of(chunks: Sequence[Sequence[int]]) -> list[list[int]]:
    """The documents in token chunks as SGLang's /add_external_corpus sends them.

    Documents run through the chunks, with a negative id in front of each but the first
    (speculative/cpp_ngram/external_corpus.py).
    """
    documents: list[list[int]] = [[]]
    for token in chain.from_iterable(chunks):
        if token < 0:
            documents.append([])
        else:
            documents[-1].append(token)
    return [document for document in documents if document]
