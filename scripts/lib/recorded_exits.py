"""What a model's early exit says along answers that it gave: recorded once, without a server."""

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from scripts.lib.lens_states import Model, load, states_of
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
    fit: Sequence[tuple[list[int], list[int]]],
    asked: Sequence[tuple[list[int], list[int]]],
    parts: Sequence[float],
    head_tokens: int = HEAD_TOKENS,
) -> list[list[RecordedAnswer]]:
    """For each part of the depth the answers `asked`, with what an exit there says.

    The lenses are fitted on the answers `fit` and their prompts.

    Args:
        head_tokens: so many tokens are asked about, the most frequent ones; 0: all.
    """
    model = load(MODEL)
    exits = [round(model.depth * part) for part in parts]
    texts = [prompt + answer for prompt, answer in fit]
    proxies = dict(zip(exits, _fitted(model, texts, exits, head_tokens), strict=True))
    made: dict[int, list[RecordedAnswer]] = {at: [] for at in exits}
    whole = states_of(model, [prompt + answer for prompt, answer in asked], exits)
    for (prompt, answer), (states, _) in zip(asked, whole, strict=True):
        for at, proxy in proxies.items():
            tokens, logprobs = proxy.candidates(states[at][len(prompt) :])
            said = tokens.to(torch.int32).numpy(), logprobs.numpy()
            made[at].append(RecordedAnswer(prompt, answer, *said))
    return [made[at] for at in exits]


def _fitted(
    model: Model, texts: Sequence[list[int]], exits: Sequence[int], head_tokens: int
) -> list[Proxy]:
    """The proxies of these exits, their lenses fitted on texts, the head narrowed as servers do."""
    plain = Proxy(model.parts, KAPPA)
    sums: dict[int, RidgeSums] = {}
    for states, final in states_of(model, texts, exits):
        for at in exits:
            known = sums.setdefault(at, RidgeSums(final.shape[-1]))
            known.add(plain.normalised(states[at]), final)
    whole = [Proxy(model.parts, KAPPA, sums[at].solve()) for at in exits]
    if not head_tokens:
        return whole
    frequent = frequent_tokens(texts, head_tokens, model.parts.vocab_size)
    return [narrowed(proxy, frequent) for proxy in whole]
