"""What a step hands to SGLang: the tokens that it commits, and what the next step starts from."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from sglang.srt.utils.common import async_d2h

if TYPE_CHECKING:
    from sglang_ext.step.known_tokens import KnownHead
    from sglang_ext.step.verify import Accepted


@dataclass(frozen=True)
class Committed:
    """What a step gives its requests.

    Attributes:
        tokens: int[bs, n], zeros (or anything) behind each request's own.
        lens: int32[bs], how many each request gets.
        new_seq_lens: int64[bs], the lengths that the next step finds.
        relaxed: bool[bs, n], which of the tokens were accepted by relaxation (relaxed.py), with
            anything behind each request's own; None: none could be.
    """

    tokens: torch.Tensor
    lens: torch.Tensor
    new_seq_lens: torch.Tensor
    relaxed: torch.Tensor | None = None

    @classmethod
    def one_each(cls, tokens: torch.Tensor, new_seq_lens: torch.Tensor) -> "Committed":
        """One token (int[bs]) for each request."""
        lens = torch.ones(len(tokens), dtype=torch.int32, device=tokens.device)
        return cls(tokens.view(-1, 1), lens, new_seq_lens)

    @classmethod
    def of_verified(cls, accepted: "Accepted", seq_lens: torch.Tensor) -> "Committed":
        """What a verify step accepted, for requests of these lengths, int64[bs]."""
        index, predict, lens = accepted.accept_index, accepted.predict, accepted.accept_lens
        if seq_lens.is_cpu:
            # Behind a pass, whose weights have filled the caches, an operator of torch takes 50 us.
            tokens = torch.from_numpy(predict.numpy()[index.numpy()])
            new_seq_lens = torch.from_numpy(seq_lens.numpy() + lens.numpy())
        else:
            tokens, new_seq_lens = predict[index.long()], seq_lens + lens
        return cls(tokens, lens, new_seq_lens, accepted.relaxed)

    def behind(self, head: "KnownHead | None", most: int) -> "Committed":
        """The same with what the requests got before the step in front, `most` tokens at most."""
        if head is None:
            return self
        tokens, lens = head.joined(self.tokens, self.lens, most)
        relaxed = None
        if self.relaxed is not None or head.relaxed is not None:
            first = _marks(head.relaxed, head.tokens)
            behind = _marks(self.relaxed, self.tokens)
            relaxed = replace(head, tokens=first).joined(behind, self.lens, most)[0]
        return Committed(tokens, lens, self.new_seq_lens, relaxed)


@dataclass
class StepResult(GenerationBatchResult):
    """A step's result; what a verify step teaches comes to the host with SGLang's own readback.

    Attributes:
        learned: int32[bs, 2 * width], the target's token after each node and the accepted nodes'
            flat indices (verify.Accepted); of a prefill that read drafts, int32[bs, n]
            (cuda/prefill.py); None: any other step, or on the host.
        relaxed: bool[bs, n], which of the tokens were accepted by relaxation, n as in rows of
            next_token_ids; None: none could be.
    """

    learned: torch.Tensor | None = None
    relaxed: torch.Tensor | None = None

    @classmethod
    def of(cls, passed: GenerationBatchResult, committed: Committed, stride: int) -> "StepResult":
        """The result of a step.

        Args:
            passed: SGLang's of the forward pass.
            committed: at most `stride` tokens for each request.
            stride: --speculative-num-draft-tokens, the relay's fixed width.
        """
        tokens, lens = committed.tokens, committed.lens
        return cls(
            logits_output=passed.logits_output,
            next_token_ids=tokens.flatten(),
            can_run_cuda_graph=passed.can_run_cuda_graph,
            accept_lens=lens,
            new_seq_lens=committed.new_seq_lens,
            next_draft_input=NgramVerifyInput(
                draft_token_num=stride,
                new_seq_lens=committed.new_seq_lens,
                accept_tokens=_relayed(tokens, stride),
                accept_lens=lens,
            ),
            speculative_num_draft_tokens=stride,
            speculative_output_stride=tokens.shape[1],
            relaxed=committed.relaxed,
        )

    @classmethod
    def of_known(cls, head: "KnownHead", new_seq_lens: torch.Tensor, stride: int) -> "StepResult":
        """The result of a step without a pass: every request gets known tokens alone."""
        passed = GenerationBatchResult(LogitsProcessorOutput(next_token_logits=None))
        return cls.of(passed, Committed(head.tokens, head.lens, new_seq_lens, head.relaxed), stride)

    def copy_to_cpu(self, *args: Any, **kwargs: Any) -> None:
        """As SGLang's, `learned` and `relaxed` included."""
        if self.next_token_ids.is_cpu:
            # All is on the host already, and looking through it all took 1% of a small step.
            self.copy_auxiliary_output_to_cpu()
            if self.copy_done is not None:
                self.copy_done.record()
            return
        if self.learned is not None:
            self.learned = async_d2h(self.learned)
        if self.relaxed is not None:
            self.relaxed = async_d2h(self.relaxed)
        super().copy_to_cpu(*args, **kwargs)

    def wait(self) -> None:
        """Wait until the readback has come; a result of SGLang's synchronous loop is there."""
        if self.copy_done is not None:
            self.copy_done.synchronize()

    def came(self) -> bool:
        """Whether the readback has come."""
        return self.copy_done is None or self.copy_done.query()

    def rows(self) -> list[list[int]]:
        """Each request's committed tokens, once `wait` has returned."""
        width = self.speculative_output_stride or 1
        tokens = self.next_token_ids.view(-1, width).tolist()
        lens = self.accept_lens.tolist()
        return [row[:n] for row, n in zip(tokens, lens, strict=True)]


def _relayed(tokens: torch.Tensor, stride: int) -> torch.Tensor:
    """int32[bs * stride]: tokens int[bs, n], zeros behind each request's."""
    count, most = tokens.shape
    if tokens.is_cpu:  # see Committed.of_verified
        room = np.zeros((count, stride), np.int32)
        room[:, :most] = tokens.numpy()
        return torch.from_numpy(room.reshape(-1))
    relay = torch.zeros(count, stride, dtype=torch.int32, device=tokens.device)
    relay[:, :most] = tokens
    return relay.flatten()


def _marks(relaxed: torch.Tensor | None, tokens: torch.Tensor) -> torch.Tensor:
    """bool as `tokens`: `relaxed`, or that none is."""
    return torch.zeros_like(tokens, dtype=torch.bool) if relaxed is None else relaxed
