"""Translation sessions under load: many at once, at random, with all that clients do wrong.

Each client opens a session, grows, revises and cuts its source (HTTP, server-sent events or a
WebSocket), breaks connections off in the middle, makes calls that must be refused, and then
finishes the session, deletes it, or lets it expire. Every source carries a number of its own, at
least three digits away from all others, so that another session's text is recognised wherever it
turns up: in answers, deltas, events and the session's state. Some sessions have a beta of 0.9,
which writes down any draft that is not the session's own.

cross_talk: texts with another session's number, and states that are not what their client sent.
unprovoked_errors: every other answer that is not the one expected, refusals with the wrong status
included. At the end nothing may be left: sessions that were let go must be unknown, the limit of
sessions must be reached after exactly as many new ones, and no request may be running.
with_own_number: the share of translations that show their number; where it is small, cross-talk
could hide. Memory is the proportional set size of the server's processes, first after a warm-up;
tracebacks are those in its log.

    python -m scripts.soak_sessions [--minutes M] [--sessions N] [--seed S] [--quick] [--json FILE]
"""

import asyncio
import random
import sys
import time
from typing import Any

import aiohttp

from scripts.lib.figures import parser, report
from scripts.lib.server import Server
from scripts.lib.soak_client import IDLE_S, PATH, TIMEOUT_S, Client, Soak, Tally

MODEL = "qwen2.5-coder-0.5b-instruct"
PROGRESS_S = 15
TRACEBACK = "Traceback (most recent call last)"


async def run_clients(soak: Soak, sessions: int, seconds: float) -> None:
    """Keep so many sessions open for so long; returns when all are at their end."""
    deadline = time.monotonic() + seconds

    async def one_after_the_other() -> None:
        while time.monotonic() < deadline:
            await Client(soak).live()
            await asyncio.sleep(soak.pause_s)

    await asyncio.gather(*(one_after_the_other() for _ in range(sessions)))
    await asyncio.gather(*soak.let_go)


async def check_empty(soak: Soak, limit: int) -> None:
    """Nothing is left: as many sessions as the limit says can be opened, and nothing runs."""
    body = {"source_language": "en", "target_language": "fr"}
    await asyncio.sleep(soak.idle_s + soak.margin_s)  # finished ones expire, too
    opened: list[str] = []
    status, answer = 200, dict[str, Any]()
    while status == 200 and len(opened) <= limit:
        status, answer = await soak.call("POST", PATH, body)
        if status == 200:
            opened.append(answer["id"])
    if status != 429 or len(opened) != limit:
        soak.tally.problem(
            "unprovoked_errors", f"{limit} sessions expected to open, then 429; {len(opened)} did, "
            f"then {status}: {str(answer)[:200]}",
        )  # fmt: skip
    soak.tally.counts["refusals"] += status == 429
    for session in opened:
        await soak.call("DELETE", f"{PATH}/{session}")
    status, answer = await soak.call("POST", "/flush_cache?timeout=60")
    if status != 200:
        soak.tally.problem("unprovoked_errors", f"requests run without a client: {answer}")


async def soak_server(
    server: Server, sessions: int, seconds: float, limit: int, seed: int
) -> dict[str, float]:
    """Load a running server and count."""
    began, memory = time.monotonic(), 0.0
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
        soak = Soak(server.base_url, http, random.Random(seed))
        load = asyncio.create_task(run_clients(soak, sessions, seconds))
        while not load.done():
            await asyncio.wait({load}, timeout=PROGRESS_S)
            now = await asyncio.to_thread(server.memory_bytes) / (1 << 20)
            passed = time.monotonic() - began
            if not memory and passed > min(60, seconds / 4):
                memory = now
            passed_of = f"{passed / 60:.1f} of {seconds / 60:.1f} min"
            print(f"{passed_of}: {_line(soak.tally)}, {now:.0f} MiB", flush=True)
        await load
        await check_empty(soak, limit)
    counts = soak.tally.counts
    end = server.memory_bytes() / (1 << 20)
    print(f"memory: {memory:.0f} MiB after the warm-up, {end:.0f} MiB at the end")
    tracebacks = server.log.read_text(errors="replace").count(TRACEBACK)
    if tracebacks:
        print(f"{tracebacks} tracebacks in the server's log, {server.log}")
    return {
        "sessions": counts["sessions"],
        "concurrent": sessions,
        "minutes": seconds / 60,
        "updates": counts["updates"],
        "events": counts["events"],
        "disconnects": counts["disconnects"],
        "expiries": counts["expiries"],
        "refusals": counts["refusals"],
        "with_own_number": counts["with_own_number"] / max(1, counts["texts"]),
        "cross_talk": counts["cross_talk"],
        "unprovoked_errors": counts["unprovoked_errors"],
        "memory_growth_mb": end - memory,
        "tracebacks": tracebacks,
    }


def _line(tally: Tally) -> str:
    shown = (
        "sessions", "updates", "events", "disconnects", "expiries", "refusals", "cross_talk",
        "unprovoked_errors",
    )  # fmt: skip
    return ", ".join(f"{tally.counts[name]} {name.replace('_', ' ')}" for name in shown)


def main() -> int:
    args = parser(__doc__)
    args.set_defaults(model=MODEL)
    args.add_argument("--minutes", type=float, default=10, metavar="M", help="[%(default)s]")
    args.add_argument("--sessions", type=int, default=50, metavar="N", help="[%(default)s]")
    args.add_argument("--seed", type=int, default=0, metavar="S", help="[%(default)s]")
    options = args.parse_args()
    if options.quick:
        options.minutes, options.sessions = 1, 10
    if options.sessions < 1 or options.minutes <= 0:
        args.error("--sessions must be at least 1 and --minutes more than 0")
    limit = 4 * options.sessions
    flags = [
        "--speculative-algorithm", "SSSD", "--drafters", "ssbd", "--enable-metrics",
        "--max-running-requests", "32", "--translation-idle-seconds", str(IDLE_S),
        # One namespace may have them all.
        "--translation-sessions", str(limit), "--namespace-share", "1",
    ]  # fmt: skip
    with Server(options.model, flags, name="soak") as server:
        figures = asyncio.run(
            soak_server(server, options.sessions, 60 * options.minutes, limit, options.seed)
        )
    report(figures, options.json)
    return int(figures["cross_talk"] > 0 or figures["unprovoked_errors"] > 0)


if __name__ == "__main__":
    sys.exit(main())
