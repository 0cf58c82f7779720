"""Greedy output with speculation against plain SGLang's, token id by token id.

Plain SGLang answers every prompt at batch 1 and at batch 8, twice, by two servers. SSSD servers
answer them cold (empty datastore), with random trees, with the truth as draft, and warm (a
datastore that holds the answers). A prompt on which plain SGLang contradicts itself at that
batch size is shown and not counted.

With `--cpu-weights bf16`, `int8` or `int4` all servers have their weights in that format:
speculative output is plain output's there too.

    python -m scripts.check_lossless [--prompts N] [--tokens N] [--cpu-weights FORMAT] [--quick]
        [--json FILE]
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.lib.client import Completion, generate_all
from scripts.lib.figures import parser, report
from scripts.lib.server import Server
from scripts.lib.spec_bench import Prompt, spec_bench

BATCH_SIZES = (1, 8)
PROMPTS, QUICK_PROMPTS, TOKENS = 104, 10, 64
# Two servers: one verifies every draft, good or bad; one chooses its budget as users' do.
# budget -> label -> (custom_params, batch sizes); "fill" lets the answers join the datastore.
MODES: dict[str, dict[str, tuple[dict[str, Any], Sequence[int]]]] = {
    "auto": {
        "cold": ({"ingest": False}, BATCH_SIZES),
        "fill": ({}, BATCH_SIZES[-1:]),
        "warm": ({}, BATCH_SIZES),
    },
    "fixed": {
        "random": ({"drafter": "random"}, BATCH_SIZES),
        "truth": ({"drafter": "oracle"}, BATCH_SIZES),
        "all, cold": ({"drafter": "sssd", "ingest": False}, BATCH_SIZES[-1:]),
    },
}


def main() -> int:
    args = parser(__doc__)
    args.add_argument("--prompts", type=int, default=PROMPTS, help="of Spec-Bench [%(default)s]")
    args.add_argument("--tokens", type=int, default=TOKENS, help="of an answer [%(default)s]")
    args.add_argument("--cpu-weights", default="fp32", metavar="FORMAT", help="[%(default)s]")
    options = args.parse_args()
    prompts = prompts_of(options.model, options.prompts, quick=options.quick)
    figures = lossless_figures(options.model, prompts, options.tokens, options.cpu_weights)
    report(figures, options.json)
    return int(figures["mismatches"] > 0)


def prompts_of(model: str, count: int = PROMPTS, *, quick: bool) -> list[Prompt]:
    """Prompts of Spec-Bench; fewer and shorter ones where it is to be quick."""
    longest, count = (120, QUICK_PROMPTS) if quick else (200, count)
    return spec_bench(model, max_prompt_tokens=longest)[:count]


def lossless_figures(
    model: str, prompts: Sequence[Prompt], tokens: int, cpu_weights: str
) -> dict[str, float]:
    """Ask all servers, one at a time, and compare; prints a line per configuration.

    Args:
        tokens: of an answer.
        cpu_weights: the servers' `--cpu-weights`.
    """
    weights = ["--cpu-weights", cpu_weights]
    ids = [prompt.input_ids for prompt in prompts]
    run = {"max_new_tokens": tokens, "ignore_eos": True}

    plain: dict[int, list[list[Completion]]] = {batch: [] for batch in BATCH_SIZES}
    answers: dict[tuple[str, int], list[Completion]] = {}

    def ask(server: Server, label: str, batch: int, params: dict[str, Any]) -> list[Completion]:
        print(f"{label}, batch {batch}", flush=True)
        return generate_all(
            server.base_url, ids, in_flight=batch, params=params, label=label, **run
        )

    def ask_plain() -> None:
        with Server(model, weights, name="plain") as server:
            for batch in BATCH_SIZES:
                plain[batch].append(ask(server, "plain", batch, {}))

    ask_plain()
    with tempfile.TemporaryDirectory() as folder:
        oracle = write_oracle(Path(folder) / "truth.jsonl", prompts, plain[1][0])
        flags = [
            *weights, "--speculative-algorithm", "SSSD", "--drafters", "random,oracle",
            "--oracle-file", str(oracle),
        ]  # fmt: skip
        # One server at a time: each takes 4 GB.
        for budget, modes in MODES.items():
            with Server(model, [*flags, "--budget", budget], name=budget) as server:
                for mode, (params, batches) in modes.items():
                    for batch in batches:
                        answers[mode, batch] = ask(server, mode, batch, params)
    ask_plain()
    return compare(prompts, plain, answers)


def write_oracle(path: Path, prompts: Sequence[Prompt], answers: Sequence[Completion]) -> Path:
    """The file that the drafter 'oracle' reads."""
    lines = [
        json.dumps({"prompt": list(prompt.input_ids), "output": answer.token_ids})
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    path.write_text("\n".join(lines))
    return path


def compare(
    prompts: Sequence[Prompt],
    plain: dict[int, list[list[Completion]]],
    answers: dict[tuple[str, int], list[Completion]],
) -> dict[str, float]:
    """Print a line per configuration and return the figures."""
    total, plain_total, checked = 0, 0, 0
    print(f"{'configuration':16} {'prompts':>7} {'differ':>7} {'accept length':>14}")
    unstable = {}
    for batch, (first, second) in plain.items():
        unstable[batch] = {
            i
            for i, (a, b) in enumerate(zip(first, second, strict=True))
            if a.token_ids != b.token_ids
        }
        plain_total += len(unstable[batch])
        print(f"plain, batch {batch:<3} {len(first):>7} {len(unstable[batch]):>7}   (with itself)")
    for (mode, batch), completions in answers.items():
        differ = []
        for i, completion in enumerate(completions):
            if i in unstable[batch]:
                continue
            checked += 1
            expected = plain[batch][0][i].token_ids
            if completion.token_ids != expected:
                at = next(
                    n
                    for n, (a, b) in enumerate(zip(completion.token_ids, expected, strict=False))
                    if a != b
                )
                differ.append(f"{prompts[i].category} #{i} from token {at}")
        total += len(differ)
        mean = sum(c.accept_length for c in completions) / len(completions)
        print(
            f"{mode + f', batch {batch}':16} {len(completions):>7} {len(differ):>7} {mean:>14.2f}"
        )
        for line in differ[:5]:
            print(f"    differs: {line}")
    return {
        "prompts": len(prompts),
        "answers_compared": checked,
        "mismatches": total,
        "plain_mismatches": plain_total,
    }


if __name__ == "__main__":
    sys.exit(main())
