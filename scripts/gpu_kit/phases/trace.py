"""Phase 6: where a step's time goes (torch's and Python's profilers), and the host's waits."""

import json
from collections.abc import Sequence
from pathlib import Path

from scripts.gpu_kit.engine import Engine, greedy, speculation_flags
from scripts.gpu_kit.kit import Kit, Part
from scripts.gpu_kit.planted import with_wrong_tokens
from scripts.gpu_kit.probe import MAX_TRACE_BYTES

USES_ENGINE = True
BATCHES, CPU_BATCHES = (1, 32), (1, 2)
STEPS, CPU_STEPS = 20, 5
# The tokens of a step come to the host once; every other wait is one too many.
ALLOWED_SYNCS_PER_STEP = 1.0
RIGHT = 0.8


def _sizes(kit: Kit) -> tuple[Sequence[int], int]:
    """Batches, and steps of each that are traced."""
    return (CPU_BATCHES, CPU_STEPS) if kit.emulated else (BATCHES, STEPS)


def steps(part: Part) -> None:
    """A trace and a count of synchronizing calls by place, for each batch size."""
    kit = part.kit
    kit.make_model()
    batches, count = _sizes(kit)
    prompts = [kit.rule.prompt(64, 50_000 + n) for n in range(max(batches))]
    tokens = 6 * count
    oracle = Path(kit.work) / "trace-oracle.jsonl"
    entries = []
    for n, prompt in enumerate(prompts):
        output = kit.rule.continuation(prompt, tokens + 32)
        draft = with_wrong_tokens(output, RIGHT, kit.shape.vocab, seed=n)
        entries.append(json.dumps({"prompt": prompt, "output": output, "draft": draft}))
    oracle.write_text("\n".join(entries))
    options = {
        "budget": "fixed", "drafter": "oracle", "oracle_file": str(oracle), "bigram_seconds": "0",
    }  # fmt: skip
    with Engine(kit, speculation_flags(kit), options) as engine:
        for batch in batches:
            with part.attempt(f"trace, batch {batch}"):
                path = Path(kit.out) / f"trace-batch-{batch}.json.gz"
                engine.trace(path, count)
                engine.answers(prompts[:batch], greedy(tokens))
                size = path.stat().st_size
                part.result(
                    f"trace, batch {batch}", size <= MAX_TRACE_BYTES, file=path.name, bytes=size,
                    steps=count,
                )  # fmt: skip
            with part.attempt(f"syncs, batch {batch}"):
                engine.begin("syncs")
                engine.answers(prompts[:batch], greedy(tokens))
                found = engine.noted("syncs")
                per_step = sum(found["by_place"].values()) / max(1, found["steps"])
                part.result(
                    f"syncs, batch {batch}", per_step <= ALLOWED_SYNCS_PER_STEP,
                    syncs_per_step=round(per_step, 3), **found,
                )  # fmt: skip
            _host(part, engine, f"host, batch {batch}", prompts[:batch], tokens)
    if kit.emulated:
        part.not_run("CUDA activities", "the trace is of the CPU")
        part.not_run("set_sync_debug_mode", "it watches CUDA; nothing is counted on a CPU")


def plain_steps(part: Part) -> None:
    """Where the host's time goes in steps whose drafts do not pay, so that none are run."""
    kit = part.kit
    kit.make_model()
    batches, count = _sizes(kit)
    prompts = [kit.rule.prompt(64, 60_000 + n) for n in range(max(batches))]
    options = {"budget": "auto", "drafter": "random", "drafters": "random", "bigram_seconds": "0"}
    with Engine(kit, speculation_flags(kit), options) as engine:
        for batch in batches:
            engine.answers(prompts[:batch], greedy(6 * count))  # until drafts are known not to pay
            _host(part, engine, f"plain steps' host, batch {batch}", prompts[:batch], 6 * count)


def _host(
    part: Part, engine: Engine, case: str, prompts: Sequence[Sequence[int]], tokens: int
) -> None:
    """Profile the scheduler's Python over answers to `prompts`, into a file."""
    with part.attempt(case):
        engine.begin("host")
        engine.answers(prompts, greedy(tokens))
        found = engine.noted("host")
        name = case.replace("'", "").replace(", ", "-").replace(" ", "-") + ".json"
        (Path(part.kit.out) / name).write_text(json.dumps(found, indent=1))
        own = sum(function["own_ms"] for function in found["functions"])
        part.result(case, found["steps"] > 0, file=name, steps=found["steps"], own_ms=round(own, 3))


PARTS = {"steps": steps, "plain_steps": plain_steps}
