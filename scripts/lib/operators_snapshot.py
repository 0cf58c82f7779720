"""check_operators: what copying a server's datastore costs the requests that it serves meanwhile.

Two clients ask without a pause. Windows of time with and without copies take turns; a copy is the
command, in a process of its own, again and again. Every copy is verified.
"""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from datastores import Datastore, verify_folder
from scripts.lib.http_client import HTTP
from scripts.lib.isolation_drafts import NothingShown
from scripts.lib.server import Server
from sglang_ext.commands.datastore.model_tokenizer import ModelTokenizer

_CLIENTS = 2
_TOKENS = 24
_CORPORA, _QUICK_CORPORA = 8, 3
_CORPUS_TOKENS = 1 << 22
_WINDOWS, _QUICK_WINDOWS = 5, 2
_WINDOW_S = 25.0
_WARM_UP_S = 15.0


def under_load(work: Path, model: str, quick: bool) -> dict[str, float]:
    """snapshot_p99_ratio, both 99th percentiles in milliseconds, snapshots, snapshot_problems.

    Raises:
        NothingShown: no copy was finished, or none has what was served.
    """
    folder = work / "store"
    _fill(folder, model, _QUICK_CORPORA if quick else _CORPORA)
    flags = ["--speculative-algorithm", "SSSD", "--datastore", str(folder)]
    copies = Copies(folder, work / "copies")
    with Server(model, flags, name="snapshots") as server:
        asked = Asking(lambda i: _ask(server.base_url, i))
        times = asked.run(copies.run, _QUICK_WINDOWS if quick else _WINDOWS, _WINDOW_S)
    copies.check()
    if not copies.made or not copies.served:
        raise NothingShown(f"{copies.made} copies were made, with {copies.served} served tokens")
    quiet, busy = (1000 * float(np.percentile(t, 99)) for t in times)
    print(f"{len(times[0])} requests without copies, {len(times[1])} beside {copies.made} of them")
    return {
        "snapshots": copies.made,
        "snapshot_problems": copies.problems,
        "quiet_p99_ms": quiet,
        "snapshot_p99_ms": busy,
        "snapshot_p99_ratio": busy / quiet,
    }


class Copies:
    """Copies of a folder, by the command."""

    def __init__(self, folder: Path, target: Path) -> None:
        self._folder, self._target = folder, target
        target.mkdir()
        self.made = self.problems = self.served = 0

    def run(self, over: threading.Event) -> None:
        """Makes one after the other until it is over; the last one is waited for."""
        while not over.is_set():
            copy = self._target / str(self.made)
            line = [sys.executable, "-m", "sglang_ext.cli", "datastore", "snapshot"]
            subprocess.run(
                [*line, str(self._folder), str(copy)], check=True, stdout=subprocess.DEVNULL
            )
            self.made += 1

    def check(self) -> None:
        """Counts what is wrong with the copies, and what was served that they hold."""
        for copy in self._target.iterdir():
            problems = verify_folder(copy)
            self.problems += len(problems)
            for problem in problems:
                print(problem, file=sys.stderr)
            with Datastore.open(copy, create=False, read_only=True) as store:
                self.served = max(self.served, sum(store.namespaces().values()))


class Asking:
    """Clients that ask without a pause, whose waits are noted by what goes on meanwhile."""

    def __init__(self, ask: Callable[[int], None]) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._times: tuple[list[float], list[float]] = ([], [])
        self._busy = 0
        self._asked = 0
        self._over = threading.Event()
        self._failures: list[Exception] = []

    def run(
        self, disturb: Callable[[threading.Event], None], windows: int, seconds: float
    ) -> tuple[list[float], list[float]]:
        """Seconds of the requests without and beside disturb(), which runs in every other window.

        A request counts for the window in which it both begins and ends; those of the warm-up that
        comes first count for none.
        """
        clients = [threading.Thread(target=self._client) for _ in range(_CLIENTS)]
        for client in clients:
            client.start()
        try:
            self._over.wait(_WARM_UP_S)
            # The first and the last are without, as a datastore that grows takes longer to search.
            for window in range(2 * windows + 1):
                self._window(disturb if window % 2 else None, seconds)
        finally:
            self._over.set()
            for client in clients:
                client.join()
        if self._failures:
            raise self._failures[0]
        return self._times

    def _window(self, disturb: Callable[[threading.Event], None] | None, seconds: float) -> None:
        over = threading.Event()
        with self._lock:
            self._busy += 1
        if disturb is None:
            over.wait(seconds)
            return
        threading.Timer(seconds, over.set).start()
        disturb(over)

    def _client(self) -> None:
        while not self._over.is_set() and not self._failures:
            with self._lock:
                window, number = self._busy, self._asked
                self._asked += 1
            began = time.perf_counter()
            try:
                self._ask(number)
            except Exception as error:  # told by run(), once the clients have ended
                self._failures.append(error)
                return
            taken = time.perf_counter() - began
            with self._lock:
                if window == self._busy and window:
                    # The first window, number 1, is without.
                    self._times[(window + 1) % 2].append(taken)


def _ask(url: str, number: int) -> None:
    sampling = {"temperature": 0, "max_new_tokens": _TOKENS, "ignore_eos": True}
    text = f"Question {number % 40}: what is {number % 40} times three?"
    answer = HTTP.post(
        f"{url}/generate", json={"text": text, "sampling_params": sampling}, timeout=300
    )
    answer.raise_for_status()


def _fill(folder: Path, model: str, corpora: int) -> None:
    """A datastore with corpora of tokens that no answer has."""
    tokenizer = ModelTokenizer(model)
    rng = np.random.default_rng(0)
    with Datastore.open(
        folder, vocab_size=tokenizer.vocab_size, tokenizer_fingerprint=tokenizer.fingerprint
    ) as store:
        for i in range(corpora):
            tokens = rng.integers(0, tokenizer.vocab_size, (_CORPUS_TOKENS // 1024, 1024))
            store.add_corpus(f"corpus-{i}", list(tokens))
