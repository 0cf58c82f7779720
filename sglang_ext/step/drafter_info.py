"""Which drafter was chosen for a request (`--drafter auto`), in the response's `meta_info`.

It travels as relaxed tokens do (relaxed_info.py): in SGLang's `customized_info`, a list with an
entry for each output token, of which the request's next one has the name. The HTTP process takes it
out of there, keeps it for the later parts of a stream, and tells it as one text.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

KEY = "drafter"
"""Of meta_info: the name of what drafts for the request."""
# Of SGLang's state of a request in the HTTP process.
_KEPT = "sglang_ext_drafter"


def note_drafter(req: "Req", name: str) -> None:
    """Have the answer of a request say what drafts for it."""
    told = [*[None] * len(req.output_ids), name]
    req.customized_info = (req.customized_info or {}) | {KEY: told}


def told_drafter(
    meta_info: dict[str, Any], state: Any, info: Mapping[str, Sequence[Any]], index: int
) -> Mapping[str, Sequence[Any]]:
    """Put the name into an answer's `meta_info`, and return the rest of `info`.

    Args:
        state: SGLang's of the request, in the HTTP process.
        info: `customized_info` of all requests that are sent together.
        index: which of them it is.
    """
    if KEY not in info:
        return info
    name = next((name for name in info[KEY][index] if name is not None), None)
    name = name or getattr(state, _KEPT, None)
    if name is not None:
        setattr(state, _KEPT, name)
        meta_info[KEY] = name
    return {key: values for key, values in info.items() if key != KEY}
