"""A server under mixed traffic for an hour: memory, threads, files and sockets must level off.

Clients send, at random and at once: greedy and sampled /generate, n > 1, penalties, stop strings,
grammars, logprobs, chat, streams, SSBD's sessions and translation sessions (soak_client.py);
some leave in the middle or abort; namespaces and requests are deleted and caches flushed. With
`--whisper MODEL` it is transcriptions instead, some of them broken off.

unprovoked_errors: answers that are not the ones expected, greedy outputs that differ from the
first ones among them (wrong_outputs). The server's process tree is sampled; growths are from the
middle of the run to its end (medians of a tenth of it), the slope is a line through each minute's
least of the second half. Exit code 1 where a limit is broken: LIMITS.

    python -m scripts.soak_server [--minutes M] [--clients N] [--whisper MODEL] [--seed S]
        [--quick] [--json FILE]
"""

import argparse
import asyncio
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

QUICK_MINUTES = 5.0
SAMPLE_S, PROGRESS_S = 2.0, 30.0
TABLE_ROWS = 12
# At most. Threads, files and sockets come and go with requests under way.
LIMITS = {
    "rss_slope_mib_per_minute_second_half": 1.0, "unprovoked_errors": 0, "wrong_outputs": 0,
    "threads_growth": 4, "files_growth": 16, "sockets_growth": 16,
}  # fmt: skip
_SSSD = ["--speculative-algorithm", "SSSD", "--max-running-requests", "16"]


@dataclass(frozen=True)
class Sample:
    """A process tree at a time: minutes since the start, MiB by process id, and counts."""

    minutes: float
    rss_mib_by_pid: Mapping[int, float]
    threads: int
    files: int
    sockets: int

    @classmethod
    def of(cls, pid: int, minutes: float) -> "Sample":
        """Take one; processes that end meanwhile are left out."""
        rss, threads, files, sockets = dict[int, float](), 0, 0, 0
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            try:
                with process.oneshot():
                    found = process.memory_info().rss, process.num_threads(), process.num_fds()
                connections = len(process.net_connections("all"))
            except psutil.Error:
                continue
            rss[process.pid] = found[0] / 2**20
            threads, files = threads + found[1], files + found[2]
            sockets += connections
        return cls(minutes, rss, threads, files, sockets)

    @property
    def rss_mib(self) -> float:
        """MiB of memory of all processes."""
        return sum(self.rss_mib_by_pid.values())


def growth_figures(samples: Sequence[Sample]) -> dict[str, float]:
    """How the second half of a run went on from the first.

    Args:
        samples: in order, four at least.
    """
    half = samples[len(samples) // 2 :]
    tenth = max(1, len(samples) // 10)
    lasting = set[int].intersection(*(set(s.rss_mib_by_pid) for s in half))
    rss = [sum(s.rss_mib_by_pid[pid] for pid in lasting) for s in half]
    slope = slope_of_least([s.minutes for s in half], rss)

    def growth(name: str) -> float:
        first, last = ([getattr(s, name) for s in part] for part in (half[:tenth], half[-tenth:]))
        return statistics.median(last) - statistics.median(first)

    return {
        "rss_slope_mib_per_minute_second_half": slope,
        "rss_mib_end": half[-1].rss_mib,
        "rss_growth_mib": growth("rss_mib"),
        "threads_growth": growth("threads"),
        "files_growth": growth("files"),
        "sockets_growth": growth("sockets"),
    }


def slope_of_least(minutes: Sequence[float], mib: Sequence[float]) -> float:
    """MiB a minute, of a line through each minute's least sample.

    What one request takes for its time comes on top and is gone again, 170 MiB at times: a line
    through all samples follows where such peaks fall. What is kept raises the least as well.

    Args:
        minutes, mib: in order, two at least, as many of both.
    """
    parts = max(2, int(minutes[-1] - minutes[0]))
    rows = np.array_split(np.column_stack([minutes, mib]), parts)
    least = np.array([part[np.argmin(part[:, 1])] for part in rows])
    return float(np.polyfit(least[:, 0], least[:, 1], 1)[0])


def table(samples: Sequence[Sample]) -> str:
    """Some of the samples, a line each."""
    lines = [f"{'minute':>8} {'MiB':>8} {'threads':>8} {'files':>8} {'sockets':>8}"]
    for n in np.linspace(0, len(samples) - 1, min(TABLE_ROWS, len(samples))).astype(int):
        s = samples[n]
        lines.append(f"{s.minutes:8.1f} {s.rss_mib:8.0f} {s.threads:8} {s.files:8} {s.sockets:8}")
    return "\n".join(lines)


async def soak_server(server: Server, soak: Soak, clients: Sequence[Callable[[], Awaitable[None]]],
                      seconds: float) -> list[Sample]:  # fmt: skip
    """Load a running server; each client does one thing after the other."""
    began, samples, shown = time.monotonic(), list[Sample](), 0.0

    async def client(one: Callable[[], Awaitable[None]]) -> None:
        while time.monotonic() < began + seconds:
            await one()
            await asyncio.sleep(soak.rng.uniform(0, 0.2))

    load = asyncio.gather(*map(client, clients))
    while not load.done():
        passed = time.monotonic() - began
        if passed < seconds:  # afterwards the load fades
            samples.append(await asyncio.to_thread(Sample.of, server.pid, passed / 60))
        if passed >= shown:
            shown += PROGRESS_S
            print(_progress(soak, samples[-1], seconds), flush=True)
        await asyncio.wait({load}, timeout=SAMPLE_S)
    await load
    await asyncio.gather(*soak.let_go)
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
    connector = aiohttp.TCPConnector(limit=0)
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
        **{name: counts[name] for name in ("unprovoked_errors", "wrong_outputs", "cross_talk")},
        **growth_figures(samples),
        **{f"sent_{name}": count for name, count in sorted(counts.items()) if name not in LIMITS},
    }


def limits_broken(figures: dict[str, float]) -> list[str]:
    """A line for each figure over its limit."""
    return [
        f"{name} is {figures[name]:.4g}, expected at most {limit}"
        for name, limit in LIMITS.items()
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
