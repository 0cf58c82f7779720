"""Bench_mirror's servers: which cores they have, and what they answer."""

import contextlib
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from scripts.lib.client import Completion, flush_cache, generate, stream
from scripts.lib.mirror_rows import Row, Split
from scripts.lib.served_metrics import read_metrics
from scripts.lib.server import Server
from scripts.lib.spec_bench import Prompt
from sglang_ext.models import resolve

# What is counted of a request: series of /metrics that only grow.
COUNTED = (
    "plain_steps_total", "verify_steps_total", "plain_seconds_total", "verify_seconds_total",
    "draft_seconds_total", "before_exit_seconds_total", "early_exit_seconds_total",
    "early_exit_steps_total", "spec_decode_num_draft_tokens_total",
    *(
        f"drafter.{name}"
        for name in (
            "hits", "fallbacks", "waited_seconds", "draft_seconds", "reading_seconds",
            "draft_steps", "draft_tokens", "asked_steps", "asked_tokens", "outcomes",
            "foreseen_top1", "foreseen_top2", "foreseen_top4", "foreseen_top8", "foreseen_top16",
        )
    ),
)  # fmt: skip
_WARM_TOKENS = 8
_GIB = 1 << 30
# Of a server beside its weights, which are in memory once more while they are packed.
_BESIDE_BYTES, _PACKING = 2 * _GIB, 1.25


@dataclass(frozen=True)
class Answer:
    """What one request took.

    Attributes:
        split, row, task: names.
        batch: requests under way with it, itself included.
        temperature: 0: greedy.
        prompt: its place among the task's prompts.
        token_ids: the output.
        decode_seconds: from the first token to the last.
        counts: growth of COUNTED while it ran; empty where others ran beside it.
    """

    split: str
    row: str
    task: str
    batch: int
    temperature: float
    prompt: int
    token_ids: tuple[int, ...]
    decode_seconds: float
    counts: Mapping[str, float] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Settings:
    """What all parts of a run agree in.

    Attributes:
        target, draft, streams: names or folders; `streams` may be empty.
        tokens: of an answer.
        window: gamma.
        prompts: of each task; `prompt_tokens` the most of one.
        lens_seconds: most that fitting a lens may take.
        draft_weights: as `--mirror-weights`; `target_weights` as `--cpu-weights`.
    """

    target: str
    draft: str
    streams: str
    tokens: int
    window: int
    prompts: int
    prompt_tokens: int
    lens_seconds: float
    draft_weights: str = "auto"
    target_weights: str = "fp32"


@contextlib.contextmanager
def on_cores(cores: Collection[int]) -> Iterator[None]:
    """Processes that this thread starts meanwhile run on these cores alone."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Servers:
    """One server at a time, started when it is asked for; a context that ends the last one.

    Args:
        settings: of the run.
        layers: of the target.
    """

    def __init__(self, settings: Settings, layers: int) -> None:
        self._settings, self._layers = settings, layers
        self._server: Server | None = None
        self._client: Client | None = None

    def of(self, split: Split) -> "Client":
        """A client of the split's server; another split's server is ended first.

        Raises:
            MemoryError: too little is free for it.
            ServerError: it does not start.
        """
        if self._client is None or self._client.split != split:
            self.stop()
            check_memory(self._settings)
            s = self._settings
            flags = split.flags(
                s.draft, self._layers, s.window, s.lens_seconds, s.streams, s.draft_weights
            )
            server = Server(s.target, [*flags, "--cpu-weights", s.target_weights], name=split.name)
            server.env["OMP_NUM_THREADS"] = str(len(split.target_cores))
            print(f"starting server {split.name}, its log {server.log}", flush=True)
            with on_cores(split.target_cores):
                server.start()
            self._server = server
            server.wait()
            self._client = Client(server.base_url, split, s.tokens, server.pid)
        return self._client

    def stop(self) -> None:
        """End the server that runs, if one does."""
        if self._server is not None:
            self._server.stop()
        self._server = self._client = None

    def __enter__(self) -> "Servers":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def check_memory(settings: Settings) -> None:
    """Raise MemoryError where the models in float32 do not fit into what is free."""
    needed = needed_bytes(Path(resolve(settings.target)), Path(resolve(settings.draft)))
    free = psutil.virtual_memory().available
    if free < needed:
        raise MemoryError(
            f"a server of {settings.target} needs about {needed / _GIB:.0f} GiB, "
            f"{free / _GIB:.1f} are free: end other programs, or take a smaller --model"
        )


def needed_bytes(target: Path, draft: Path) -> int:
    """About what a server takes: the target in float32 as it is packed, and what is beside it."""
    config = json.loads((target / "config.json").read_text())
    stored = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    wider = 1 if stored.endswith("float32") else 2
    sizes = {
        folder: sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        for folder in (target, draft)
    }
    return int(_PACKING * wider * sizes[target]) + sizes[draft] + _BESIDE_BYTES


class Client:
    """Asks one server.

    Args:
        url: its address.
        split: it.
        tokens: of an answer.
        pid: its process.
    """

    def __init__(self, url: str, split: Split, tokens: int, pid: int) -> None:
        self.url, self.split, self.tokens, self.pid = url, split, tokens, pid
        self._warm = set[str]()

    def warm_up(self, rows: Iterable[Row], prompt: Prompt) -> None:
        """Have what is compiled or measured on first use done, once for each row."""
        for row in rows:
            if row.name not in self._warm:
                generate(self.url, prompt.input_ids, params=row.params, max_new_tokens=_WARM_TOKENS)
                self._warm.add(row.name)

    def answer(
        self, row: Row, task: str, number: int, prompt: Prompt, temperature: float
    ) -> Answer:
        """One request by itself: its prompt is read anew by target and draft model."""
        flush_cache(self.url)
        before = self.counts()
        made = self._stream(row, prompt, temperature)
        after = self.counts()
        grown = {name: after[name] - before[name] for name in COUNTED}
        return self._answer(row, task, 1, temperature, number, made, grown)

    def batch(
        self, row: Row, task: str, first: int, prompts: Sequence[Prompt], temperature: float
    ) -> list[Answer]:
        """Requests that are under way together, the prompts of a task from its `first` on."""
        flush_cache(self.url)
        with ThreadPoolExecutor(len(prompts)) as pool:
            made = list(pool.map(lambda prompt: self._stream(row, prompt, temperature), prompts))
        return [
            self._answer(row, task, len(prompts), temperature, number, one, {})
            for number, one in enumerate(made, first)
        ]

    def counts(self) -> dict[str, float]:
        """COUNTED, so far."""
        found = read_metrics(self.url)
        return {name: found.get(name, 0.0) for name in COUNTED}

    def _stream(self, row: Row, prompt: Prompt, temperature: float) -> Completion:
        return stream(
            self.url,
            prompt.input_ids,
            params=row.params,
            max_new_tokens=self.tokens,
            temperature=temperature,
        )

    def _answer(
        self,
        row: Row,
        task: str,
        batch: int,
        temperature: float,
        number: int,
        made: Completion,
        grown: Mapping[str, float],
    ) -> Answer:
        return Answer(
            self.split.name, row.name, task, batch, temperature, number, tuple(made.token_ids),
            made.decode_seconds, grown,
        )  # fmt: skip
