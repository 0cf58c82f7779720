"""Weights that a layer does not keep once it has them packed in fewer bits.

In a parameter's place comes one of its shape and type that takes no memory, holds NaN wherever it
is read and cannot be written to. Updates and exports of such a model's weights are refused as
SGLang refuses those of weights that its own caches are derived from.

SGLANG_EXT_CPU_KEEP_WEIGHTS=1 keeps all weights as they were loaded.
"""

import math
import os
from typing import Any

import torch

KEEP_VARIABLE = "SGLANG_EXT_CPU_KEEP_WEIGHTS"

_HASHED = 64
# What SGLang 0.5.23 looks for on each module of a model: WeightUpdater's
# _unsupported_derived_weight_cache_error and WeightExporter's _weight_export_unsupported_reason.
_REFUSALS = {"_derived_weight_cache_error": "updated", "_weight_export_error": "read"}


def keeps_weights() -> bool:
    """Whether loaded weights are to stay beside packed ones."""
    return os.environ.get(KEEP_VARIABLE, "0") == "1"


def release(layer: Any) -> None:
    """Let go of `layer.weight`; whoever else holds that parameter keeps it."""
    weight = layer.weight
    nothing = torch.full((), math.nan, dtype=weight.dtype).expand(weight.shape)
    stand_in = torch.nn.Parameter(nothing, requires_grad=False)
    vars(stand_in).update(vars(weight))  # SGLang's loaders are attributes of parameters
    # What tells one model's weights from another's (drafters/target_reader.py).
    stand_in.first_numbers = weight.detach().reshape(-1)[:_HASHED].clone()  # type: ignore[attr-defined]
    layer.weight = stand_in
    for name, what in _REFUSALS.items():
        setattr(layer, name, refusal(what))


def is_released(weight: torch.Tensor) -> bool:
    """Whether it only stands for a weight that is not kept."""
    return weight.dim() > 0 and not any(weight.stride())


def refusal(what: str) -> str:
    """Why weights cannot be `what`, and what helps."""
    return (
        f"weights cannot be {what}: with --cpu-weights other than fp32 linear layers keep packed "
        f"weights alone. Start the server with {KEEP_VARIABLE}=1 to keep the loaded ones too."
    )


def check_weights_refused(runner: Any, *args: Any, **kwargs: Any) -> None:
    """Before SGLang's ModelRunner.check_weights, which would compare what is not there.

    Raises:
        ValueError: the model has weights that are not kept.
    """
    if any(is_released(parameter) for parameter in runner.model.parameters()):
        raise ValueError(refusal("checked"))
