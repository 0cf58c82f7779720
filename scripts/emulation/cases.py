"""What the emulated server is asked: prompts under every drafter, and each feature of a request."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from scripts.emulation.traffic import Job
from scripts.lib.spec_bench import Prompt

DRAFTERS = ("sssd", "random", "oracle")
# Prefills of more are split; a long prompt below has several times as many.
CHUNK = 128

# ignore_eos where a case is not about how an output ends.
_FEATURES: dict[str, list[dict[str, Any]]] = {
    "stop": [
        {"stop": [" the", ". "]},
        {"stop_regex": "[a-z]+ing"},
        {"stop_token_ids": [30, 28]},
        {"stop": ["\n"], "no_stop_trim": True},
    ],
    "penalties": [
        {"frequency_penalty": 0.8, "ignore_eos": True},
        {"presence_penalty": 1.2, "ignore_eos": True},
        {"repetition_penalty": 1.3, "ignore_eos": True},
        {"min_new_tokens": 12, "stop_token_ids": [30, 28, 253]},
        {
            "frequency_penalty": 0.3,
            "presence_penalty": -0.4,
            "repetition_penalty": 1.1,
            "min_new_tokens": 12,
        },
    ],
    "logit_bias": [{"logit_bias": {"260": 3.0, "253": -5.0}, "ignore_eos": True}],
    "grammar": [
        {
            "json_schema": json.dumps(
                {
                    "type": "object",
                    "properties": {"city": {"type": "string"}, "people": {"type": "integer"}},
                    "required": ["city", "people"],
                }
            )
        },
        {"regex": r"(yes|no|perhaps)( and (yes|no)){3}"},
    ],
    "n": [{"n": 2, "ignore_eos": True}, {"n": 3, "ignore_eos": True}],
}
# What stands beside sampling_params.
_BODIES: dict[str, list[dict[str, Any]]] = {
    "logprobs": [
        {"return_logprob": True, "top_logprobs_num": 3, "token_ids_logprob": [5, 260]},
        {"return_logprob": True, "logprob_start_len": 0},
    ],
    "streaming": [{"stream": True}],
}


def make_cases(
    prompts: Sequence[Prompt], tokens: int, per_feature: int, every_drafter: bool = True
) -> list[Job]:
    """Jobs of all features, mixed.

    Args:
        prompts: asked with outputs of 1 to `tokens` tokens.
        per_feature: how often each variant of a feature is asked, by drafters in turn.
        every_drafter: each prompt is asked under every drafter; else under one, in turn.
    """
    made = [
        _job("prompts", prompt, {"ignore_eos": True}, drafter, 1 + (7 * i + 5 * d) % tokens)
        for d, drafter in enumerate(DRAFTERS)
        for i, prompt in enumerate(prompts)
        if every_drafter or i % len(DRAFTERS) == d
    ]
    others = [
        *_feature_jobs(prompts, tokens, per_feature),
        *_chunked_jobs(prompts, per_feature),
        *_leaving_jobs(prompts, per_feature),
        *_retranslations(prompts, tokens, per_feature),
    ]
    return _mixed(made, others)


def oracle_lines(jobs: Sequence[Job], answers: Sequence[Any]) -> list[str]:
    """The lines of the oracle drafter's file: of each prompt the longest plain output."""
    known: dict[tuple[int, ...], list[int]] = {}
    for job, answer in zip(jobs, answers, strict=True):
        if job.feature in ("prompts", "chunked"):
            prompt = tuple(job.body["input_ids"])
            known[prompt] = max(known.get(prompt, []), answer["output_ids"], key=len)
    return [json.dumps({"prompt": p, "output": output}) for p, output in known.items()]


def _job(
    feature: str,
    prompt: Prompt,
    sampling: dict[str, Any],
    drafter: str,
    tokens: int,
    **body: Any,
) -> Job:
    sampling = {"temperature": 0, "max_new_tokens": tokens} | sampling
    # Half of them choose their budget as users' requests do, so that plain steps come between.
    params = {"drafter": drafter}
    if len(prompt.input_ids) % 2:
        params["budget"] = "fixed"
    return Job(feature, {"input_ids": prompt.input_ids, "sampling_params": sampling} | body, params)


def _feature_jobs(prompts: Sequence[Prompt], tokens: int, per_feature: int) -> list[Job]:
    variants = [
        *((feature, {}, sampling) for feature, all_ in _FEATURES.items() for sampling in all_),
        *((feature, body, {}) for feature, all_ in _BODIES.items() for body in all_),
    ]
    made = []
    for number, (feature, body, sampling) in enumerate(variants * per_feature):
        prompt = prompts[number % len(prompts)]
        drafter = ("sssd", "random")[(number // len(variants) + number) % 2]
        made.append(_job(feature, prompt, sampling, drafter, tokens, **body))
    return made


def _chunked_jobs(prompts: Sequence[Prompt], per_feature: int) -> list[Job]:
    """Prompts of several chunks, the second time behind a cached prefix."""
    ids = tuple(token for prompt in prompts for token in prompt.input_ids)
    made = []
    for number in range(2 * per_feature):
        long = Prompt("long", "", ids[7 * number : 7 * number + 3 * CHUNK + 40])
        made.append(_job("chunked", long, {"ignore_eos": True}, DRAFTERS[number % 3], 12))
    return made


def _leaving_jobs(prompts: Sequence[Prompt], per_feature: int) -> list[Job]:
    """Clients that go while others stay: a closed connection, /abort_request."""
    return [
        replace(
            _job("aborts", prompts[i % len(prompts)], {"ignore_eos": True}, drafter, 160),
            leaves_after=3 + i % 4,
            abort=bool(i % 2),
        )
        for i, drafter in zip(range(2 * per_feature), DRAFTERS * per_feature, strict=False)
    ]


def _retranslations(prompts: Sequence[Prompt], tokens: int, per_feature: int) -> list[Job]:
    """SSBD without a bias: each draft is the answer to a prompt that ends earlier."""
    made = []
    for number in range(per_feature):
        prompt = prompts[number % len(prompts)]
        for step, end in enumerate((len(prompt.input_ids) - 9, len(prompt.input_ids))):
            grown = Prompt(prompt.category, "", prompt.input_ids[:end])
            job = _job("ssbd", grown, {"ignore_eos": True}, "ssbd", tokens)
            ssbd = {"session": f"session-{number}", "beta": 0} | ({"trim": 3} if step else {})
            made.append(replace(job, params={**job.params, "ssbd": ssbd}))
    return made


def _mixed(many: Sequence[Job], few: Sequence[Job]) -> list[Job]:
    """Both in their own order, `few` spread evenly over `many`."""
    places = [(i / max(1, len(part)), part[i]) for part in (many, few) for i in range(len(part))]
    return [job for _, job in sorted(places, key=lambda place: place[0])]
