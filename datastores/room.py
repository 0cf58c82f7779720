"""Bounded numbers of tokens that namespaces share."""

from collections import Counter


class Room:
    """Counts what namespaces hold of a bounded number of tokens. Not thread-safe.

    Args:
        most: tokens of all together.
        share: of what other namespaces leave of `most`, as much may be one namespace's, 0 to 1; its
            first document is taken in any case.
    """

    def __init__(self, most: int, share: float = 1.0) -> None:
        self.tokens = 0
        self._most = most
        self._share = share
        self._held: Counter[str] = Counter()

    def fits(self, namespace: str, tokens: int) -> bool:
        """Whether a document of so many tokens may be taken."""
        held = self._held[namespace]
        left = self._most - (self.tokens - held)
        return held + tokens <= left and (not held or held + tokens <= self._share * left)

    def take(self, namespace: str, tokens: int) -> None:
        """Count a document, whether it fits or not."""
        self._held[namespace] += tokens
        self.tokens += tokens

    def give_back(self, namespace: str, tokens: int) -> None:
        """Count it no more."""
        self.tokens -= tokens
        self._held[namespace] -= tokens
        if not self._held[namespace]:
            del self._held[namespace]

    def clear(self) -> None:
        """Count nothing."""
        self.tokens = 0
        self._held.clear()
