"""Kill -9 of the draft executor, again and again, while requests are answered."""

import contextlib
import itertools
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import psutil  # type: ignore[import-untyped]

from scripts.lib.client import generate
from scripts.lib.load_threads import LoadThreads
from scripts.lib.mirror_rows import Row
from scripts.lib.mirror_runs import Client
from scripts.lib.served_metrics import read_metrics
from scripts.lib.spec_bench import Prompt

_EXECUTOR = "sglang_ext.mirror.draft_process"
# Back-offs of up to a minute, and a draft model that loads beside a busy target.
_RESTART_S = 300.0
_TOGETHER = 2
# So long after it was ready the executor is killed, at different places of the answers.
_AFTER_S = (0.3, 1.1, 2.3, 3.7)

Ask = Callable[[int], Sequence[int]]


@dataclass
class Kills:
    """What became of requests while the executor was killed again and again.

    Attributes:
        kills: executors that were killed.
        answers: requests that ended meanwhile.
        wrong: answers that were not the expected ones.
        hangs: requests that failed or were not answered in time, and executors that did not come
            back.
    """

    kills: int = 0
    answers: int = 0
    wrong: int = 0
    hangs: int = 0

    def figures(self) -> dict[str, float]:
        """By the names of bench_mirror."""
        return {
            "executor_kills": self.kills, "answers_under_kills": self.answers,
            "wrong_after_kills": self.wrong, "hangs_after_kills": self.hangs,
        }  # fmt: skip


class Load(LoadThreads):
    """Asks one request after the other, two at a time, while the block runs.

    Args:
        ask: answers the prompt of a number.
        expected: the right answers.
        found: counts what comes.
    """

    def __init__(self, ask: Ask, expected: Sequence[Sequence[int]], found: Kills) -> None:
        self._ask, self._expected, self._found = ask, expected, found
        self._numbers = itertools.cycle(range(len(expected)))
        self._lock = threading.Lock()
        super().__init__(_TOGETHER)

    def run(self) -> None:
        while not self.ending.is_set():
            with self._lock:
                number = next(self._numbers)
            wrong, failed = False, ""
            try:
                wrong = list(self._ask(number)) != list(self._expected[number])
            except Exception as error:
                failed = str(error)
            with self._lock:
                self._found.answers += 1
                self._found.wrong += wrong
                self._found.hangs += bool(failed)
            if wrong or failed:
                print(f"prompt {number}: {failed or 'another answer than expected'}", flush=True)


def kill_executors(client: Client, prompts: Sequence[Prompt], row: Row, kills: int) -> Kills:
    """Kill the draft process with kill -9 as soon as it drafts again, while requests are answered.

    What is right is what the same server writes without a drafter.
    """

    def ask(number: int, params: Mapping[str, object] = row.params) -> Sequence[int]:
        tokens = client.tokens
        prompt = prompts[number].input_ids
        return generate(client.url, prompt, params=params, max_new_tokens=tokens).token_ids

    expected = [ask(n, {"drafter": "none", "ingest": False}) for n in range(len(prompts))]
    before, found = _restarts(client), Kills()
    with Load(ask, expected, found):
        for number in range(kills):
            if not _came_back(client, before + number):
                break
            time.sleep(_AFTER_S[number % len(_AFTER_S)])
            _executor(client.pid).send_signal(signal.SIGKILL)
            found.kills += 1
            print(f"kill {found.kills} of {kills}: {found.figures()}", flush=True)
        lost = not _came_back(client, before + found.kills)
    if lost:
        print("the executor did not come back", flush=True)
        found.hangs += 1  # no thread counts any more
    return found


def _restarts(client: Client) -> float:
    return read_metrics(client.url).get("drafter.executor_restarts", 0.0)


def _came_back(client: Client, restarts: float) -> bool:
    """Whether an executor is ready again, in time, for the so-many-th time."""
    deadline = time.monotonic() + _RESTART_S
    while _restarts(client) < restarts:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)
    return True


def _executor(server_pid: int) -> psutil.Process:
    """The draft process below a server.

    Raises:
        RuntimeError: there is none.
    """
    for process in psutil.Process(server_pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if _EXECUTOR in process.cmdline()[:3]:
                return process
    raise RuntimeError(f"no {_EXECUTOR} below process {server_pid}")
