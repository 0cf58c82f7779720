"""An update of a translation session that waits or runs: the text so far, and its result."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from sglang_ext.api.http import ApiError
from sglang_ext.api.translation.translator import OnText
from sglang_ext.request_options import shown

Message = dict[str, Any]
Work = Callable[[OnText], Coroutine[Any, Any, Message]]


class RunningUpdate:
    """An update in a task of its own, so that who waits for it may leave.

    Args:
        work: makes the update; it is given what to call with the text so far.
        revision: the revision in the making.
        ended: called when there is a result.
    """

    def __init__(
        self,
        session_id: str,
        work: Work,
        revision: Callable[[], int],
        ended: Callable[["RunningUpdate"], None],
    ):
        self._session_id = session_id
        self._revision = revision
        self._ended = ended
        self._text: str | None = None
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(work(self._wrote))
        self._task.add_done_callback(self._done)

    async def begun(self) -> None:
        """Returns when there is text or a result.

        Raises:
            ApiError: there is an error instead.
        """
        await self._changed.wait()
        if self._task.done():
            await self.result()

    async def deltas(self) -> AsyncIterator[Message]:
        """The text so far whenever there is more of it, until there is a result."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._task.done():
                return
            yield {
                "object": "translation.delta",
                "session": self._session_id,
                "revision": self._revision(),
                "text": self._text,
            }

    async def result(self) -> Message:
        """The update.

        Raises:
            ApiError: it failed, or the session went meanwhile (404).
        """
        await asyncio.wait({self._task})
        if self._task.cancelled():
            raise unknown(self._session_id)
        return self._task.result()

    def cancel(self) -> None:
        """Give the update up, if it is not done; the session is as before it."""
        self._task.cancel()

    def _wrote(self, text: str) -> None:
        if text != self._text:
            self._text = text
            self._changed.set()

    def _done(self, task: asyncio.Task[Message]) -> None:
        self._changed.set()
        self._ended(self)
        if not task.cancelled():
            task.exception()  # seen, also if nobody waits for it any more


def unknown(session_id: str) -> ApiError:
    """The refusal of a session that is not there."""
    return ApiError(
        f"there is no translation session {shown(session_id)}: it was deleted, has expired, or "
        "belongs to another namespace; open another",
        404,
        code="session_not_found",
    )
