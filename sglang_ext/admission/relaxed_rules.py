"""Requests for relaxed acceptance (step/relaxed.py) that cannot be served, refused with a 400."""

from typing import Any

from sglang_ext.drafters import load_class
from sglang_ext.options import Options
from sglang_ext.request_options import NO_DRAFTER, RequestOptionError, RequestOptions, shown


def check_relaxed(request: RequestOptions, sampling: Any, server: Options) -> None:
    """Refuse a relaxed rule that this server or these sampling parameters do not go with.

    Args:
        sampling: SGLang's SamplingParams, which has a top_k of 1 where temperature was 0.

    Raises:
        RequestOptionError: the server forbids it, the request samples, or its drafter has no
            log-probabilities to go by.
    """
    rule = request.relaxed
    if rule is None:
        return
    if not server.relaxed_acceptance:
        raise RequestOptionError(
            "custom_params.relaxed is not allowed on this server (--relaxed-acceptance 0)"
        )
    if sampling.top_k != 1:
        raise RequestOptionError(
            "custom_params.relaxed must be left out where tokens are sampled: temperature must be "
            f"0, got {shown(sampling.temperature)}"
        )
    drafter = request.drafter or server.default_drafter
    if rule.by == "drafter" and not _gives_logprobs(drafter):
        raise RequestOptionError(
            f"custom_params.relaxed.by must be target for the drafter {shown(drafter)}, which has "
            "no log-probabilities of its own"
        )


def _gives_logprobs(drafter: str) -> bool:
    return drafter != NO_DRAFTER and load_class(drafter).gives_logprobs
