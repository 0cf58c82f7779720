"""Predicted outputs as tokens: schedulers get these in place of the text, and need no tokenizer."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from sglang_ext.admission.errors import AdmissionError
from sglang_ext.drafters.predicted_text import MOST_TOKENS, TOKENS_KEY, packed_tokens

PREDICTION_KEY = "prediction"
# Of the prompt's end: a tokenizer joins no more than that with what comes behind.
_BEFORE = 8
_KEPT = 16


class Prediction(str):
    """A prediction whose tokens somebody waits for, on its way through SGLang's HTTP process.

    Attributes:
        tokens: its token ids, once they are known.
        refused: why it is refused, once that is known.
    """

    tokens: tuple[int, ...] | None = None
    refused: str | None = None


def tokenize_early(request: Any, tokenizer: Any) -> None:
    """Tokenize a request's `Prediction`, if it has one and its prompt's tokens are known.

    Args:
        request: SGLang's GenerateReqInput, of one prompt, or another request, which is left alone.
        tokenizer: the served model's, of transformers.

    Raises:
        AdmissionError: it has too many tokens.
    """
    params = getattr(request, "sampling_params", None)
    params = params.get("custom_params") if isinstance(params, dict) else None
    text = params.get(PREDICTION_KEY) if isinstance(params, dict) else None
    ids = getattr(request, "input_ids", None)
    if isinstance(text, Prediction) and tokenizer is not None and isinstance(ids, list):
        _take_tokens(text, ids, tokenizer)


def bring_tokens(request: Any, tokenizer: Any) -> None:
    """Give a request's `custom_params` the tokens of its prediction, in place of the text.

    Args:
        request: SGLang's TokenizedGenerateReqInput, or one without sampling (embeddings), which is
            left as it is.
        tokenizer: the served model's, of transformers; None: the server has none.

    Raises:
        AdmissionError: it has too many tokens, or there is no tokenizer.
    """
    sampling = getattr(request, "sampling_params", None)
    given = getattr(sampling, "custom_params", None)
    if not given or not {PREDICTION_KEY, TOKENS_KEY} & given.keys():
        return
    params = {k: v for k, v in given.items() if k not in (PREDICTION_KEY, TOKENS_KEY)}
    text = given.get(PREDICTION_KEY)
    if text:
        if tokenizer is None:
            raise AdmissionError(
                f"custom_params.{PREDICTION_KEY} cannot be used: the server has no tokenizer "
                "(--skip-tokenizer-init)"
            )
        if not isinstance(text, Prediction):
            text = Prediction(text)
        if text.tokens is None:
            _take_tokens(text, request.input_ids or (), tokenizer)
        params[TOKENS_KEY] = packed_tokens(text.tokens or ())
    assert sampling is not None
    sampling.custom_params = params


def _take_tokens(text: Prediction, prompt: Sequence[int], tokenizer: Any) -> None:
    tokens = tokens_behind(tokenizer, str(text), tuple(prompt[-_BEFORE:]))
    if len(tokens) > MOST_TOKENS:
        text.refused = (
            f"{PREDICTION_KEY} has {len(tokens)} tokens; this server takes at most {MOST_TOKENS}"
        )
        raise AdmissionError(text.refused)
    text.tokens = tokens


@lru_cache(maxsize=_KEPT)
def tokens_behind(tokenizer: Any, text: str, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """The tokens of a text as they are written behind a prompt's last tokens.

    A tokenizer may put a space in front of a text's first word, which the model does not write
    behind a line break of the chat template: so both are tokenized together.

    Args:
        tokenizer: of transformers.
        prompt: its last tokens; what is no token of the tokenizer's is left out.
    """
    known = [token for token in prompt if 0 <= token < len(tokenizer)]
    lead = tokenizer.decode(known, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    before = tokenizer.encode(lead, add_special_tokens=False)
    together = tokenizer.encode(lead + text, add_special_tokens=False)
    if before and together[: len(before)] == before:
        return tuple(together[len(before) :])
    return tuple(tokenizer.encode(text, add_special_tokens=False))
