"""A transcription session of OpenAI's realtime protocol, without its socket: events in and out.

Audio becomes turns, each one item: where the VAD hears one begin and end (server_vad), or from one
commit to the next. A turn is transcribed again with each step of audio, and what two hypotheses
agree on is sent as a delta at once, before the item is committed. Turns are transcribed one after
the other: there is one request of a session at a time.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from sglang_ext.api.http import ApiError
from sglang_ext.api.realtime.client_events import audio_bytes, event_id, parsed
from sglang_ext.api.realtime.live_audio import AudioFront, FrameHistory, Frames
from sglang_ext.api.realtime.realtime_events import (
    Event,
    completed_event,
    delta_event,
    error_event,
    event,
    failed_event,
    item_events,
    new_id,
    session_event,
    tail_event,
)
from sglang_ext.api.realtime.realtime_settings import BETA, GA, SessionSettings, SettingsParser
from sglang_ext.api.realtime.turn import Turn
from sglang_ext.api.realtime.window_decoder import WindowDecoder
from sglang_ext.request_options import shown
from speech.buffer import SpeechProbabilities
from speech.streaming import Update
from speech.turns import MIN_SPEECH_FRAMES, TurnDetector
from speech.vad import FRAMES_PER_SECOND

logger = logging.getLogger(__name__)

_LEAST_COMMIT_S = 0.1  # as OpenAI's API
_FRAME_MS = 1000 / FRAMES_PER_SECOND
_BEFORE_CHARS = 200
_threads = ThreadPoolExecutor(2, thread_name_prefix="sglang-ext-realtime")


@dataclass(frozen=True)
class SessionParts:
    """What a session is made of.

    Attributes:
        parser: of its settings.
        decoder: makes what transcribes an item, of the settings and what was said before it.
        detector: of speech.
        most_held_s: seconds of audio that may wait.
        keep_alive_s: a session that has nothing to say says so this often.
        beta: the client speaks the protocol's beta.
    """

    parser: SettingsParser
    decoder: Callable[[SessionSettings, str], WindowDecoder]
    detector: SpeechProbabilities
    most_held_s: float = 60.0
    keep_alive_s: float = 15.0
    beta: bool = False


class RealtimeSession:
    """One session.

    Args:
        send: takes each server event; must not wait.
        broken: called once if the session cannot go on.
    """

    def __init__(
        self, parts: SessionParts, send: Callable[[Event], None], broken: Callable[[], None]
    ):
        self.id = new_id("sess")
        self._parts = parts
        self._send = send
        self._broken = broken
        self._beta = parts.beta
        self._settings = parts.parser.default
        self._front = AudioFront(parts.detector, self._settings.wire)
        self._history = FrameHistory()
        self._turn: Turn | None = None  # that takes audio
        self._detector = self._new_detector()
        self._turns: list[Turn] = []  # whose text is not complete
        self._committed = 0  # frames
        self._last_item: str | None = None
        self._before = ""  # what was said in the items that are complete
        self.handlers: dict[str, Callable[[Mapping[str, Any]], Awaitable[None]]] = {
            GA: self._update,
            BETA: self._update,
            "input_audio_buffer.append": self._append,
            "input_audio_buffer.commit": self._commit,
            "input_audio_buffer.clear": self._clear,
        }
        """What answers each type of client event."""

    @property
    def settings(self) -> SessionSettings:
        """Those that are in force."""
        return self._settings

    @property
    def lag_s(self) -> float:
        """Seconds of speech that came and were not heard yet."""
        return sum(turn.recognizer.lag_s for turn in self._turns)

    @property
    def held_s(self) -> float:
        """Seconds of audio that are kept: not heard yet, or not settled."""
        return sum(turn.recognizer.held_s for turn in self._turns)

    async def run(self) -> None:
        """Tell that the session is there, and then, for ever, that it still is."""
        self._tell_session("created")
        while True:
            await asyncio.sleep(self._parts.keep_alive_s)
            turn = self._turns[0] if self._turns else None
            item, tail = (None, "") if turn is None else (turn.item_id, turn.tail)
            language = None if turn is None else turn.language
            self._send(tail_event(item, tail, (), self.lag_s, language))

    async def finish(self) -> None:
        """End the audio; returns when all of it is transcribed."""
        self._take(await self._off_the_loop(self._front.flush))
        if self._turn is not None:
            self._close(self._turn)
        tasks = [turn.task for turn in self._turns if turn.task is not None]
        if tasks:
            await asyncio.wait(tasks)

    def abandon(self) -> "set[asyncio.Task[None]]":
        """Give up what runs; SGLang has been told to abort it once these tasks are done."""
        tasks = {turn.task for turn in self._turns if turn.task is not None}
        for task in tasks:
            task.cancel()
        return tasks

    async def handle(self, text: str) -> None:
        """Answer one client event; what is wrong with it is told as an error event."""
        client_event = None
        try:
            given = parsed(text)
            client_event = event_id(given)
            kind = given.get("type")
            handler = self.handlers.get(kind) if isinstance(kind, str) else None
            if handler is None:
                raise ApiError(
                    f"unknown event type {shown(kind)}; this server takes "
                    f"{', '.join(self.handlers)}",
                    param="type",
                    code="unknown_event",
                )
            await handler(given)
        except ApiError as error:
            self._send(error_event(error, client_event))
        except Exception:
            self._fail()

    def _fail(self) -> None:
        logger.exception("a realtime session failed")
        self._broken()

    async def _update(self, given: Mapping[str, Any]) -> None:
        settings = self._parts.parser.updated(given, self._settings)
        before, self._settings = self._settings, settings
        self._beta = given["type"] == BETA
        if settings.wire != before.wire:
            self._front.set_format(settings.wire)
        if settings.turn_detection != before.turn_detection:
            self._detector = self._new_detector()
        self._tell_session("updated")

    async def _append(self, given: Mapping[str, Any]) -> None:
        data, wire = audio_bytes(given), self._settings.wire
        seconds = len(data) / wire.sample_bytes / wire.rate
        held, most = self.held_s, self._parts.most_held_s
        if held + seconds > most:
            raise ApiError(
                f"these {seconds:.1f} s of audio were not taken: {held:.1f} s wait, and at most "
                f"{most:g} s may (--asr-max-buffer-seconds). Send audio as it is spoken",
                429,
                "audio",
                "buffer_overflow",
            )
        try:
            frames = await self._off_the_loop(lambda: self._front.push(data))
        except ValueError as error:
            raise ApiError(str(error), param="audio", code="invalid_audio") from None
        self._take(frames)

    async def _commit(self, given: Mapping[str, Any]) -> None:
        self._take(await self._off_the_loop(self._front.flush))
        frames = self._history.end - self._committed
        if frames < _LEAST_COMMIT_S * FRAMES_PER_SECOND:
            raise ApiError(
                f"the buffer has {frames * _FRAME_MS:.0f} ms of audio, and a commit takes at least "
                f"{_LEAST_COMMIT_S * 1000:.0f} ms",
                code="input_audio_buffer_commit_empty",
            )
        turn = self._turn or self._open()
        turn.feed(self._history.take(self._history.end))
        self._close(turn)
        self._detector = self._new_detector()

    async def _clear(self, given: Mapping[str, Any]) -> None:
        self._history.push(await self._off_the_loop(self._front.flush))
        self._history.drop(self._history.end)
        turn, self._turn = self._turn, None
        self._committed = self._history.end
        self._detector = self._new_detector()
        if turn is not None and turn.task is not None:
            turn.task.cancel()
        self._send(event("input_audio_buffer.cleared"))

    async def _off_the_loop(self, make: Callable[[], Frames]) -> Frames:
        return await asyncio.get_running_loop().run_in_executor(_threads, make)

    def _take(self, frames: Frames) -> None:
        """Give frames to the turns that they belong to."""
        self._history.push(frames)
        vad = self._settings.turn_detection
        if vad is None:
            if len(frames) and self._turn is None:
                self._open()
        else:
            prefix = round(vad.prefix_padding_ms / _FRAME_MS)
            for change in self._detector.push(frames.probabilities):
                if change.started:
                    self._history.drop(change.frame - prefix)
                    self._tell_speech("started", self._open())
                elif self._turn is not None:
                    self._turn.feed(self._history.take(change.frame))
                    self._tell_speech("stopped", self._turn)
                    self._close(self._turn)
            if self._turn is None:
                self._history.drop(self._history.end - prefix - 2 * MIN_SPEECH_FRAMES)
        if self._turn is not None:
            self._turn.feed(self._history.take(self._history.end))

    def _open(self) -> Turn:
        """A turn begins with the first frame that is kept."""
        turn = Turn(new_id("item"), self._history.origin, self._settings)
        before = self._turns[-1].task if self._turns else None
        turn.task = asyncio.create_task(self._follow(turn, before))
        # Not within it: a task that is cancelled before it begins runs nothing.
        turn.task.add_done_callback(lambda _: self._turns.remove(turn))
        self._turns.append(turn)
        self._turn = turn
        return turn

    def _close(self, turn: Turn) -> None:
        """A turn becomes an item; its last words follow."""
        previous, self._last_item = self._last_item, turn.item_id
        self._turn, self._committed = None, self._history.origin
        self._send(
            event("input_audio_buffer.committed", item_id=turn.item_id, previous_item_id=previous)
        )
        for told in item_events(turn.item_id, previous, turn.text, self._beta):
            self._send(told)
        turn.recognizer.end()

    async def _follow(self, turn: Turn, before: asyncio.Task[None] | None) -> None:
        """Transcribe a turn once the one before it is done."""
        try:
            if before is not None:
                await asyncio.wait([before])
            turn.decoder = self._parts.decoder(turn.settings, self._before)
            async with contextlib.aclosing(turn.recognizer.updates()) as updates:
                async for update in updates:
                    self._show(turn, update)
            if turn.error is not None:
                self._send(failed_event(turn.item_id, turn.error))
            else:
                self._send(completed_event(turn.item_id, turn.text, turn.seconds))
            self._before = f"{self._before} {turn.text}"[-_BEFORE_CHARS:]
        except Exception:
            self._fail()

    def _show(self, turn: Turn, update: Update) -> None:
        delta, words = turn.take(update)
        if delta:
            self._send(delta_event(turn.item_id, delta))
        pairs = [(word.text, word.end) for word in words]
        self._send(tail_event(turn.item_id, turn.tail, pairs, self.lag_s, turn.language))

    def _new_detector(self) -> TurnDetector:
        vad = self._settings.turn_detection
        silence_s = 0.5 if vad is None else vad.silence_duration_ms / 1000
        return TurnDetector(
            self._settings.threshold,
            silence_s,
            speaking=self._turn is not None,
            frame=self._history.end,
        )

    def _tell_session(self, done: str) -> None:
        described = self._parts.parser.described(self._settings, self.id, self._beta)
        self._send(session_event(done, described, self._beta))

    def _tell_speech(self, change: str, turn: Turn) -> None:
        kind = f"input_audio_buffer.speech_{change}"
        at = round(self._history.origin * _FRAME_MS)
        place = {"audio_start_ms" if change == "started" else "audio_end_ms": at}
        self._send(event(kind, item_id=turn.item_id, **place))
