"""The tokens of the last step, which SGLang's output_ids lack under overlap scheduling.

SGLang launches step N before it appends step N - 1's tokens to `output_ids` (event_loop_overlap in
managers/scheduler.py), so these are taken from step N - 1's own result. How many of a request's
tokens are lacking is told by its KV: of a request with n entries, n + 1 tokens exist. After an
interleaved prefill none are, although the last decode step's tokens are still at hand.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

    from sglang_ext.step.step_result import StepResult


class LastStep:
    """The step that was launched last, prefills included."""

    def __init__(self) -> None:
        self._reqs: list[Req] = []
        self._result: StepResult | None = None

    def launched(self, reqs: Sequence["Req"], result: "StepResult") -> None:
        """A step of these requests was launched."""
        self._reqs, self._result = list(reqs), result

    def lacking(self, batch: "ScheduleBatch") -> list[list[int]]:
        """For each request of a decode batch the committed tokens that its output_ids lack.

        Waits for the last step where any does.

        Raises:
            RuntimeError: KV and tokens contradict each other; going on would write nonsense.
        """
        counts = lacking_counts(batch)
        if not any(counts):
            return [[] for _ in counts]
        assert self._result is not None, "tokens are lacking, and no step was launched"
        self._result.wait()
        rows = {id(r): row for r, row in zip(self._reqs, self._result.rows(), strict=True)}
        found = []
        for req, count in zip(batch.reqs, counts, strict=True):
            row = rows.get(id(req), []) if count else []
            if not 0 <= count <= len(row):
                raise RuntimeError(
                    f"request {req.rid} has KV of {count} tokens more than its output, and the "
                    f"last step gave it {len(row)}: SGLang's and sglang-ext's bookkeeping disagree"
                )
            found.append(row[len(row) - count :])
        return found


def lacking_counts(batch: "ScheduleBatch") -> list[int]:
    """How many committed tokens each request's output_ids lack, by its KV's length.

    Of an encoder-decoder target, seq_lens counts decoder tokens alone, while the prompt's ids have
    the encoder's places in front (ScheduleBatch.prepare_encoder_info_extend).
    """
    encoders = batch.encoder_lens_cpu or [0] * len(batch.reqs)
    lens = batch.seq_lens_cpu.tolist()
    return [
        length + encoder + 1 - len(req.origin_input_ids) - len(req.output_ids)
        for req, length, encoder in zip(batch.reqs, lens, encoders, strict=True)
    ]


def last_tokens(batch: "ScheduleBatch") -> torch.Tensor:
    """int64[bs], each request's last committed token, where SGLang's relay keeps it.

    Nothing is waited for. A relay of a request that none was accepted of has it in front.
    """
    relayed = batch.spec_info.accept_tokens.view(len(batch.reqs), -1)
    last = (batch.spec_info.accept_lens - 1).clamp(min=0).long()
    return relayed.gather(1, last[:, None])[:, 0].long()
