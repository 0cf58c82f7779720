"""Sentences that grow -> their translations, by a server's translation sessions.

Each sentence has a session of its own, which is finished when the sentence is final. There is one
request at a time, for the first sentence that has changed, with its newest text: a slow server
gets fewer updates, not older ones. Translations so come in the order of the sentences.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from sglang_ext.api.calls import RequestError, call
from speech.sentences import Sentence

_PATH = "/v1/translation/sessions"
_RETRY_S, _MOST_RETRY_S = 1.0, 8.0
_LAST_TRIES = 3  # when no more sentences come, so many failures in a row end it
_LOST = frozenset({404, 409})  # expired, deleted or finished: another session will do
_REFUSED = frozenset({400, 413, 422})  # the same text would be refused again
_CLOSE_S = 2.0


@dataclass(frozen=True)
class Translated:
    """A sentence's translation.

    Attributes:
        index: the sentence's.
        stable: text that is not held back by the mask.
        unstable: what follows it for now.
        final: of a final sentence, with nothing unstable.
        source: the text that it translates.
    """

    index: int
    stable: str
    unstable: str
    final: bool
    source: str = ""

    @property
    def text(self) -> str:
        """All of it."""
        return self.stable + self.unstable


@dataclass
class _Job:
    """A sentence and how far its translation is.

    Attributes:
        source, final: the newest.
        session: the id of its open session.
        sent: the source that was translated last, None: none was.
    """

    source: str = ""
    final: bool = False
    session: str | None = None
    sent: str | None = None

    @property
    def due(self) -> bool:
        """Whether there is something to do."""
        return self.final or self.source != (self.sent or "")


class LiveTranslation:
    """Keeps the translations of sentences up to date.

    Args:
        settings: of a sentence's session, by its index, as POST /v1/translation/sessions takes
            them; None: it stands in the target language already, and is its own translation.
        on_translated: called with every translation.
        on_error: called with one line for each request that failed.
        most_waiting: so many sentences may wait; then the oldest is given up. None: any number.
        on_dropped: called with the index of each sentence that was given up.
    """

    def __init__(
        self,
        client: httpx.AsyncClient,
        settings: Callable[[int], Mapping[str, Any] | None],
        on_translated: Callable[[Translated], None],
        on_error: Callable[[str], None],
        most_waiting: int | None = None,
        on_dropped: Callable[[int], None] = lambda index: None,
    ):
        self._client = client
        self._settings = settings
        self._on_translated = on_translated
        self._on_error = on_error
        self._most_waiting = most_waiting
        self._on_dropped = on_dropped
        self._jobs: dict[int, _Job] = {}
        self._spare: str | None = None
        self._changed = asyncio.Event()
        self._ended = False
        self._failures = 0

    @property
    def unfinished(self) -> bool:
        """Whether there are texts without their translation."""
        return any(job.due for job in self._jobs.values())

    async def check(self) -> None:
        """Open the first session, which shows whether the server takes the settings.

        Raises:
            RequestError: it does not.
        """
        self._spare = await self._open(self._settings(0) or {})

    def update(self, sentences: Sequence[Sentence]) -> None:
        """Sentences that are new or have changed; one without text is no longer there."""
        for sentence in sentences:
            job = self._jobs.setdefault(sentence.index, _Job())
            job.source, job.final = sentence.text, sentence.final
        self._drop_oldest()
        self._changed.set()

    def end(self) -> None:
        """No more sentences will change."""
        self._ended, self._failures = True, 0
        self._changed.set()

    async def run(self) -> None:
        """Translate until the end, then finish what is final."""
        while True:
            self._changed.clear()
            due = [index for index, job in self._jobs.items() if job.due]
            if due:
                await self._try(min(due))
                if self._ended and self._failures >= _LAST_TRIES:
                    return
            elif self._ended:
                return
            else:
                await self._changed.wait()

    async def close(self) -> None:
        """Delete the sessions that are still open, as far as that is possible quickly."""
        sessions = [job.session for job in self._jobs.values()] + [self._spare]
        with contextlib.suppress(TimeoutError, RequestError):
            async with asyncio.timeout(_CLOSE_S):
                for session in filter(None, sessions):
                    await call(self._client, "DELETE", f"{_PATH}/{session}")

    def _drop_oldest(self) -> None:
        """Give up what waits behind the sentence that is being translated, if it is too much."""
        waiting = sorted(index for index, job in self._jobs.items() if job.due)[1:]
        if self._most_waiting is None:
            return
        for index in waiting[: max(0, len(waiting) - self._most_waiting)]:
            del self._jobs[index]
            self._on_dropped(index)

    async def _try(self, index: int) -> None:
        """Bring one sentence up to date; errors are told, and the next try waits."""
        job = self._jobs[index]
        source, final = job.source, job.final  # it may change meanwhile
        try:
            translated = await self._translate(index, job, source, final)
        except RequestError as error:
            if error.status in _REFUSED:
                self._on_error(f"translation: {error}")
                job.sent = source
                translated = Translated(index, "", "", final, source)
            else:
                await self._recover(job, error)
                return
        self._failures = 0
        self._on_translated(translated)
        if translated.final:
            self._jobs.pop(index, None)

    async def _recover(self, job: _Job, error: RequestError) -> None:
        self._failures += 1
        if error.status in _LOST:
            # Its translation was lost with it: that costs time, not text.
            job.session, job.sent = None, None
            if self._failures == 1:
                return
        self._on_error(f"translation: {error}")
        await asyncio.sleep(min(_RETRY_S * 2 ** (self._failures - 1), _MOST_RETRY_S))

    async def _translate(self, index: int, job: _Job, source: str, final: bool) -> Translated:
        if job.session is None:
            settings = self._settings(index)
            if settings is None:
                job.sent = source
                return Translated(index, source, "", final, source)
            self._spare, job.session = None, self._spare or await self._open(settings)
        path = f"{_PATH}/{job.session}"
        if source != job.sent:
            body = await call(
                self._client, "POST", f"{path}/updates", json={"source": source, "final": final}
            )
            job.sent = source
        if final:
            body = await call(self._client, "POST", f"{path}/finish", json={})
            job.session = None
        try:
            return Translated(index, body["stable"], body["unstable"], final, source)
        except KeyError as error:
            raise RequestError(f"the answer has no field {error}") from None

    async def _open(self, settings: Mapping[str, Any]) -> str:
        body = await call(self._client, "POST", _PATH, json=settings)
        try:
            return str(body["id"])
        except KeyError:
            raise RequestError(f"{self._client.base_url}{_PATH} does not open sessions") from None
