"""Which tokens of an answer were accepted by relaxation: `relaxed_tokens` of its `meta_info`."""

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sglang_ext import sglang_points
from sglang_ext.sglang_points.hooking import apply_hooks, hook
from sglang_ext.step.token_info import RELAXED as KEY
from sglang_ext.step.token_info import entries_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

    from sglang_ext.step.step_result import StepResult

logger = logging.getLogger(__name__)


def tell_of_relaxed_tokens() -> None:
    """Have the tokens of each step marked; in a scheduler."""
    hook(sglang_points.COMMITTED_TOKENS, _committed)
    hook(sglang_points.COLLECTED_INFO, _collected)
    apply_hooks()


def _committed(
    runs: Sequence[Sequence[int]], _processor: Any, result: Any, batch: "ScheduleBatch"
) -> None:
    try:
        note_tokens(batch.reqs, runs, result)
    except Exception:
        # What is told of an answer must not end the server that writes it.
        logger.exception("the relaxed tokens of a step were not noted")


def _collected(_result: None, _processor: Any, _i: int, req: "Req", *_: Any) -> None:
    if _asks(req):
        entries_of(req, KEY)


def note_tokens(reqs: Sequence["Req"], runs: Sequence[Sequence[int]], result: "StepResult") -> None:
    """Mark the tokens that a step's requests are about to get.

    Args:
        runs: each request's new tokens, which its `output_ids` lack yet.
    """
    marks = result.relaxed.tolist() if result.relaxed is not None else None
    for row, (req, run) in enumerate(zip(reqs, runs, strict=True)):
        if not _asks(req) or req.finished() or req.is_retracted:
            continue
        known = entries_of(req, KEY)
        new = marks[row][: len(run)] if marks is not None else [0] * len(run)
        known.extend(map(int, new))


def note_first_token(req: "Req") -> None:
    """Mark the token that a request is about to get from its prefill."""
    req.customized_info = (req.customized_info or {}) | {KEY: [1]}


def _asks(req: "Req") -> bool:
    params = getattr(req.sampling_params, "custom_params", None)
    return isinstance(params, Mapping) and params.get("relaxed") is not None
