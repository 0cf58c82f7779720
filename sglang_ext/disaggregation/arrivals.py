"""Requests that come to a decode server, told to the worker while their prompts are read elsewhere.

SGLang 0.5.23 has no place for a plugin there: a request joins disaggregation/decode.py's
DecodePreallocQueue, waits for its KV, and is seen by the worker in its first decode step.
"""

import logging
from typing import Any

from sglang_ext import sglang_points
from sglang_ext.sglang_points.hooking import apply_hooks, hook

logger = logging.getLogger(__name__)


def tell_of_arrivals() -> None:
    """Have the worker's `note_arrival` called for each; in a decode server's scheduler."""
    hook(sglang_points.ARRIVAL, _arrived)
    apply_hooks()


def _arrived(
    _result: None, queue: Any, req: Any, is_retracted: bool = False, is_rebootstrap: bool = False
) -> None:
    if is_retracted or is_rebootstrap or req.finished():
        return
    try:
        queue.scheduler.draft_worker.note_arrival(req)
    except Exception:
        # Drafting starts later then; nothing of it may stop the scheduler.
        logger.exception("the arrival of request %s was not noted", req.rid)
