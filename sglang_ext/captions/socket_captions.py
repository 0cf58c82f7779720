"""Captions and their translation from a server's WebSocket (docs/realtime.md, Translations)."""

import asyncio
import base64
import contextlib
import json
from collections.abc import Mapping
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from sglang_ext.api.realtime.realtime_events import OUTPUT_TAIL, TAIL
from sglang_ext.api.translation.sentence_translations import Translated
from sglang_ext.captions.captions_options import CaptionsError
from sglang_ext.captions.live_captions import Captions
from sglang_ext.captions.playback import Playback
from speech.agreement import split_words
from speech.audio import SAMPLE_RATE, AudioError
from speech.streaming import Update, Word

_PATH = "/v1/realtime/translations"
_OUTPUT = "session.output_transcript.delta"
_ANSWER_S = 30.0
_LONGEST_EVENT = 1 << 24  # bytes


class SocketCaptions:
    """Plays audio into a translation session, and shows what comes back.

    Args:
        session: settings, as session.update takes them; the audio is 16 kHz PCM.
    """

    def __init__(self, captions: Captions, playback: Playback, session: Mapping[str, Any]):
        self._captions = captions
        self._playback = playback
        self._session = session
        self._stable: dict[int, str] = {}  # of sentences that are not final
        self._item: str | None = None
        self._complete = True

    async def run(self, url: str, api_key: str) -> bool:
        """Returns whether all of the audio was heard and translated.

        Args:
            url: the server's, http://HOST:PORT.

        Raises:
            CaptionsError: it is not there, or takes no such session.
            DisplayError: captions cannot be shown.
        """
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        address = url.replace("http", "ws", 1) + _PATH
        try:
            socket = await connect(address, additional_headers=headers, max_size=_LONGEST_EVENT)
        except (OSError, TimeoutError, InvalidHandshake) as error:
            raise CaptionsError(f"{url}{_PATH}: {error or type(error).__name__}") from None
        async with socket:
            await self._begin(socket)
            try:
                await self._play(socket)
            finally:
                self._captions.end()
                self._captions.close(0.0)
        return self._complete

    async def _begin(self, socket: ClientConnection) -> None:
        """Have the settings taken.

        Raises:
            CaptionsError: they are not.
        """
        try:
            await socket.send(json.dumps({"type": "session.update", "session": self._session}))
            async with asyncio.timeout(_ANSWER_S):
                async for message in socket:
                    event = json.loads(message)
                    if event["type"] == "error":
                        raise CaptionsError(event["error"]["message"])
                    if event["type"] == "session.updated":
                        return
        except TimeoutError:
            raise CaptionsError(f"no answer in {_ANSWER_S:g} s") from None
        except ConnectionClosed:
            pass
        raise CaptionsError("the server closed the session")

    async def _play(self, socket: ClientConnection) -> None:
        feeding = asyncio.create_task(self._feed(socket))
        try:
            async for message in socket:
                event = json.loads(message)
                if event["type"] == "session.closed":
                    break
                self._take(event)
            else:
                self._fail(f"the server closed the session: {socket.close_reason or 'no reason'}")
        except ConnectionClosed as closed:
            self._fail(f"the connection was lost: {closed}")
        finally:
            feeding.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await feeding

    async def _feed(self, socket: ClientConnection) -> None:
        """Send the audio as it plays, and that it is over."""
        try:
            async with contextlib.aclosing(self._playback.pieces()) as pieces:
                async for piece in pieces:
                    data = (piece.clip(-1, 1) * 32767).round().astype("<i2").tobytes()
                    audio = base64.b64encode(data).decode()
                    event = {"type": "session.input_audio_buffer.append", "audio": audio}
                    await socket.send(json.dumps(event))
            if not self._playback.position:
                raise AudioError("no audio came")
        except (AudioError, OSError) as error:
            self._fail(f"audio: {error}")
        except ConnectionClosed:
            return  # of which the reader tells
        with contextlib.suppress(ConnectionClosed):
            await socket.send('{"type": "session.close"}')

    def _take(self, event: Mapping[str, Any]) -> None:
        """Show what an event tells."""
        kind = event["type"]
        if kind == "error":
            self._fail(event["error"]["message"])
        elif kind == TAIL and event["item_id"] is not None:
            if self._item not in (None, event["item_id"]):
                self._captions.end()
            self._item = event["item_id"]
            words = tuple(Word(w["word"], w["end_ms"] / 1000) for w in event["words"])
            tail = tuple(Word(word, 0.0) for word in split_words(event["text"]))
            self._captions.heard(Update(words, tail, 0.0))
        elif kind == _OUTPUT:
            number = event["sglang_ext"]["sentence"]
            self._stable[number] = self._stable.get(number, "") + event["delta"]
        elif kind == OUTPUT_TAIL:
            number, final = event["sentence"], event["final"]
            stable = self._stable.get(number, "").lstrip()
            tail_text = event["text"] if stable else event["text"].lstrip()
            self._captions.translation(Translated(number, stable, tail_text, final))
            if final:
                self._stable.pop(number, None)

    def _fail(self, message: str) -> None:
        self._complete = False
        self._captions.error(message)


def pcm_settings(silence_s: float, language: str, prompt: str) -> dict[str, Any]:
    """session.audio.input of 16 kHz PCM.

    Args:
        silence_s: so long a silence ends what was said.
        language: ISO code of what is spoken.
        prompt: names and words that may come up.
    """
    return {
        "format": {"type": "audio/pcm", "rate": SAMPLE_RATE},
        "turn_detection": {
            "type": "server_vad",
            "silence_duration_ms": round(silence_s * 1000),
        },
        "transcription": {"language": language, "prompt": prompt or None},
    }
