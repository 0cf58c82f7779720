"""Requests that are wrong in every way, against a running server: each gets an answer, none a 500.

Blocks of 50 requests of one class (scripts/lib/fuzz_grammar.py) are sent, six of them alone and
with short outputs, for some do harm only where nothing else is in their batch, then eight at a
time; after each block a valid request must give the tokens that it gave at first. With the seed a
request's number makes the request: --offset goes on where a run was ended, and `--offset N
--requests 1` sends one again. What fails is printed, and goes to --failures as a line of JSON.

Memory is what the server's lasting processes have made themselves (scripts/lib/own_memory.py), at
rest: a minute after the last request, when free heap has been given back (docs/cpu.md). That is
after every 2800 requests, four blocks of each class, and at the end; memory_growth_mib is the last
against the first, when pools and caches have filled. A corpus is added and removed at first: the
tokenizer's copy that this takes stays. Over 100 MiB the exit code is 1. A server that is started
here is started again after it died.

    python -m scripts.fuzz_server [--requests 10000] [--seed 0] [--offset 0] [--url URL] [--pid PID]
        [--classes NAMES] [--failures FILE] [--quick] [--json FILE]
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil

from scripts.lib.figures import parser, report
from scripts.lib.fuzz_client import FuzzClient
from scripts.lib.fuzz_grammar import FuzzRequest, block, classes, shortened
from scripts.lib.http_client import HTTP
from scripts.lib.own_memory import growth_mib, own_mib
from scripts.lib.server import Server
from sglang_ext.cpu.heap_trim import DEFAULT_SECONDS

BLOCK = 50
REST_EVERY = 2800
QUICK_REQUESTS = 4200
_ALONE = 6
_ALONE_TOKENS = 16
_PARALLEL = 8
_MODEL = "smollm2-135m-instruct"
_MOST_GROWTH_MIB = 100
_REST_S = DEFAULT_SECONDS + 2.0
# A short context and few answers at once: what a request may cost here is small. Few grammars are
# kept, so that the warm-up fills their cache.
FLAGS = [
    "--speculative-algorithm", "SSSD", "--budget", "fixed", "--drafters", "random,ssbd",
    "--context-length", "256", "--max-choices", "16", "--max-answers", "32",
    "--chunked-prefill-size", "128", "--grammar-cache-mb", "16",
]  # fmt: skip


def main() -> int:
    made = parser(__doc__, model=False)
    made.add_argument("--requests", type=int, default=10_000, help="[%(default)s]")
    made.add_argument("--seed", type=int, default=0, help="of all requests [%(default)s]")
    made.add_argument("--offset", type=int, default=0, help="number of the first [%(default)s]")
    made.add_argument("--url", help="a running server, else one is started")
    made.add_argument("--pid", type=int, help="of that server, whose processes are watched")
    made.add_argument("--classes", help="only these, joined by commas [all]")
    made.add_argument("--failures", type=Path, help="file of what failed, a line of JSON each")
    options = made.parse_args()
    if options.quick:
        options.requests = min(options.requests, QUICK_REQUESTS)
    unknown = set((options.classes or "generate").split(",")) - set(classes("model"))
    if unknown:
        made.error(f"--classes: no {', '.join(unknown)}; there are {', '.join(classes('model'))}")
    if options.requests < 1 or options.offset < 0:
        made.error("--requests must be at least 1, --offset at least 0")
    if options.url:
        run = _fuzz_run(options, options.url, options.pid)
        run.send(options.offset, options.requests)
        run.rest()
    else:
        run = _own_server(options)
    figures = run.figures()
    report(figures, options.json)
    return 0 if run.is_good() and figures["memory_growth_mib"] <= _MOST_GROWTH_MIB else 1


def _fuzz_run(options: argparse.Namespace, url: str, pid: int | None) -> "FuzzRun":
    only = options.classes.split(",") if options.classes else ()
    return FuzzRun(url, pid, options.seed, options.failures, only=only)


def _own_server(options: argparse.Namespace) -> "FuzzRun":
    server = Server(_MODEL, FLAGS, name="fuzz")
    print(f"the server's log: {server.log}")
    with server:
        run = _fuzz_run(options, server.base_url, server.pid)
        end = options.offset + options.requests
        number = run.send(options.offset, options.requests)
        while number < end:
            print(server.tail(40))
            server.stop()
            server.start().wait()
            run.restarted(server.pid)
            number = run.send(number, end - number)
        run.rest()
    return run


class FuzzRun:
    """Sends numbered requests and counts what came of them.

    Args:
        url: of a server with a SmolLM2 and the drafter ssbd.
        pid: of its first process; None: its processes are not watched.
        seed: of all requests.
        failures: file that what fails is added to.
        most_tokens: longest output that is asked for; 0: what the grammar says.
        only: names of classes; empty: all.
    """

    def __init__(
        self,
        url: str,
        pid: int | None,
        seed: int,
        failures: Path | None = None,
        most_tokens: int = 0,
        only: Sequence[str] = (),
    ):
        self._client = FuzzClient(url)
        self._seed = seed
        self._failures = failures
        self._most_tokens = most_tokens
        models = HTTP.get(url + "/v1/models", timeout=60).json()
        every = classes(models["data"][0]["id"])
        self._classes = {kind: every[kind] for kind in only or every}
        self._counts: Counter[str] = Counter()
        self._statuses: Counter[str] = Counter()
        self._expected = self._client.known()
        self._pid: int | None = None
        self._rests: list[dict[int, float]] = []  # memory at rest
        self._unrested = 0  # requests since the start or the last rest
        self.restarted(pid)

    def restarted(self, pid: int | None) -> None:
        """The server has started (again)."""
        self._pid = pid
        self._schedulers = _schedulers(pid)
        self._rests.clear()
        self._unrested = 0
        if pid is not None:
            self._client.load_corpus()

    def rest(self) -> None:
        """Read the server's memory once it has been without requests for a while."""
        if self._pid is None or self._schedulers != _schedulers(self._pid):
            return
        if self._rests and not self._unrested:
            return  # it has rested
        print(f"at rest for {_REST_S:.0f} s", end="", flush=True)
        time.sleep(_REST_S)
        self._client.known()  # free heap is given back with a step
        self._rests.append(own_mib(self._pid))
        print(f": {sum(self._rests[-1].values()):.0f} MiB")
        self._unrested = 0

    def send(self, first: int, count: int) -> int:
        """Send the requests of these numbers.

        Returns:
            the number after the last one that was sent: the server may have died.
        """
        number, end, start = first, first + count, time.monotonic()
        with ThreadPoolExecutor(_PARALLEL) as pool:
            while number < end:
                at, skipped = divmod(number, BLOCK)
                kind = list(self._classes)[at % len(self._classes)]
                made = block(self._classes[kind], self._seed * 1_000_003 + at, BLOCK)
                part = [
                    shortened(request, self._most_tokens) if self._most_tokens else request
                    for request in made[skipped : skipped + end - number]
                ]
                self._send_block(pool, number, part)
                number += len(part)
                seconds = time.monotonic() - start
                sound = self._is_sound(kind, number)
                memory = self._memory() if sound else ""
                print(f"{number}, {kind}, {seconds:.0f} s{memory} {dict(self._counts)}")
                if not sound:
                    break
                self._unrested += len(part)
                if self._unrested >= REST_EVERY:
                    self.rest()
        return number

    def figures(self) -> dict[str, float]:
        """The run's figures."""
        sent = self._counts["requests"]
        return {
            "requests": sent,
            "unanswered": self._counts["unanswered"],
            "scheduler_deaths": self._counts["deaths"],
            "server_errors_5xx": self._counts["5xx"],
            "wrong_outputs": self._counts["wrong"],
            "accepted": self._statuses["200"],
            "refused": self._statuses["400"],
            "memory_growth_mib": round(self._growth(), 1),
        }

    def is_good(self) -> bool:
        """Whether nothing failed."""
        return not any(self._counts[name] for name in ("unanswered", "deaths", "5xx", "wrong"))

    def _send_block(
        self, pool: ThreadPoolExecutor, first: int, part: Sequence[FuzzRequest]
    ) -> None:
        alone = max(0, _ALONE - first % BLOCK)
        part = [*(shortened(each, _ALONE_TOKENS) for each in part[:alone]), *part[alone:]]
        outcomes = [self._client.send(each) for each in part[:alone]]
        outcomes += pool.map(self._client.send, part[alone:])
        for number, (request, outcome) in enumerate(zip(part, outcomes, strict=True), first):
            self._counts["requests"] += 1
            self._statuses[outcome.split()[-1]] += 1
            if outcome.is_good:
                continue
            self._counts[outcome.split()[0]] += 1
            line = json.dumps({**request.record(number), "outcome": outcome})
            print(f"--seed {self._seed} --offset {number}: {outcome}\n    {line[:600]}")
            if self._failures is not None:
                with self._failures.open("a") as file:
                    file.write(line + "\n")

    def _is_sound(self, kind: str, number: int) -> bool:
        """Whether the server lives and still answers as at first."""
        if self._schedulers != _schedulers(self._pid) or not self._client.alive():
            self._counts["deaths"] += 1
            print(f"the server or its scheduler died among the {BLOCK} requests up to {number}")
            return False
        try:
            wrong = self._client.known() != self._expected
        except (httpx.HTTPError, ValueError) as error:
            print(f"no answer to a valid request: {error}")
            wrong = True
        if wrong:
            self._counts["wrong"] += 1
            print(f"after {kind}, {number}: a valid request does not give what it gave at first")
        return True

    def _memory(self) -> str:
        return "" if self._pid is None else f", {sum(own_mib(self._pid).values()):.0f} MiB"

    def _growth(self) -> float:
        return growth_mib(self._rests[0], self._rests[-1]) if self._rests else 0.0


def _schedulers(pid: int | None) -> set[int]:
    """Process ids of the server that must not change: decoders of audio may."""
    if pid is None:
        return set()
    try:
        process = psutil.Process(pid)
        named = {p.pid for p in process.children(recursive=True) if p.name().startswith("sglang::")}
    except psutil.Error:
        return set()
    return named | {pid}


if __name__ == "__main__":
    sys.exit(main())
