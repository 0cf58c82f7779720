"""Logits that cannot be sampled end their request, not the server.

A row of NaN, or one in which no token is left, makes `torch.multinomial` raise, and SGLang's
scheduler ends with it, for all clients (layers/sampler.py; its SGLANG_SANITIZE_NAN_LOGITS draws a
token from nothing instead, and says so only in the log).
"""

import logging
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req

logger = logging.getLogger(__name__)

_MESSAGE = "the model gave no logits that can be sampled for this request; others are not affected"


class LogitsGuard:
    """Looks at what SGLang's sampler is given, on the host.

    On a device nothing looks: it would have to be waited for, and SGLang's sampling kernels there
    do not raise.

    Attributes:
        reqs: the requests of the step that runs.
    """

    def __init__(self, sampler: torch.nn.Module):
        self.reqs: Sequence[Req] = ()
        sampler.register_forward_pre_hook(self._look)

    def _look(self, _sampler: torch.nn.Module, args: tuple[Any, ...]) -> None:
        output, info = args[:2]
        if info.is_all_greedy:
            return
        logits = output.next_token_logits
        bad = torch.nonzero(~torch.isfinite(logits.amax(dim=-1)))[:, 0].tolist()
        if not bad:
            return
        # Whose the rows are, where they are nodes of a tree.
        rows = getattr(info, "rows", range(len(self.reqs)))
        for row in bad:
            req = self.reqs[rows[row]]
            logger.error(
                "Request %s: a row of logits holds %d NaN and no finite maximum, after %d tokens%s",
                req.rid,
                int(torch.isnan(logits[row]).sum()),
                len(req.output_ids),
                " under a grammar" if req.grammar is not None else "",
            )
            # Any token will do: the answer ends here, with an error.
            logits[row] = 0
            if req.inflight_middle_chunks <= 0:
                req.to_finish = FINISH_ABORT(
                    _MESSAGE, HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError"
                )
