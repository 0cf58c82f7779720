"""Phase 4: sampled output at the verified nodes against the target's own distribution.

Each prompt is sampled many times for three tokens, the second and third by steps that verify
drafts. Joint counts are compared with the exact distribution, from the target's logits in prefills
of every prefix that can occur, by scripts/check_sampling.py's chi-square test.
"""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from scripts.check_sampling import SIGNIFICANCE, TOKENS, Counts, chi_square_p
from scripts.gpu_kit.engine import Engine, speculation_flags
from scripts.gpu_kit.kit import Part

USES_ENGINE = True
# The planted rule names four tokens; at these temperatures each of them is likely.
CASES: tuple[dict[str, Any], ...] = (
    {"temperature": 8.0, "top_k": 4},
    {"temperature": 6.0, "top_k": 2},
    {"temperature": 8.0, "top_k": 4, "min_p": 0.2},
)
DRAFTERS = ("oracle", "random", "sssd")
AT_ONCE = 32


def nodes(part: Part) -> None:
    """Chi-square of each case and drafter."""
    kit = part.kit
    kit.make_model()
    samples, cases = (96, CASES[:2]) if kit.emulated else (1024, CASES)
    # One prompt a case, so that `sssd` learns from samples of the same distribution.
    prompts = [kit.rule.prompt(30 + n, 900 + n) for n in range(len(cases))]
    path = Path(kit.work) / "sampling-oracle.jsonl"
    path.write_text(
        "\n".join(
            json.dumps({"prompt": prompt, "output": kit.rule.continuation(prompt, 16)})
            for prompt in prompts
        )
    )
    options = {"budget": "fixed", "drafters": "random,oracle", "oracle_file": str(path)}
    with Engine(kit, speculation_flags(kit), options) as engine:
        exact = [_exact(engine, p, c) for p, c in zip(prompts, cases, strict=True)]
        for drafter in DRAFTERS[:2] if kit.emulated else DRAFTERS:
            for prompt, case, expected in zip(prompts, cases, exact, strict=True):
                name = f"{drafter}, " + " ".join(f"{k}={v}" for k, v in case.items())
                with part.attempt(name):
                    counts, steps = _sample(engine, prompt, case, samples, drafter)
                    p = chi_square_p(counts, expected)
                    part.result(
                        name, p >= SIGNIFICANCE, p=p, samples=samples, outcomes=len(expected),
                        steps_per_answer=steps / samples,
                    )  # fmt: skip


def _sample(
    engine: Engine, prompt: list[int], case: Mapping[str, Any], count: int, drafter: str
) -> tuple[Counts, int]:
    sampling = dict(case) | {
        "max_new_tokens": TOKENS,
        "ignore_eos": True,
        "custom_params": {"drafter": drafter},
    }
    counts: Counts = Counter()
    steps = 0
    answers = engine.answers([prompt] * count, sampling, at_once=AT_ONCE)
    for answer in answers:
        counts[tuple(answer.tokens)] += 1
        steps += answer.steps
    return counts, steps


def _exact(
    engine: Engine, prompt: list[int], case: Mapping[str, Any]
) -> dict[tuple[int, ...], float]:
    """The probability of every output of TOKENS tokens."""
    paths: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(TOKENS):
        rows = engine.largest_logits([[*prompt, *path] for path in paths])
        paths = {
            (*path, token): chance * p
            for (path, chance), row in zip(paths.items(), rows, strict=True)
            for token, p in filtered(row, case).items()
        }
    return paths


def filtered(logits: Mapping[int, float], case: Mapping[str, Any]) -> dict[int, float]:
    """The next token's distribution under temperature, top_k and min_p.

    Args:
        logits: by token, the largest ones, `top_k` at least.
    """
    tokens = sorted(logits, key=lambda token: -logits[token])[: case["top_k"]]
    values = np.array([logits[token] for token in tokens]) / case["temperature"]
    probs = np.exp(values - values[0])
    keep = probs >= case.get("min_p", 0.0)
    probs = probs[keep] / probs[keep].sum()
    return dict(zip([t for t, k in zip(tokens, keep, strict=True) if k], probs, strict=True))


PARTS = {"nodes": nodes}
