"""Greedy sampling on CPUs, without torch's argmax.

For a row of 49,152 logits that takes 0.2 ms, 3% of a small model's step; NumPy's takes a tenth.
"""

from collections.abc import Callable
from typing import Any

import torch

from sglang_ext import sglang_points
from sglang_ext.cpu.likeliest import likeliest_tokens
from sglang_ext.sglang_points.hooking import hook


def sample(
    original: Callable[..., torch.Tensor],
    sampler: Any,
    logits_output: Any,
    sampling_info: Any,
    return_logprob: bool,
    *args: Any,
    logprob_logits: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """`Sampler.forward`: int64[bs], where all requests are greedy and want their tokens alone."""
    more = (
        return_logprob
        or logprob_logits is not None
        or sampling_info.grammars
        or sampling_info.sampling_mask_batch_indices is not None
    )
    if more or not sampling_info.is_all_greedy:
        return original(
            sampler, logits_output, sampling_info, return_logprob, *args,
            logprob_logits=logprob_logits, **kwargs,
        )  # fmt: skip
    logits = sampler._preprocess_logits(logits_output.next_token_logits, sampling_info)
    return likeliest_tokens(logits)


def register() -> None:
    """Have SGLang sample with `sample`; once in every process."""
    hook(sglang_points.SAMPLER, sample)
