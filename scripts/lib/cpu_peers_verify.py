"""Part `verify` of scripts.bench_cpu_peers: a verify step by its linear layers and attention."""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig

from scripts.lib.client import generate
from scripts.lib.cpu_peers_common import weights_flags
from scripts.lib.served_metrics import read_metrics
from scripts.lib.server import Server
from scripts.lib.spec_bench import Prompt, spec_bench
from sglang_ext.cpu.attention_kernel import attend
from sglang_ext.cpu.install import usable_cores
from sglang_ext.models import resolve
from sglang_ext.sweep.provenance import forward_costs

# Nodes of a step, the root included.
NODES = 12
_PROMPTS, _QUICK_PROMPTS = 16, 4
_TOKENS = 96
_ROUNDS = 200


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
        with Server(options.model, [*flags, *more], name="verify") as server:
            step_s, width = step_seconds(server, prompts)
    linear_s = linear_seconds(resolve(options.model), options.llm_weights or "fp32")
    context = int(np.mean([len(p.input_ids) for p in prompts])) + _TOKENS // 2
    attention_s = attention_seconds(resolve(options.model), context)
    return {
        "verify_overhead": step_s / (linear_s + attention_s),
        "verify_step_ms": 1e3 * step_s,
        "verify_width": width,
        "verify_linear_ms": 1e3 * linear_s,
        "verify_attention_ms": 1e3 * attention_s,
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


def step_seconds(server: Server, prompts: Sequence[Prompt]) -> tuple[float, float]:
    """(mean seconds of a verify step, its mean nodes), of the server's own metrics."""
    params = {"drafter": "oracle", "budget": "fixed"}

    def run(prompt: Prompt) -> None:
        generate(
            server.base_url, prompt.input_ids, params=params, max_new_tokens=_TOKENS,
            ignore_eos=True,
        )  # fmt: skip

    run(prompts[0])  # what is made on first use
    before = read_metrics(server.base_url)
    for prompt in prompts:
        run(prompt)
    after = read_metrics(server.base_url)

    def mean(total: str, number: str) -> float:
        return (after[total] - before.get(total, 0.0)) / (after[number] - before.get(number, 0.0))

    width = mean("verify_width_sum", "verify_width_count")
    return mean("verify_seconds_total", "verify_steps_total"), width


def linear_seconds(model_path: str, weights: str) -> float:
    """What linear layers of this form took for NODES tokens, as a server measured them here."""
    own = [
        costs["seconds"][str(NODES)]
        for costs in forward_costs(model_path)
        if costs["for"].get("weights", "fp32") == weights
        and costs["for"]["threads"] == usable_cores()
    ]
    return float(own[-1])


def attention_seconds(model_path: str, context: int) -> float:
    """Attention of NODES nodes over `context` cached tokens, all layers, on the usable cores."""
    config = AutoConfig.from_pretrained(model_path)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    slots = context + NODES
    torch.set_num_threads(usable_cores())
    rng = np.random.default_rng(0)
    query = rng.standard_normal((NODES, heads, size), dtype=np.float32)
    # Every layer has K and V of its own, as in a pool.
    caches = [
        rng.standard_normal((2, slots, kv_heads, size), dtype=np.float32)
        for _ in range(config.num_hidden_layers)
    ]
    table = np.arange(slots, dtype=np.int32)[None]
    rows, starts = np.zeros(NODES, np.int64), np.zeros(NODES, np.int64)
    counts = np.full(NODES, context, np.int64)
    extra = np.concatenate([context + np.arange(n + 1) for n in range(NODES)])  # a chain
    extra_count = np.arange(1, NODES + 1)
    extra_start = np.cumsum(extra_count) - extra_count
    least = float("inf")
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        for keys, values in caches:
            attend(
                query, keys, values, np.empty_like(query), table, rows, starts, counts, extra,
                extra_start, extra_count, np.float32(size**-0.5), np.float32(0.0), usable_cores(),
            )  # fmt: skip
        least = min(least, time.perf_counter() - began)
    return least
