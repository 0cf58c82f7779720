"""Short texts that the target reads at the start of a server, before its first request.

Whoever reads empties the pools behind it: `req_to_token_pool.clear()` and
`token_to_kv_pool_allocator.clear()` of the runner.
"""

import hashlib
from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.runtime_context import get_parallel, get_schedule
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.utils import require_mlp_sync


def why_not(runner: Any, tokenizer: Any) -> str:
    """Why the target cannot be asked; empty: it can."""
    if runner.model_config.is_encoder_decoder:
        return "an encoder-decoder target says nothing without its input"
    if not hasattr(tokenizer, "encode"):
        return "there is no tokenizer"
    if get_parallel().pp_size > 1 or require_mlp_sync():
        return "pipeline parallelism and DP attention need other batches"
    return ""


def model_identity(runner: Any) -> dict[str, str]:
    """What tells a model and its weights apart from others, for tables that are kept of it."""
    config = runner.model_config
    return {
        "model": config.model_path,
        "config": hashlib.sha256(config.hf_config.to_json_string().encode()).hexdigest()[:16],
        "weights": weights_hash(runner.model),
    }


class TargetReader:
    """Reads short texts, as SGLang's benchmark/one_batch.py does: a prefill, nothing decoded.

    Args:
        runner: SGLang's ModelRunner, its pools empty.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._shared = _Shared(
            page_size=get_schedule().page_size,
            device=runner.device,
            token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
        )

    def share(self, before: Sequence[int]) -> None:
        """Read what every text begins with once, where its K and V can be shared."""
        if isinstance(self._runner.token_to_kv_pool, MHATokenToKVPool) and (
            self._shared.page_size == 1
        ):
            self._shared.slots = self._read([before])[1]

    def read(self, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        """float[n, vocabulary], of what follows each of these texts."""
        logits, slots = self._read(texts)
        self._runner.token_to_kv_pool_allocator.free(slots)
        return logits

    @torch.no_grad()
    def _read(self, texts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits behind each text, and the KV slots of what was read."""
        runner = self._runner
        runner.req_to_token_pool.clear()
        batch = ScheduleBatch.init_new(
            reqs=[_request(text, len(self._shared.slots)) for text in texts],
            req_to_token_pool=runner.req_to_token_pool,
            token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
            tree_cache=self._shared,
            model_config=runner.model_config,
            enable_overlap=False,
            spec_algorithm=SpeculativeAlgorithm.NONE,
        )
        batch.prepare_for_extend()
        if batch.input_ids is None:
            batch.input_ids = batch.prefill_input_ids_cpu.to(batch.device)
            batch.prefill_input_ids_cpu = None
        forward = ForwardBatch.init_new(batch, runner, return_hidden_states_before_norm=False)
        logits = runner.forward(forward).logits_output.next_token_logits
        return logits, batch.out_cache_loc


def _request(text: Sequence[int], read: int) -> Req:
    """One whose first `read` tokens were read before."""
    req = Req(
        "read-at-start", "", array("q", text), SamplingParams(temperature=0, max_new_tokens=1)
    )
    req.full_untruncated_fill_ids = req.origin_input_ids
    req.logprob_start_len = -1
    req.prefix_len = read
    req.extend_end = len(text)
    return req


class _Shared(SimpleNamespace):
    """As much of a prefix cache as a batch asks for: one prefix, in these slots."""

    slots = torch.empty(0, dtype=torch.int64)

    def prefix_device_indices(self, req: Req) -> torch.Tensor:
        return self.slots

    def supports_swa(self) -> bool:
        return False

    def supports_mamba(self) -> bool:
        return False

    def supports_prefix_sharing(self) -> bool:
        return True

    def evict(self, params: Any) -> None:
        pass

    def maybe_hand_to_session(self, req: Req) -> None:
        pass


def weights_hash(model: torch.nn.Module) -> str:
    """Tells weights apart that were put in the same folder: a few numbers of each parameter."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        # A weight that is not kept (cpu/released_weights.py) has its first numbers beside it.
        numbers = getattr(parameter, "first_numbers", parameter).detach().reshape(-1)
        head = numbers[:64].float().cpu().numpy()
        digest.update(name.encode() + head.tobytes())
    return digest.hexdigest()[:16]
