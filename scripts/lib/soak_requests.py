"""What soak_server's clients send: every kind of request, and how each may end."""

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import aiohttp

from scripts.lib.soak_client import NAMESPACE_HEADER, Mismatch, Soak
from scripts.lib.spec_bench import Prompt
from sglang_ext.sweep.data_files import CARRIED

CLIP = CARRIED / "LJ001-0001.flac"
# None of those of the translation sessions (soak_client): a deletion ends these as well.
NAMESPACES = ("c", "d")
_SCHEMA = json.dumps(
    {"type": "object", "properties": {"people": {"type": "integer"}}, "required": ["people"]}
)
_LONG_TOKENS = 200
_SAMPLED: tuple[Mapping[str, Any], ...] = (
    {"n": 3, "temperature": 0.8},
    {"frequency_penalty": 0.5, "presence_penalty": 0.3},
    {"repetition_penalty": 1.2, "min_new_tokens": 4},
    {"stop": [" the", ". "]},
    {"stop_regex": "[a-z]+ing"},
    {"json_schema": _SCHEMA},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 40},
)


class Traffic:
    """Requests of a text server, chosen at random.

    Args:
        soak: the connection and the tally; `sent` KIND counts are added to it.
        prompts: for /generate; each one's greedy output must always be its first one.
    """

    def __init__(self, soak: Soak, prompts: Sequence[Prompt], model: str):
        self.soak, self.rng, self.prompts, self.model = soak, soak.rng, prompts, model
        self._known: dict[int, list[int]] = {}
        # Names that nobody guesses: with others a beta above 0 is refused.
        self._sessions = [str(uuid.uuid4()) for _ in range(200)]
        self.kinds: dict[Callable[[], Awaitable[None]], int] = {
            self.greedy: 6, self.varied: 6, self.chat: 3, self.streamed: 4, self.logprobs: 2,
            self.session: 3, self.leave: 4, self.abort: 3, self.delete: 1, self.flush: 1,
        }  # fmt: skip

    async def one(self) -> None:
        """One request of some kind; what goes wrong is in the tally."""
        kind = self.rng.choices(list(self.kinds), list(self.kinds.values()))[0]
        name = getattr(kind, "__name__", "request")
        self.soak.tally.counts[name] += 1
        try:
            await kind()
        except (Mismatch, aiohttp.ClientError, TimeoutError, KeyError, TypeError, ValueError) as e:
            self.soak.tally.problem("unprovoked_errors", f"{name}: {type(e).__name__}: {e}")

    async def greedy(self) -> None:
        """A greedy answer, which is the same each time."""
        number = self.rng.randrange(len(self.prompts))
        self._compare(number, (await self._generate(number, {}))["output_ids"])

    async def varied(self) -> None:
        """n > 1, penalties, stop strings, a grammar, sampling."""
        await self._generate(self._any(), self.rng.choice(_SAMPLED))

    async def chat(self) -> None:
        """/v1/chat/completions."""
        body = {
            "model": self.model, "max_tokens": 24, "temperature": 0,
            "messages": [{"role": "user", "content": f"Say {self.rng.randrange(1000)} in words."}],
        }  # fmt: skip
        answer = await self._post("/v1/chat/completions", body)
        if not answer["choices"][0]["message"]["content"]:
            raise Mismatch(f"an empty chat answer: {answer}")

    async def streamed(self) -> None:
        """A greedy answer in events, to its end."""
        number = self.rng.randrange(len(self.prompts))
        last: dict[str, Any] = {}
        async with self._stream(self._body(number, {})) as answer:
            if answer.status != 200:
                raise Mismatch(f"a stream was answered {answer.status}")
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    last = json.loads(line[len(b"data: ") :])
        self._compare(number, last["output_ids"])

    async def logprobs(self) -> None:
        """Logprobs of prompt and output."""
        more = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
        meta = (await self._generate(self._any(), {}, more))["meta_info"]
        if len(meta["output_token_logprobs"]) != meta["completion_tokens"]:
            raise Mismatch("not every token has a logprob")

    async def session(self) -> None:
        """A re-translation of some session."""
        ssbd = {"session": self.rng.choice(self._sessions), "beta": self.rng.choice((0, 0.2))}
        await self._generate(self._any(), {"custom_params": {"drafter": "ssbd", "ssbd": ssbd}})

    async def leave(self) -> None:
        """A client that goes while its answer is written."""
        body = self._body(self._any(), {"max_new_tokens": _LONG_TOKENS, "ignore_eos": True})
        with suppress(TimeoutError):
            async with asyncio.timeout(self.rng.uniform(0.02, 1)), self._stream(body) as answer:
                await answer.content.readline()

    async def abort(self) -> None:
        """/abort_request of a request under way."""
        rid = uuid.uuid4().hex
        body = self._body(self._any(), {"max_new_tokens": _LONG_TOKENS, "ignore_eos": True})
        request = asyncio.create_task(self.soak.call("POST", "/generate", body | {"rid": rid}))
        await asyncio.sleep(self.rng.uniform(0, 1))
        await self._post("/abort_request", {"rid": rid})
        status, answer = await request
        if status not in (200, 400, 499, 503):
            raise Mismatch(f"an aborted request was answered {status} {answer}")

    async def delete(self) -> None:
        """Delete a namespace, or a request that may not be known."""
        path = self.rng.choice(
            (*(f"namespaces/{n}" for n in NAMESPACES), f"requests/{uuid.uuid4().hex}")
        )
        status, answer = await self.soak.call("DELETE", f"/datastore/{path}")
        if status != 200 and not (status == 404 and path.startswith("requests")):
            raise Mismatch(f"DELETE {path} was answered {status} {answer}")

    async def flush(self) -> None:
        """/flush_cache, which is refused while requests run."""
        status, answer = await self.soak.call("POST", "/flush_cache")
        if status not in (200, 400):
            raise Mismatch(f"/flush_cache was answered {status} {answer}")

    def _any(self) -> int:
        return self.rng.randrange(len(self.prompts))

    def _body(self, number: int, sampling: Mapping[str, Any]) -> dict[str, Any]:
        settings = {"temperature": 0, "max_new_tokens": 24} | dict(sampling)
        return {"input_ids": list(self.prompts[number].input_ids), "sampling_params": settings}

    async def _generate(
        self, number: int, sampling: Mapping[str, Any], more: Mapping[str, Any] | None = None
    ) -> Any:
        name = self.rng.choice((None, *NAMESPACES))
        headers = None if name is None else {NAMESPACE_HEADER: name}
        return await self._post(
            "/generate", self._body(number, sampling) | dict(more or {}), headers
        )

    async def _post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Any:
        status, answer = await self.soak.call("POST", path, body, headers)
        if status != 200:
            raise Mismatch(f"{path} was answered {status} {str(answer)[:300]}")
        return answer

    def _stream(self, body: dict[str, Any]) -> Any:
        return self.soak.http.post(f"{self.soak.url}/generate", json=body | {"stream": True})

    def _compare(self, number: int, output: list[int]) -> None:
        if output != self._known.setdefault(number, output):
            self.soak.tally.counts["wrong_outputs"] += 1
            raise Mismatch(f"prompt {number}: {output} instead of {self._known[number]}")


class SpeechTraffic:
    """Transcriptions of one clip, of which some clients do not wait for the answer."""

    def __init__(self, soak: Soak, model: str):
        self.soak, self.rng, self.model = soak, soak.rng, model
        self._audio = CLIP.read_bytes()
        self._known: str | None = None

    async def one(self) -> None:
        """One upload."""
        leaves = self.rng.random() < 0.25
        kind = "transcription_left" if leaves else "transcription"
        self.soak.tally.counts[kind] += 1
        try:
            if not leaves:
                return await self._transcribe()
            with suppress(TimeoutError):
                async with asyncio.timeout(self.rng.uniform(0.02, 1)):
                    await self._transcribe()
        except (Mismatch, aiohttp.ClientError, KeyError, TypeError, ValueError) as e:
            self.soak.tally.problem("unprovoked_errors", f"{kind}: {type(e).__name__}: {e}")

    async def _transcribe(self) -> None:
        form = aiohttp.FormData()
        form.add_field("file", self._audio, filename="clip.flac")
        form.add_field("model", self.model)
        form.add_field("language", "en")
        form.add_field("temperature", "0")
        url = f"{self.soak.url}/v1/audio/transcriptions"
        async with self.soak.http.post(url, data=form) as answer:
            if answer.status != 200:
                raise Mismatch(f"answered {answer.status} {(await answer.text())[:300]}")
            text = (await answer.json())["text"]
        self._known = self._known or text
        if text != self._known:
            self.soak.tally.counts["wrong_outputs"] += 1
            raise Mismatch(f"{text!r} instead of {self._known!r}")
