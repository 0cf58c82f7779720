"""Phase 5: what a decode step costs, by configuration, batch size and acceptance.

Answers are known (the planted rule), so the drafter 'oracle' is right as often as it is told to be.
Step times come from the probe in the scheduler: between the starts of two steps (wall), from the
target's forward pass to the end of what the step launched (device, CUDA events). The host gap is
what the device waits for: wall minus device.
"""

import importlib.util
import itertools
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from scripts.gpu_kit.engine import SPECULATION, Engine, greedy
from scripts.gpu_kit.kit import Kit, Part
from scripts.gpu_kit.planted import with_wrong_tokens

USES_ENGINE = True
# The telling ones first, as time may end before the last.
BATCHES, CPU_BATCHES = (1, 16, 64, 4, 32, 8, 48, 2), (1, 2)
ACCEPTANCES = (0.8, 0.0, 1.0, 0.5)
PROMPT_TOKENS = 256
TOKENS, CPU_TOKENS = 96, 16
# The configurations that others are compared with.
PLAIN = ("plain", "plain, flashinfer")
# The configuration that learns from what it has verified, so that it is measured the second time.
ADAPTIVE = "adaptive"
# Left for the engine's end.
CLOSING_S = 6.0


def plain(part: Part) -> None:
    """Plain SGLang as its users start it (FA3 on Hopper)."""
    if not part.kit.emulated and not has_fa3():
        part.not_run("plain", "sgl_kernel's flash_ops, SGLang's default on Hopper, is not here")
        return
    _plainly(part, PLAIN[0], [])


def plain_flashinfer(part: Part) -> None:
    """Plain SGLang on the attention backend that verification uses."""
    _plainly(part, PLAIN[1], ["--attention-backend", "flashinfer"])


def ngram(part: Part) -> None:
    """SGLang's own NGRAM speculation at 16 nodes; its drafts are its own."""
    part.kit.make_model()
    flags = ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "16"]
    with Engine(part.kit, [*flags, "--attention-backend", "flashinfer"]) as engine:
        for batch in _batches(part.kit):
            _measure(part, engine, "ngram", batch, None)


def adaptive(part: Part) -> None:
    """SSSD choosing its width by the step."""
    _speculate(part, ADAPTIVE, 16, "auto")


def width_16(part: Part) -> None:
    """16 nodes in every step."""
    _speculate(part, "width 16", 16, "fixed")


def width_8(part: Part) -> None:
    """8 nodes in every step."""
    _speculate(part, "width 8", 8, "fixed")


def width_4(part: Part) -> None:
    """4 nodes in every step."""
    _speculate(part, "width 4", 4, "fixed")


def _plainly(part: Part, label: str, flags: list[str]) -> None:
    part.kit.make_model()
    with Engine(part.kit, flags) as engine:
        for batch in _batches(part.kit):
            figures = _measure(part, engine, label, batch, None)
            if figures is not None:
                kept = part.kit.kept(f"latency-{label}") or {}
                part.kit.keep(f"latency-{label}", kept | {str(batch): figures["token_ms"]})


def _speculate(part: Part, label: str, width: int, budget: str) -> None:
    kit = part.kit
    kit.make_model()
    options = {
        "budget": budget, "drafter": "oracle", "oracle_file": str(_oracle(kit)),
        "bigram_seconds": "0",
    }  # fmt: skip
    flags = [*SPECULATION, "--speculative-num-draft-tokens", str(width)]
    if not kit.emulated:
        flags += ["--attention-backend", "flashinfer"]
    with Engine(kit, flags, options) as engine:
        for batch in _batches(kit):
            for acceptance in ACCEPTANCES:
                _measure(part, engine, label, batch, acceptance)


def _batches(kit: Kit) -> Sequence[int]:
    return CPU_BATCHES if kit.emulated else BATCHES


def _tokens(kit: Kit) -> int:
    return CPU_TOKENS if kit.emulated else TOKENS


def _prompt(kit: Kit, acceptance: float | None, number: int) -> list[int]:
    """Each acceptance has prompts of its own: by them the drafter finds its drafts."""
    of_acceptance = ACCEPTANCES.index(acceptance) if acceptance is not None else 0
    length = 32 if kit.emulated else PROMPT_TOKENS
    return kit.rule.prompt(length, 10_000 + 1000 * of_acceptance + number)


def _oracle(kit: Kit) -> Path:
    path = Path(kit.work) / "latency-oracle.jsonl"
    if path.exists():
        return path
    lines = []
    for acceptance in ACCEPTANCES:
        for number in range(max(_batches(kit))):
            prompt = _prompt(kit, acceptance, number)
            output = kit.rule.continuation(prompt, _tokens(kit) + 32)
            draft = with_wrong_tokens(output, acceptance, kit.shape.vocab, seed=number)
            lines.append(json.dumps({"prompt": prompt, "output": output, "draft": draft}))
    path.write_text("\n".join(lines))
    return path


def _measure(
    part: Part, engine: Engine, label: str, batch: int, acceptance: float | None
) -> dict[str, Any] | None:
    case = f"{label}, batch {batch}"
    case += f", acceptance {acceptance}" if acceptance is not None else ""
    if part.is_done(case):
        return None
    if part.remaining() < CLOSING_S:
        part.not_run(case, "no time was left for it")
        return None
    with part.attempt(case):
        prompts = [_prompt(part.kit, acceptance, n) for n in range(batch)]
        sampling = greedy(_tokens(part.kit))
        if not part.kit.emulated:
            # What a first batch of this size pays for, and what a budget has to learn.
            first = _tokens(part.kit) if label == ADAPTIVE else 8
            engine.answers(prompts, greedy(first))
        engine.begin("steps")
        answers = engine.answers(prompts, sampling)
        figures = summary(engine.noted("steps"), batch, sum(len(a.tokens) for a in answers))
        figures |= (
            _against_plain(part.kit, batch, figures["token_ms"]) if label not in PLAIN else {}
        )
        part.result(case, True, batch=batch, acceptance=acceptance, **figures)
        return figures
    return None


def _against_plain(kit: Kit, batch: int, token_ms: float) -> dict[str, float]:
    """Speed against each plain configuration that was measured."""
    found = {}
    for field, label in (("speed_vs_plain", PLAIN[0]), ("speed_vs_flashinfer", PLAIN[1])):
        theirs = (kit.kept(f"latency-{label}") or {}).get(str(batch))
        if theirs:
            found[field] = round(theirs / token_ms, 3)
    return found


def has_fa3() -> bool:
    """Whether sgl_kernel has the library of FlashAttention 3, or the GPU does not take it."""
    if torch.cuda.get_device_capability(0)[0] != 9:
        return True
    spec = importlib.util.find_spec("sgl_kernel")
    places = spec.submodule_search_locations if spec is not None else None
    return any(list(Path(place).glob("flash_ops.*")) for place in places or [])


def summary(steps: Sequence[dict[str, Any]], batch: int, tokens: int) -> dict[str, Any]:
    """What the probe's steps say of a batch's decoding.

    Args:
        steps: Probe.steps' lines; only those that decode all `batch` requests count for times.
        tokens: that the requests wrote, one of each by its prefill.

    Returns:
        step_ms (median, between starts), device_ms and forward_ms (medians), host_gap_ms,
        tokens_per_step and request, token_ms (wall per token of a request, over all steps), widths
        and the share of steps in a CUDA graph.

    Raises:
        ValueError: fewer than two whole steps.
    """
    decoding = [step for step in steps if step["decode"]]
    whole = [
        (later["at"] - step["at"], step)
        for step, later in itertools.pairwise(decoding)
        if step["requests"] == batch == later["requests"]
    ]
    if not whole:
        raise ValueError(f"no two steps in a row with all {batch} requests")
    step_ms = 1e3 * statistics.median(seconds for seconds, _ in whole)
    device_ms = statistics.median(step["device_ms"] for _, step in whole)
    forwards = [step["forward_ms"] for _, step in whole if step["forward_ms"] is not None]
    request_steps = sum(step["requests"] for step in decoding)
    per_step = (tokens - batch) / request_steps
    mean_ms = 1e3 * statistics.mean(seconds for seconds, _ in whole)
    return {
        "step_ms": round(step_ms, 3),
        "device_ms": round(device_ms, 3),
        "forward_ms": round(statistics.median(forwards), 3) if forwards else None,
        "host_gap_ms": round(step_ms - device_ms, 3),
        "tokens_per_step": round(per_step, 3),
        "token_ms": round(mean_ms / per_step, 3),
        "widths": sorted({step["width"] for _, step in whole}),
        "graph_share": round(sum(step["graph"] for _, step in whole) / len(whole), 3),
        "steps": len(whole),
    }


PARTS = {
    "plain": plain,
    "plain_flashinfer": plain_flashinfer,
    "ngram": ngram,
    "adaptive": adaptive,
    "width_16": width_16,
    "width_8": width_8,
    "width_4": width_4,
}
