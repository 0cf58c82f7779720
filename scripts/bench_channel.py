"""Round trips over the token channel between two processes.

    python -m scripts.bench_channel --json FILE

A view of a window of 8 nodes with 8 candidates each goes to another process, which answers with 8
drafted tokens, as the target and the draft executor of docs/mirror.md do. One round trip has both
rendezvous of the latency law (Eq. 10): T_rv(ee) there and T_rv(fv) back.

- rendezvous_p50_us, rendezvous_p99_us: a round trip after --gap-ms of rest, in microseconds: both
  processes sleep in between, as they do between steps.
- busy_p50_us, busy_p99_us: a round trip right behind the last one.
- send_p50_us, send_p99_us: what sending the view costs the target.
- idle_cpu_share: CPU time that the waiting process uses while nothing comes, of the wall time.
"""

import argparse
import sys
import time

import numpy as np
import psutil

from scripts.lib.figures import parser, report
from sglang_ext.mirror import messages
from sglang_ext.mirror.channel import Channel
from sglang_ext.mirror.messages import Kind
from sglang_ext.servers import processes

NODES, KAPPA, DRAFTED = 8, 8, 8
_ANSWER_S = 60.0
_IDLE_S = 1.0


def main() -> int:
    """Measure, or be the process that answers."""
    made = parser(__doc__, model=False)
    made.add_argument("--gap-ms", type=float, default=20.0, help="rest between two round trips")
    made.add_argument("--answer", metavar="PATH", help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.answer:
        _answer(options.answer)
        return 0
    trips = 100 if options.quick else 1000
    channel = Channel.create()
    process = processes.start(
        [sys.executable, "-m", "scripts.bench_channel", "--answer", channel.path]
    )
    try:
        _round_trips(channel, 10, 0.0)  # it is up, and everything was touched once
        rested, sent = _round_trips(channel, trips, options.gap_ms / 1e3)
        busy, _ = _round_trips(channel, trips, 0.0)
        idle = _idle_share(process.pid)
    finally:
        processes.stop_group(process, 1.0)
    figures: dict[str, float] = {"trips": trips}
    for name, seconds in (("rendezvous", rested), ("busy", busy), ("send", sent)):
        for percentile in (50, 99):
            key = f"{name}_p{percentile}_us"
            figures[key] = float(np.percentile(seconds, percentile) * 1e6)
    report(figures | {"idle_cpu_share": idle}, options.json)
    return 0


def _round_trips(channel: Channel, trips: int, gap_s: float) -> tuple[list[float], list[float]]:
    """Seconds of each round trip, and of sending within it."""
    ids = np.arange(NODES, dtype=np.int32)
    candidates = np.zeros((NODES, KAPPA), dtype=np.int32)
    logprobs = np.zeros((NODES, KAPPA), dtype=np.float32)
    whole, sent = [], []
    for trip in range(trips):
        time.sleep(gap_s)
        begun = time.perf_counter()
        view = (ids, ids - 1, candidates, logprobs, begun)
        channel.send(*messages.view_records(trip, 100, *view))
        sent.append(time.perf_counter() - begun)
        records = channel.receive()
        while not records:
            if not channel.wait(_ANSWER_S):
                raise SystemExit("the answering process has ended")
            records = channel.receive()
        assert [r.request for r in records] == [trip] and len(messages.nodes_of(records[0]))
        whole.append(time.perf_counter() - begun)
    return whole, sent


def _answer(path: str) -> None:
    channel = Channel.open(path)
    while True:
        channel.wait(_ANSWER_S)
        for record in channel.receive():
            if record.kind == Kind.VIEW:
                messages.view_of(record)
                nodes = [(i, 100 + i, i, 0.5) for i in range(DRAFTED)]
                channel.send(*messages.node_records(record.request, nodes))


def _idle_share(pid: int) -> float:
    [child] = psutil.Process(pid).children()
    before = child.cpu_times()
    time.sleep(_IDLE_S)
    after = child.cpu_times()
    return (after.user + after.system - before.user - before.system) / _IDLE_S


if __name__ == "__main__":
    sys.exit(main())
