"""Sequence-level distillation: the served target writes the outputs that a drafter learns from.

Source: SpecDec (arXiv 2203.16487, section 4.1), after Kim and Rush (2016); greedy outputs, as the
target is to be drafted for by greedy decoding.
"""

import asyncio
import functools
import gzip
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import httpx

from sglang_ext.block_drafter.drafter_manifest import BlockDrafterError
from sglang_ext.block_drafter.target_models import TargetModel
from sglang_ext.block_drafter.training_data import check_header, header, shared_tokens

PLACEHOLDER = "{source}"
_TIMEOUT = httpx.Timeout(600.0, connect=10.0)
_ATTEMPTS = 4


@dataclass(frozen=True)
class Wanted:
    """What outputs are written.

    Attributes:
        prompt: a text with PLACEHOLDER where a source goes.
        raw: the prompt as it is; else as a user's message in the target's chat template.
        max_tokens: longest output.
        namespace: whose outputs they are: they join it in the server's datastore, and the drafter's
            manifest names it; "": nobody's, and no datastore keeps them.
        states_layer: the target's states behind so many layers are recorded too, by the server's
            drafter `recorder`; 0: none are.
    """

    prompt: str = PLACEHOLDER
    raw: bool = False
    max_tokens: int = 256
    namespace: str = ""
    states_layer: int = 0

    def as_json(self) -> dict[str, Any]:
        """What a file's header says, so that it is gone on with in the same way."""
        found = {"prompt": self.prompt, "raw": self.raw, "max_tokens": self.max_tokens}
        return found | {"states_layer": self.states_layer} if self.states_layer else found


@dataclass
class Distilled:
    """Totals: outputs written now, tokens of them, sources that the server refused."""

    outputs: int = 0
    tokens: int = 0
    refused: int = 0
    reason: str = ""


class Distillation:
    """One file of outputs, begun or gone on with."""

    def __init__(self, target: TargetModel, wanted: Wanted, sources: Path, out: Path) -> None:
        """Raises BlockDrafterError: a file cannot be read, or was written otherwise."""
        if PLACEHOLDER not in wanted.prompt:
            raise BlockDrafterError(f"--prompt must have {PLACEHOLDER} where a source goes")
        self._target, self._wanted, self._sources, self._out = target, wanted, sources, out
        try:
            self.total = sum(1 for _ in _read_sources(sources))
            self.done = self._prepare()
        except OSError as error:
            raise BlockDrafterError(
                f"cannot use {error.filename or out}: {error.strerror or error}"
            ) from None
        if not self.total:
            raise BlockDrafterError(f"{sources} holds no sources")

    def _prepare(self) -> set[int]:
        """Sources whose outputs are there already; the file is made, or its torn end cut off."""
        if not self._out.is_file() or not self._out.stat().st_size:
            self._begin()
            return set()
        done: set[int] = set()
        with open(self._out, "r+b") as file:
            first = file.readline()
            check_header(self._out, first.decode(errors="replace"), self._target)
            if len(first) == self._out.stat().st_size:  # no output came of it
                self._begin()
                return set()
            if json.loads(first).get("settings") != self._wanted.as_json():
                raise BlockDrafterError(
                    f"{self._out} was written with another --prompt, --raw, --max-tokens or "
                    "--states: name another file"
                )
            end = len(first)
            for line in file:
                number = _number(line)
                if number is None:
                    break
                done.add(number)
                end += len(line)
            file.truncate(end)
        return done

    def _begin(self) -> None:
        self._out.parent.mkdir(parents=True, exist_ok=True)
        head = {**header(self._target), "settings": self._wanted.as_json()}
        self._out.write_text(json.dumps(head) + "\n", encoding="utf-8")

    async def run(
        self, url: str, api_key: str, at_once: int, tell: Callable[[Distilled], None]
    ) -> Distilled:
        """Ask for what is missing, `at_once` outputs at a time.

        Raises:
            BlockDrafterError: the server does not answer, or the disk is full; the same command
                goes on where this one stopped.
        """
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        totals = Distilled()
        waiting = (item for item in _read_sources(self._sources) if item[0] not in self.done)
        limits = httpx.Limits(max_connections=at_once)
        async with httpx.AsyncClient(
            base_url=url, headers=headers, timeout=_TIMEOUT, limits=limits
        ) as client:
            with open(self._out, "ab") as file:
                workers = [
                    asyncio.create_task(self._work(client, waiting, file, totals, tell))
                    for _ in range(at_once)
                ]
                try:
                    await asyncio.gather(*workers)
                except OSError as error:
                    raise BlockDrafterError(
                        f"cannot write {self._out}: {error.strerror or error}"
                    ) from None
                finally:
                    for worker in workers:
                        worker.cancel()
        return totals

    async def _work(
        self,
        client: httpx.AsyncClient,
        waiting: Iterator[tuple[int, str]],
        file: BinaryIO,
        totals: Distilled,
        tell: Callable[[Distilled], None],
    ) -> None:
        for number, source in waiting:
            text = self._wanted.prompt.replace(PLACEHOLDER, source)
            encode = self._target.encode if self._wanted.raw else self._target.encode_chat
            prompt = encode(text)
            output = await self._written(client, number, prompt, totals)
            if output is None:
                continue
            line = {"n": number, "prompt": prompt, "output": output}
            if self._wanted.namespace:
                line["namespace"] = self._wanted.namespace
            # Whole lines alone, each at once: a kill costs what is on its way.
            file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
            file.flush()
            totals.outputs += 1
            totals.tokens += len(output)
            tell(totals)

    async def _written(
        self, client: httpx.AsyncClient, number: int, prompt: list[int], totals: Distilled
    ) -> list[int] | None:
        """The target's output; None: the server refuses this prompt."""
        sampling = {
            "temperature": 0.0,
            "max_new_tokens": self._wanted.max_tokens,
            "custom_params": self._params(number),
        }
        body = {"input_ids": prompt, "sampling_params": sampling}
        for attempt in range(_ATTEMPTS):
            if attempt:
                await asyncio.sleep(2**attempt)
            try:
                response = await client.post("/generate", json=body)
            except httpx.HTTPError as error:
                reason = f"{error or type(error).__name__}"
                continue
            if response.status_code == 200:
                return self._output(response)
            reason = f"{response.status_code}: {' '.join(response.text.split())[:200]}"
            if response.status_code in (400, 413, 422):
                totals.refused, totals.reason = totals.refused + 1, reason
                return None
            if response.status_code in (401, 403, 404):
                break
        raise BlockDrafterError(
            f"the server at {client.base_url} does not write outputs ({reason}); the same command "
            "goes on where this one stopped"
        )

    def _params(self, number: int) -> dict[str, Any]:
        namespace = self._wanted.namespace
        params: dict[str, Any] = {"namespace": namespace} if namespace else {"ingest": False}
        if self._wanted.states_layer:
            params["drafter"] = "recorder"
            params["recorder"] = {"number": number, "begin": self._begin_of_states}
        return params

    @functools.cached_property
    def _begin_of_states(self) -> int:
        """How many tokens the chat template has before any message: nothing learns from these."""
        if self._wanted.raw:
            return 0
        chats = [self._target.encode_chat(text) for text in ("a", "Z")]
        return shared_tokens(chats, range(min(map(len, chats))))

    def _output(self, response: httpx.Response) -> list[int]:
        """Token ids with the one that ended them."""
        try:
            content = response.json()
            output = [int(token) for token in content["output_ids"]]
            matched = content["meta_info"]["finish_reason"].get("matched")
        except (ValueError, KeyError, TypeError, AttributeError):
            raise BlockDrafterError(
                "the server's answer has no output_ids: is it SGLang?"
            ) from None
        if isinstance(matched, int) and output[-1:] != [matched]:
            output.append(matched)
        return output


def _read_sources(path: Path) -> Iterator[tuple[int, str]]:
    """Number of the line and source of each line that has one; `.jsonl`: its field `source`.

    Raises:
        BlockDrafterError: a line is no source.
    """
    opened = gzip.open if path.suffix == ".gz" else open
    name = path.name.removesuffix(".gz")
    with opened(path, "rt", encoding="utf-8") as file:
        try:
            for number, line in enumerate(file):
                source = _source(path, number, line) if name.endswith(".jsonl") else line.strip()
                if source:
                    yield number, source
        except UnicodeDecodeError:
            raise BlockDrafterError(f"{path} is not UTF-8") from None


def _source(path: Path, number: int, line: str) -> str:
    if not line.strip():
        return ""
    try:
        source = json.loads(line)["source"]
    except (ValueError, KeyError, TypeError):
        source = None
    if not isinstance(source, str):
        raise BlockDrafterError(f'{path}, line {number + 1}: expected {{"source": "text"}}')
    return source.strip()


def _number(line: bytes) -> int | None:
    """The source of a line; None: the line is torn."""
    if not line.endswith(b"\n"):
        return None
    try:
        return int(json.loads(line)["n"])
    except (ValueError, KeyError, TypeError):
        return None


def default_parallel() -> int:
    """Outputs that are asked for at once: SGLang batches them."""
    return 8 * (os.cpu_count() or 1)
