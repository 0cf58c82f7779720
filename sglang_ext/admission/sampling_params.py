"""Sampling parameters as a client sent them, before SGLang makes its object of them.

The limits are those past which SGLang 0.5.23's sampler, penalizers or scheduler raise: int32 and
float32 tensors (sampling/sampling_batch_info.py, sampling/penaltylib), `scatter_add_` over the
vocabulary (penaltylib/min_new_tokens.py), and `re.search` in the scheduler's loop
(managers/schedule_batch.py).
"""

import math
from collections.abc import Mapping
from functools import cache
from typing import Any, get_type_hints

import msgspec

from sglang_ext.admission.errors import AdmissionError
from sglang_ext.admission.patterns import check_grammar, check_stop_regex
from sglang_ext.request_options import shown

_INT32 = (1 << 31) - 1
_LARGEST_BIAS = 1e20
# Logits of 1e4 over it, and then over SGLang's least temperature of 1e-6, are float32 still.
_LEAST_REPETITION = 0.01
_DEEPEST = 32
_LONGEST_STOP, _MOST_STOP_IDS = 4096, 1024
_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
# What SGLang's object keeps for itself; given by a client it passes the checks by.
_INTERNAL = frozenset(
    {"stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized"}
)
_ANY = frozenset({"custom_params", "watermark", "stop_token_ids", "n"})  # checked elsewhere


@cache
def _types() -> dict[str, Any]:
    from sglang.srt.sampling.sampling_params import SamplingParams

    return get_type_hints(SamplingParams)


def check_sampling(params: Any, vocab_size: int) -> None:
    """Refuse sampling parameters that would end or stall a scheduler.

    What SGLang refuses itself with a ValueError is left to it.

    Args:
        params: the request's `sampling_params`, one prompt's.
        vocab_size: of the model; token ids are 0 to vocab_size - 1.

    Raises:
        AdmissionError: a name is SGLang's own, or a value is of the wrong type or out of bounds.
    """
    if not isinstance(params, Mapping):
        raise AdmissionError(f"sampling_params must be an object, got {shown(params)}")
    for name, value in params.items():
        if name in _INTERNAL:
            raise AdmissionError(f"sampling_params has no field {shown(name)}")
        # Other names are for a processor (Whisper's language), or SGLang refuses them itself.
        if value is not None and name in _types():
            _check_type(name, value)
    _check_numbers(params)
    _check_token_ids(params, vocab_size)
    _check_texts(params)
    check_custom_params(params.get("custom_params"))


def check_custom_params(params: Any) -> None:
    """Refuse custom_params that no scheduler can be sent.

    Raises:
        AdmissionError: they are no object, or nested deeper than 32.
    """
    if params is None:
        return
    if not isinstance(params, Mapping):
        raise AdmissionError(f"custom_params must be an object, got {shown(params)}")
    check_depth("custom_params", params)


def check_depth(field: str, value: Any, most: int = _DEEPEST) -> None:
    """Refuse a value of JSON that is nested deeper than `most`.

    Raises:
        AdmissionError: it is.
    """
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > most:
            raise AdmissionError(f"{field} is nested deeper than {most}")
        inner = []
        for part in level:
            values = part.values() if isinstance(part, Mapping) else part
            inner += [v for v in values if isinstance(v, Mapping | list | tuple)]
        level = inner


def _check_type(name: str, value: Any) -> None:
    if name in _ANY:
        return
    kind = _types()[name]
    # SGLang takes 0 and 1 for a switch, and many clients write them so.
    if kind is bool and type(value) is int and value in (0, 1):
        return
    try:
        msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError, OverflowError) as error:
        raise AdmissionError(f"{name}: {error}; got {shown(value)}") from None


def _check_numbers(params: Mapping[str, Any]) -> None:
    for name in ("temperature", "top_p", "min_p"):
        _within(params, name, -1e30, 1e30)
    for name in ("top_k", "min_new_tokens", "max_new_tokens"):
        _within(params, name, -_INT32, _INT32)
    _within(params, "stream_interval", 1, _INT32)
    _within(params, "repetition_penalty", _LEAST_REPETITION, 2.0)
    if params.get("temperature") is not None and params["temperature"] < 0:
        raise AdmissionError(f"temperature must be at least 0, got {params['temperature']!r}")


def _check_token_ids(params: Mapping[str, Any], vocab_size: int) -> None:
    stops = params.get("stop_token_ids")
    if stops is not None:
        if not isinstance(stops, list | tuple | set | frozenset):
            raise AdmissionError(f"stop_token_ids must be a list of token ids, got {shown(stops)}")
        if len(stops) > _MOST_STOP_IDS:
            raise AdmissionError(f"stop_token_ids has more than {_MOST_STOP_IDS} ids")
        # SGLang leaves nulls out.
        check_ids("stop_token_ids", [t for t in stops if t is not None], vocab_size)
    for token, bias in (params.get("logit_bias") or {}).items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise AdmissionError(f"logit_bias: a key must be a token id, got {shown(token)}")
        check_ids("logit_bias", [int(token)], vocab_size)
        if not abs(bias) <= _LARGEST_BIAS:
            raise AdmissionError(
                f"logit_bias: a bias must be within +-{_LARGEST_BIAS:g}, got {shown(bias)}"
            )


def check_ids(field: str, ids: Any, vocab_size: int) -> None:
    """Refuse token ids that are none of the model's.

    Raises:
        AdmissionError: one is no whole number of 0 to vocab_size - 1.
    """
    if any(type(token) is not int for token in ids):
        raise AdmissionError(f"{field} must hold whole numbers, got {shown(ids)}")
    if len(ids) and not (min(ids) >= 0 and max(ids) < vocab_size):
        worst = min(ids) if min(ids) < 0 else max(ids)
        raise AdmissionError(
            f"{field} has the token id {worst}, which is outside of the vocabulary, "
            f"0 to {vocab_size - 1}"
        )


def _check_texts(params: Mapping[str, Any]) -> None:
    for name in ("stop", "stop_regex"):
        texts = params.get(name)
        for text in [texts] if isinstance(texts, str) else texts or []:
            check_text(name, text)
            if len(text) > _LONGEST_STOP:
                raise AdmissionError(f"{name} is longer than {_LONGEST_STOP} characters")
            if name == "stop_regex":
                check_stop_regex(text)
    for name in _GRAMMARS:
        grammar = params.get(name)
        if grammar:
            check_text(name, grammar)
            check_grammar(name, grammar)


def check_text(field: str, text: str) -> None:
    """Refuse text that has no encoding.

    Raises:
        AdmissionError: it holds half of a surrogate pair.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise AdmissionError(
            f"{field} is no text: at character {error.start} there is half a surrogate pair"
        ) from None


def _within(params: Mapping[str, Any], name: str, low: float, high: float) -> None:
    value = params.get(name)
    if value is None:
        return
    if not (low <= value <= high) or (isinstance(value, float) and math.isnan(value)):
        raise AdmissionError(f"{name} must be {low:g} to {high:g}, got {shown(value)}")
