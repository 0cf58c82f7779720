"""What a workload is made of."""

import hashlib
import itertools
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

# Whisper's encoder positions and its decoder's prompt: what 30 s of audio take in a KV pool.
_AUDIO_TOKENS = 1504


@dataclass(frozen=True)
class Item:
    """One request.

    Attributes:
        id: unique in its workload.
        category: what results are also shown by.
        input_ids: the prompt; empty with audio, whose prompt the server makes (English, without
            timestamps).
        max_tokens: of its output.
        audio: data URL of what is to be transcribed.
        reference: what the output should say; "": nobody has written it down.
        stream: items of one stream follow each other; each is sent when the one before it has been
            answered.
        group: items of one group begin with the same long text, which is read before a run; they
            are measured one behind the other.
        params: custom_params of this request, over those of its method.
    """

    id: str
    category: str
    input_ids: tuple[int, ...]
    max_tokens: int
    audio: str = ""
    reference: str = ""
    stream: str = ""
    group: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)

    @property
    def most_tokens(self) -> int:
        """Tokens that it may take in a server's KV pool."""
        return (_AUDIO_TOKENS if self.audio else len(self.input_ids)) + self.max_tokens


@dataclass(frozen=True)
class Workload:
    """Requests of one kind.

    Attributes:
        kind: what a method must be able to decode, as methods.TEXT.
        measured: what is timed.
        served_before: never timed; its outputs are the corpus of the methods that have one.
    """

    name: str
    kind: str
    measured: tuple[Item, ...]
    served_before: tuple[Item, ...]


def streams(items: Sequence[Item]) -> list[list[Item]]:
    """The items by stream, in order; one without a stream is by itself."""
    found: list[list[Item]] = []
    for item in items:
        if item.stream and found and found[-1][-1].stream == item.stream:
            found[-1].append(item)
        else:
            found.append([item])
    return found


def tokens_in_flight(items: Iterable[Item], count: int) -> int:
    """Tokens that `count` requests sent one behind the other take in a KV pool, at the most.

    What a prompt begins with as the one before it does, a radix cache has once.
    """
    items = list(items)
    own = [item.most_tokens for item in items]
    for place, (before, item) in enumerate(itertools.pairwise(items), start=1):
        pairs = zip(before.input_ids, item.input_ids, strict=False)
        own[place] -= sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    most = 0
    for place, item in enumerate(items):
        most = max(most, item.most_tokens + sum(own[place + 1 : place + count]))
    return most


def heads(items: Iterable[Item]) -> list[Item]:
    """Requests that read what the items of each group have in common; no groups, no requests."""
    first: dict[str, Item] = {}
    for item in items:
        if item.group:
            first.setdefault(item.group, replace(item, max_tokens=1))
    return list(first.values())


def as_sessions(items: Sequence[Item], params: Mapping[str, Any], run: str) -> list[Item]:
    """Requests of retranslation with each stream a session of SSBD's.

    A session's last output is the draft of its next one; only what a stream ends with is ingested,
    if anything is.

    Args:
        params: custom_params of the method.
        run: a name, so that no run goes on with the sessions of another.
    """
    made: list[Item] = []
    for stream in streams(items):
        for item in stream:
            session = _session_name(run, item.stream or item.id)
            ingest = params.get("ingest", True) and item is stream[-1]
            own = {"ssbd": {**params["ssbd"], "session": session}, "ingest": ingest}
            made.append(replace(item, params=own))
    return made


def _session_name(run: str, stream: str) -> str:
    """A UUID of version 4, as a session with a bias must be named (drafters/session_outputs.py).

    As random as the run's name, and the same for the same stream of it.
    """
    digest = hashlib.blake2b(f"{run}/{stream}".encode(), digest_size=16).digest()
    return str(uuid.UUID(bytes=digest, version=4))
