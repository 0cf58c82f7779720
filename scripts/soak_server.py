"""A server under mixed traffic for an hour: memory, threads, files and sockets must level off.

Clients send, at random and at once: greedy and sampled /generate, n > 1, penalties, stop strings,
grammars, logprobs, chat, streams, SSBD's sessions and translation sessions (soak_client.py);
some leave in the middle or abort; namespaces and requests are deleted and caches flushed. With
`--whisper MODEL` it is transcriptions instead, some of them broken off.

unprovoked_errors: answers that are not the ones expected, greedy outputs that differ from the
first ones among them (wrong_outputs). The server's process tree is sampled; growths are from the
middle of the run to its end (medians of a tenth of it). Requests under way come and go with 300
MiB, so the clients rest every few minutes: once the last answer is there, what is left is what the
server keeps, and the slope is a line through these samples of the second half; threads are compared
in them too, in processes that are there all the time. So that a rest can be short, the server gives
freed memory back every few seconds, not once a minute (docs/cpu.md).
Exit code 1 where a limit is broken: LIMITS. Caches fill for a while (SmolLM2, 10 minutes: 16 MiB
in the first of eight parts, 3 to 6 in the last three), so a run of less than half an hour is held
to UNSETTLED_SLOPE: it finds what leaks a megabyte with every few requests, and no less.

    python -m scripts.soak_server [--minutes M] [--clients N] [--whisper MODEL] [--seed S]
        [--quick] [--json FILE]
"""

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import aiohttp
import numpy as np
import psutil  # type: ignore[import-untyped]

from scripts.lib.figures import parser, report
from scripts.lib.server import Server
from scripts.lib.soak_client import IDLE_S, TIMEOUT_S, Client, Soak
from scripts.lib.soak_requests import SpeechTraffic, Traffic
from scripts.lib.spec_bench import spec_bench
from sglang_ext.cpu.heap_trim import TRIM_VARIABLE

QUICK_MINUTES = 5.0
SAMPLE_S, PROGRESS_S = 2.0, 30.0
REST_EVERY_S, RESTS_AT_LEAST = 180.0, 10
TRIM_S = 3.0
# SGLang closes a connection that is idle for 5 s (SGLANG_TIMEOUT_KEEP_ALIVE). Clients let go of it
# before, as else the first request after a rest may go into one that is just being closed.
KEEP_ALIVE_S = 2.0
TABLE_ROWS = 12
# At most. Threads, files and sockets come and go with requests under way.
LIMITS = {
    "rss_slope_mib_per_minute_second_half": 1.0, "unprovoked_errors": 0, "wrong_outputs": 0,
    "threads_growth": 4, "files_growth": 16, "sockets_growth": 16,
}  # fmt: skip
SETTLED_MINUTES, UNSETTLED_SLOPE = 30.0, 10.0
_SSSD = ["--speculative-algorithm", "SSSD", "--max-running-requests", "16"]


@dataclass(frozen=True)
class Sample:
    """A process tree at a time: minutes since the start, MiB and threads by process id, and counts.

    `at_rest`: no request is under way, and freed memory was given back.
    """

    minutes: float
    rss_mib_by_pid: Mapping[int, float]
    threads_by_pid: Mapping[int, int]
    files: int
    sockets: int
    at_rest: bool = False

    @classmethod
    def of(cls, pid: int, minutes: float, at_rest: bool = False) -> "Sample":
        """Take one; processes that end meanwhile are left out."""
        rss, threads, files, sockets = dict[int, float](), dict[int, int](), 0, 0
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            try:
                with process.oneshot():
                    found = process.memory_info().rss, process.num_threads(), process.num_fds()
                connections = len(process.net_connections("all"))
            except psutil.Error:
                continue
            rss[process.pid], threads[process.pid] = found[0] / 2**20, found[1]
            files += found[2]
            sockets += connections
        return cls(minutes, rss, threads, files, sockets, at_rest)

    @property
    def rss_mib(self) -> float:
        """MiB of memory of all processes."""
        return sum(self.rss_mib_by_pid.values())

    @property
    def threads(self) -> int:
        """Threads of all processes."""
        return sum(self.threads_by_pid.values())


def growth_figures(samples: Sequence[Sample]) -> dict[str, float]:
    """How the second half of a run went on from the first.

    Args:
        samples: in order; two at least of the second half are at rest.
    """
    half = samples[len(samples) // 2 :]
    tenth = max(1, len(samples) // 10)
    rests = [s for s in half if s.at_rest]
    lasting = set[int].intersection(*(set(s.rss_mib_by_pid) for s in rests))
    rss = [sum(s.rss_mib_by_pid[pid] for pid in lasting) for s in rests]
    # A process that comes and goes would be growth of its own.
    threads = [sum(s.threads_by_pid[pid] for pid in lasting) for s in rests]
    slope = float(np.polyfit([s.minutes for s in rests], rss, 1)[0])

    def growth(name: str) -> float:
        first, last = ([getattr(s, name) for s in part] for part in (half[:tenth], half[-tenth:]))
        return statistics.median(last) - statistics.median(first)

    return {
        "rss_slope_mib_per_minute_second_half": slope,
        "rss_mib_end": half[-1].rss_mib,
        "rss_growth_mib": growth("rss_mib"),
        "threads_growth": threads[-1] - threads[0],
        "files_growth": growth("files"),
        "sockets_growth": growth("sockets"),
    }


def table(samples: Sequence[Sample]) -> str:
    """Some of the samples at rest, a line each."""
    lines = [f"{'minute':>8} {'MiB':>8} {'threads':>8} {'files':>8} {'sockets':>8}"]
    rests = [s for s in samples if s.at_rest] or samples
    for n in np.linspace(0, len(rests) - 1, min(TABLE_ROWS, len(rests))).astype(int):
        s = rests[n]
        lines.append(f"{s.minutes:8.1f} {s.rss_mib:8.0f} {s.threads:8} {s.files:8} {s.sockets:8}")
    return "\n".join(lines)


class Clients:
    """Clients that do one thing after the other, and rest when they are told to.

    Args:
        each: what a client does, awaited again and again.
        until: when they stop (time.monotonic).
    """

    def __init__(self, each: Sequence[Callable[[], Awaitable[None]]], until: float, soak: Soak):
        self._go = asyncio.Event()
        self._busy = 0
        self._soak = soak
        self._go.set()
        self.done = asyncio.gather(*(self._run(one, until) for one in each))

    async def _run(self, one: Callable[[], Awaitable[None]], until: float) -> None:
        while time.monotonic() < until:
            await self._go.wait()
            self._busy += 1
            try:
                await one()
            finally:
                self._busy -= 1
            await asyncio.sleep(self._soak.rng.uniform(0, 0.2))

    async def rest(self) -> None:
        """Wait for the answers that are under way; nothing new is asked until `go`."""
        self._go.clear()
        while self._busy:
            await asyncio.sleep(0.1)
        # A pass gives freed memory back where it is time.
        for _ in range(3):
            body = {"text": "A", "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
            await self._soak.call("POST", "/generate", body)
            await asyncio.sleep(TRIM_S / 2)

    def go(self) -> None:
        """Ask again."""
        self._go.set()


async def soak_server(server: Server, soak: Soak, each: Sequence[Callable[[], Awaitable[None]]],
                      seconds: float) -> list[Sample]:  # fmt: skip
    """Load a running server; each client does one thing after the other."""
    began, samples, shown = time.monotonic(), list[Sample](), 0.0
    every = min(REST_EVERY_S, seconds / RESTS_AT_LEAST)
    clients, due = Clients(each, began + seconds, soak), every

    async def sample(at_rest: bool) -> None:
        passed = time.monotonic() - began
        samples.append(await asyncio.to_thread(Sample.of, server.pid, passed / 60, at_rest))

    while not clients.done.done():
        await sample(at_rest=False)
        if time.monotonic() - began >= shown:
            shown += PROGRESS_S
            print(_progress(soak, samples[-1], seconds), flush=True)
        if time.monotonic() - began >= due:
            await clients.rest()
            await sample(at_rest=True)
            clients.go()
            due = time.monotonic() - began + every  # a long rest is not followed by another
        await asyncio.wait({clients.done}, timeout=SAMPLE_S)
    await clients.done
    await asyncio.gather(*soak.let_go)
    await clients.rest()
    await sample(at_rest=True)
    status, answer = await soak.call("POST", "/flush_cache?timeout=60")
    if status != 200:
        soak.tally.problem("unprovoked_errors", f"requests run without a client: {answer}")
    return samples


def _progress(soak: Soak, sample: Sample, seconds: float) -> str:
    counts = soak.tally.counts
    done = sum(counts.values()) - counts["unprovoked_errors"]
    return (
        f"{sample.minutes:.1f} of {seconds / 60:.1f} min: {done} events, "
        f"{counts['unprovoked_errors']} unprovoked errors, {sample.rss_mib:.0f} MiB, "
        f"{sample.threads} threads, {sample.files} files, {sample.sockets} sockets"
    )


async def run(server: Server, options: argparse.Namespace, minutes: float) -> dict[str, float]:
    """All of it, on a server that is ready."""
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
        soak = Soak(server.base_url, http, random.Random(options.seed))
        clients: list[Callable[[], Awaitable[None]]]
        if options.whisper:
            clients = [SpeechTraffic(soak, options.whisper).one] * options.clients
        else:
            prompts = spec_bench(options.model, max_prompt_tokens=200)[:12]
            text = Traffic(soak, prompts, options.model)
            clients = [text.one] * options.clients
            clients += [lambda: Client(soak).live()] * max(1, options.clients // 3)
        samples = await soak_server(server, soak, clients, 60 * minutes)
    print(f"\n{table(samples)}")
    counts = soak.tally.counts
    return {
        "soak_minutes": minutes,
        "soak_samples": len(samples),
        "soak_rests": sum(s.at_rest for s in samples),
        **{name: counts[name] for name in ("unprovoked_errors", "wrong_outputs", "cross_talk")},
        **growth_figures(samples),
        **{f"sent_{name}": count for name, count in sorted(counts.items()) if name not in LIMITS},
    }


def limits_broken(figures: dict[str, float]) -> list[str]:
    """A line for each figure over its limit."""
    limits = dict(LIMITS)
    if figures["soak_minutes"] < SETTLED_MINUTES:
        limits["rss_slope_mib_per_minute_second_half"] = UNSETTLED_SLOPE
    return [
        f"{name} is {figures[name]:.4g}, expected at most {limit}"
        for name, limit in limits.items()
        if not figures[name] <= limit
    ]


def main() -> int:
    args = parser(__doc__)
    args.add_argument("--minutes", type=float, metavar="M", help="[60; with --quick 5]")
    args.add_argument("--clients", type=int, default=6, metavar="N", help="[%(default)s]")
    args.add_argument("--whisper", metavar="MODEL", help="transcriptions by this model instead")
    args.add_argument("--seed", type=int, default=0, metavar="S", help="[%(default)s]")
    options = args.parse_args()
    minutes = options.minutes or (QUICK_MINUTES if options.quick else 60.0)
    if options.clients < 1 or minutes <= 0:
        args.error("--clients must be at least 1 and --minutes more than 0")
    os.environ.setdefault(TRIM_VARIABLE, str(TRIM_S))
    with tempfile.TemporaryDirectory() as folder:
        flags = [*_SSSD, "--drafters", "ssbd", "--translation-idle-seconds", str(IDLE_S),
                 "--namespace-share", "1", "--datastore", f"{folder}/store"]  # fmt: skip
        if options.whisper:
            flags = ["--max-running-requests", "16"]
        with Server(options.whisper or options.model, flags, name="soak") as server:
            figures = asyncio.run(run(server, options, minutes))
    report(figures, options.json)
    broken = limits_broken(figures)
    print("\n".join(broken))
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
