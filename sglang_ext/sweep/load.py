"""The load generator: requests to /generate, and when their tokens came.

While a run is on, only chunks of bytes and their times are kept, so that the cores stay with the
server; what they say is read when the run is over.
"""

import asyncio
import itertools
import json
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from sglang_ext.sweep.items import Item, streams

# With long prompts the first token of the last request in a batch comes late.
_READ_TIMEOUT_S = 600.0
_HEALTH_TIMEOUT_S = 5.0
# A server that is about to end may still answer.
_GRACE_S = 0.5
_HEADERS = {"Content-Type": "application/json"}
_EVENT_END = b"\n\n"
_DATA = b"data: "
_DONE = b"data: [DONE]"


class ServerGone(Exception):
    """The server does not answer any more; the message says what was seen."""


@dataclass(frozen=True)
class Answer:
    """What became of one request.

    Attributes:
        id, category: of its item.
        start_s: when it was sent, in seconds from the run's begin.
        ttft_s: time to first token; None: there was none.
        e2e_s: from sending it to its end.
        itl_s: seconds between tokens; a chunk of n tokens counts n times interval / n, as in
            SGLang's benchmark/serving.py.
        spec_verify_ct: verify steps; None without speculation.
        error: why it failed.
    """

    id: str
    category: str
    start_s: float
    ttft_s: float | None
    e2e_s: float
    itl_s: list[float]
    prompt_tokens: int
    output_ids: list[int]
    spec_verify_ct: int | None
    error: str | None


@dataclass(frozen=True)
class Load:
    """A run. duration_s: from the first request's begin to the last one's end."""

    answers: list[Answer]
    duration_s: float

    @property
    def output_tokens(self) -> int:
        """Output tokens of the requests that did not fail."""
        return sum(len(answer.output_ids) for answer in self.answers if answer.error is None)


def run_batch(
    url: str, items: Sequence[Item], in_flight: int, params: Mapping[str, Any] | None = None
) -> Load:
    """Closed loop: all items as soon as fewer than `in_flight` are under way.

    Args:
        items: those of a stream wait for one another; `in_flight` streams are under way.
        params: custom_params of the requests.

    Raises:
        ServerGone: the server ended.
    """

    async def send_all(send: _Send, chains: list[list[_Raw]]) -> None:
        pending = iter(chains)

        async def one_after_the_other() -> None:
            for chain in pending:
                for raw in chain:
                    await send(raw)

        await asyncio.gather(*(one_after_the_other() for _ in range(in_flight)))

    return _run(url, items, params, send_all)


def run_rate(
    url: str,
    items: Sequence[Item],
    rate: float,
    seed: int,
    params: Mapping[str, Any] | None = None,
) -> Load:
    """Open loop: the items arrive by a Poisson process, whatever is still under way.

    Args:
        items: of a stream the first one arrives, the others follow.
        rate: requests (streams) a second in the mean; the first one comes at once.
        seed: of the arrivals; equal ones arrive equally.

    Raises:
        ServerGone: the server ended.
    """

    async def send_all(send: _Send, chains: list[list[_Raw]]) -> None:
        at = arrivals(len(chains), rate, seed)
        begin = time.perf_counter()

        async def later(chain: list[_Raw], seconds: float) -> None:
            await asyncio.sleep(seconds - (time.perf_counter() - begin))
            for raw in chain:
                await send(raw)

        await asyncio.gather(*(later(chain, t) for chain, t in zip(chains, at, strict=True)))

    return _run(url, items, params, send_all)


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Seconds from the begin at which `count` requests arrive."""
    draw = random.Random(seed)
    gaps = (draw.expovariate(rate) for _ in range(count - 1))
    return list(itertools.accumulate(gaps, initial=0.0))[:count]


@dataclass
class _Raw:
    """A request under way. chunks: (time, bytes) as they came; times of time.perf_counter."""

    item: Item
    body: bytes
    start: float = 0.0
    end: float = 0.0
    status: int = 0
    chunks: list[tuple[float, bytes]] = field(default_factory=list)
    error: str | None = None


_Send = Callable[[_Raw], Awaitable[None]]
# What sends all requests; those of a chain wait for one another.
_SendAll = Callable[[_Send, list[list[_Raw]]], Awaitable[None]]


def _run(
    url: str, items: Sequence[Item], params: Mapping[str, Any] | None, send_all: _SendAll
) -> Load:
    chains = [[_Raw(item, _body(item, params)) for item in stream] for stream in streams(items)]
    asyncio.run(_drive(url, chains, send_all))
    raws = [raw for chain in chains for raw in chain]
    if not raws:
        return Load([], 0.0)
    begin = min(raw.start for raw in raws)
    return Load([_answer(raw, begin) for raw in raws], max(raw.end for raw in raws) - begin)


def _body(item: Item, params: Mapping[str, Any] | None) -> bytes:
    sampling: dict[str, Any] = {
        "temperature": 0.0,
        "max_new_tokens": item.max_tokens,
        "ignore_eos": False,
    }
    if custom := {**(params or {}), **item.params}:
        sampling["custom_params"] = custom
    body: dict[str, Any] = {"sampling_params": sampling, "stream": True}
    if item.audio:  # the decoder's prompt is the server's own
        body |= {"text": "", "audio_data": item.audio, "modalities": ["audio"]}
    else:
        body["input_ids"] = list(item.input_ids)
    return json.dumps(body).encode()


async def _drive(url: str, chains: list[list[_Raw]], send_all: _SendAll) -> None:
    timeout = aiohttp.ClientTimeout(total=None, sock_read=_READ_TIMEOUT_S)
    # Shorter than servers keep idle connections (uvicorn: 5 s): none is lost as it is used again.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:

        async def send(raw: _Raw) -> None:
            raw.start = time.perf_counter()
            try:
                async with http.post(
                    url + "/generate", data=raw.body, headers=_HEADERS
                ) as response:
                    raw.status = response.status
                    async for chunk in response.content.iter_any():
                        raw.chunks.append((time.perf_counter(), chunk))
            except (aiohttp.ClientError, TimeoutError) as error:
                raw.error = str(error) or type(error).__name__
                if not await _is_healthy(http, url):
                    raise ServerGone(f"{url} is gone: {raw.error}") from None
            finally:
                raw.end = time.perf_counter()

        await send_all(send, chains)


async def _is_healthy(http: aiohttp.ClientSession, url: str) -> bool:
    await asyncio.sleep(_GRACE_S)
    timeout = aiohttp.ClientTimeout(total=_HEALTH_TIMEOUT_S)
    try:
        async with http.get(url + "/health", timeout=timeout) as response:
            return response.ok
    except (aiohttp.ClientError, TimeoutError):
        return False


def _answer(raw: _Raw, begin: float) -> Answer:
    """Reads a request's chunks."""
    reading = _Reading(raw.start)
    if raw.status == 200:
        for seconds, events in _events(raw.chunks):
            reading.take(seconds, events)
        error = reading.error or raw.error or (None if reading.done else "the stream broke off")
    else:
        body = b"".join(chunk for _, chunk in raw.chunks).decode(errors="replace").strip()
        error = raw.error or f"HTTP {raw.status}: {body[:500]}"
    return Answer(
        id=raw.item.id,
        category=raw.item.category,
        start_s=raw.start - begin,
        ttft_s=reading.ttft_s,
        e2e_s=raw.end - raw.start,
        itl_s=reading.itl_s,
        prompt_tokens=reading.meta.get("prompt_tokens", len(raw.item.input_ids)),
        output_ids=reading.output_ids(),
        spec_verify_ct=reading.meta.get("spec_verify_ct"),
        error=error,
    )


def _events(chunks: Iterable[tuple[float, bytes]]) -> Iterable[tuple[float, list[bytes]]]:
    """(time, the server-sent events that this chunk completed)."""
    rest = b""
    for seconds, chunk in chunks:
        *events, rest = (rest + chunk).split(_EVENT_END)
        if events:
            yield seconds, events


class _Reading:
    """What a stream's events say."""

    def __init__(self, start: float):
        self.ttft_s: float | None = None
        self.itl_s: list[float] = []
        self.meta: dict[str, Any] = {}
        self.error: str | None = None
        self.done = False
        self._start = self._before = start
        self._tokens = 0
        self._ids: list[list[int]] = []

    def take(self, seconds: float, events: Sequence[bytes]) -> None:
        """Events that came together, at `seconds`."""
        for event in events:
            if event == _DONE:
                self.done = True
            elif event.startswith(_DATA):
                self._read(json.loads(event[len(_DATA) :]))
        new = self.meta.get("completion_tokens", 0) - self._tokens
        if new <= 0:
            return
        if self.ttft_s is None:
            self.ttft_s = seconds - self._start
        else:
            self.itl_s += [(seconds - self._before) / new] * new
        self._before = seconds
        self._tokens += new

    def _read(self, data: dict[str, Any]) -> None:
        if "error" in data:
            error = data["error"]
            self.error = str(error.get("message", error) if isinstance(error, dict) else error)
            return
        self.meta = data["meta_info"]
        self._ids.append(data["output_ids"])
        reason = self.meta.get("finish_reason")
        if isinstance(reason, dict) and reason.get("type") == "abort":
            self.error = f"aborted: {reason.get('message', 'no reason given')}"

    def output_ids(self) -> list[int]:
        """The output, from deltas (--incremental-streaming-output) or from what grows."""
        if not self._ids or len(self._ids[-1]) >= self._tokens:
            return self._ids[-1] if self._ids else []
        return [token for ids in self._ids for token in ids]
