"""The translation sessions of this process, in memory: how many, whose, and how long.

A lost session costs a client its draft, nothing else.
"""

import asyncio
import time
from collections.abc import Callable

from sglang_ext.api.http import ApiError
from sglang_ext.api.translation.session import Session
from sglang_ext.api.translation.session_update import Message, unknown

_SWEEP_S = 5.0


class SessionTable:
    """Sessions by id; each belongs to a namespace and is not there for others.

    Args:
        most: sessions open at once.
        idle_s: seconds without use after which a session expires.
        share: of what other namespaces leave of `most`, as much may be one namespace's, 0 to 1. So
            one that takes all it can leaves room for the next, and that one for others again
            (dynamic thresholds, Choudhury and Hahne 1998).
        stopping: whether the server is shutting down; what listens to sessions is ended then, or
            it would wait for them.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        most: int,
        idle_s: float,
        stopping: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
        share: float = 1.0,
    ) -> None:
        self._most = most
        self._share = share
        self._idle_s = idle_s
        self._stopping = stopping
        self._clock = clock
        self._sessions: dict[str, Session] = {}
        self._sweeper: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._sessions)

    def add(self, session: Session) -> None:
        """Keep a new session; the finished one that was used longest ago makes room.

        Raises:
            ApiError: too many are open, of all or of its namespace (429).
        """
        namespace = session.namespace
        if not self._has_room(namespace):
            self.drop_expired()
        if not self._has_room(namespace):
            self._drop_finished(namespace)
        if len(self) >= self._most:
            self._drop_finished()
        if not self._has_room(namespace):
            raise self._full(namespace)
        self._sessions[session.id] = session
        if self._sweeper is None or self._sweeper.done():
            self._sweeper = asyncio.create_task(self._sweep())

    def get(self, session_id: str, owner: str) -> Session:
        """A session, which is thereby used.

        Raises:
            ApiError: the owner has none of this name (404).
        """
        session = self._sessions.get(session_id)
        if session is None or session.owner != owner:
            raise unknown(session_id)
        if self._expired(session):
            self._drop(session)
            raise unknown(session_id)
        session.touch()
        return session

    def delete(self, session_id: str, owner: str) -> None:
        """Close a session and give up its updates.

        Raises:
            ApiError: as in get.
        """
        self._drop(self.get(session_id, owner))

    def forget(self, namespace: str | None, session_id: str | None = None) -> None:
        """Close a namespace's sessions (None: of all), or the one of this id in it."""
        for session in list(self._sessions.values()):
            if namespace in (None, session.namespace) and session_id in (None, session.id):
                self._drop(session)

    def message(self, session: Session) -> Message:
        """The session, with the Unix time at which it expires if nobody uses it."""
        left = session.used_at + self._idle_s - self._clock()
        return session.message(expires_at=int(time.time() + left))

    def drop_expired(self) -> None:
        """Close the sessions that were idle for too long."""
        for session in [s for s in self._sessions.values() if self._expired(s)]:
            self._drop(session)

    def _expired(self, session: Session) -> bool:
        return not session.busy and self._clock() - session.used_at >= self._idle_s

    def _drop(self, session: Session) -> None:
        del self._sessions[session.id]
        session.close()

    def _has_room(self, namespace: str) -> bool:
        own = self._of(namespace)
        limit = int(self._share * (self._most - (len(self) - own)))
        return len(self) < self._most and own < max(1, limit)

    def _of(self, namespace: str) -> int:
        return sum(s.namespace == namespace for s in self._sessions.values())

    def _full(self, namespace: str) -> ApiError:
        if len(self) >= self._most:
            message = (
                f"{self._most} translation sessions are open, which is this server's limit "
                "(--translation-sessions); finish or delete one"
            )
        else:
            message = (
                f"{self._of(namespace)} translation sessions of this namespace are open, which is "
                f"its share of the {self._most} that this server has (--translation-sessions, "
                "--namespace-share); finish or delete one"
            )
        return ApiError(message, 429, code="too_many_sessions")

    def _drop_finished(self, namespace: str | None = None) -> None:
        finished = [
            s for s in self._sessions.values() if s.finished and namespace in (None, s.namespace)
        ]
        if finished:
            self._drop(min(finished, key=lambda s: s.used_at))

    async def _sweep(self) -> None:
        """Look now and then, while there are sessions."""
        while self._sessions:
            await asyncio.sleep(min(_SWEEP_S, self._idle_s / 2))
            self.drop_expired()
            if self._stopping():
                for session in self._sessions.values():
                    session.stop_listening()
