"""What a forward pass costs by the number of its tokens: swept at start-up, kept for the next.

One JSON file a model and device in ~/.cache/sglang-ext/knee, named after what it was measured
for. Every start adds a round, and the least of all rounds counts: a machine is never faster than
it can be, so what other work disturbed heals. Delete the file to measure afresh.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from sglang_ext.budget.choice import knee, token_grid
from sglang_ext.budget.cost_model import DELAYED_CUDA, NODE_READS_CUDA, CostModel
from sglang_ext.models.cached_tables import CachedTable
from sglang_ext.models.store import default_cache_dir
from sglang_ext.options import Options
from sglang_ext.whisper.encoder_decoder import runs_at_prefill_only

logger = logging.getLogger(__name__)

# On a CPU the cost rises in steps, where a kernel takes another block of rows: a small batch's
# width is best just before one.
CPU_COUNTS = (*range(1, 33), 64, 128, 256)
# Those, and what a CPU's steps may have; see warm_up.
WARM_COUNTS = tuple(sorted({*CPU_COUNTS, *token_grid(32, 128)}))
# GPUs stay flat for longer: some 300 tokens in bf16.
CUDA_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
# Stands in for a sweep that failed, relative to one token's cost: flat to the knee that bfloat16
# products have on the common server GPUs (150 to 300 tokens), then by the token; one token costs
# what reading the weights so fast takes. CostModel scales it to the steps that are run, and learns.
_ASSUMED = {1: 1.0, 128: 1.0, 256: 1.4, 512: 2.6, 1024: 5.2}
_ASSUMED_BYTES_PER_S = 1.5e12
# Rounds of the first start, and of those that find its figures.
_FIRST_ROUNDS, _LATER_ROUNDS = 5, 1
_HEADS = ("lm_head", "proj_out")  # the latter is Whisper's
# No further round begins after this: the sweep is not to delay the start.
_SWEEP_S = 8.0


def costs_of(runner: Any, tp_size: int) -> dict[int, float]:
    """Seconds of a forward pass by token count; empty where a GPU's cannot be measured.

    Args:
        runner: SGLang's ModelRunner, its model loaded.
    """
    config = runner.model_config
    identity = {
        "model": config.model_path,
        "config": hashlib.sha256(config.hf_config.to_json_string().encode()).hexdigest()[:16],
        "dtype": str(runner.dtype),
        "prepacked": os.environ.get("SGLANG_EXT_CPU_PREPACK", "1"),
        "tp_size": tp_size,
    }
    weights = Options.from_env().cpu_weights
    if runner.device == "cpu" and weights != "fp32":
        identity["weights"] = weights
    try:
        return forward_costs(runner.model, identity)
    except Exception:
        if runner.device == "cpu":
            raise
        # Quantized or expert layers may not run on their own; see cost_model_of.
        logger.warning("the cost of forward passes is not measured", exc_info=True)
        return {}


def forward_costs(model: torch.nn.Module, identity: Mapping[str, Any]) -> dict[int, float]:
    """Seconds of the linear layers by token count: the least of this start and earlier ones.

    Args:
        identity: what the figures hold for, besides the device: model, dtype and the like.
    """
    device = next(model.parameters()).device
    identity = dict(identity) | {
        "device": _device_name(device),
        "threads": torch.get_num_threads() if device.type == "cpu" else 0,
    }
    kept = CachedTable(default_cache_dir() / "knee", identity, ".json", "the cost sweep is")
    known = kept.read(lambda path: _stored(path, identity)) or {}
    if device.type == "cpu":
        warm_up(model)  # first: a later start measures each count once
    rounds = _LATER_ROUNDS if known.keys() >= set(_counts(device)) else _FIRST_ROUNDS
    costs = measure_forward_cost(model, device, rounds)
    costs = {count: min(s, known.get(count, s)) for count, s in costs.items()}
    if costs != known:
        content = {"for": identity, "I_knee": knee(costs), "seconds": costs}
        kept.keep(lambda file: file.write((json.dumps(content, indent=2) + "\n").encode()))
    shown = [n for n in costs if n.bit_count() == 1]  # powers of two
    logger.info(
        "sglang-ext forward cost: %s ms for %s tokens, I_knee %d (%s)",
        " / ".join(f"{1e3 * costs[n]:.3g}" for n in shown),
        " / ".join(map(str, shown)),
        knee(costs),
        kept.path,
    )
    return costs


def cost_model_of(runner: Any, costs: Mapping[int, float]) -> CostModel:
    """What steps cost on the runner's device, as far as it is known before any is run.

    Args:
        runner: SGLang's ModelRunner, its model loaded and its KV pool made.
        costs: as `costs_of` measures them; none: assumed by the size of the weights.
    """
    costs = costs or assumed_costs(_weight_bytes(runner.model))
    read_s = kv_read_s(runner, costs)
    if runner.device == "cpu":
        return CostModel(costs, read_s)
    return CostModel(costs, read_s, node_reads=NODE_READS_CUDA, delayed=DELAYED_CUDA)


def assumed_costs(weight_bytes: int) -> dict[int, float]:
    """Seconds of a forward pass by token count on a GPU where they could not be measured."""
    reading = max(1, weight_bytes) / _ASSUMED_BYTES_PER_S
    return {tokens: reading * cost for tokens, cost in _ASSUMED.items()}


def kv_read_s(runner: Any, costs: Mapping[int, float]) -> float:
    """Seconds that reading a KV entry (a token's K and V of all layers) should take.

    A pass of one token takes as long as reading the weights: they tell how fast memory is.

    Args:
        runner: SGLang's ModelRunner, its model loaded and its KV pool made.
        costs: as `costs_of` measures them.
    """
    pool = runner.token_to_kv_pool
    weights = max(1, _weight_bytes(runner.model))
    return costs[min(costs)] * pool.mem_usage * 2**30 / pool.size / weights


def _weight_bytes(model: torch.nn.Module) -> int:
    return sum(_read_bytes(layer) for layer, _ in _linear_layers(model))


def _read_bytes(layer: Any) -> int:
    """What a layer's product reads: packed weights (cpu/linear.py) may take less than loaded."""
    packed = getattr(layer.quant_method, "read_bytes", None)
    if packed is not None:
        return int(packed(layer))
    return sum(p.nbytes for p in layer.parameters(recurse=False))


@torch.inference_mode()
def measure_forward_cost(
    model: torch.nn.Module, device: torch.device, rounds: int
) -> dict[int, float]:
    """The least seconds that the model's linear layers took in so many rounds, by token count.

    The linear layers are nearly all of a small batch's forward pass, and the only part whose
    cost per token falls with the number of tokens; the worker corrects the rest as it serves.
    """
    layers, like = _linear_layers(model), next(model.parameters())
    costs = dict.fromkeys(_counts(device), float("inf"))
    started = time.monotonic()
    for _ in range(rounds):
        # The counts take turns, so that a disturbance does not hit one of them alone.
        for tokens in costs:
            costs[tokens] = min(costs[tokens], _seconds(_forward(layers, tokens, like), device))
        if time.monotonic() - started > _SWEEP_S:
            break
    return costs


@torch.inference_mode()
def warm_up(model: torch.nn.Module) -> None:
    """Run one layer of each shape at every count, so that oneDNN has its kernels made.

    Making those of a count takes 4 to 20 ms on the machine this was written on, half a step.
    """
    shapes = {
        tuple(p.shape for p in layer.parameters(recurse=False)): (layer, size)
        for layer, size in _linear_layers(model)
    }
    for tokens in WARM_COUNTS:
        _forward(list(shapes.values()), tokens, next(model.parameters()))()


def _counts(device: torch.device) -> tuple[int, ...]:
    return CPU_COUNTS if device.type == "cpu" else CUDA_COUNTS


def _linear_layers(model: torch.nn.Module) -> list[tuple[Any, int]]:
    """A decode step's linear layers, the LM head among them, with their input features."""
    layers = [
        m
        for name, m in model.named_modules()
        if hasattr(m, "quant_method") and _input_size(m) and not runs_at_prefill_only(name)
    ]
    for name in _HEADS:
        if hasattr(getattr(model, name, None), "quant_method"):
            layers.append(getattr(model, name))
    return [(layer, _input_size(layer) or layer.embedding_dim) for layer in layers]


def _forward(
    layers: Sequence[tuple[Any, int]], tokens: int, like: torch.Tensor
) -> Callable[[], None]:
    sizes = {size for _, size in layers}
    inputs = {
        size: torch.randn(tokens, size, dtype=like.dtype, device=like.device) for size in sizes
    }

    def forward() -> None:
        for layer, size in layers:
            layer.quant_method.apply(layer, inputs[size])

    return forward


def _seconds(forward: Callable[[], None], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        forward()
        return time.perf_counter() - start
    forward()  # so that no kernel is chosen or loaded within the measurement
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    forward()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def _input_size(module: Any) -> int:
    """Input features of a linear layer, 0 for other modules."""
    size = getattr(module, "input_size_per_partition", None) or getattr(module, "input_size", None)
    return int(size or 0)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return device.type


def _stored(path: Path, identity: Mapping[str, Any]) -> dict[int, float] | None:
    """The costs in a file; None where they were measured for something else or cannot be."""
    stored = json.loads(path.read_text())
    costs = {int(n): float(s) for n, s in stored["seconds"].items()}
    return costs if stored["for"] == identity and all(s > 0 for s in costs.values()) else None
