"""Which corpora there are, for the HTTP process: a request that names another is refused.

The scheduler has them. It is asked at most five times a second, and waited for half a second at
most, as the event loop does the waiting.
"""

import time
from collections.abc import Callable, Collection
from functools import cache
from typing import Any

from datastores import DEFAULT_NAMESPACE
from sglang_ext.api.datastore.control import ControlError
from sglang_ext.api.datastore.control_client import call_all
from sglang_ext.request_options import RequestOptionError, shown

_TIMEOUT_S = 0.5
# So long a corpus that is gone may pass; it drafts nothing.
_FRESH_S = 5.0
_LEAST_S = 0.2
_MOST_SHOWN = 20

Names = Collection[tuple[str | None, str]]


class KnownCorpora:
    """The corpora of this server's datastore, as far as is known.

    Args:
        ask: gives each corpus's namespace (None: everybody's) and name.
        clock: monotonic seconds.
    """

    def __init__(self, ask: Callable[[], Names], clock: Callable[[], float] = time.monotonic):
        self._ask = ask
        self._clock = clock
        self._names: Names | None = None
        self._asked_at = float("-inf")

    def check(self, namespace: str, names: Collection[str]) -> None:
        """Refuse names of corpora that a request of a namespace cannot read.

        Where the datastore does not answer, none is refused: what is not there drafts nothing.

        Raises:
            RequestOptionError: there is no such corpus; the message names those that there are.
        """
        age = self._clock() - self._asked_at
        if age > _FRESH_S or (age > _LEAST_S and self._unknown(namespace, names)):
            self._asked_at = self._clock()
            try:
                self._names = self._ask()
            except ControlError:
                self._names = None
        unknown = self._unknown(namespace, names)
        if unknown:
            readable = self._readable(namespace)
            there = ", ".join(map(repr, readable[:_MOST_SHOWN])) or "none"
            more = f" and {len(readable) - _MOST_SHOWN} more" if readable[_MOST_SHOWN:] else ""
            raise RequestOptionError(
                f"custom_params.corpora: there is no corpus {shown(unknown[0])}; there are: "
                f"{there}{more}"
            )

    def _unknown(self, namespace: str, names: Collection[str]) -> list[str]:
        if self._names is None:
            return []
        readable = self._readable(namespace)
        return [name for name in names if name not in readable]

    def _readable(self, namespace: str) -> list[str]:
        return sorted({name for owner, name in self._names or () if owner in (None, namespace)})


def check_corpora(request: Any) -> None:
    """Refuse a tokenized request whose `custom_params` choose a corpus that it cannot read.

    Args:
        request: SGLang's TokenizedGenerateReqInput, its namespace settled, or one without sampling.

    Raises:
        RequestOptionError: there is no such corpus.
    """
    params = getattr(getattr(request, "sampling_params", None), "custom_params", None) or {}
    if params.get("corpora"):
        _known().check(params.get("namespace") or DEFAULT_NAMESPACE, params["corpora"])


@cache
def _known() -> KnownCorpora:
    return KnownCorpora(_ask)


def _ask() -> Names:
    ranks = call_all("corpora", _TIMEOUT_S)
    return {(each["namespace"], each["name"]) for rank in ranks for each in rank}
