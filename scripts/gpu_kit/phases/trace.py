"""Phase 6: where a step's time goes (torch's profiler), and how often the host waits."""

import json
from pathlib import Path

from scripts.gpu_kit.engine import SPECULATION, Engine, greedy
from scripts.gpu_kit.kit import Part
from scripts.gpu_kit.planted import with_wrong_tokens
from scripts.gpu_kit.probe import MAX_TRACE_BYTES

USES_ENGINE = True
BATCHES, CPU_BATCHES = (1, 32), (1, 2)
STEPS, CPU_STEPS = 20, 5
# The tokens of a step come to the host once; every other wait is one too many.
ALLOWED_SYNCS_PER_STEP = 1.0
RIGHT = 0.8


def steps(part: Part) -> None:
    """A trace and a count of synchronizing calls by place, for each batch size."""
    kit = part.kit
    kit.make_model()
    batches, count = (CPU_BATCHES, CPU_STEPS) if kit.emulated else (BATCHES, STEPS)
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
    flags = [*SPECULATION, *([] if kit.emulated else ["--attention-backend", "flashinfer"])]
    with Engine(kit, flags, options) as engine:
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
    if kit.emulated:
        part.not_run("CUDA activities", "the trace is of the CPU")
        part.not_run("set_sync_debug_mode", "it watches CUDA; nothing is counted on a CPU")


PARTS = {"steps": steps}
