"""A whole request: its size, the shapes and types of its fields, and its ids."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, get_type_hints

import msgspec

from sglang_ext.admission.errors import AdmissionError, refusing
from sglang_ext.admission.sampling_params import check_depth, check_ids, check_sampling, check_text
from sglang_ext.request_options import shown

# Deletions name a request by its id, in at most so many bytes (datastores).
LONGEST_RID = 512
LONGEST_TEXT_FIELD = 4096
# SGLang's own, which a client could set over /generate.
_INTERNAL = (
    "lora_id", "http_worker_ipc", "encoder_urls", "num_items_assigned", "need_wait_for_mm_inputs",
)  # fmt: skip
# Opaque to msgspec, or checked by what reads them.
_UNTYPED = frozenset(
    {"input_ids", "input_embeds", "mm_inputs", "sampling_params", "positional_embed_overrides",
     "time_stats", "kv_hints", "input_text", "http_worker_ipc"}
)  # fmt: skip
_TEXTS = ("rid", "session_id", "extra_key", "cache_salt", "routing_key", "lora_path",
          "bootstrap_host", "conversation_id")  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """What one request may ask for at most.

    Attributes:
        choices: most answers to one prompt (`n`).
        prompts: most prompts times `n`.
        logprobs: most alternatives for which a token's logprobs are given.
    """

    choices: int = 128
    prompts: int = 4096
    logprobs: int = 128


class RequestCheck:
    """The checks of one server's requests.

    Args:
        limits: of one request.
        vocab_size: of the model.
        hidden_size: of the model, of each input embedding.
    """

    def __init__(self, limits: Limits, vocab_size: int, hidden_size: int = 0):
        self._limits = limits
        self._vocab_size = vocab_size
        self._hidden_size = hidden_size

    def before(self, request: Any) -> None:
        """Check what SGLang multiplies a request by, before it does (`normalize_...` of its
        managers/io_struct.py).

        Args:
            request: SGLang's GenerateReqInput or EmbeddingReqInput.

        Raises:
            AdmissionError: it asks for too much, or for what only SGLang itself may set.
        """
        for name in _INTERNAL:
            if getattr(request, name, None) is not None:
                raise AdmissionError(f"{name} cannot be set by a client")
        params = request.sampling_params
        given = params if isinstance(params, list) else [params or {}]
        if not given:
            raise AdmissionError("sampling_params must be an object or one for each prompt")
        choices = [self._choices(each) for each in given]
        prompts = _count(request)
        if prompts * max(choices) > self._limits.prompts:
            raise AdmissionError(
                f"the request asks for {prompts * max(choices)} answers, prompts times n; this "
                f"server gives {self._limits.prompts} at once (--max-answers)"
            )
        if isinstance(params, list) and len(params) != prompts:
            raise AdmissionError(f"sampling_params has {len(params)} entries, prompts: {prompts}")
        for name in _TEXTS:
            _check_texts(name, getattr(request, name, None))
        text = request.text
        for part in text if isinstance(text, list) else [text]:
            if isinstance(part, str):
                check_text("text", part)

    def after(self, request: Any) -> None:
        """Check each prompt's fields, once SGLang has given each prompt its own.

        Raises:
            AdmissionError: a field is of the wrong type or out of bounds.
        """
        parts = [request] if request.is_single else self._parts(request)
        seen: set[int] = set()
        for part in parts:
            if id(part.sampling_params) not in seen:
                seen.add(id(part.sampling_params))
                check_sampling(part.sampling_params, self._vocab_size)
            self._check_part(part)

    def tokenized(self, request: Any, prompt_is_tokens: bool) -> None:
        """Check a request as a scheduler will get it.

        Args:
            request: SGLang's TokenizedGenerateReqInput or TokenizedEmbeddingReqInput.
            prompt_is_tokens: whether its input_ids are all of the vocabulary, and not
                placeholders for other media.

        Raises:
            AdmissionError: a field is of the wrong type or out of bounds.
        """
        _check_types(request)
        if request.rid is None or len(request.rid.encode()) > LONGEST_RID:
            raise AdmissionError(
                f"rid is longer than {LONGEST_RID} bytes, which is the most that can be deleted"
            )
        ids = request.input_ids
        if ids is not None and not len(ids):
            raise AdmissionError("the prompt holds no token: give at least one character or id")
        if ids is not None and prompt_is_tokens:
            check_ids("input_ids", ids if isinstance(ids, array) else list(ids), self._vocab_size)
        start = getattr(request, "logprob_start_len", None)
        if start is not None and start < -1:
            raise AdmissionError(f"logprob_start_len must be -1 or more, got {start}")
        overrides = getattr(request, "positional_embed_overrides", None)
        # SGLang's scoring makes them; a scheduler ends at what JSON can say here.
        if overrides is not None and not isinstance(overrides, _positional_embeds()):
            raise AdmissionError("positional_embed_overrides cannot be set by a client")
        for name in ("multi_item_delimiter_indices", "token_indices_to_pool"):
            positions = getattr(request, name, None)
            if positions:
                check_ids(name, positions, len(ids or ()))

    def _choices(self, params: Any) -> int:
        if not isinstance(params, Mapping):
            raise AdmissionError(f"sampling_params must be an object, got {shown(params)}")
        for name in ("n", "beam_width"):
            value = params.get(name, 1)
            # SGLang reads null as a beam width of 1, and fails on a null n.
            if value is None and name == "beam_width":
                continue
            if type(value) is not int or not 1 <= value <= self._limits.choices:
                raise AdmissionError(
                    f"{name} must be a whole number of 1 to {self._limits.choices} "
                    f"(--max-choices), got {shown(value)}"
                )
        return int(params.get("n", 1))

    def _parts(self, request: Any) -> list[Any]:
        with refusing("a field has not one value for each prompt"):
            return [request[i] for i in range(len(request.rid))]

    def _check_part(self, part: Any) -> None:
        for name in ("top_logprobs_num", "logprob_start_len"):
            value = getattr(part, name, None)
            if value is not None and type(value) is not int:
                raise AdmissionError(f"{name} must be a whole number, got {shown(value)}")
        most = self._limits.logprobs
        top = getattr(part, "top_logprobs_num", None)
        if top is not None and not 0 <= top <= min(most, self._vocab_size):
            raise AdmissionError(
                f"top_logprobs must be 0 to {min(most, self._vocab_size)} (--max-logprobs), "
                f"got {shown(top)}"
            )
        named = getattr(part, "token_ids_logprob", None)
        if named is not None:
            if not isinstance(named, list) or len(named) > most:
                raise AdmissionError(
                    f"token_ids_logprob must be a list of at most {most} token ids "
                    f"(--max-logprobs), got {shown(named)}"
                )
            check_ids("token_ids_logprob", named, self._vocab_size)
        if isinstance(part.input_ids, list):
            check_ids("input_ids", part.input_ids, self._vocab_size)
        for name in ("session_params", "custom_labels", "mm_processor_kwargs"):
            value = getattr(part, name, None)
            if value is not None:
                check_depth(name, [value])
        if part.input_embeds is not None:
            self._check_embeds(part)

    def _check_embeds(self, part: Any) -> None:
        if getattr(part, "session_params", None) is not None:
            raise AdmissionError("input_embeds cannot be part of a session")
        for row in part.input_embeds:
            if (
                not isinstance(row, list)
                or len(row) != self._hidden_size
                or not all(isinstance(x, float | int) and abs(x) < 1e30 for x in row)
            ):
                raise AdmissionError(
                    f"input_embeds must hold {self._hidden_size} finite numbers for each token"
                )


def _count(request: Any) -> int:
    """How many prompts a request has, before or after SGLang has split it."""
    if request.text is not None:
        return len(request.text) if isinstance(request.text, list) else 1
    for ids in (request.input_ids, request.input_embeds):
        if ids is not None:
            nested = bool(ids) and isinstance(ids[0], list)
            if ids is request.input_embeds:
                nested = nested and bool(ids[0]) and isinstance(ids[0][0], list)
            return len(ids) if nested else 1
    return 1


def _check_texts(name: str, value: Any) -> None:
    for text in value if isinstance(value, list) else [value]:
        if text is None:
            continue
        if not isinstance(text, str):
            raise AdmissionError(f"{name} must be a string, got {shown(text)}")
        check_text(name, text)
        if len(text) > LONGEST_TEXT_FIELD or (name == "rid" and not text.isprintable()):
            raise AdmissionError(
                f"{name} must be at most {LONGEST_TEXT_FIELD} characters"
                + (", all of them printable" if name == "rid" else "")
            )


@cache
def _types(kind: type) -> dict[str, Any]:
    return {n: t for n, t in get_type_hints(kind).items() if n not in _UNTYPED}


def _check_types(struct: Any) -> None:
    """Refuse values that are not of their field's type, which SGLang's pickles do not look at."""
    of: Any = type(struct)
    for name, kind in _types(of).items():
        value = getattr(struct, name)
        if isinstance(value, msgspec.Struct):
            _check_types(value)
            continue
        try:
            msgspec.convert(value, kind)
        except (msgspec.ValidationError, OverflowError, RecursionError) as error:
            raise AdmissionError(f"{name}: {error}; got {shown(value)}") from None


@cache
def _positional_embeds() -> type:
    from sglang.srt.managers.embed_types import PositionalEmbeds

    return PositionalEmbeds
