"""Which frame of its audio each output token attends to, for requests that ask.

`custom_params.attended_frames` says how many of the encoder's frames hold audio; the answer's
`meta_info` has a list of the same name (token_info.py). The frame of a token is that of the place
from which it was predicted, as openai-whisper's word times have it (timing.py): the end of the
prompt, a plain step's root, or an accepted node of a draft tree.

Where our attention on the CPU runs the pass (cpu/attention.py). On a device nothing is read:
kernels and captured graphs leave no weights, and answers come without the list.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from sglang_ext.cpu.attention import TreeAttentionBackend
from sglang_ext.request_options import MOST_FRAMES
from sglang_ext.step.token_info import FRAMES, entries_of
from sglang_ext.whisper.cross_attention import FrameReader, heads_to_read

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

    from sglang_ext.step.verify import Accepted
    from sglang_ext.tree import PackedTrees


class AttendedFrames:
    """Has passes read for requests that ask, and keeps what was read with them.

    Args:
        backend: of the passes.
        reader: of its cross-attention.
    """

    def __init__(self, backend: TreeAttentionBackend, reader: FrameReader) -> None:
        self._backend = backend
        self._reader = reader

    @classmethod
    def of(cls, runner: Any) -> "AttendedFrames | None":
        """What reads a target's passes; None where it cannot be done.

        Args:
            runner: SGLang's ModelRunner.

        Raises:
            ValueError: the checkpoint names attention heads that it does not have.
        """
        config = runner.model_config
        if not isinstance(runner.attn_backend, TreeAttentionBackend) or not can_read(config):
            return None
        generation = getattr(config, "hf_generation_config", None)
        heads = heads_to_read(config.hf_config, getattr(generation, "alignment_heads", None))
        return cls(runner.attn_backend, FrameReader(heads))

    @property
    def asked(self) -> bool:
        """Whether a request of the step asks."""
        return self._backend.reader is not None

    def begin(self, batch: "ScheduleBatch") -> None:
        """A step of this batch begins."""
        asked = [frames_asked(req) for req in batch.reqs]
        self._backend.reader = None
        if not any(asked) or batch.encoder_lens is None:
            return
        rows, lens = batch.req_pool_indices.tolist(), batch.encoder_lens.tolist()
        # Behind its frames a request's row has its tokens.
        frames = map(min, asked, lens)
        self._reader.watch({row: n for row, n in zip(rows, frames, strict=True) if n})
        self._backend.reader = self._reader

    def note_prefill(self, batch: "ScheduleBatch") -> None:
        """A prefill was run; each request whose prompt is read gets its first token."""
        if not self.asked:
            return
        ends = [end - 1 for end in accumulate(batch.extend_lens)]
        # Of a prompt that is read in parts the rest is still to come.
        read = [req is not batch.chunked_req for req in batch.reqs]
        self._note(batch.reqs, [[end][:done] for end, done in zip(ends, read, strict=True)])

    def note_plain(self, batch: "ScheduleBatch") -> None:
        """A plain step was run; each request gets a token."""
        if self.asked:
            self._note(batch.reqs, [[row] for row in range(len(batch.reqs))])

    def note_verified(
        self, batch: "ScheduleBatch", packed: "PackedTrees", accepted: "Accepted", ragged: bool
    ) -> None:
        """A verify step was run; each request gets the tokens behind its accepted nodes.

        Args:
            ragged: the pass ran the trees' nodes alone, without padding.
        """
        if not self.asked:
            return
        place = np.arange(packed.tokens.size)
        if ragged:
            nodes = packed.nodes()
            place[nodes] = np.arange(len(nodes))
        rows = zip(accepted.accept_index.numpy(), accepted.accept_lens.tolist(), strict=True)
        self._note(batch.reqs, [place[row[:n]].tolist() for row, n in rows])

    def _note(self, reqs: "Sequence[Req]", places: Sequence[list[int]]) -> None:
        """Keep the frames of the tokens that requests are about to get.

        Args:
            places: of each request, the tokens of the pass from which they were predicted.
        """
        frames = self._reader.frames()
        for req, own in zip(reqs, places, strict=True):
            if own and frames_asked(req):
                known = entries_of(req, FRAMES)
                known[len(req.output_ids) :] = [frames[place] for place in own]


def can_read(config: Any) -> bool:
    """Whether a target's cross-attention is a Whisper's (SGLang's ModelConfig)."""
    return bool(config.is_encoder_decoder) and hasattr(config.hf_config, "decoder_attention_heads")


def frames_asked(req: "Req") -> int:
    """How many frames of its audio a request asks about; 0: it asks nothing."""
    params = getattr(req.sampling_params, "custom_params", None)
    asked = params.get(FRAMES) if isinstance(params, Mapping) else None
    if not isinstance(asked, int) or isinstance(asked, bool) or not 0 < asked <= MOST_FRAMES:
        return 0
    return asked
