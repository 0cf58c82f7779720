"""A client of translation sessions for soak_sessions: what it does at random, what it expects."""

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp

PATH = "/v1/translation/sessions"
NAMESPACE_HEADER = "x-sglang-ext-namespace"
NAMESPACES: tuple[Mapping[str, str], ...] = ({}, {NAMESPACE_HEADER: "a"}, {NAMESPACE_HEADER: "b"})
IDLE_S = 20
# The server looks for idle sessions every few seconds.
EXPIRY_MARGIN_S = 10
TIMEOUT_S = 300
SHOWN_PROBLEMS = 20
SENTENCES = (
    "The parcel number {} was left at the station by a man in a blue coat.",
    "Please tell room {} that the two children are waiting near the old bridge.",
    "A train with {} passengers stopped in the snow before it reached the town.",
    "The house at {} Garden Street has a green door and three small windows.",
    "Her telephone number is {} and she will be at home after the concert.",
    "About {} people watched the boats on the river while the sun went down.",
)
# Not a part of a word: the sessions' names are hexadecimal.
_NUMBER = re.compile(r"(?<!\w)(?:\d{3}[ \u00a0\u202f.,'\u2019]\d{3}|\d+)(?!\w)")


class Markers:
    """Numbers of six digits, any two of which differ in three digits or more."""

    def __init__(self, rng: random.Random):
        self._rng = rng
        self._taken: set[str] = set()

    def new(self) -> str:
        """One that nobody has."""
        while True:
            made = str(self._rng.randrange(100_000, 1_000_000))
            if all(sum(a != b for a, b in zip(made, t, strict=True)) >= 3 for t in self._taken):
                self._taken.add(made)
                return made

    def found(self, text: str) -> set[str]:
        """Those in a text, as they are or written in groups of three digits."""
        numbers = (re.sub(r"\D", "", number) for number in _NUMBER.findall(text))
        return self._taken.intersection(numbers)


@dataclass
class Tally:
    """What happened.

    Attributes:
        counts: by kind: sessions, updates, disconnects, expiries, refusals, ...
        problems: cross-talk and errors, in words.
    """

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def problem(self, kind: str, text: str) -> None:
        """Count cross_talk or unprovoked_errors, and show the first ones at once."""
        self.counts[kind] += 1
        self.problems.append(f"{kind}: {text}")
        if len(self.problems) <= SHOWN_PROBLEMS:
            print(f"    {self.problems[-1][:600]}", flush=True)


@dataclass
class Soak:
    """What all clients share.

    Attributes:
        url: the server's.
        idle_s: when the server lets go of a session that nobody uses, in seconds.
        margin_s: how much later it must be gone.
        pause_s: the longest pause of a client between two calls.
    """

    url: str
    http: aiohttp.ClientSession
    rng: random.Random
    idle_s: float = IDLE_S
    margin_s: float = EXPIRY_MARGIN_S
    pause_s: float = 1.0
    tally: Tally = field(default_factory=Tally)
    let_go: list[asyncio.Task[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.markers = Markers(self.rng)

    async def call(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any]:
        """Status and JSON of one request; `body` may be bytes, which are sent as they are."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        given = {"content-type": "application/json", **(headers or {})}
        async with self.http.request(method, self.url + path, data=data, headers=given) as answer:
            text = await answer.text()
        try:
            return answer.status, json.loads(text)
        except ValueError:
            return answer.status, text


class Mismatch(Exception):
    """An answer that is not the one expected."""


# What a wrong answer, a broken connection, or a message without its fields raises.
_WRONG = (Mismatch, aiohttp.ClientError, TimeoutError, KeyError, TypeError, ValueError)


class Client:
    """One session from its opening to its end."""

    def __init__(self, soak: Soak):
        self.soak, self.rng, self.tally = soak, soak.rng, soak.tally
        self.marker = soak.markers.new()
        self.headers = self.rng.choice(NAMESPACES)
        self.transport = self.rng.choice(("http", "events", "websocket"))
        self.mask = self.rng.choice((0, 0, 3, 5))
        self.path = PATH
        self.source = ""
        # Whether `source` and `revision` are the server's, too: not after a disconnect.
        self.in_step = True
        self.revision = 0
        self.socket: aiohttp.ClientWebSocketResponse | None = None
        self.listener: asyncio.Task[None] | None = None

    async def live(self) -> None:
        """The whole life; what goes wrong is in the tally."""
        try:
            await self._open()
            for _ in range(self.rng.randint(3, 7)):
                await self._step()()
                await self._pause()
            await self.rng.choice((self._finish, self._finish, self._delete, self._let_go))()
        except _WRONG as error:
            name = self.path.rsplit("/", 1)[-1]
            self.tally.problem("unprovoked_errors", f"{name}: {type(error).__name__}: {error}")
            if self.listener is not None:
                self.listener.cancel()
        finally:
            await self._close_socket()

    def _step(self) -> Callable[[], Awaitable[None]]:
        """What to do next."""
        if not self.in_step:
            return self._revise
        steps = {
            self._append: 8, self._revise: 3, self._replace_tail: 3, self._empty: 1,
            self._disconnect: 3, self._be_refused: 4,
        }  # fmt: skip
        return self.rng.choices(list(steps), list(steps.values()))[0]

    # -- the session's life -------------------------------------------------------------------

    async def _open(self) -> None:
        body = {
            "source_language": "English", "target_language": self.rng.choice(("French", "fr")),
            "beta": self.rng.choice((None, 0, 0.2, 0.9)), "mask": self.mask,
            "trim_draft": self.rng.choice((0, 0, 3)), "max_tokens": 48,
            "realign": self.rng.random() < 0.7, "retrieve": self.rng.random() < 0.7,
            "metadata": {"marker": self.marker},
        }  # fmt: skip
        session = await self._expect("POST", PATH, body)
        self.path = f"{PATH}/{session['id']}"
        self.tally.counts["sessions"] += 1
        if self.rng.random() < 0.3:
            self.listener = asyncio.create_task(self._listen())

    async def _finish(self) -> None:
        if not self.in_step:
            await self._revise()
        if self.transport == "websocket":
            update = await self._over_socket({"finish": True})
        else:
            update = await self._expect("POST", f"{self.path}/finish")
        self._check_update(update, final=True)
        self._check_state(await self._expect("GET", self.path), "finished")
        await self._refused("POST", f"{self.path}/updates", {"append": " more"}, 409)
        if self.listener is not None:
            await self._ended(self.listener)

    async def _delete(self) -> None:
        answer = await self._expect("DELETE", self.path)
        if answer.get("deleted") is not True:
            raise Mismatch(f"DELETE answered {answer}")
        await self._refused("GET", self.path, None, 404)
        await self._refused("POST", f"{self.path}/updates", {"append": " more"}, 404)
        if self.listener is not None:
            await self._ended(self.listener)

    async def _let_go(self) -> None:
        """Leave it; it must be gone after its idle time."""
        await self._close_socket()
        self.soak.let_go.append(asyncio.create_task(self._gone()))

    async def _gone(self) -> None:
        await asyncio.sleep(self.soak.idle_s + self.soak.margin_s)
        try:
            await self._refused("GET", self.path, None, 404)
            if self.listener is not None:
                await self._ended(self.listener)
            self.tally.counts["expiries"] += 1
        except _WRONG as error:
            self.tally.problem("unprovoked_errors", f"a session that was let go: {error!r}")

    async def _pause(self) -> None:
        await asyncio.sleep(self.rng.uniform(0, self.soak.pause_s))

    # -- updates ------------------------------------------------------------------------------

    def _words(self) -> list[str]:
        return self.rng.choice(SENTENCES).format(self.marker).split()

    async def _append(self) -> None:
        words = self._words()
        more = " ".join(words[: self.rng.randint(5, len(words))])
        more = more if not self.source else f" {more}"
        if len(self.source) > 300:
            return await self._revise()
        await self._update({"append": more}, self.source + more)

    async def _revise(self) -> None:
        words = self._words()
        whole = " ".join(words[: self.rng.randint(5, len(words))])
        await self._update({"source": whole}, whole)

    async def _replace_tail(self) -> None:
        keep = self.rng.randint(0, len(self.source))
        tail = " ".join(self._words())
        await self._update({"keep": keep, "append": tail}, self.source[:keep] + tail)

    async def _empty(self) -> None:
        update = await self._update({"source": self.rng.choice(("", "  "))}, None)
        if update["text"]:
            raise Mismatch(f"an empty source gave {update['text']!r}")

    async def _update(self, body: dict[str, Any], source: str | None) -> dict[str, Any]:
        """One update over the session's transport; `source`: what it will be, None: as sent."""
        self.source = body["source"] if source is None else source
        if self.transport == "websocket" and self.in_step:
            update = await self._over_socket(body)
        elif self.transport == "events" and self.in_step:
            update = await self._over_events(body)
        else:
            # Also after a disconnect: what is still running ends before this one begins.
            update = await self._expect("POST", f"{self.path}/updates", body)
        self.in_step = True
        self.tally.counts["updates"] += 1
        self._check_update(update)
        if self.rng.random() < 0.3:
            self._check_state(await self._expect("GET", self.path), "open")
        return update

    async def _over_events(self, body: dict[str, Any]) -> dict[str, Any]:
        update: dict[str, Any] | None = None
        async with self._stream({**body, "stream": True}) as answer:
            if answer.status != 200:
                raise Mismatch(f"a streamed update was answered {answer.status}")
            async for message in _events(answer):
                self._check_text(message)
                if "error" in message:
                    raise Mismatch(f"a streamed update ended with {message}")
                if message["object"] == "translation.update":
                    update = message
        if update is None:
            raise Mismatch("a streamed update ended without its result")
        return update

    def _stream(self, body: dict[str, Any]) -> Any:
        return self.soak.http.post(
            f"{self.soak.url}{self.path}/updates", json=body, headers=self.headers
        )

    async def _over_socket(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = await self._ask_socket(body)
        if "error" in answer:
            raise Mismatch(f"the WebSocket answered {answer}")
        return answer

    async def _ask_socket(self, body: dict[str, Any]) -> dict[str, Any]:
        """The update or the error that a message is answered with."""
        if self.socket is None or self.socket.closed:
            url = f"{self.soak.url}{self.path}/ws"
            self.socket = await self.soak.http.ws_connect(url, headers=self.headers)
        await self.socket.send_json(body)
        while True:
            message = await self.socket.receive_json(timeout=TIMEOUT_S)
            self._check_text(message)
            if "error" in message or message["object"] == "translation.update":
                return message

    async def _disconnect(self) -> None:
        """Send an update and do not wait for its answer."""
        self.tally.counts["disconnects"] += 1
        before, words = self.source, " ".join(self._words())
        self.in_step = False
        if self.transport == "websocket" and self.socket is not None and not self.socket.closed:
            await self.socket.send_json({"source": words})
            await self._pause()
            await self._close_socket()
        else:
            with suppress(TimeoutError):
                async with (
                    asyncio.timeout(self.rng.uniform(0.05, 3) * self.soak.pause_s),
                    self._stream({"source": words, "stream": self.transport == "events"}) as answer,
                ):
                    await answer.content.readline()
        await asyncio.sleep(0.3 * self.soak.pause_s)  # what was sent has arrived
        state = await self._expect("GET", self.path)
        if state["source"] not in (before, words):
            self.tally.problem(
                "cross_talk", f"after a disconnect the source is {state['source']!r}"
            )

    async def _listen(self) -> None:
        """Read the session's events to their end."""
        url = f"{self.soak.url}{self.path}/events"
        endless = aiohttp.ClientTimeout(total=None)
        async with self.soak.http.get(url, headers=self.headers, timeout=endless) as answer:
            if answer.status != 200:
                raise Mismatch(f"the events were answered {answer.status}")
            async for message in _events(answer):
                self._check_text(message)
                self.tally.counts["events"] += 1

    async def _ended(self, listener: asyncio.Task[None]) -> None:
        try:
            await asyncio.wait_for(listener, self.soak.margin_s)
        except TimeoutError:
            raise Mismatch("the events go on after the session's end") from None

    async def _close_socket(self) -> None:
        if self.socket is not None:
            await self.socket.close()
            self.socket = None

    # -- calls that must be refused -----------------------------------------------------------

    async def _be_refused(self) -> None:
        if self.transport == "websocket" and self.rng.random() < 0.5:
            await self._be_refused_by_socket()
        else:
            await self._be_refused_by_http()
        self._check_state(await self._expect("GET", self.path), "open")

    async def _be_refused_by_socket(self) -> None:
        self.tally.counts["refusals"] += 1
        wrong: dict[str, dict[str, Any]] = {
            "append": {"append": 5},
            "keep": {"append": "a", "keep": 1 << 20},
        }
        param = self.rng.choice(list(wrong))
        answer = await self._ask_socket(wrong[param])
        if "error" not in answer or answer["error"].get("param") != param:
            raise Mismatch(f"the WebSocket must refuse {wrong[param]}, got {answer}")

    async def _be_refused_by_http(self) -> None:
        languages = {"source_language": "en", "target_language": "fr"}
        updates, elsewhere = f"{self.path}/updates", {NAMESPACE_HEADER: "elsewhere"}
        unknown = f"{PATH}/trs-{self.rng.getrandbits(64):x}"
        method, path, body, status, param, headers = self.rng.choice(
            (
                ("GET", unknown, None, 404, None, None),
                ("POST", f"{unknown}/updates", {"append": "a"}, 404, None, None),
                ("DELETE", unknown, None, 404, None, None),
                ("GET", self.path, None, 404, None, elsewhere),
                ("POST", updates, {"source": "theirs"}, 404, None, elsewhere),
                ("POST", f"{self.path}/finish", None, 404, None, elsewhere),
                ("DELETE", self.path, None, 404, None, elsewhere),
                ("POST", PATH, {**languages, "beta": 1.5}, 400, "beta", None),
                ("POST", PATH, {**languages, "beta": "high"}, 400, "beta", None),
                ("POST", PATH, {**languages, "mask": -1}, 400, "mask", None),
                ("POST", PATH, {"source_language": "en"}, 400, "target_language", None),
                ("POST", updates, {}, 400, None, None),
                ("POST", updates, {"append": "a", "source": "b"}, 400, None, None),
                ("POST", updates, {"append": 5}, 400, "append", None),
                ("POST", updates, {"append": "a", "keep": 1 << 20}, 400, "keep", None),
                ("POST", updates, b'{"append": ', 400, None, None),
                ("POST", updates, {"source": "word " * 6000}, 413, None, None),
                ("POST", updates, {"source": "word " * 200_000}, 413, None, None),
            )
        )
        await self._refused(method, path, body, status, param, headers)

    async def _refused(
        self,
        method: str,
        path: str,
        body: Any,
        status: int,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.tally.counts["refusals"] += 1
        got, answer = await self.soak.call(method, path, body, headers or self.headers)
        self._check_text(answer)
        error = answer.get("error") if isinstance(answer, dict) else None
        message = error.get("message") if isinstance(error, dict) else None
        if got != status or not message or (param and (error or {}).get("param") != param):
            sent = str(body)[:80]
            raise Mismatch(
                f"{method} {path} with {sent} must be refused with {status}"
                f"{f' for {param}' if param else ''}, got {got}: {str(answer)[:200]}"
            )

    # -- checks -------------------------------------------------------------------------------

    async def _expect(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        status, answer = await self.soak.call(method, path, body, self.headers)
        self._check_text(answer)
        if status != 200 or not isinstance(answer, dict):
            raise Mismatch(f"{method} {path} with {str(body)[:80]}: {status} {str(answer)[:200]}")
        return answer

    def _check_text(self, message: Any) -> None:
        """No other session's number may be in it."""
        found = self.soak.markers.found(json.dumps(message, ensure_ascii=False))
        if found - {self.marker}:
            self.tally.problem("cross_talk", f"{self.marker} got {found} in {message}")

    def _check_update(self, update: dict[str, Any], final: bool = False) -> None:
        whole = update["stable"] + update["unstable"] == update["text"]
        own = update["session"] == self.path.rsplit("/", 1)[-1]
        held = update["unstable"] and (final or not self.mask)
        if not (own and whole and not held and update["revision"] > self.revision):
            raise Mismatch(f"an update after revision {self.revision}: {update}")
        self.revision = update["revision"]
        self.tally.counts["texts"] += bool(update["text"])
        own_number = self.marker in self.soak.markers.found(update["text"])
        self.tally.counts["with_own_number"] += own_number

    def _check_state(self, state: dict[str, Any], status: str) -> None:
        if state["source"] != self.source or state["metadata"] != {"marker": self.marker}:
            self.tally.problem("cross_talk", f"{self.source!r} was sent, the state is {state}")
        if state["status"] != status or state["revision"] != self.revision:
            raise Mismatch(f"{status}, revision {self.revision} expected: {state}")


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The JSON messages of server-sent events."""
    async for line in answer.content:
        if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
            yield json.loads(line[5:])
