"""What an attention backend of SGLang works on, in a process without a server: a pool and batches.

Model runner, pool and batch are reduced to the fields that the backends read. The verify input is
SGLang's NgramVerifyInput with the product's mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from scripts.emulation.verify_cases import Step, dense, worst

HEADS, KV_HEADS, DIM = 4, 2, 32
CONTEXT, ROWS, SLOTS = 256, 24, 6000
SCALE = DIM**-0.5
DTYPE = torch.float32


class Pool:
    """The parts of SGLang's MHATokenToKVPool that backends use; one layer."""

    start_layer = 0

    def __init__(self) -> None:
        self.k = torch.randn(SLOTS, KV_HEADS, DIM)
        self.v = torch.randn(SLOTS, KV_HEADS, DIM)

    def get_kv_cache_quant_method(self) -> SimpleNamespace:
        access = SimpleNamespace(kind=None, scale_recipe=None)
        return SimpleNamespace(
            resolve_attention_access=lambda *_: access, needs_global_scale=lambda: False
        )

    def get_kv_buffer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.k, self.v

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        return self.k

    def get_value_buffer(self, layer: int) -> torch.Tensor:
        return self.v

    def set_kv_buffer(
        self, layer: Any, where: Any, k: torch.Tensor, v: torch.Tensor, *scales: Any
    ) -> None:
        self.k[where.loc], self.v[where.loc] = k, v


@dataclass
class Bench:
    """A backend and what its batches live in.

    Attributes:
        req_to_token: int32[ROWS, CONTEXT], row 0 for padded lanes.
    """

    backend: Any
    pool: Pool
    req_to_token: torch.Tensor


@dataclass
class Requests:
    """A batch's requests in the pool, and their keys and values in the order of positions.

    Attributes:
        rows: int64[bs], their rows of req_to_token.
        lens, encoder_lens: decoder tokens before the step and encoder tokens in front of them.
        k, v: of each request [encoder + len + new, KV_HEADS, DIM].
        new_slots: int64[bs * new], where the step's own tokens are stored.
    """

    rows: torch.Tensor
    lens: list[int]
    encoder_lens: list[int]
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    new_slots: torch.Tensor

    @classmethod
    def stored(
        cls, bench: Bench, lens: Sequence[int], new: int, encoder_lens: Sequence[int] = ()
    ) -> "Requests":
        """Requests with `new` tokens each behind their `lens`, at random slots of the pool."""
        encoder_lens = list(encoder_lens) or [0] * len(lens)
        free = torch.randperm(SLOTS - 1) + 1
        rows = torch.randperm(ROWS - 1)[: len(lens)] + 1
        bench.req_to_token.random_(1, SLOTS)  # what is not a request's own is somebody else's
        keys, values, new_slots, at = [], [], [], 0
        for row, length, encoder in zip(rows, lens, encoder_lens, strict=True):
            slots = free[at : at + encoder + length + new]
            at += len(slots)
            bench.req_to_token[row, : len(slots)] = slots.int()
            keys.append(bench.pool.k[slots].clone())
            values.append(bench.pool.v[slots].clone())
            new_slots.append(slots[encoder + length :])
        return cls(rows, list(lens), encoder_lens, keys, values, torch.cat(new_slots))

    def decoder(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of request i's decoder tokens."""
        return self.k[i][self.encoder_lens[i] :], self.v[i][self.encoder_lens[i] :]

    def encoder(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of request i's encoder tokens."""
        return self.k[i][: self.encoder_lens[i]], self.v[i][: self.encoder_lens[i]]


def model_runner(
    pool: Pool, window: int | None, encoder_decoder: bool = False, **fields: Any
) -> SimpleNamespace:
    """What a backend reads of a ModelRunner, with SGLang's KVIndexTranslator."""
    from sglang.srt.configs.model_config import AttentionArch
    from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator

    req_to_token = torch.zeros(ROWS, CONTEXT, dtype=torch.int32)
    allocator = SimpleNamespace(get_kvcache=lambda: pool)
    config = SimpleNamespace(
        attention_arch=AttentionArch.MHA,
        num_attention_heads=HEADS,
        get_num_kv_heads=lambda *_: KV_HEADS,
        get_max_num_attention_heads=lambda: HEADS,
        head_dim=DIM,
        v_head_dim=DIM,
        swa_v_head_dim=DIM,
        context_len=CONTEXT,
        is_multimodal=encoder_decoder,  # as Whisper is
        is_encoder_decoder=encoder_decoder,
        hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]),
    )
    return SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=req_to_token, size=ROWS),
        token_to_kv_pool=pool,
        kv_index_translator=KVIndexTranslator(
            req_to_token=req_to_token,
            token_to_kv_pool_allocator=allocator,
            token_to_kv_pool=pool,
            page_size=1,
            device="cpu",
        ),
        token_to_kv_pool_allocator=allocator,
        kv_cache_dtype=DTYPE,
        dtype=DTYPE,
        model_config=config,
        page_size=1,
        sliding_window_size=window,
        device="cpu",
        is_draft_worker=False,
        **fields,
    )


def layer(cross: bool = False, window: int = -1) -> SimpleNamespace:
    """What a backend reads of a RadixAttention layer."""
    return SimpleNamespace(
        layer_id=0,
        tp_q_head_num=HEADS,
        tp_k_head_num=KV_HEADS,
        tp_v_head_num=KV_HEADS,
        head_dim=DIM,
        qk_head_dim=DIM,
        v_head_dim=DIM,
        scaling=SCALE,
        logit_cap=0.0,
        logit_capping_method="tanh",
        xai_temperature_len=-1,
        is_cross_attention=cross,
        attn_type=None,
        sliding_window_size=window,
        k_scale=None,
        v_scale=None,
        k_scale_float=None,
        v_scale_float=None,
    )


def forward_batch(requests: Requests, mode: Any, lens: Sequence[int], **fields: Any) -> Any:
    """A ForwardBatch's fields; `lens` are the step's seq_lens."""
    has_encoder = any(requests.encoder_lens)
    seq_lens = torch.tensor(lens)
    return SimpleNamespace(
        batch_size=len(lens),
        req_pool_indices=requests.rows,
        seq_lens=seq_lens,
        seq_lens_cpu=seq_lens.clone(),
        seq_lens_sum=sum(lens),
        encoder_lens=torch.tensor(requests.encoder_lens) if has_encoder else None,
        encoder_lens_cpu=requests.encoder_lens if has_encoder else None,
        forward_mode=mode,
        kv_loc_plan=None,
        out_cache_loc=requests.new_slots,
        out_cache_loc_is_physical=True,
        cross_attention_custom_mask=None,
        mha_one_shot=False,
        attn_attend_prefix_cache=False,
        extend_seq_lens_cpu=None,
        **({"spec_info": None} | fields),
    )


def verify_batch(requests: Requests, step: Step) -> Any:
    """The batch of a verify step, its input made as the worker makes it."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.speculative.ngram_info import NgramVerifyInput

    from sglang_ext.cuda.encoder_tokens import keep_encoder_lens

    verify_input = NgramVerifyInput(
        custom_mask=step.mask(), positions=step.positions(), draft_token_num=step.width
    )
    batch = forward_batch(
        requests,
        ForwardMode.TARGET_VERIFY,
        step.lens,
        spec_info=verify_input,
        positions=verify_input.positions,
    )
    keep_encoder_lens(verify_input, batch)
    return batch


class Graph:
    """A captured graph of the backend, without the graph: its fixed buffers and its wrappers.

    As DecodeCudaGraphRunner: a capture plans a dummy batch of `bs` requests; a replay copies the
    live batch into the first lanes and plans again, the lanes behind it as the capture or an
    earlier replay left them where the runner does.

    Args:
        width: nodes per request; 1 for a plain decode graph.
        encoder_len: the encoder tokens of a capture's dummy requests, 0 without an encoder.
    """

    def __init__(self, bench: Bench, bs: int, width: int, encoder_len: int = 0) -> None:
        from sglang.srt.model_executor.forward_batch_info import ForwardMode
        from sglang.srt.speculative.ngram_info import NgramVerifyInput

        self._backend, self._bs, self._width = bench.backend, bs, width
        self._encoder_lens = torch.full((bs,), encoder_len, dtype=torch.int32)
        mode, spec_info = ForwardMode.DECODE, None
        if width > 1:
            mode = ForwardMode.TARGET_VERIFY
            every_bit = torch.ones(bs * width * CONTEXT, dtype=torch.bool)
            spec_info = NgramVerifyInput(
                custom_mask=every_bit, positions=None, draft_token_num=width
            )
        self._backend.init_cuda_graph_state(bs, bs * width)
        dummy = SimpleNamespace(
            batch_size=bs,
            req_pool_indices=torch.zeros(bs, dtype=torch.int64),
            seq_lens=torch.ones(bs, dtype=torch.int64),
            seq_lens_cpu=torch.ones(bs, dtype=torch.int64),
            seq_lens_sum=bs,
            encoder_lens=self._encoder_lens if encoder_len else None,
            forward_mode=mode,
            spec_info=spec_info,
            positions=torch.zeros(bs * width, dtype=torch.int64),
            out_cache_loc=None,
            kv_loc_plan=None,
        )
        self._backend.init_forward_metadata_out_graph(dummy, in_capture=True)
        self._metadata = self._backend.forward_metadata

    def replay(self, live: Any) -> Any:
        """Plan for `live`; what the backend computes next reads the graph's buffers.

        Returns:
            the padded batch that the captured forward sees.
        """
        count = live.batch_size
        padding = torch.ones(self._bs - count, dtype=torch.int64)
        if live.encoder_lens is not None:
            self._encoder_lens[:count] = live.encoder_lens
        view = SimpleNamespace(**vars(live))
        del view.encoder_lens_cpu  # which a replay's view of the batch does not carry
        view.batch_size = self._bs
        view.req_pool_indices = torch.cat([live.req_pool_indices, padding - 1])
        view.seq_lens = torch.cat([live.seq_lens, padding])
        view.seq_lens_cpu = view.seq_lens.clone()
        view.seq_lens_sum = live.seq_lens_sum + len(padding)
        view.encoder_lens = None if live.encoder_lens is None else self._encoder_lens
        self._backend.init_forward_metadata_out_graph(view)
        self._backend.forward_metadata = self._metadata
        unused = torch.zeros(len(padding) * self._width, dtype=torch.int64)
        view.out_cache_loc = torch.cat([live.out_cache_loc, unused])
        return view


def verify_error(
    made: Bench,
    requests: Requests,
    step: Step,
    batch: Any,
    rows: int,
    cross: bool = False,
    window: int = -1,
    sinks: torch.Tensor | None = None,
) -> float:
    """The largest absolute error of one layer's forward over a planned verify step.

    Padding nodes do not count.

    Args:
        rows: nodes of the planned batch, padded lanes included.
        cross: a cross-attention layer, over the encoder's tokens.
        window: a window layer's, -1 for none.
        sinks: float32[HEADS], the layer's attention sinks.
    """
    q = torch.randn(rows, HEADS, DIM)
    kind = layer(cross, window)
    options = {} if sinks is None else {"sinks": sinks}
    got = made.backend.forward_extend(q, None, None, kind, batch, **options).view(-1, HEADS, DIM)
    errors = []
    for i, tree in enumerate(step.trees):
        nodes = slice(i * step.width, i * step.width + len(tree) + 1)
        seen = step.seen(i, window)
        k, v = requests.decoder(i)
        if cross:
            k, v = requests.encoder(i)
            seen = torch.ones(len(seen), len(k), dtype=torch.bool)
        count = seen.shape[1]
        want = dense(q[nodes], k[:count], v[:count], seen, SCALE, sinks)
        errors.append(worst(got[nodes], want))
    return max(errors)
