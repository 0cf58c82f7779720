"""What sessions show, for those who only watch: many viewers of one session.

A session that names its view (session.sglang_ext.view) can be watched under that name. Viewers are
sent what is shown now, whenever that changes: no queue grows for one that is slow.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fastapi import WebSocket, WebSocketDisconnect

from sglang_ext.api.http import until_one_ends
from sglang_ext.api.realtime.realtime_events import OUTPUT_TAIL, TAIL, Event, event
from sglang_ext.api.realtime.realtime_socket import POLICY
from sglang_ext.api.realtime.transcripts import Transcript

VIEW = "sglang_ext.view"
"""The event that viewers are sent."""

_KEPT_CHARS = 600  # of either text: some lines
_ITEM_DELTA = "conversation.item.input_audio_transcription.delta"
_INPUT, _OUTPUT = "session.input_transcript.delta", "session.output_transcript.delta"
_NOT_READ_S = 10.0
_KEEP_ALIVE_S = 15.0


@dataclass
class _Text:
    """The end of a text that grows.

    Attributes:
        chars: how long all of it is.
        tail: what may still change behind it.
    """

    text: str = ""
    chars: int = 0
    tail: str = ""

    def grow(self, text: str) -> None:
        self.text = (self.text + text)[-_KEPT_CHARS:]
        self.chars += len(text)


class View:
    """What the sessions of one name show, one after the other, and who watches."""

    def __init__(self) -> None:
        self.session: object = None
        """Whose events it shows; None: there is none."""
        self._said, self._translated = _Text(), _Text()
        self._transcript = Transcript()
        self._has_items = False
        self._viewers: set[asyncio.Event] = set()

    @property
    def used(self) -> bool:
        """Whether anybody shows or watches."""
        return self.session is not None or bool(self._viewers)

    def take(self, told: Event) -> None:
        """Follow an event that the session sends."""
        kind = told["type"]
        if kind == _ITEM_DELTA:
            self._has_items = True
            self._said.grow(self._transcript.grown(told["item_id"], told["delta"]))
        elif kind == _INPUT and not self._has_items:
            self._said.grow(told["delta"])
        elif kind == _OUTPUT:
            self._translated.grow(told["delta"])
        elif kind == TAIL:
            self._said.tail = told["text"][-_KEPT_CHARS:]
        elif kind == OUTPUT_TAIL:
            self._translated.tail = told["text"][-_KEPT_CHARS:]
        else:
            return
        self.tell()

    def event(self) -> Event:
        """What is shown now."""
        live = self.session is not None
        return event(VIEW, live=live, source=vars(self._said), translation=vars(self._translated))

    def tell(self) -> None:
        """Wake the viewers."""
        for changed in self._viewers:
            changed.set()

    @contextlib.contextmanager
    def watching(self) -> Iterator[asyncio.Event]:
        """Set whenever something has changed, and at first."""
        changed = asyncio.Event()
        changed.set()
        self._viewers.add(changed)
        try:
            yield changed
        finally:
            self._viewers.discard(changed)


class Views:
    """Views by namespace and name, as long as somebody shows or watches."""

    def __init__(self) -> None:
        self._views: dict[tuple[str, str], View] = {}

    def __len__(self) -> int:
        return len(self._views)

    def at(self, namespace: str, name: str) -> View:
        """A view, which need not be shown yet."""
        return self._views.setdefault((namespace, name), View())

    def tidy(self, namespace: str, name: str) -> None:
        """Forget a view that nobody uses."""
        view = self._views.get((namespace, name))
        if view is not None and not view.used:
            del self._views[namespace, name]


class Publisher:
    """One session's way to its view.

    Args:
        send: takes each event of the session, too.
    """

    def __init__(self, views: Views, namespace: str, send: Callable[[Event], None]):
        self._views = views
        self._namespace = namespace
        self._send = send
        self._name: str | None = None

    def send(self, told: Event) -> None:
        """Send an event, and show it."""
        self._send(told)
        if told["type"] in ("session.updated", "transcription_session.updated"):
            self._rename(told["session"]["sglang_ext"]["view"])
        elif self._name is not None:
            view = self._views.at(self._namespace, self._name)
            if view.session is self:  # another session of this name may have come
                view.take(told)

    def close(self) -> None:
        """The session is over; its last words stay until the next one comes."""
        self._rename(None)

    def _rename(self, name: str | None) -> None:
        before, self._name = self._name, name
        if before == name:
            return
        if before is not None:
            view = self._views.at(self._namespace, before)
            if view.session is self:
                view.session = None
                view.tell()
            self._views.tidy(self._namespace, before)
        if name is not None:
            view = self._views.at(self._namespace, name)
            view.session = self
            view.tell()


async def watch(socket: WebSocket, view: View) -> None:
    """Send a viewer what a view shows, until it goes; one that does not read is let go."""
    await until_one_ends(
        {asyncio.create_task(_leave(socket)), asyncio.create_task(_show(socket, view))}
    )


async def _leave(socket: WebSocket) -> None:
    """Returns when the viewer has gone; it has nothing to say."""
    while (await socket.receive())["type"] != "websocket.disconnect":
        pass


async def _show(socket: WebSocket, view: View) -> None:
    """Returns when the viewer has gone, or was let go."""
    with (
        view.watching() as changed,
        contextlib.suppress(WebSocketDisconnect, RuntimeError),  # it has gone
    ):
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_KEEP_ALIVE_S):
                    await changed.wait()
            changed.clear()
            try:
                async with asyncio.timeout(_NOT_READ_S):
                    await socket.send_json(view.event())
            except TimeoutError:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        await socket.close(POLICY, "the viewer does not read")
                return
