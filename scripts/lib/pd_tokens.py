"""check_pd: the same tokens as a single server's, and how fast they come."""

import argparse
import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from scripts.lib.client import Completion, generate_all, stream
from scripts.lib.pd_servers import Disaggregated
from scripts.lib.served_metrics import read_metrics
from scripts.lib.server import Server
from scripts.lib.spec_bench import Prompt, spec_bench, tokenizer

SSSD = ["--speculative-algorithm", "SSSD"]
IN_FLIGHT = 4
# Spec-Bench prompts joined to one of so many tokens.
LONG_TOKENS = 4096
# Each prompt is answered so often by each method for the speeds.
ROUNDS = 2
_PLAIN: dict[str, Any] = {"drafter": "none", "ingest": False}
# custom_params by label, one after another: the last one drafts from what the second one served.
_SSSD_PASSES: dict[str, dict[str, Any]] = {
    "SSSD, all drafts": {"budget": "fixed", "ingest": False},
    "SSSD": {},
    "SSSD, warm": {},
}


def check(options: argparse.Namespace) -> dict[str, float]:
    """The figures prompts, mismatches, ratio_sssd_vs_ar_pd, ratio_sssd_vs_ar_single and others."""
    prompts = [p.input_ids for p in spec_bench(options.model, max_prompt_tokens=200)]
    prompts = prompts[: options.prompts]
    long = long_prompts(options.model, options.long)
    figures: dict[str, float] = {"prompts": len(prompts) + len(long)}
    with Server(options.model, name="single") as server:
        expected = answers(server.base_url, [*prompts, *long], options.tokens, {})
    wrong = 0
    with Disaggregated(options.model, name="pd-ar") as plain:
        given = answers(plain.base_url, [*prompts, *long], options.tokens, {})
        wrong += differing("AR", expected, given)
    with ExitStack() as stack:
        pd = stack.enter_context(
            Disaggregated(options.model, [*SSSD, "--enable-metrics"], name="pd-sssd")
        )
        for label, params in _SSSD_PASSES.items():
            given = answers(pd.base_url, [*prompts, *long], options.tokens, params)
            wrong += differing(label, expected, given)
        figures["mismatches"] = wrong
        single = stack.enter_context(Server(options.model, SSSD, name="single-sssd"))
        some = [*prompts[: 3 * (len(long) or 1)], *long]
        for params in _SSSD_PASSES.values():  # so that it has learned the same
            answers(single.base_url, some, options.tokens, params)
        figures |= speeds(pd, single, some, options.tokens)
        figures |= leads(pd)
    return figures


def long_prompts(model: str, count: int) -> list[Sequence[int]]:
    """Prompts of LONG_TOKENS tokens or a little more, none like another."""
    texts: list[list[Prompt]] = []
    size = LONG_TOKENS + 1
    for prompt in spec_bench(model):
        if size > LONG_TOKENS:
            if len(texts) == count:
                break
            texts.append([])
            size = 0
        texts[-1].append(prompt)
        size += len(prompt.input_ids)
    made = []
    for group in texts:
        text = "\n\n".join(prompt.text for prompt in group) + "\n\nAnswer the last question."
        made.append(
            tokenizer(model).apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
            )
        )
    return made


def answers(
    url: str, prompts: Sequence[Sequence[int]], tokens: int, params: dict[str, Any]
) -> list[Completion]:
    """Greedy answers, a few at a time."""
    return generate_all(url, prompts, in_flight=IN_FLIGHT, params=params, max_new_tokens=tokens)


def differing(label: str, expected: Sequence[Completion], given: Sequence[Completion]) -> int:
    """How many answers are others; says which."""
    pairs = enumerate(zip(expected, given, strict=True))
    wrong = [number for number, (a, b) in pairs if a.token_ids != b.token_ids]
    mean = sum(answer.accept_length for answer in given) / len(given)
    places = f" ({', '.join(f'#{i}' for i in wrong[:5])})" if wrong else ""
    print(
        f"{label:20} {len(given)} prompts, {len(wrong)} differ{places}, accept length {mean:.2f}",
        flush=True,
    )
    return len(wrong)


def speeds(
    pd: Disaggregated, single: Server, prompts: Sequence[Sequence[int]], tokens: int
) -> dict[str, float]:
    """Decode tokens a second of SSSD by plain decoding's, both ways, prompt by prompt by turns.

    The time runs from the first token to the last, so it is the decode server's.
    """
    ways = {"pd": pd.base_url, "single": single.base_url}
    kinds: dict[str, dict[str, Any]] = {"ar": _PLAIN, "sssd": {}}
    count = dict.fromkeys(itertools.product(ways, kinds), 0)
    seconds = dict.fromkeys(count, 0.0)
    for number, (_, prompt) in enumerate(itertools.product(range(ROUNDS), prompts)):
        runs = list(count)
        for way, kind in runs[number % len(runs) :] + runs[: number % len(runs)]:
            answer = stream(ways[way], prompt, params=kinds[kind], max_new_tokens=tokens)
            count[way, kind] += len(answer.token_ids) - 1
            seconds[way, kind] += answer.decode_seconds
    speed = {run: count[run] / seconds[run] for run in count}
    for (way, kind), value in speed.items():
        print(f"{way:8} {kind:6} {value:8.1f} decode tokens/s", flush=True)
    figures = {f"decode_tokens_per_s_{kind}_{way}": value for (way, kind), value in speed.items()}
    return figures | {
        f"ratio_sssd_vs_ar_{way}": speed[way, "sssd"] / speed[way, "ar"] for way in ways
    }


def leads(pd: Disaggregated) -> dict[str, float]:
    """How long the drafters took to be ready, and how long before the KV they were."""
    found = read_metrics(pd.urls["decode 1"])
    count = found.get("draft_lead_seconds_count", 0.0)
    if not count:
        return {}
    return {
        "draft_state_ms": 1e3 * found["draft_prefill_seconds_total"]
        / found["draft_prefill_steps_total"],
        "draft_lead_ms": 1e3 * found["draft_lead_seconds_sum"] / count,
    }  # fmt: skip
