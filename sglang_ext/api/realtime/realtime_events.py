"""What a realtime session says: OpenAI's server events, and one of our own."""

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_ext.api.http import ApiError

Event = dict[str, Any]

TAIL = "sglang_ext.input_audio_transcription.tail"
"""The event of our own: what may still change, times of what was settled, and the lag."""

OUTPUT_TAIL = "sglang_ext.output_transcript.tail"
"""The same of a translation: what may still change of the sentence that is being translated."""

TAILS = frozenset({TAIL, OUTPUT_TAIL})
"""Events that the next one of their type replaces."""


def new_id(kind: str) -> str:
    """An id as OpenAI's: its kind and a random number."""
    return f"{kind}_{uuid.uuid4().hex}"


def event(kind: str, **fields: Any) -> Event:
    """A server event."""
    return {"event_id": new_id("event"), "type": kind, **fields}


def error_event(error: ApiError, client_event: str | None = None) -> Event:
    """An error, as an event.

    Args:
        client_event: event_id of what the client sent.
    """
    return event("error", error=error.body()["error"] | {"event_id": client_event})


def session_event(done: str, session: Mapping[str, Any], beta: bool) -> Event:
    """The session was created or updated.

    Args:
        done: "created" or "updated".
    """
    return event(f"transcription_session.{done}" if beta else f"session.{done}", session=session)


def item_events(item_id: str, previous: str | None, transcript: str, beta: bool) -> list[Event]:
    """An item is there: what the beta calls created is added and done by now.

    SGLang's own sessions say created as well, and their clients wait for it.
    """
    item = {
        "id": item_id,
        "object": "realtime.item",
        "type": "message",
        "role": "user",
        "status": "completed",
        "content": [{"type": "input_audio", "transcript": transcript}],
    }
    kinds = ("created",) if beta else ("created", "added", "done")
    return [
        event(f"conversation.item.{kind}", previous_item_id=previous, item=item) for kind in kinds
    ]


def delta_event(item_id: str, text: str) -> Event:
    """Text that follows what the item has so far."""
    kind = "conversation.item.input_audio_transcription.delta"
    return event(kind, item_id=item_id, content_index=0, delta=text)


def completed_event(item_id: str, transcript: str, seconds: float) -> Event:
    """An item's transcript.

    Args:
        seconds: of its audio.
    """
    return event(
        "conversation.item.input_audio_transcription.completed",
        item_id=item_id,
        content_index=0,
        transcript=transcript,
        usage={"type": "duration", "seconds": round(seconds, 3)},
    )


def failed_event(item_id: str, error: ApiError) -> Event:
    """An item whose transcript, or some of it, could not be made."""
    return event(
        "conversation.item.input_audio_transcription.failed",
        item_id=item_id,
        content_index=0,
        error=error.body()["error"],
    )


def tail_event(
    item_id: str | None,
    text: str,
    words: Sequence[tuple[str, float]],
    lag_s: float,
    language: str | None = None,
) -> Event:
    """What an item has beside its deltas.

    Args:
        text: follows the deltas, for now; it is replaced by the next such event.
        words: that the deltas since the last such event brought, and where each ends, in seconds
            of the session's audio.
        lag_s: seconds of speech that came and were not heard yet.
        language: what the item is spoken in, an ISO code; None: that is not known yet.
    """
    return event(
        TAIL,
        item_id=item_id,
        content_index=0,
        text=text,
        words=[{"word": word, "end_ms": round(end * 1000)} for word, end in words],
        lag_s=round(lag_s, 3),
        language=language,
    )


def transcript_event(side: str, delta: str, elapsed_ms: int, **more: Any) -> Event:
    """Text that follows what a translation session has said so far, in either language.

    Args:
        side: "input" or "output".
        elapsed_ms: where what it says ends in the session's audio.
        more: our own, under the key sglang_ext.
    """
    fields = {"sglang_ext": more} if more else {}
    kind = f"session.{side}_transcript.delta"
    return event(kind, delta=delta, elapsed_ms=elapsed_ms, **fields)
