"""Decoding speed at batch 1: SSSD cold, warm and on repeated prompts, against plain SGLang and
SGLang's own NGRAM, all servers up in one run and every prompt answered by each in turn.

Warm means that the datastore holds the served model's own answers to other Spec-Bench prompts of
the same categories. NGRAM gets the same answers as its external corpus. The plain server is
SGLang on the same CPU engine, prepacked weights included.

`--formats` compares plain decoding with weights in each format of `--cpu-weights` instead, and the
perplexity of GSM8K's worked answers behind what all begin with: decode_ratio_FORMAT is its tokens a
second by fp32's, perplexity_ratio_FORMAT its perplexity by fp32's, in the same run.

`--layers` compares plain decoding with fused decoder layers (docs/cpu.md) and with SGLang's, which
have the same products: fused_ratio_FORMAT is the one's tokens a second by the other's.

    python -m scripts.bench_decode [--prompts N] [--tokens N] [--formats | --layers] [--quick]
        [--json FILE]
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.lib.client import Completion, generate_all, stream
from scripts.lib.figures import parser, report
from scripts.lib.http_client import HTTP
from scripts.lib.lens_states import gsm8k_texts
from scripts.lib.perplexity import perplexity
from scripts.lib.server import Server
from scripts.lib.spec_bench import Prompt, spec_bench, tokenizer
from sglang_ext.models.store import default_cache_dir

WARM_TOKENS = 102_000
QUICK_WARM_TOKENS = 8_000
DRAFT_TOKENS = 16
# The first prompts may be measured; what is learned beforehand comes from the rest.
MOST_MEASURED = 104
FORMATS = ("fp32", "int8", "int4")
FUSED_LAYERS = "SGLANG_EXT_CPU_FUSED_LAYERS"
LAYER_FORMATS = ("fp32", "bf16", "int8", "int4")
SCORED_TEXTS, QUICK_SCORED_TEXTS = 200, 40


@dataclass
class Timing:
    """What one contender did in one phase."""

    answers: list[Completion] = field(default_factory=list)

    def tokens_per_s(self, rows: Iterable[int] | None = None) -> float:
        """Decoded tokens a second, of all answers or some; first tokens belong to the prefill."""
        chosen = self.answers if rows is None else [self.answers[row] for row in rows]
        tokens = sum(len(answer.token_ids) - 1 for answer in chosen)
        return tokens / sum(answer.decode_seconds for answer in chosen)

    @property
    def accept_length(self) -> float:
        """Mean over the answers."""
        return statistics.mean(answer.accept_length for answer in self.answers)


@dataclass(frozen=True)
class Contender:
    """A server, and what to ask it for."""

    url: str
    params: Mapping[str, Any] | None = None


def main() -> int:
    options = read_options()
    prompts = spec_bench(options.model, max_prompt_tokens=512)
    measured, others = prompts[: min(options.prompts, MOST_MEASURED)], prompts[MOST_MEASURED:]
    if options.formats:
        scored = QUICK_SCORED_TEXTS if options.quick else SCORED_TEXTS
        figures = compare_formats(options.model, measured, options.tokens, scored)
    elif options.layers:
        figures = compare_layers(options.model, measured, options.tokens)
    else:
        figures = compare_methods(options, measured, others)
    report(figures, options.json)
    return 0


def read_options() -> argparse.Namespace:
    """The command line."""
    args = parser(__doc__)
    args.add_argument(
        "--prompts", type=int, default=26, help=f"prompts measured, up to {MOST_MEASURED} [26]"
    )
    args.add_argument("--tokens", type=int, default=128, help="most tokens per answer [128]")
    args.add_argument("--warm-tokens", type=int, default=WARM_TOKENS, help="[%(default)s]")
    modes = args.add_mutually_exclusive_group()
    modes.add_argument("--formats", action="store_true", help="compare weight formats")
    modes.add_argument("--layers", action="store_true", help="compare fused layers and SGLang's")
    options = args.parse_args()
    if options.quick:
        options.prompts, options.tokens = 8, 64
        options.warm_tokens = QUICK_WARM_TOKENS
    return options


def compare_methods(
    options: argparse.Namespace, measured: Sequence[Prompt], others: Sequence[Prompt]
) -> dict[str, float]:
    """SSSD and NGRAM against plain decoding, all servers up at once."""
    with ExitStack() as stack:
        plain, sssd, ngram = (
            Server(options.model, flags(name), name=name.lower()).start()
            for name in ("plain", "SSSD", "NGRAM")
        )
        for server in (plain, sssd, ngram):
            stack.callback(server.stop)
        for server in (plain, sssd, ngram):
            server.wait()
        answers = warm_answers(options.model, plain.base_url, others, options.warm_tokens)
        texts = [tokenizer(options.model).decode(answer) for answer in answers]

        p = Contender(plain.base_url)
        phases = {
            "cold": {"plain": p, "sssd": Contender(sssd.base_url, {"ingest": False})},
            "warm": {
                "plain": p,
                "ngram": Contender(ngram.base_url),
                "sssd": Contender(sssd.base_url),
            },
            "repeat": {"plain": p, "sssd": Contender(sssd.base_url)},
        }
        results = {}
        for phase, contenders in phases.items():
            if phase == "warm":
                for server in (sssd, ngram):
                    add_corpus(server.base_url, texts)
            results[phase] = race(phase, contenders, measured, options.tokens)
    return summarize(results, measured) | {"warm_tokens": sum(map(len, answers))}


def compare_formats(
    model: str, prompts: Sequence[Prompt], tokens: int, scored: int
) -> dict[str, float]:
    """Plain decoding in each weight format, all servers up at once, and its cost in quality."""
    with ExitStack() as stack:
        servers = {
            kind: Server(model, ["--cpu-weights", kind], name=kind).start() for kind in FORMATS
        }
        for server in servers.values():
            stack.callback(server.stop)
        for server in servers.values():
            server.wait()
        contenders = {kind: Contender(server.base_url) for kind, server in servers.items()}
        timings = race("formats", contenders, prompts, tokens)
        texts = gsm8k_texts(model)[:scored]
        perplexities = {}
        for kind, server in servers.items():
            perplexities[kind] = perplexity(server.base_url, texts)
            print(f"{kind}: perplexity {perplexities[kind]:.3f}", flush=True)
    speeds = {kind: timing.tokens_per_s() for kind, timing in timings.items()}
    figures = {"fp32_tokens_per_s": speeds["fp32"]}
    for kind in FORMATS[1:]:
        figures[f"decode_ratio_{kind}"] = speeds[kind] / speeds["fp32"]
        figures[f"perplexity_ratio_{kind}"] = perplexities[kind] / perplexities["fp32"]
    return figures


def compare_layers(model: str, prompts: Sequence[Prompt], tokens: int) -> dict[str, float]:
    """Plain decoding with fused layers and with SGLang's, two servers at a time."""
    figures = {}
    for kind in LAYER_FORMATS:
        with ExitStack() as stack:
            servers = {
                name: Server(model, ["--cpu-weights", kind], name=f"{kind}-{name}")
                for name in ("sglang", "fused")
            }
            servers["sglang"].env[FUSED_LAYERS] = "0"
            for server in servers.values():
                stack.callback(server.start().stop)
            for server in servers.values():
                server.wait()
            contenders = {name: Contender(server.base_url) for name, server in servers.items()}
            timings = race(kind, contenders, prompts, tokens)
        speeds = {name: timing.tokens_per_s() for name, timing in timings.items()}
        figures[f"fused_tokens_per_s_{kind}"] = speeds["fused"]
        figures[f"fused_ratio_{kind}"] = speeds["fused"] / speeds["sglang"]
    return figures


def flags(name: str) -> list[str]:
    """A server's flags; "plain" has none."""
    if name == "plain":
        return []
    given = ["--speculative-algorithm", name, "--speculative-num-draft-tokens", str(DRAFT_TOKENS)]
    # NGRAM keeps part of its tree for the external corpus: half of it here.
    return [*given, "--speculative-ngram-external-sam-budget", "8"] if name == "NGRAM" else given


def warm_answers(model: str, url: str, prompts: Sequence[Prompt], wanted: int) -> list[list[int]]:
    """The model's own answers to `prompts`, at least `wanted` tokens, kept for the next run."""
    path = default_cache_dir() / "bench" / f"answers-{Path(model).name}.jsonl"
    answers: list[list[int]] = []
    if path.exists():
        answers = [json.loads(line) for line in path.read_text().splitlines()]
    path.parent.mkdir(parents=True, exist_ok=True)
    ids = [prompt.input_ids for prompt in prompts]
    while (have := sum(map(len, answers))) < wanted:
        # Greedy answers first; where those are too few, sampled ones. Each is 100 tokens or more.
        sampling: dict[str, float] = {"temperature": 0.7} if len(answers) >= len(ids) else {}
        start = len(answers) % len(ids)
        batch = ids[start : start + -(-(wanted - have) // 100)]
        label = f"warm-up answers, {have} of {wanted} tokens"
        for answer in generate_all(
            url, batch, in_flight=32, label=label, max_new_tokens=256, **sampling
        ):
            answers.append(answer.token_ids)
        path.write_text("\n".join(map(json.dumps, answers)))
    return answers


def add_corpus(url: str, texts: Sequence[str]) -> None:
    """SGLang's /add_external_corpus."""
    response = HTTP.post(
        url + "/add_external_corpus",
        json={"corpus_id": "answers", "documents": list(texts)},
        timeout=300,
    )
    response.raise_for_status()
    print(f"{url}: {response.json()['message']}")


def race(
    phase: str, contenders: Mapping[str, Contender], prompts: Sequence[Prompt], tokens: int
) -> dict[str, Timing]:
    """Every contender answers every prompt; who goes first takes turns."""
    timings = {name: Timing() for name in contenders}
    names = list(contenders)
    for i, prompt in enumerate(prompts):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            contender = contenders[name]
            answer = stream(
                contender.url, prompt.input_ids, params=contender.params, max_new_tokens=tokens
            )
            timings[name].answers.append(answer)
        speeds = ", ".join(f"{n} {t.tokens_per_s():.1f}" for n, t in timings.items())
        print(f"\r{phase} {i + 1}/{len(prompts)}: {speeds} tok/s", end="", flush=True)
    print()
    return timings


def summarize(
    results: Mapping[str, Mapping[str, Timing]], prompts: Sequence[Prompt]
) -> dict[str, float]:
    """Print the tables; return the figures."""
    print(
        f"\n{'phase':8} {'server':8} {'tok/s':>8} {'ratio':>7} {'accept length':>14}  same tokens"
    )
    for phase, timings in results.items():
        base = timings["plain"]
        for name, timing in timings.items():
            same = sum(
                a.token_ids == b.token_ids
                for a, b in zip(timing.answers, base.answers, strict=True)
            )
            print(
                f"{phase:8} {name:8} {timing.tokens_per_s():>8.1f} "
                f"{timing.tokens_per_s() / base.tokens_per_s():>7.2f} "
                f"{timing.accept_length:>14.2f}  {same}/{len(base.answers)}"
            )
    categories = sorted({prompt.category for prompt in prompts})
    print(f"\n{'category':16} {'cold':>6} {'warm':>6} {'repeat':>7}   (SSSD / plain)")
    by_category: dict[str, list[float]] = {}
    for category in categories:
        rows = [i for i, prompt in enumerate(prompts) if prompt.category == category]
        ratios = [
            results[phase]["sssd"].tokens_per_s(rows) / results[phase]["plain"].tokens_per_s(rows)
            for phase in results
        ]
        by_category[category] = ratios
        print(f"{category:16} {ratios[0]:>6.2f} {ratios[1]:>6.2f} {ratios[2]:>7.2f}")

    def ratio(phase: str, name: str = "sssd", to: str = "plain") -> float:
        return results[phase][name].tokens_per_s() / results[phase][to].tokens_per_s()

    return {
        "ratio_cold": ratio("cold"),
        "ratio_cold_worst_category": min(ratios[0] for ratios in by_category.values()),
        "ratio_warm": ratio("warm"),
        "ratio_repeat": ratio("repeat"),
        "ratio_vs_ngram": ratio("warm", "sssd", "ngram"),
        "accept_length_warm": results["warm"]["sssd"].accept_length,
    }


if __name__ == "__main__":
    sys.exit(main())
