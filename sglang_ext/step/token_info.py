"""What is told of each token of an answer, in the response's `meta_info`.

SGLang sends a request's `customized_info` along with its output: lists with an entry for each
output token, cut and joined as the tokens of a stream are (`_GenerationStreamAccumulator` in
managers/scheduler_components/output_streamer.py). What one request has, the others that are sent
with it get as well, filled with None: that is taken out again. Beside them travels what was chosen
to draft (drafter_info.py).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sglang_ext import sglang_points
from sglang_ext.sglang_points.hooking import hook
from sglang_ext.step.drafter_info import told_drafter

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

RELAXED = "relaxed_tokens"
"""For each output token 1 if relaxation has accepted it, else 0 (relaxed_info.py)."""
FRAMES = "attended_frames"
"""For each output token the encoder's frame that it attends to most (attended_frames.py); -1 where
that is not known."""

_UNKNOWN = {RELAXED: 0, FRAMES: -1}


def register() -> None:
    """Have each answer carry its own entries and no other's; in an HTTP process."""
    hook(sglang_points.META_INFO, _told)


def entries_of(req: "Req", key: str) -> list[int]:
    """A request's entries, one for each token that it has; to be added to."""
    if req.customized_info is None:
        req.customized_info = {}
    known: list[int] = req.customized_info.setdefault(key, [])
    known.extend([_UNKNOWN[key]] * (len(req.output_ids) - len(known)))
    return known


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
    known = state.customized_info_accumulated
    others = set()
    for key in _UNKNOWN.keys() & customized_info.keys():
        if key not in known and all(entry is None for entry in customized_info[key][index]):
            others.add(key)
        else:
            # A first token from a prefill server may have come without.
            first = known.setdefault(key, [])
            first.extend([_UNKNOWN[key]] * (len(state.output_ids) - len(first)))
    if others:
        customized_info = {k: v for k, v in customized_info.items() if k not in others}
    original(manager, meta_info, state, customized_info, index, *more, **named)
