"""Which tokens of an answer were accepted by relaxation, in the response's `meta_info`.

SGLang sends a request's `customized_info` along with its output: lists with an entry for each
output token, cut and joined as the tokens of a stream are (`_GenerationStreamAccumulator` in
managers/scheduler_components/output_streamer.py). Ours is `relaxed_tokens`. What one request has,
the others that are sent with it get as well, filled with None: that is taken out again. Beside them
travels what was chosen to draft (drafter_info.py).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sglang_ext import sglang_points
from sglang_ext.sglang_points.hooking import apply_hooks, hook
from sglang_ext.step.drafter_info import told_drafter

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

    from sglang_ext.step.step_result import StepResult

logger = logging.getLogger(__name__)

KEY = "relaxed_tokens"
"""Of meta_info: for each output token 1 if relaxation has accepted it, else 0."""


def tell_of_relaxed_tokens() -> None:
    """Have the tokens of each step marked; in a scheduler."""
    hook(sglang_points.COMMITTED_TOKENS, _committed)
    hook(sglang_points.COLLECTED_INFO, _collected)
    apply_hooks()


def register() -> None:
    """Have each answer carry its own marks and no other's; in an HTTP process."""
    hook(sglang_points.META_INFO, _told)


def _told(
    original: Callable[..., None],
    manager: Any,
    meta_info: dict[str, Any],
    state: Any,
    customized_info: Mapping[str, Sequence[Any]],
    index: int,
    *more: Any,
    **named: Any,
) -> None:
    customized_info = told_drafter(meta_info, state, customized_info, index)
    marks = customized_info.get(KEY)
    if marks is not None:
        known = state.customized_info_accumulated
        if KEY not in known and all(mark is None for mark in marks[index]):
            customized_info = {k: v for k, v in customized_info.items() if k != KEY}
        else:
            # A first token from a prefill server may have come without.
            first = known.setdefault(KEY, [])
            first.extend([0] * (len(state.output_ids) - len(first)))
    original(manager, meta_info, state, customized_info, index, *more, **named)


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
        _marks_of(req)


def note_tokens(reqs: Sequence["Req"], runs: Sequence[Sequence[int]], result: "StepResult") -> None:
    """Mark the tokens that a step's requests are about to get.

    Args:
        runs: each request's new tokens, which its `output_ids` lack yet.
    """
    marks = result.relaxed.tolist() if result.relaxed is not None else None
    for row, (req, run) in enumerate(zip(reqs, runs, strict=True)):
        if not _asks(req) or req.finished() or req.is_retracted:
            continue
        known = _marks_of(req)
        new = marks[row][: len(run)] if marks is not None else [0] * len(run)
        known.extend(map(int, new))


def note_first_token(req: "Req") -> None:
    """Mark the token that a request is about to get from its prefill."""
    req.customized_info = (req.customized_info or {}) | {KEY: [1]}


def _marks_of(req: "Req") -> list[int]:
    """A request's marks, one for each token that it has."""
    if req.customized_info is None:
        req.customized_info = {}
    known: list[int] = req.customized_info.setdefault(KEY, [])
    known.extend([0] * (len(req.output_ids) - len(known)))
    return known


def _asks(req: "Req") -> bool:
    params = getattr(req.sampling_params, "custom_params", None)
    return isinstance(params, Mapping) and params.get("relaxed") is not None
