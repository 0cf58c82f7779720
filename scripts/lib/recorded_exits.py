"""What a model's early exit says along answers that it gave: recorded once, without a server."""

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from scripts.lib.lens_states import load, states_of
from scripts.lib.spec_bench import DATA, MODEL, spec_bench
from sglang_ext.mirror.fit_texts import frequent_tokens
from sglang_ext.mirror.lens import RidgeSums
from sglang_ext.mirror.proxy import Proxy, narrowed

KAPPA = 8
HEAD_TOKENS = 8192  # as servers do by default


@dataclass(frozen=True)
class RecordedAnswer:
    """A greedy answer, and the exit's candidates behind its tokens.

    Attributes:
        prompt, answer: token ids.
        candidates: int32[len(answer), kappa], behind each token of the answer, best first.
        logprobs: float32[len(answer), kappa].
    """

    prompt: list[int]
    answer: list[int]
    candidates: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]


def answered(max_prompt_tokens: int) -> list[tuple[list[int], list[int]]]:
    """Prompts and the answers of SmolLM2-135M-Instruct that this repository carries."""
    with gzip.open(DATA / "answers.jsonl.gz", "rt") as lines:
        answers = [json.loads(line) for line in lines]
    pairs = zip(spec_bench(MODEL, max_prompt_tokens=700), answers, strict=False)
    return [(list(p.input_ids), a) for p, a in pairs if len(p.input_ids) <= max_prompt_tokens]


@torch.no_grad()
def record(
    fit: Sequence[tuple[list[int], list[int]]], asked: Sequence[tuple[list[int], list[int]]]
) -> list[RecordedAnswer]:
    """The answers `asked` with what the exit at half the depth says, its lens fitted on `fit`."""
    model = load(MODEL)
    exit_layer = model.depth // 2
    proxy = Proxy(model.parts, KAPPA)
    sums: RidgeSums | None = None
    texts = [prompt + answer for prompt, answer in fit]
    for states, final in states_of(model, texts, [exit_layer]):
        sums = sums or RidgeSums(final.shape[-1])
        sums.add(proxy.normalised(states[exit_layer]), final)
    assert sums is not None
    lensed = Proxy(model.parts, KAPPA, sums.solve())
    proxy = narrowed(lensed, frequent_tokens(texts, HEAD_TOKENS, model.parts.vocab_size))
    made = []
    texts = [prompt + answer for prompt, answer in asked]
    for (prompt, answer), (states, _) in zip(
        asked, states_of(model, texts, [exit_layer]), strict=True
    ):
        tokens, logprobs = proxy.candidates(states[exit_layer][len(prompt) :])
        made.append(
            RecordedAnswer(prompt, answer, tokens.to(torch.int32).numpy(), logprobs.numpy())
        )
    return made
