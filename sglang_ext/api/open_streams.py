"""How many connections that stay open there are, and whose."""

import weakref
from collections import Counter

from sglang_ext.api.http import ApiError


class Streams:
    """Counts open streams by namespace.

    Args:
        most: streams open at once.
        share: of what other namespaces leave of `most`, as much may be one namespace's, 0 to 1.
    """

    def __init__(self, most: int, share: float = 1.0) -> None:
        self._most = most
        self._share = share
        self._open: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._open.total()

    def enter(self, namespace: str) -> "Stream":
        """Count a stream, until it is closed or dropped.

        Raises:
            ApiError: too many are open, of all or of its namespace (429).
        """
        own = self._open[namespace]
        others = len(self) - own
        limit = max(1, int(self._share * (self._most - others)))
        if len(self) >= self._most or own >= limit:
            raise ApiError(
                f"{own} streams of this namespace are open, of {self._most} that this server has "
                "for all (--max-streams, --namespace-share); close one",
                429,
                code="too_many_streams",
            )
        self._open[namespace] += 1
        return Stream(self._open, namespace)


class Stream:
    """One open stream, a context manager."""

    def __init__(self, counted: "Counter[str]", namespace: str) -> None:
        # Also a response that is never sent gives its place back.
        self._leave = weakref.finalize(self, _leave, counted, namespace)

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()


def _leave(counted: "Counter[str]", namespace: str) -> None:
    counted[namespace] -= 1
    if not counted[namespace]:
        del counted[namespace]
