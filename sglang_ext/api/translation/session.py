"""One translation session: a source that grows, its last translation, who listens.

Its state is replaced as a whole when an update has succeeded, so an update that fails or is given
up leaves no trace.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from sglang_ext.api.http import ApiError, refusal
from sglang_ext.api.translation.session_settings import SECRETS, SessionSettings, Update
from sglang_ext.api.translation.session_update import Message, RunningUpdate, Work
from sglang_ext.api.translation.translator import OnText, Translation, Translator

MOST_WAITING = 64
"""Updates of one session that may wait or run at once."""
_MOST_UNREAD = 64  # events; each holds the whole text, so a slow reader may miss old ones

Events = asyncio.Queue[Message | None]


@dataclass(frozen=True)
class State:
    """What an update replaces.

    Attributes:
        revision: how many updates there were, the finish included.
        stable, unstable: the translation's text, cut where the mask begins.
        held: so many tokens of the translation the next one begins with (append_only).
        final: whether nothing is held back.
    """

    revision: int = 0
    source: str = ""
    translation: Translation = field(default_factory=Translation)
    stable: str = ""
    unstable: str = ""
    final: bool = False
    held: int = 0


class Session:
    """One source and its translation. Updates run one after the other, in the order of the calls.

    Args:
        namespace: whose served outputs it reads and joins.
        max_source_chars: the longest source.
        clock: monotonic seconds.
        owner: the namespace of those who may use it; None: `namespace`.
    """

    def __init__(
        self,
        namespace: str,
        settings: SessionSettings,
        translator: Translator,
        max_source_chars: int,
        clock: Callable[[], float] = time.monotonic,
        owner: str | None = None,
    ):
        self.id = f"trs-{uuid.uuid4().hex}"
        self.namespace = namespace
        self.owner = owner or namespace
        self.settings = settings
        self.created = int(time.time())
        self.state = State()
        self.finished = False
        self.gone = asyncio.Event()
        """Set when it was deleted or has expired."""
        self.used_at = clock()
        """When it was last asked for, or had something to do."""
        self._clock = clock
        self._translator = translator
        self._max_source_chars = max_source_chars
        self._last_update: Message | None = None
        self._lock = asyncio.Lock()
        self._running: set[RunningUpdate] = set()
        self._listeners: set[Events] = set()

    @property
    def busy(self) -> bool:
        """Whether updates wait or run."""
        return bool(self._running)

    def touch(self) -> None:
        """It is used now."""
        self.used_at = self._clock()

    def update(self, update: Update, stream: bool) -> RunningUpdate:
        """Change the source and translate it again, when earlier updates are done.

        Args:
            stream: whether the text is wanted while it is written.

        Raises:
            ApiError: too many wait already (429).
        """
        return self._start(lambda wrote: self._update(update, wrote if stream else None))

    def finish(self) -> RunningUpdate:
        """Show what is held back and take no more updates, when earlier updates are done.

        Raises:
            ApiError: as in update.
        """
        return self._start(lambda wrote: self._finish())

    @contextlib.contextmanager
    def listening(self, seen: int | None = None) -> Iterator[Events]:
        """A queue of the updates from the last one on, then None.

        Args:
            seen: the revision that the listener has; it is not sent again.
        """
        events: Events = asyncio.Queue(_MOST_UNREAD)
        if self._last_update is not None and self.state.revision != seen:
            events.put_nowait(self._last_update)
        if self.finished or self.gone.is_set():
            events.put_nowait(None)
        self._listeners.add(events)
        try:
            yield events
        finally:
            self._listeners.discard(events)

    def stop_listening(self) -> None:
        """End what listens."""
        self._tell(None)

    def close(self) -> None:
        """Give up its updates and end what listens; it is not to be used again."""
        self.gone.set()
        for running in list(self._running):
            running.cancel()
        self.stop_listening()

    def message(self, expires_at: int) -> Message:
        """The session as OpenAI's API might show it.

        Args:
            expires_at: Unix time in seconds.
        """
        return {
            "id": self.id,
            "object": "translation.session",
            "created": self.created,
            "expires_at": expires_at,
            "status": "finished" if self.finished else "open",
            "revision": self.state.revision,
            "source": self.state.source,
            "stable": self.state.stable,
            "unstable": self.state.unstable,
            "final": self.state.final,
            **self.settings.model_dump(exclude=SECRETS),
        }

    def _start(self, work: Work) -> RunningUpdate:
        if len(self._running) >= MOST_WAITING:
            raise ApiError(
                f"{MOST_WAITING} updates of this session wait already; send the next one when "
                "some are answered",
                429,
                code="too_many_updates",
            )
        running = RunningUpdate(self.id, work, lambda: self.state.revision + 1, self._end)
        self._running.add(running)
        return running

    def _end(self, running: RunningUpdate) -> None:
        self._running.discard(running)
        self.touch()

    async def _update(self, update: Update, on_text: OnText | None) -> Message:
        async with self._lock:
            if self.finished:
                raise ApiError(
                    f"the session {self.id} is finished and takes no more updates; open another",
                    409,
                    code="session_finished",
                )
            try:
                source = update.applied(self.state.source, self._max_source_chars)
                translation = await self._translated(source, update.final, on_text)
            except Exception as error:
                raise self._unchanged(error) from error
            return self._commit(source, translation, update.final)

    async def _finish(self) -> Message:
        async with self._lock:
            if self.finished and self._last_update is not None:
                return self._last_update  # asked again by a client that missed the answer
            self.finished = True
            message = self._commit(self.state.source, _again(self.state.translation), final=True)
            self._tell(None)
            return message

    async def _translated(self, source: str, final: bool, on_text: OnText | None) -> Translation:
        if not source.strip():
            return Translation()
        before = self.state
        if source.strip() == before.source.strip():
            return _again(before.translation)
        return await self._translator.translate(
            self.settings,
            source,
            before.translation.token_ids,
            self.namespace,
            # What is translated again in a moment would crowd the datastore.
            ingest=self.id if final else None,
            on_text=on_text,
            held=before.held,
        )

    def _commit(self, source: str, translation: Translation, final: bool) -> Message:
        """Make this the state and tell who listens; returns the update."""
        held, stable = self._stable(source, translation, final)
        unstable = translation.text[len(stable) :]
        revision = self.state.revision + 1
        self.state = State(revision, source, translation, stable, unstable, final, held)
        self._last_update = {
            "object": "translation.update",
            "session": self.id,
            "revision": revision,
            "stable": stable,
            "unstable": unstable,
            "text": translation.text,
            "final": final,
            "finish_reason": translation.finish_reason,
            "usage": {
                "prompt_tokens": translation.prompt_tokens,
                "completion_tokens": translation.completion_tokens,
                "total_tokens": translation.prompt_tokens + translation.completion_tokens,
                "accepted_draft_tokens": translation.accepted_draft_tokens,
            },
        }
        self._tell(self._last_update)
        return self._last_update

    def _stable(self, source: str, translation: Translation, final: bool) -> tuple[int, str]:
        """How many tokens the next translation must begin with, and the text that is stable."""
        before, mask = self.state, self.settings.mask
        if not self.settings.append_only:
            return 0, self._translator.stable_part(translation, 0 if final else mask)
        if final or not translation.token_ids:
            return len(translation.token_ids), translation.text
        if source.strip() == before.source.strip():  # which is no second translation
            return before.held, before.stable
        return self._translator.settled(before.translation, translation, before.held, mask)

    def _tell(self, message: Message | None) -> None:
        for events in self._listeners:
            if events.full():
                events.get_nowait()
            events.put_nowait(message)

    def _unchanged(self, error: Exception) -> ApiError:
        """The error with what it means for the session."""
        refused = refusal(error, f"an update of the session {self.id}")
        return ApiError(
            f"{refused}; the session is as it was, at revision {self.state.revision}",
            refused.status,
            refused.param,
            refused.code,
        )


def _again(translation: Translation) -> Translation:
    """A translation that cost nothing this time."""
    return replace(translation, prompt_tokens=0, completion_tokens=0, accepted_draft_tokens=0)
