"""check_operators: two SGLang servers on one datastore's folder, as two decode servers share one.

What operators_fleet.py shows of processes that stand for servers, with real ones: slower, so with
fewer kills.
"""

import argparse
import random
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx
import numpy as np

from datastores import verify_folder
from datastores.segment import document_digest
from scripts.lib.client import generate
from scripts.lib.http_client import HTTP
from scripts.lib.isolation_drafts import NothingShown
from scripts.lib.known_outputs import stored_documents
from scripts.lib.server import Server
from scripts.lib.spec_bench import spec_bench

KILLS, QUICK_KILLS = 10, 2
SAMPLES, QUICK_SAMPLES = 12, 4
_TOKENS = 24
_LONGEST_LIFE_S = 8.0
_WAIT_S = 60.0
_POLL_S = 0.02


@dataclass
class Clients:
    """Requests to one server, one after another, until it ends.

    Attributes:
        outputs: tokens of each answer by document_digest() of its id.
        times: when the answers came.
    """

    url: str
    prompts: Sequence[Sequence[int]]
    outputs: dict[bytes, list[int]]
    times: list[float] = field(default_factory=list)
    _ending: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> "Clients":
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        number = 0
        while not self._ending.is_set():
            prompt = self.prompts[number % len(self.prompts)]
            number += 1
            try:
                answer = generate(self.url, prompt, max_new_tokens=_TOKENS, ignore_eos=True)
            except (OSError, ValueError, httpx.HTTPError):
                return  # the server has been killed
            self.outputs[document_digest(answer.rid)] = answer.token_ids
            self.times.append(time.monotonic())


def check(options: argparse.Namespace) -> dict[str, float]:
    """fleet_servers_found_seconds, _warm_gain, _kills, _lost, _corrupt, _election_seconds and
    _answer_gap_seconds.

    Raises:
        NothingShown: no server that folded was killed.
    """
    prompts = [list(p.input_ids) for p in spec_bench(options.model, max_prompt_tokens=120)]
    with tempfile.TemporaryDirectory(prefix="fleet-servers-") as folder:
        servers = [started(options.model, folder, name) for name in "ab"]
        try:
            for server in servers:
                server.wait()
            samples = QUICK_SAMPLES if options.quick else SAMPLES
            figures = learning(servers, prompts[:samples])
            kills = QUICK_KILLS if options.quick else KILLS
            figures |= killing(servers, folder, options.model, prompts[samples:], kills)
        finally:
            for server in servers:
                server.stop()
    return {f"fleet_servers_{name}": value for name, value in figures.items()}


def started(model: str, folder: str, name: str) -> Server:
    """A server of the folder, on its way up."""
    flags = ["--speculative-algorithm", "SSSD", "--datastore", folder, "--datastore-shared", "1"]
    flags += ["--datastore-fold-tokens", "400"]
    return Server(model, flags, name=f"fleet-{name}").start()


def learning(servers: Sequence[Server], prompts: Sequence[list[int]]) -> dict[str, float]:
    """What each server is given, in turn, is a draft on the other: how soon, and how good."""
    delays, cold, warm = [], [], []
    for number, prompt in enumerate(prompts):
        giver, taker = servers[number % 2], servers[1 - number % 2]
        cold.append(generate(giver.base_url, prompt, max_new_tokens=_TOKENS).accept_length)
        start = time.monotonic()
        HTTP.post(giver.base_url + "/datastore/flush", timeout=30).raise_for_status()
        wanted = info(giver)["num_tokens"]
        while info(taker)["num_tokens"] < wanted:
            if time.monotonic() - start > _WAIT_S:
                raise NothingShown("a server never had what the other one has served")
            time.sleep(_POLL_S)
        delays.append(time.monotonic() - start)
        # Not ingested: the next sample's tokens are the giver's alone.
        again = generate(taker.base_url, prompt, max_new_tokens=_TOKENS, params={"ingest": False})
        warm.append(again.accept_length)
    return {"found_seconds": max(delays), "warm_gain": sum(warm) / sum(cold)}


def killing(
    servers: list[Server], folder: str, model: str, prompts: Sequence[list[int]], kills: int
) -> dict[str, float]:
    """What kill -9 of either costs, while both are asked."""
    rng = random.Random(0)
    outputs: dict[bytes, list[int]] = {}
    elections: list[float] = []
    gaps: list[float] = []
    corrupt = lost = 0
    for _ in range(kills):
        place = rng.randrange(len(servers))
        if not elections:  # one at least of the server that folds
            place = [info(server)["role"] for server in servers].index("writer")
        victim, other = servers[place], servers[1 - place]
        was_writer = info(victim)["role"] == "writer"
        half = len(prompts) // 2
        with (
            Clients(victim.base_url, prompts[:half], outputs),
            Clients(other.base_url, prompts[half:], outputs) as asked,
        ):
            time.sleep(rng.uniform(1.0, _LONGEST_LIFE_S))
            at = time.monotonic()
            victim.kill()
            if was_writer:
                elections.append(seconds_until_writer(other, at))
            count = len(asked.times)
            while len(asked.times) < count + 2 and time.monotonic() - at < _WAIT_S:
                time.sleep(_POLL_S)
        if was_writer:
            around = [t for t in asked.times if t > at - 2.0]
            gaps.append(max((b - a for a, b in pairwise(around)), default=_WAIT_S))
        corrupt += len(verify_folder(folder))
        lost = missing(folder, outputs)
        servers[place] = started(model, folder, "ab"[place])
        servers[place].wait()
    if not elections:
        raise NothingShown("no server that folded was killed")
    return {
        "kills": kills,
        "lost": lost,
        "corrupt": corrupt,
        "outputs": len(outputs),
        "election_seconds": max(elections),
        "answer_gap_seconds": max(gaps),
    }


def seconds_until_writer(server: Server, since: float) -> float:
    """Until it folds, in seconds; the most that is waited for where it does not."""
    while time.monotonic() - since < _WAIT_S:
        if info(server)["role"] == "writer":
            return time.monotonic() - since
        time.sleep(_POLL_S)
    return _WAIT_S


def missing(folder: str, outputs: dict[bytes, list[int]]) -> int:
    """How many acknowledged outputs a restart would not find whole."""
    found = stored_documents(folder)
    return sum(
        not np.array_equal(found.get(name, np.empty(0))[-len(tokens) :], tokens)
        for name, tokens in outputs.items()
    )


def info(server: Server) -> dict[str, Any]:
    """The server's datastore."""
    answer = HTTP.get(server.base_url + "/datastore", timeout=30)
    answer.raise_for_status()
    return answer.json()
