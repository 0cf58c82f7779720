"""Part `verify` of scripts.bench_cpu_peers: a verify step by its linear layers and attention.

After each prompt that a server verifies, its parts are timed here, with random weights in the
model's shapes: a host's speed changes within minutes, and nothing then compares with an hour ago.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig

from scripts.bench_products import run, shapes
from scripts.lib.client import flush_cache, generate
from scripts.lib.cpu_peers_common import ratio_figures, weights_flags
from scripts.lib.served_metrics import read_metrics
from scripts.lib.server import Server
from scripts.lib.spec_bench import Prompt, spec_bench
from sglang_ext.cpu.attention_kernel import attend
from sglang_ext.cpu.defaults import ROUNDED
from sglang_ext.cpu.install import usable_cores
from sglang_ext.cpu.packed_weights import Product, as_it_is, bits_of, in_bits
from sglang_ext.models import resolve

_OVERHEAD = "verify_overhead"
# Nodes of a step, the root included.
NODES = 12
_PROMPTS, _QUICK_PROMPTS = 16, 4
_TOKENS = 96
# Of each part, after each prompt.
_ROUNDS = 15
# All prompts are gone through so often, or until the ratio is off by so little.
_MOST_TURNS, _ERROR_PERCENT = 20, 3.0


def verify_figures(options: argparse.Namespace) -> dict[str, float]:
    """verify_overhead and its parts, ms; see scripts.bench_cpu_peers.

    Raises:
        UsageError: the form of the weights is not known.
    """
    flags = weights_flags(options.llm_weights, "--llm-weights")
    count = _QUICK_PROMPTS if options.quick else _PROMPTS
    prompts = spec_bench(options.model, max_prompt_tokens=160)[:count]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "outputs.jsonl")
        with Server(options.model, flags, name="plain") as plain:
            write_outputs(plain, prompts, file)
        more = [
            "--speculative-algorithm", "SSSD", "--drafters", "oracle", "--oracle-file", str(file),
            "--speculative-num-draft-tokens", str(NODES), "--enable-metrics",
        ]  # fmt: skip
        torch.set_num_threads(usable_cores())
        path, form = resolve(options.model), options.llm_weights or "fp32"
        context = int(np.mean([len(p.input_ids) for p in prompts])) + _TOKENS // 2
        linear, attention = linear_pass(shapes(path), form), attention_pass(path, context, form)
        with Server(options.model, [*flags, *more], name="verify") as server:
            verify_seconds(server, prompts[0])  # what is made on first use

            def measured(prompt: Prompt) -> VerifyTurn:
                step_s, width = verify_seconds(server, prompt)
                return VerifyTurn(step_s, width, median_seconds(linear), median_seconds(attention))

            return repeated(measured, prompts, 1 if options.quick else _MOST_TURNS)


@dataclass(frozen=True)
class VerifyTurn:
    """A prompt's verify steps and their parts.

    Attributes:
        step_s: seconds, mean of the steps.
        width: their nodes, mean.
        linear_s, attention_s: seconds of these parts, timed right after the steps.
    """

    step_s: float
    width: float
    linear_s: float
    attention_s: float


def repeated(
    measured: Callable[[Prompt], VerifyTurn], prompts: Sequence[Prompt], most: int
) -> dict[str, float]:
    """`overhead_figures` of all prompts, in turns, until they are off by little.

    Args:
        most: turns.
    """
    turns: list[VerifyTurn] = []
    figures: dict[str, float] = {}
    for number in range(most):
        turns += [measured(prompt) for prompt in prompts]
        figures = overhead_figures(turns)
        ratio, error = figures[_OVERHEAD], figures[f"{_OVERHEAD}_error_percent"]
        print(f"turn {number + 1}: {ratio:.3f} of its parts, off by {error:.1f}% at most")
        if error <= _ERROR_PERCENT:
            break
    return figures


def overhead_figures(turns: Sequence[VerifyTurn]) -> dict[str, float]:
    """verify_overhead, its error in percent, and means of what it is made of."""
    steps = [turn.step_s for turn in turns]
    linears, attentions = [t.linear_s for t in turns], [t.attention_s for t in turns]
    parts = [sum(pair) for pair in zip(linears, attentions, strict=True)]
    return ratio_figures(_OVERHEAD, steps, parts) | {
        "verify_step_ms": 1e3 * statistics.mean(steps),
        "verify_width": statistics.mean(turn.width for turn in turns),
        "verify_linear_ms": 1e3 * statistics.mean(linears),
        "verify_attention_ms": 1e3 * statistics.mean(attentions),
    }


def write_outputs(server: Server, prompts: Sequence[Prompt], file: Path) -> None:
    """What the target says, for the drafter `oracle`: every draft is right, every step full."""
    with file.open("w", encoding="utf-8") as lines:
        for prompt in prompts:
            said = generate(
                server.base_url, prompt.input_ids, max_new_tokens=_TOKENS, ignore_eos=True
            )
            known = {"prompt": list(prompt.input_ids), "output": said.token_ids}
            lines.write(json.dumps(known) + "\n")


def verify_seconds(server: Server, prompt: Prompt) -> tuple[float, float]:
    """(mean seconds of a prompt's verify steps, their mean nodes), of the server's own metrics.

    In KV slots that were used before, as those of a server that has run for a while: the system
    backs a slot's page when it is first written, which takes a virtual machine milliseconds.
    """
    flush_cache(server.base_url)
    before = read_metrics(server.base_url)
    params = {"drafter": "oracle", "budget": "fixed"}
    generate(
        server.base_url, prompt.input_ids, params=params, max_new_tokens=_TOKENS, ignore_eos=True
    )
    after = read_metrics(server.base_url)

    def mean(total: str, number: str) -> float:
        return (after[total] - before.get(total, 0.0)) / (after[number] - before.get(number, 0.0))

    width = mean("verify_width_sum", "verify_width_count")
    return mean("verify_seconds_total", "verify_steps_total"), width


def median_seconds(work: Callable[[], None]) -> float:
    """Of _ROUNDS runs."""
    taken = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def linear_pass(weights: Sequence[tuple[int, int]], form: str) -> Callable[[], None]:
    """Multiplies NODES rows by weights of these shapes [N, K], the last one an LM head.

    Args:
        form: of the weights, as `--cpu-weights`.
    """
    *body, head = weights
    made = [*(packed(shape, form) for shape in body), packed(head, form, head=True)]
    by_size = {size: torch.randn(NODES, size) for _, size in weights}
    rows = [by_size[size] for _, size in weights]

    @torch.inference_mode()
    def work() -> None:
        run(rows, made)

    return work


def packed(shape: tuple[int, int], form: str, *, head: bool = False) -> Product:
    """A random weight of this shape as a server packs it."""
    bits, weight = bits_of(form, head=head), torch.randn(shape)
    return as_it_is(weight) if bits is None else in_bits(weight, bits)


def attention_pass(model_path: str, context: int, form: str) -> Callable[[], None]:
    """Attention of NODES nodes over `context` cached tokens, all layers, on the usable cores.

    Args:
        form: of the weights, as `--cpu-weights`: K and V are kept as servers keep them with it.
    """
    config = AutoConfig.from_pretrained(model_path)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    slots = context + NODES
    rng = np.random.default_rng(0)
    query = rng.standard_normal((NODES, heads, size), dtype=np.float32)
    # Every layer has K and V of its own, as in a pool.
    caches = [
        kept(rng.standard_normal((2, slots, kv_heads, size), dtype=np.float32), form)
        for _ in range(config.num_hidden_layers)
    ]
    table = np.arange(slots, dtype=np.int32)[None]
    rows, starts = np.zeros(NODES, np.int64), np.zeros(NODES, np.int64)
    counts = np.full(NODES, context, np.int64)
    extra = np.concatenate([context + np.arange(n + 1) for n in range(NODES)])  # a chain
    extra_count = np.arange(1, NODES + 1)
    extra_start = np.cumsum(extra_count) - extra_count
    seen = (table, rows, starts, counts, extra, extra_start, extra_count)
    factors, threads = (np.float32(size**-0.5), np.float32(0.0)), usable_cores()
    out = np.empty_like(query)

    def work() -> None:
        for keys, values in caches:
            attend(query, keys, values, out, *seen, *factors, threads)

    return work


def kept(numbers: np.ndarray, form: str) -> np.ndarray:
    """Float32 as it is, or the bits of bfloat16, which NumPy has not, in uint16."""
    if form not in ROUNDED:
        return numbers
    return torch.from_numpy(numbers).bfloat16().view(torch.uint16).numpy()
