"""Named corpora (SGLang's /add_external_corpus): every loaded drafter that keeps them gets all."""

from collections.abc import Iterable, Sequence
from itertools import chain

from sglang_ext.drafters import Drafter, overrides


class Corpora:
    """The corpora of a server's drafters: of those that have `Drafter.add_corpus`."""

    def __init__(self, drafters: Iterable[Drafter]) -> None:
        self._keepers = [d for d in drafters if overrides(d, Drafter.add_corpus)]

    def add(self, name: str, documents: Sequence[Sequence[int]]) -> int:
        """Give a corpus to all of them, or to none if one refuses it; returns its tokens.

        Raises:
            ValueError: no loaded drafter keeps corpora.
        """
        keepers, tokens = self._all(), []
        try:
            for keeper in keepers:
                tokens.append(keeper.add_corpus(name, documents))
        except Exception:
            for keeper in keepers[: len(tokens)]:
                keeper.remove_corpus(name)
            raise
        return tokens[0]

    def remove(self, name: str) -> None:
        """Take a corpus from all of them."""
        for keeper in self._all():
            keeper.remove_corpus(name)

    def tokens_by_name(self) -> dict[str, int]:
        """Tokens of each corpus."""
        return self._all()[0].list_corpora()

    def _all(self) -> list[Drafter]:
        if not self._keepers:
            raise ValueError(
                "no loaded drafter keeps corpora; start the server with --drafter sssd"
            )
        return self._keepers


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
