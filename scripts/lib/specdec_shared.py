"""A block drafter with the target's encoder against one with its own: its tokens, its cost."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from scripts.lib.served_metrics import read_metrics
from scripts.lib.specdec_results import Answer, per_step
from sglang_ext.block_drafter.block_predictor import BlockPredictor
from sglang_ext.block_drafter.drafter_files import load_drafter

# What a drafter takes: before prompts are read, and in steps.
_SECONDS = ("draft_seconds_total", "draft_prefill_seconds_total")
_SOURCE_TOKENS, _TIMES = 32, 30


@dataclass(frozen=True)
class Drafting:
    """What a server's block drafter did for some requests, alone with them.

    Attributes:
        answers: theirs.
        seconds: that drafting took in all, encoding included.
        encode_s: that one source takes, by itself.
    """

    answers: Sequence[Answer]
    seconds: float
    encode_s: float


def drafting_of(url: str, drafter: Path, ask: Callable[[], Iterable[Answer]]) -> Drafting:
    """Ask a server, and see in its metrics what drafting took meanwhile.

    Args:
        url: the server's, with `--enable-metrics` and nothing else to do.
        drafter: the directory that it serves.
        ask: has it answer.
    """
    before = _drafted_s(url)
    answers = list(ask())
    return Drafting(answers, _drafted_s(url) - before, encode_seconds(drafter))


def encode_seconds(drafter: Path) -> float:
    """The median seconds of one source of 32 tokens, as a server on a CPU takes them."""
    loaded = load_drafter(drafter)
    predictor, states = BlockPredictor(loaded.model, int8=True), loaded.manifest.states
    places = torch.arange(_SOURCE_TOKENS)
    taken = []
    for _ in range(_TIMES):
        start = time.perf_counter()
        if states is None:
            predictor.encode([loaded.kept.rows(loaded.kept.tokens[:_SOURCE_TOKENS])])
        else:
            predictor.remember(torch.ones(_SOURCE_TOKENS, states.width).half(), places)
        taken.append(time.perf_counter() - start)
    return sorted(taken)[_TIMES // 2]


def shared_figures(own: Drafting, shared: Drafting) -> dict[str, float]:
    """The figures of a target's encoder, by those of a drafter's own."""
    per_request = [each.seconds / len(each.answers) for each in (own, shared)]
    return {
        "shared_encoder_accepted": per_step(shared.answers),
        "shared_encoder_accepted_ratio": per_step(shared.answers) / per_step(own.answers),
        "shared_encoder_drafting_ms": 1000 * per_request[1],
        "own_encoder_drafting_ms": 1000 * per_request[0],
        "shared_encoder_cost_ratio": per_request[1] / per_request[0],
        "shared_encoder_encode_ratio": shared.encode_s / own.encode_s,
    }


def _drafted_s(url: str) -> float:
    series = read_metrics(url)
    return sum(series.get(name, 0.0) for name in _SECONDS)
