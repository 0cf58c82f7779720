"""Sampling with speculation against the target's own distribution.

Each prompt is sampled many times for three tokens: the first comes from the prefill, the second
and third from steps that verify drafts. Their joint counts are compared with the exact
distribution (the target's probabilities, read from a plain server for every prefix that can
occur, filtered as SGLang defines temperature, top-k, top-p and min-p) by a chi-square test, and
with the counts of plain SGLang by total variation distance, beside the same distance between
two runs of plain SGLang. Drafts: bad (random trees), good (the greedy output), live (SSSD that
ingests what it serves).

    python -m scripts.check_sampling [--samples N] [--quick] [--json FILE]
"""

import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import chi2
from tqdm import tqdm

from scripts.check_lossless import write_oracle
from scripts.lib.client import TIMEOUT_S, generate_all
from scripts.lib.figures import parser, report
from scripts.lib.http_client import HTTP
from scripts.lib.server import Server
from scripts.lib.spec_bench import Prompt, spec_bench

# The third token is the second that a verify step decides.
TOKENS = 3
CASES: list[dict[str, Any]] = [
    {"temperature": 1.0, "top_k": 4},
    {"temperature": 0.8, "top_p": 0.5},
    {"temperature": 1.3, "min_p": 0.3},
    {"temperature": 0.9, "top_k": 5, "top_p": 0.8, "min_p": 0.05},
]
DRAFTS = {"good": "oracle", "bad": "random", "live": "sssd"}
PER_REQUEST = 32
SIGNIFICANCE = 0.001

Counts = Counter[tuple[int, ...]]


def main() -> int:
    args = parser(__doc__)
    args.add_argument("--samples", type=int, default=4_000, help="outputs per kind of draft [4000]")
    options = args.parse_args()
    samples = 1_000 if options.quick else options.samples
    prompts = spec_bench(options.model, max_prompt_tokens=80)[: len(CASES)]
    each = samples // len(CASES)

    with Server(options.model, name="plain") as server:
        url = server.base_url
        exact = [exact_distribution(url, p, c) for p, c in zip(prompts, CASES, strict=True)]
        plain = [[sample(url, p, c, each) for p, c in pairs(prompts)] for _ in range(2)]
        greedy = generate_all(url, [p.input_ids for p in prompts], max_new_tokens=16)
    results: dict[str, list[Counts]] = {}
    with tempfile.TemporaryDirectory() as folder:
        oracle = write_oracle(Path(folder) / "greedy.jsonl", prompts, greedy)
        flags = [
            "--speculative-algorithm", "SSSD", "--budget", "fixed", "--drafters", "oracle,random",
            "--oracle-file", str(oracle),
        ]  # fmt: skip
        with Server(options.model, flags, name="sssd") as server:
            for label, drafter in DRAFTS.items():
                results[label] = [
                    sample(server.base_url, p, c, each, {"drafter": drafter})
                    for p, c in pairs(prompts)
                ]
            again = generate_all(server.base_url, [p.input_ids for p in prompts], max_new_tokens=16)
    figures = compare(exact, plain, results)
    figures["greedy_mismatches"] = sum(
        a.token_ids != b.token_ids for a, b in zip(greedy, again, strict=True)
    )
    report(figures, options.json)
    return int(figures["rejected"] > 0 or figures["greedy_mismatches"] > 0)


def pairs(prompts: Sequence[Prompt]) -> list[tuple[Prompt, dict[str, Any]]]:
    """Each case on its own prompt."""
    return list(zip(prompts, CASES, strict=True))


def sample(
    url: str,
    prompt: Prompt,
    case: dict[str, Any],
    count: int,
    params: dict[str, Any] | None = None,
) -> Counts:
    """Counts of the sampled outputs, TOKENS ids each.

    Args:
        params: custom_params; None: those of a plain server.
    """

    def one(_: int) -> list[tuple[int, ...]]:
        answers = post(
            url, prompt.input_ids, n=PER_REQUEST, max_new_tokens=TOKENS, ignore_eos=True,
            custom_params=params, **case,
        )  # fmt: skip
        return [tuple(answer["output_ids"]) for answer in answers]

    counts: Counts = Counter()
    requests_needed = range(-(-count // PER_REQUEST))
    with ThreadPoolExecutor(2) as pool:
        batches = pool.map(one, requests_needed)
        label = f"{(params or {}).get('drafter', 'plain')} {case}"
        total = len(requests_needed)
        for batch in tqdm(batches, total=total, desc=label, disable=None, leave=False):
            counts.update(batch)
    return counts


def exact_distribution(
    url: str, prompt: Prompt, case: dict[str, Any]
) -> dict[tuple[int, ...], float]:
    """The probability of every output of TOKENS tokens under the target."""
    paths: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(TOKENS):
        longer = {}
        for path, probability in paths.items():
            for token, p in next_tokens(url, [*prompt.input_ids, *path], case).items():
                longer[(*path, token)] = probability * p
        paths = longer
    return paths


def next_tokens(url: str, input_ids: Sequence[int], case: dict[str, Any]) -> dict[int, float]:
    """The filtered, renormalised next-token distribution (layers/sampler.py of SGLang)."""
    # Sampled without filters, SGLang reports logprobs at the temperature, over all tokens.
    answer = post(url, input_ids, temperature=case["temperature"], max_new_tokens=1, logprobs=200)[
        0
    ]
    top = answer["meta_info"]["output_top_logprobs"][0]
    probs = np.exp(np.array([entry[0] for entry in top], dtype=np.float64))
    tokens = [entry[1] for entry in top]
    before = np.cumsum(probs) - probs
    keep = np.arange(len(probs)) < case.get("top_k", len(probs))
    keep &= before <= case.get("top_p", 1.0)
    keep &= probs >= probs[0] * case.get("min_p", 0.0)
    kept = probs[keep] / probs[keep].sum()
    return dict(zip([t for t, k in zip(tokens, keep, strict=True) if k], kept, strict=True))


def post(url: str, input_ids: Sequence[int], *, logprobs: int = 0, **sampling: Any) -> list[Any]:
    """One /generate request; always a list of answers."""
    body: dict[str, Any] = {"input_ids": list(input_ids), "sampling_params": sampling}
    if logprobs:
        body |= {"return_logprob": True, "top_logprobs_num": logprobs}
    response = HTTP.post(url + "/generate", json=body, timeout=TIMEOUT_S)
    response.raise_for_status()
    answer = response.json()
    return answer if isinstance(answer, list) else [answer]


def compare(
    exact: Sequence[dict[tuple[int, ...], float]],
    plain: Sequence[Sequence[Counts]],
    results: dict[str, list[Counts]],
) -> dict[str, float]:
    """Print a line per kind of draft and case; return the figures."""
    print(f"{'drafts':10} {'case':58} {'samples':>7} {'TV':>7} {'noise':>7} {'p':>7}")
    worst, noises, rejected, samples, smallest = 0.0, [], 0, 0, 1.0
    runs = {"plain": list(plain[1])} | results
    for label, counts_per_case in runs.items():
        for case, expected, first, second, counts in zip(
            CASES, exact, plain[0], plain[1], counts_per_case, strict=True
        ):
            noise = total_variation(first, second)
            distance = total_variation(first, counts)
            p = chi_square_p(counts, expected)
            name = " ".join(f"{key}={value}" for key, value in case.items())
            n = sum(counts.values())
            print(f"{label:10} {name:58} {n:>7} {distance:>7.4f} {noise:>7.4f} {p:>7.3f}")
            if label != "plain":
                worst = max(worst, distance)
                samples += (TOKENS - 1) * n
                smallest = min(smallest, p)
                rejected += p < SIGNIFICANCE
                noises.append(noise)
    return {
        "tv_distance": worst,
        "tv_noise": max(noises),
        "samples": samples,
        "smallest_p": smallest,
        "rejected": rejected,
    }


def total_variation(a: Counts, b: Counts) -> float:
    """Half the L1 distance between two empirical distributions."""
    n_a, n_b = sum(a.values()), sum(b.values())
    return 0.5 * sum(abs(a[key] / n_a - b[key] / n_b) for key in a.keys() | b.keys())


def chi_square_p(counts: Counts, expected: dict[tuple[int, ...], float]) -> float:
    """P-value of the counts under the exact distribution; rare outputs share a cell."""
    n = sum(counts.values())
    statistic, cells, rest_expected, rest_seen = 0.0, 0, 0.0, n
    for key, probability in expected.items():
        if n * probability >= 5:
            statistic += (counts[key] - n * probability) ** 2 / (n * probability)
            cells += 1
            rest_seen -= counts[key]
        else:
            rest_expected += n * probability
    if rest_expected >= 5:
        statistic += (rest_seen - rest_expected) ** 2 / rest_expected
        cells += 1
    elif rest_seen > 0 and rest_expected < 1e-9:
        return 0.0  # an output that cannot occur
    return float(chi2.sf(statistic, cells - 1)) if cells > 1 else 1.0


if __name__ == "__main__":
    sys.exit(main())
