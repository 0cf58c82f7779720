"""Greedy tokens are those of SGLang's sampler; what wants more than tokens goes to it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_ext.cpu.greedy_sampler import sample

LOGITS = torch.tensor([[0.5, 2.0, 2.0, -1.0], [3.0, float("-inf"), 0.0, 1.0]])


class Sampler:
    """Sets the logits of token 0 to the least, as a custom processor would."""

    def _preprocess_logits(self, logits: torch.Tensor, info: Any) -> torch.Tensor:
        return logits.index_fill(1, torch.tensor([0]), float("-inf"))


def sampled(**changes: Any) -> torch.Tensor | str:
    info = {"is_all_greedy": True, "grammars": None, "sampling_mask_batch_indices": None}
    more = {"return_logprob": False, "logprob_logits": None} | changes
    info |= {name: more.pop(name) for name in list(more) if name in info}
    return sample(
        lambda *args, **kwargs: "SGLang's",
        Sampler(),
        LogitsProcessorOutput(next_token_logits=LOGITS),
        SimpleNamespace(**info),
        more["return_logprob"],
        [],
        [],
        torch.zeros(2),
        logprob_logits=more["logprob_logits"],
    )


def test_greedy_tokens_are_the_first_of_the_likeliest():
    tokens = sampled()
    assert isinstance(tokens, torch.Tensor) and tokens.dtype == torch.int64
    assert tokens.tolist() == [1, 3]


@pytest.mark.parametrize(
    "change",
    [
        {"is_all_greedy": False},
        {"return_logprob": True},
        {"logprob_logits": LOGITS},
        {"grammars": [object()]},
        {"sampling_mask_batch_indices": torch.tensor([0])},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_wants_more_is_sampled_by_sglang(change):
    assert sampled(**change) == "SGLang's"
