"""Where SGLang's HTTP process runs the checks: when it normalizes a request, and as it sends it."""

from collections.abc import Callable
from functools import cache
from typing import Any

from sglang_ext import sglang_points
from sglang_ext.admission.cache_salts import name_by_salts
from sglang_ext.admission.errors import AdmissionError, refusing
from sglang_ext.admission.predictions import bring_tokens, tokenize_early
from sglang_ext.admission.requests import Limits, RequestCheck
from sglang_ext.api.datastore.known_corpora import check_corpora
from sglang_ext.options import Options
from sglang_ext.sglang_points.hooking import hook


def register(is_ours: Callable[[], bool]) -> None:
    """Hook the checks into SGLang.

    Args:
        is_ours: whether this server speculates with our algorithm; others are left as they are.
    """

    def normalize(original: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_ours() or not _serves():
            return original(request, *args, **kwargs)
        check = _check()
        with refusing("its fields do not fit together"):
            check.before(request)
            result = original(request, *args, **kwargs)
            check.after(request)
        return result

    def tokenized(original: Any, manager: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_ours():
            return original(manager, request, *args, **kwargs)
        if not _serves():
            made = original(manager, request, *args, **kwargs)
        else:
            with refusing("its parameters do not fit together"):
                made = original(manager, request, *args, **kwargs)
            _check().tokenized(made, prompt_is_tokens=made.mm_inputs is None)
        if _options().salt_namespaces:
            name_by_salts(made, _options().namespace_key)
        check_corpora(made)
        bring_tokens(made, getattr(manager, "tokenizer", None))
        return made

    def convert(original: Any, serving: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_ours():
            return original(serving, *args, **kwargs)
        try:
            with refusing("its messages cannot be rendered"):
                made = original(serving, *args, **kwargs)
            # SGLang is off the event loop here, and later it is not.
            tokenize_early(made[0], serving.tokenizer_manager.tokenizer)
            return made
        except UnicodeError as error:
            raise AdmissionError(f"the request has text without an encoding: {error}") from None

    for point in sglang_points.NORMALIZE:
        hook(point, normalize)
    hook(sglang_points.TOKENIZED, tokenized)
    for point in sglang_points.CONVERSIONS:
        hook(point, convert)


def _serves() -> bool:
    """Whether requests come from clients; those of `sglang.Engine` are its own program's."""
    from sglang.srt.entrypoints.http_server import get_global_state

    return get_global_state() is not None


@cache
def _options() -> Options:
    return Options.from_env()


@cache
def _check() -> RequestCheck:
    from sglang.srt.entrypoints.http_server import get_global_state

    options, config = _options(), get_global_state().tokenizer_manager.model_config
    limits = Limits(options.max_choices, options.max_answers, options.max_logprobs)
    return RequestCheck(limits, config.vocab_size, config.hidden_size)
