"""What requests ask for beside plain greedy decoding, and what it does to the target's logits."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from scripts.gpu_kit.checkpoint import Shape

PENALTIES = {"frequency_penalty": 2.0, "presence_penalty": 1.0, "repetition_penalty": 1.3}
BANNED = (ord("a"), ord("c"))
STOP = "b"
PROCESSOR = "logit processor"
# Symbols that the grammar forbids: of four candidates at least one is nearly always allowed.
FORBIDDEN_SYMBOLS = 4


def sampling(shape: Shape) -> dict[str, dict[str, Any]]:
    """sampling_params by feature; of the logit processor, its request says the rest."""
    return {
        "penalties": dict(PENALTIES),
        "grammar": {"regex": f"[a-{chr(_allowed(shape)[-1])}]{{1,200}}"},
        "stop string": {"stop": [STOP]},
    }


def _allowed(shape: Shape) -> list[int]:
    return [ord("a") + n for n in range(shape.symbols - FORBIDDEN_SYMBOLS)]


def adjusted(
    logits: Mapping[int, float], feature: str, output: Sequence[int], shape: Shape
) -> dict[int, float]:
    """The target's largest logits with a feature applied, as SGLang's sampler does.

    Args:
        logits: by token, without it.
        output: the tokens written so far, which the penalties count.
    """
    if feature == "grammar":
        allowed = set(_allowed(shape))
        return {token: value for token, value in logits.items() if token in allowed}
    if feature == PROCESSOR:
        return {token: value for token, value in logits.items() if token not in BANNED}
    if feature == "penalties":
        counts = Counter(output)
        return {token: _penalized(value, counts[token]) for token, value in logits.items()}
    return dict(logits)


def _penalized(value: float, count: int) -> float:
    if not count:
        return value
    value -= PENALTIES["frequency_penalty"] * count + PENALTIES["presence_penalty"]
    scale = PENALTIES["repetition_penalty"]
    return value / scale if value > 0 else value * scale
