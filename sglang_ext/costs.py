"""What a forward pass costs by the number of its tokens, measured at start-up."""

import logging
import time
from typing import Any

import torch

logger = logging.getLogger(__name__)

TOKEN_COUNTS = (1, 2, 4, 8, 16, 32, 64)
_REPEATS = 5


@torch.inference_mode()
def measure_forward_cost(model: torch.nn.Module) -> dict[int, float]:
    """Seconds that the model's linear layers take for each of TOKEN_COUNTS tokens.

    The linear layers are nearly all of a small batch's forward pass, and the only part whose
    cost per token falls with the number of tokens; the worker corrects the rest as it serves.
    """
    layers = [m for m in model.modules() if hasattr(m, "quant_method") and _input_size(m)]
    if hasattr(getattr(model, "lm_head", None), "quant_method"):
        layers.append(model.lm_head)
    features = [_input_size(layer) or layer.embedding_dim for layer in layers]
    costs = dict.fromkeys(TOKEN_COUNTS, float("inf"))
    for _ in range(_REPEATS):
        # The counts take turns, so that a disturbance does not hit one of them alone.
        for tokens in TOKEN_COUNTS:
            inputs = {size: torch.randn(tokens, size) for size in set(features)}
            start = time.perf_counter()
            for layer, size in zip(layers, features, strict=True):
                layer.quant_method.apply(layer, inputs[size])
            costs[tokens] = min(costs[tokens], time.perf_counter() - start)
    logger.info(
        "sglang-ext forward cost: %s ms for %s tokens",
        " / ".join(f"{1e3 * costs[t]:.1f}" for t in TOKEN_COUNTS),
        " / ".join(map(str, TOKEN_COUNTS)),
    )
    return costs


def _input_size(module: Any) -> int:
    """Input features of a linear layer, 0 for other modules."""
    size = getattr(module, "input_size_per_partition", None) or getattr(module, "input_size", None)
    return int(size or 0)
