"""What the sizes of a stream's chunks tell about the prompt, and what hiding it costs.

A speculative server commits as many tokens a step as it accepts, and streams them as they come: who
sees encrypted chunks go by can count the tokens of each and recognise a request that he has
profiled (arXiv 2411.01076, "When Speculation Spills Secrets"). Here the observer knows the traces
of --prompts prompts, each of the same number of tokens, sees every prompt again, and names the one
whose trace is nearest (L1 distance of the chunks' token counts; ties share the answer).

    python -m scripts.bench_stream_side_channel [--prompts 50] [--tokens 64] [--quick] [--json FILE]

Asked is with SGLang's `stream_interval` of 1, 8 and 32 tokens and these defences: `live`, none (the
datastore has served every prompt before); `own`, `datastore: false`; `plain`, `drafter: none`.

recognised_DEFENCE_INTERVAL: the part of the prompts that are named rightly; recognised_by_chance:
what guessing gives. wait_DEFENCE_INTERVAL: the mean time between chunks, over that of `live` at 1:
what a reader waits longer for.
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from scripts.lib.client import events, generate_all
from scripts.lib.figures import parser, report
from scripts.lib.http_client import HTTP
from scripts.lib.server import Server
from scripts.lib.spec_bench import spec_bench

INTERVALS = (1, 8, 32)
DEFENCES: dict[str, dict[str, Any]] = {
    "live": {},
    "own": {"datastore": False},
    "plain": {"drafter": "none"},
}
_QUICK_PROMPTS = 6
_TIMEOUT_S = 300


@dataclass(frozen=True)
class Trace:
    """What an observer sees of one stream.

    Attributes:
        sizes: tokens of each chunk.
        wait_s: mean seconds between chunks.
    """

    sizes: tuple[int, ...]
    wait_s: float


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--prompts", type=int, default=50, help="[%(default)s]")
    made.add_argument("--tokens", type=int, default=64, help="of each output [%(default)s]")
    options = made.parse_args()
    count = min(options.prompts, _QUICK_PROMPTS) if options.quick else options.prompts
    asked = [p.input_ids for p in spec_bench(options.model, max_prompt_tokens=200)[:count]]
    with Server(options.model, ["--speculative-algorithm", "SSSD"], name="stream") as server:
        figures = measure(server.base_url, asked, options.tokens)
    report(figures, options.json)
    return 0


def measure(url: str, asked: Sequence[Sequence[int]], tokens: int) -> dict[str, float]:
    """The figures of prompts, as token ids, that are all served once before."""
    generate_all(
        url, asked, in_flight=4, label="served before", max_new_tokens=tokens, ignore_eos=True
    )
    HTTP.post(f"{url}/datastore/flush", timeout=_TIMEOUT_S).raise_for_status()
    figures: dict[str, float] = {"recognised_by_chance": 1 / len(asked)}
    unhidden = 0.0
    for defence, params in DEFENCES.items():
        for interval in INTERVALS:
            name = f"{defence}_{interval}"
            known, seen = (
                [
                    streamed(url, ids, tokens, interval, params)
                    for ids in tqdm(asked, desc=name, disable=None, leave=False)
                ]
                for _ in range(2)
            )
            figures[f"recognised_{name}"] = recognised(known, seen)
            wait = float(np.mean([trace.wait_s for trace in seen]))
            unhidden = unhidden or wait
            figures[f"wait_{name}"] = wait / unhidden
    return figures


def streamed(
    url: str, ids: Sequence[int], tokens: int, interval: int, params: Mapping[str, Any]
) -> Trace:
    """The trace of one prompt, whose output does not join the datastore."""
    sampling = {
        "temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True,
        "stream_interval": interval, "custom_params": {"ingest": False, **params},
    }  # fmt: skip
    totals, times = [0], []
    for event in events(url, {"input_ids": list(ids), "sampling_params": sampling}):
        totals.append(json.loads(event)["meta_info"]["completion_tokens"])
        times.append(time.perf_counter())
    gaps = np.diff(times)
    return Trace(tuple(int(n) for n in np.diff(totals)), float(gaps.mean()) if len(gaps) else 0.0)


def recognised(known: Sequence[Trace], seen: Sequence[Trace]) -> float:
    """The part of `seen` whose nearest trace in `known` is at the same place, 0 to 1."""
    return float(np.mean([_share(known, trace, i) for i, trace in enumerate(seen)]))


def _share(known: Sequence[Trace], seen: Trace, true: int) -> float:
    """The observer's chance to name the right one of the nearest."""
    distances = np.array([_distance(trace.sizes, seen.sizes) for trace in known])
    nearest = distances == distances.min()
    return float(nearest[true] / nearest.sum())


def _distance(a: Sequence[int], b: Sequence[int]) -> int:
    longer = max(len(a), len(b))
    padded = [np.pad(np.array(sizes, int), (0, longer - len(sizes))) for sizes in (a, b)]
    return int(np.abs(padded[0] - padded[1]).sum())


if __name__ == "__main__":
    sys.exit(main())
