"""What SSBD sessions wrote last: bounded, fair to namespaces, and forgotten when asked to."""

import re
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakSet

MOST_TOKENS = 1 << 24
"""Tokens of all outputs kept (64 MiB)."""
_RANDOM_UUID = re.compile(
    r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", re.IGNORECASE
)


def is_secret(session: str) -> bool:
    """Whether a session's name is one that nobody guesses: a random UUID (RFC 9562, version 4)."""
    return _RANDOM_UUID.fullmatch(session) is not None


@dataclass(eq=False)
class Output:
    """An output that a session wrote.

    Attributes:
        namespace: the session's.
        name: what the request that wrote it can be deleted by.
        tokens: its token ids; empty once it is forgotten.
        put_at: monotonic seconds.
        forgotten: it was deleted, maybe while another request drafts from it.
    """

    namespace: str
    name: str
    tokens: Sequence[int]
    put_at: float
    forgotten: bool = False


class SessionOutputs:
    """The last output of each session, by namespace and the session's name.

    Where there are too many, the namespace with the most of them loses the one that was written
    longest ago: no namespace pushes out those of others that have fewer. What is forgotten costs a
    session its draft, nothing else. Safe to use from several threads.

    Args:
        most: sessions kept.
        idle_s: seconds after which a session that was not written to is forgotten.
        most_tokens: tokens kept, of all sessions.
    """

    def __init__(self, most: int, idle_s: float, most_tokens: int = MOST_TOKENS) -> None:
        self._most = most
        self._idle_s = idle_s
        self._most_tokens = most_tokens
        self._lock = threading.Lock()
        # All in the order of their last output, and the same by namespace.
        self._outputs: OrderedDict[tuple[str, str], Output] = OrderedDict()
        self._sessions: dict[str, OrderedDict[str, None]] = {}
        self._tokens: dict[str, int] = {}
        self._total_tokens = 0
        # Those too that were replaced, while a request drafts from them.
        self._alive: WeakSet[Output] = WeakSet()

    def __len__(self) -> int:
        return len(self._outputs)

    def get(self, namespace: str, session: str) -> Output | None:
        """A session's last output; None if it is not known."""
        with self._lock:
            self._drop_idle()
            return self._outputs.get((namespace, session))

    def put(
        self,
        namespace: str,
        session: str,
        name: str,
        tokens: Sequence[int],
        source: Output | None = None,
    ) -> None:
        """This is a session's last output now.

        Args:
            name: what the request that wrote it can be deleted by.
            source: what it was drafted from; if that was forgotten meanwhile, nothing is kept.
        """
        with self._lock:
            if source is not None and source.forgotten:
                return
            self._remove((namespace, session))
            output = Output(namespace, name, array("i", tokens), time.monotonic())
            self._alive.add(output)
            self._outputs[namespace, session] = output
            self._sessions.setdefault(namespace, OrderedDict())[session] = None
            self._count(namespace, len(output.tokens))
            self._drop_idle()
            self._drop_excess()

    def forget(self, namespace: str | None, name: str | None = None) -> None:
        """Forget a namespace's outputs, or those of one request.

        Args:
            namespace: None: all namespaces.
            name: what the request can be deleted by; None: all requests.
        """
        with self._lock:
            for key, output in list(self._outputs.items()):
                if _matches(output, namespace, name):
                    self._remove(key)
            for output in self._alive:
                if _matches(output, namespace, name):
                    output.forgotten, output.tokens = True, ()

    def _remove(self, key: tuple[str, str]) -> None:
        output = self._outputs.pop(key, None)
        if output is None:
            return
        namespace, session = key
        del self._sessions[namespace][session]
        self._count(namespace, -len(output.tokens))
        if not self._sessions[namespace]:
            del self._sessions[namespace], self._tokens[namespace]

    def _count(self, namespace: str, tokens: int) -> None:
        self._tokens[namespace] = self._tokens.get(namespace, 0) + tokens
        self._total_tokens += tokens

    def _drop_idle(self) -> None:
        oldest = time.monotonic() - self._idle_s
        while self._outputs:
            key, output = next(iter(self._outputs.items()))
            if output.put_at >= oldest:
                break
            self._remove(key)

    def _drop_excess(self) -> None:
        while len(self._outputs) > self._most:
            self._drop_oldest_of(max(self._sessions, key=lambda name: len(self._sessions[name])))
        while self._total_tokens > self._most_tokens:
            self._drop_oldest_of(max(self._tokens, key=self._tokens.__getitem__))

    def _drop_oldest_of(self, namespace: str) -> None:
        self._remove((namespace, next(iter(self._sessions[namespace]))))


def _matches(output: Output, namespace: str | None, name: str | None) -> bool:
    return namespace in (None, output.namespace) and name in (None, output.name)
