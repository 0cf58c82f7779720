"""Bench_mirror's servers: which cores they have, what they answer, and the executor's end."""

import contextlib
import os
import signal
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import psutil  # type: ignore[import-untyped]

from scripts.lib.client import Completion, generate, stream
from scripts.lib.http_client import HTTP
from scripts.lib.mirror_rows import Row, Split
from scripts.lib.served_metrics import read_metrics
from scripts.lib.server import Server
from scripts.lib.spec_bench import Prompt

_EXECUTOR = "sglang_ext.mirror.draft_process"
_RESTART_S = 240.0
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
class Kills:
    """What became of requests while the executor was killed again and again.

    Attributes:
        kills: executors that were killed with requests under way.
        asked: requests that were answered meanwhile.
        wrong: answers that were not the expected ones.
        hangs: requests that failed or were not answered in time.
    """

    kills: int
    asked: int
    wrong: int
    hangs: int


@contextlib.contextmanager
def on_cores(cores: Collection[int]) -> Iterator[None]:
    """Processes that this thread starts meanwhile run on these cores alone."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def serving(split: Split, target: str, flags: Sequence[str]) -> Iterator[tuple[str, int]]:
    """The address of a split's server, and its process id."""
    server = Server(target, flags, name=split.name.replace(" ", "-").replace("/", "-"))
    server.env["OMP_NUM_THREADS"] = str(len(split.target_cores))
    with on_cores(split.target_cores):
        server.start()
    print(f"{split.name}: server {server.pid}, its log {server.log}", flush=True)
    with server:
        yield server.base_url, server.pid


class Client:
    """Asks one server.

    Args:
        url: its address.
        split: it.
        tokens: of an answer.
    """

    def __init__(self, url: str, split: Split, tokens: int) -> None:
        self.url = url
        self._split = split
        self._tokens = tokens

    def answer(
        self, row: Row, task: str, number: int, prompt: Prompt, temperature: float
    ) -> Answer:
        """One request by itself: its prompt is read anew by target and draft model."""
        response = HTTP.post(self.url + "/flush_cache", params={"timeout": 60}, timeout=600)
        response.raise_for_status()
        before = self._counts()
        made = self._stream(row, prompt, temperature)
        after = self._counts()
        grown = {name: after[name] - before[name] for name in COUNTED}
        return self._answer(row, task, 1, temperature, number, made, grown)

    def batch(
        self, row: Row, task: str, prompts: Sequence[Prompt], temperature: float
    ) -> list[Answer]:
        """Requests that are under way together."""
        HTTP.post(self.url + "/flush_cache", params={"timeout": 60}, timeout=600).raise_for_status()
        with ThreadPoolExecutor(len(prompts)) as pool:
            made = list(pool.map(lambda prompt: self._stream(row, prompt, temperature), prompts))
        return [
            self._answer(row, task, len(prompts), temperature, number, one, {})
            for number, one in enumerate(made)
        ]

    def _stream(self, row: Row, prompt: Prompt, temperature: float) -> Completion:
        return stream(
            self.url,
            prompt.input_ids,
            params=row.params,
            max_new_tokens=self._tokens,
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
            self._split.name, row.name, task, batch, temperature, number, tuple(made.token_ids),
            made.decode_seconds, grown,
        )  # fmt: skip

    def _counts(self) -> dict[str, float]:
        found = read_metrics(self.url)
        return {name: found.get(name, 0.0) for name in COUNTED}


def by_turns(
    client: Client, split: Split, prompts: Mapping[str, Sequence[Prompt]], temperature: float = 0.0
) -> Iterator[Answer]:
    """Every prompt by all rows of a split, which take turns at being first."""
    rows = [split.base, *split.rows]
    turn = 0
    for task, of_task in prompts.items():
        for number, prompt in enumerate(of_task):
            first = turn % len(rows)
            turn += 1
            for row in [*rows[first:], *rows[:first]]:
                made = client.answer(row, task, number, prompt, temperature)
                rate = (len(made.token_ids) - 1) / made.decode_seconds
                print(f"{split.name}, {task} {number}: {row.name} {rate:.2f} tok/s", flush=True)
                yield made


def kill_executors(
    url: str, server_pid: int, prompts: Sequence[Prompt], row: Row, kills: int, tokens: int
) -> Kills:
    """Kill the draft process with kill -9 while two requests at a time are answered.

    What is right is what the same server writes without a drafter.
    """
    expected = [
        _ids(url, prompt, {"drafter": "none", "ingest": False}, tokens) for prompt in prompts
    ]
    asked = wrong = hangs = done = 0
    for number in range(kills):
        process = _executor(server_pid)
        if process is None:
            hangs += 1  # it was not started again in time
            continue
        with ThreadPoolExecutor(2) as pool:
            jobs = [
                (i, pool.submit(_ids, url, prompts[i], row.params, tokens))
                for i in {number % len(prompts), (number + 1) % len(prompts)}
            ]
            time.sleep(0.3 + 0.4 * (number % 4))  # at different places of the answers
            process.send_signal(signal.SIGKILL)
            done += 1
            for i, job in jobs:
                asked += 1
                try:
                    wrong += job.result(600) != expected[i]
                except Exception as error:
                    print(f"kill {number}: {error}", flush=True)
                    hangs += 1
    return Kills(done, asked, wrong, hangs)


def _ids(url: str, prompt: Prompt, params: Mapping[str, object], tokens: int) -> list[int]:
    made = generate(url, prompt.input_ids, params=params, max_new_tokens=tokens)
    return made.token_ids


def _executor(server_pid: int) -> psutil.Process | None:
    """The draft process below a server, once it is there; None: it does not come."""
    deadline = time.monotonic() + _RESTART_S
    while time.monotonic() < deadline:
        for process in psutil.Process(server_pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if _EXECUTOR in process.cmdline()[:3]:
                    return process
        time.sleep(0.2)
    return None
