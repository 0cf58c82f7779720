"""The attention backend `tree_cpu`: SGLang's attention on CPUs, tree-masked verification included.

`init_forward_metadata` works out once per forward which cache slots every query token sees; each
layer is then one call of `attention_kernel.attend`.
"""

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from sglang_ext.cpu.attention_kernel import attend, seen_of_trees
from sglang_ext.cpu.fused_layers import fuse_layers
from sglang_ext.cpu.heap_trim import give_back
from sglang_ext.cpu.shared_cores import is_crowded, watch_cores
from sglang_ext.whisper.cross_attention import FrameReader

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

TREE_ATTENTION_BACKEND = "tree_cpu"
# What NumPy, which has no bfloat16, takes its bits for.
_KV_KINDS = {torch.float32: np.float32, torch.bfloat16: np.uint16}
# Query-key pairs (over all heads) below which waking other threads costs more than it saves: a pair
# takes 4 to 15 ns, and threads that have just computed a layer's product are still awake.
_PARALLEL_FROM = 1_000
# And where others want the cores: those threads sleep.
_PARALLEL_FROM_IN_A_CROWD = 10_000


@dataclass(frozen=True)
class VisibleSlots:
    """Which cache slots each of T query tokens sees; all arrays int64.

    Token t sees `count[t]` entries of row `row[t]` of req_to_token from column `start[t]` on, then
    `extra[extra_start[t]:][:extra_count[t]]`.
    """

    row: np.ndarray
    start: np.ndarray
    count: np.ndarray
    extra: np.ndarray
    extra_start: np.ndarray
    extra_count: np.ndarray

    @functools.cached_property
    def pairs(self) -> int:
        """Query-key pairs of one head."""
        return int(self.count.sum() + self.extra_count.sum())

    @classmethod
    def of_rows(cls, row: np.ndarray, start: np.ndarray, count: np.ndarray) -> "VisibleSlots":
        nothing = np.zeros(len(row), np.int64)
        return cls(row, start, count, np.zeros(1, np.int64), nothing, nothing)

    def within(self, window: int) -> "VisibleSlots":
        """Slots of the same tokens where each sees itself and the `window` tokens before it."""
        extra_count = np.minimum(self.extra_count, window + 1)
        count = np.minimum(self.count, window + 1 - extra_count)
        return VisibleSlots(
            self.row,
            self.start + self.count - count,
            count,
            self.extra,
            self.extra_start + self.extra_count - extra_count,
            extra_count,
        )


def decode_slots(batch: "ForwardBatch") -> VisibleSlots:
    """One new token per request, which sees its whole sequence (its own slot is in the row)."""
    rows = _int64(batch.req_pool_indices)
    return VisibleSlots.of_rows(rows, _encoder_lens(batch), _int64(batch.seq_lens))


def extend_slots(batch: "ForwardBatch", causal: bool) -> VisibleSlots:
    """The new tokens of a prefill (or of a chunk, or after a cached prefix)."""
    new, prefix = _int64(batch.extend_seq_lens), _int64(batch.extend_prefix_lens)
    rows = np.repeat(_int64(batch.req_pool_indices), new)
    starts = np.repeat(_encoder_lens(batch), new)
    if not causal:
        return VisibleSlots.of_rows(rows, starts, np.repeat(prefix + new, new))
    first = np.cumsum(new) - new
    counts = np.arange(len(rows)) + np.repeat(prefix + 1 - first, new)
    return VisibleSlots.of_rows(rows, starts, counts)


def verify_slots(batch: "ForwardBatch") -> VisibleSlots:
    """The nodes of draft trees: each sees its request's sequence, its ancestors and itself.

    Reads `spec_info.draft_token_num` (n) and `spec_info.custom_mask`: bool [bs * n * n], row =
    query node, column = node it sees, parents before their children (None: a chain). Where
    `spec_info.nodes` is set (int64 [T], indices into bs * n, ascending), only these nodes are in
    the forward pass; every node that they see must be among them.

    Raises:
        ValueError: if the mask has another size (a full mask, say, as GPU backends take).
    """
    bs, n = batch.batch_size, int(batch.spec_info.draft_token_num)
    mask = batch.spec_info.custom_mask
    if mask is None:
        tree = np.tile(np.tri(n, dtype=bool), (bs, 1))
    elif mask.numel() == bs * n * n:
        tree = mask.numpy().astype(bool, copy=False).reshape(bs * n, n)
    else:
        raise ValueError(
            f"tree_cpu: custom_mask has {mask.numel()} entries; expected the tree part only, "
            f"batch * nodes * nodes = {bs} * {n} * {n} = {bs * n * n}."
        )
    nodes = getattr(batch.spec_info, "nodes", None)
    if nodes is None:
        nodes = np.arange(bs * n)
    request = nodes // n
    return VisibleSlots(
        _int64(batch.req_pool_indices)[request],
        _encoder_lens(batch)[request],
        _int64(batch.seq_lens)[request],
        *seen_of_trees(tree, nodes, _int64(batch.out_cache_loc)),
    )


def encoder_slots(batch: "ForwardBatch", rows: np.ndarray) -> VisibleSlots:
    """Cross-attention: every query token sees its request's encoder part, at the row's start."""
    lens = np.zeros(int(batch.req_pool_indices.max()) + 1, np.int64)
    lens[_int64(batch.req_pool_indices)] = _encoder_lens(batch)
    return VisibleSlots.of_rows(rows, np.zeros(len(rows), np.int64), lens[rows])


class TreeAttentionBackend(AttentionBackend):
    """Attention on CPUs for decoder-only and encoder-decoder models, fp32, with draft trees.

    Attributes:
        kv_like: an array of the KV cache's dtype, as the kernels know it.
        reader: takes in the cross-attention of the passes that are run; None: nobody asks.

    Raises:
        ValueError: for models that it cannot serve, when the server starts.
    """

    def __init__(self, runner: "ModelRunner") -> None:
        super().__init__()
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        if runner.use_mla_backend:
            raise ValueError(
                f"--attention-backend {TREE_ATTENTION_BACKEND} cannot serve models with multi-head "
                "latent attention (MLA); use --attention-backend torch_native."
            )
        if isinstance(self.token_to_kv_pool, SWAKVPool):
            raise ValueError(
                f"--attention-backend {TREE_ATTENTION_BACKEND} needs one KV pool for all layers; "
                "add --disable-hybrid-swa-memory."
            )
        if runner.kv_cache_dtype not in _KV_KINDS:
            raise ValueError(
                f"--attention-backend {TREE_ATTENTION_BACKEND} keeps its KV cache in float32 or "
                f"bfloat16, not {runner.kv_cache_dtype}; use --dtype float32 and --kv-cache-dtype "
                "auto or bf16."
            )
        self.kv_like = np.empty((0, 0, 0), _KV_KINDS[runner.kv_cache_dtype])
        self._threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
        self.reader: FrameReader | None = None
        self._slots: VisibleSlots | None = None
        self._variants: dict[str | int, VisibleSlots] = {}
        warm_up(self.kv_like)
        fuse_layers(runner.model, self)
        start_watching_cores()
        give_back()  # what was only needed to load the model

    def init_forward_metadata(self, forward_batch: "ForwardBatch") -> None:
        self._variants = {}
        mode = forward_batch.forward_mode
        if mode.is_idle():
            self._slots = None
        elif mode.is_decode():
            self._slots = decode_slots(forward_batch)
        elif mode.is_target_verify():
            self._slots = verify_slots(forward_batch)
        else:
            self._slots = extend_slots(forward_batch, causal=True)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: "RadixAttention",
        forward_batch: "ForwardBatch",
        save_kv_cache: bool = True,
        **kwargs: object,
    ) -> torch.Tensor:
        """q [T, H * D], k and v [T', KH * D] (None: already cached) -> [T, H * DV], float32."""
        pool = self.token_to_kv_pool
        if save_kv_cache and k is not None and v is not None:
            cross = layer.is_cross_attention
            written = forward_batch.encoder_out_cache_loc if cross else forward_batch.out_cache_loc
            pool.set_kv_buffer(layer, KVWriteLoc(written, None), k, v)

        slots = self._slots_for(layer, forward_batch)
        tokens = len(slots.row)
        query = q.reshape(tokens, layer.tp_q_head_num, layer.qk_head_dim).contiguous()
        out = q.new_empty(tokens, layer.tp_q_head_num, layer.v_head_dim)
        keys, values = self.layer_pool(layer.layer_id)
        attend(
            query.numpy(), _rows(keys), _rows(values), out.numpy(),
            *self.attention_arguments(layer, forward_batch),
        )  # fmt: skip
        if self.reader is not None and layer.is_cross_attention:
            self.reader.read(
                layer.layer_id,
                query,
                pool.get_key_buffer(layer.layer_id),
                self.req_to_token_pool.req_to_token,
                torch.from_numpy(slots.row),
                layer.scaling,
            )
        return out.view(tokens, -1)

    # Decode, extend and verify differ in the visible slots only.
    forward_extend = forward_decode

    def layer_pool(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values in the KV cache, [slots, KH, D] and [slots, KH, DV]."""
        pool = self.token_to_kv_pool
        return pool.get_key_buffer(layer_id), pool.get_value_buffer(layer_id)

    def kept_pools(self) -> object | None:
        """What stays the same object while `layer_pool` gives the same; None: it is to be asked."""
        pool = self.token_to_kv_pool
        if type(pool) is not MHATokenToKVPool or pool.layer_transfer_counter is not None:
            return None
        return pool.k_buffer

    def attention_arguments(
        self, layer: "RadixAttention", batch: "ForwardBatch"
    ) -> tuple[Any, ...]:
        """What `attend` takes behind its output: the same for layers that are alike."""
        slots = self._slots_for(layer, batch)
        return (
            self.req_to_token_pool.req_to_token.numpy(),
            slots.row,
            slots.start,
            slots.count,
            slots.extra,
            slots.extra_start,
            slots.extra_count,
            np.float32(layer.scaling),
            np.float32(layer.logit_cap or 0.0),
            self._threads_for(slots.pairs * layer.tp_q_head_num),
        )

    def _threads_for(self, pairs: int) -> int:
        enough = _PARALLEL_FROM_IN_A_CROWD if is_crowded() else _PARALLEL_FROM
        return self._threads if pairs >= enough else 1

    def tokens_of(self, layer: "RadixAttention", batch: "ForwardBatch") -> int:
        """How many query tokens a pass has; -1: it is none of requests."""
        return -1 if self._slots is None else len(self._slots_for(layer, batch).row)

    def support_triton(self) -> bool:
        return False

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def _slots_for(self, layer: "RadixAttention", batch: "ForwardBatch") -> VisibleSlots:
        assert self._slots is not None, "init_forward_metadata has not run"
        if layer.is_cross_attention:
            if "cross" not in self._variants:
                self._variants["cross"] = encoder_slots(batch, self._slots.row)
            return self._variants["cross"]
        if layer.attn_type == AttentionType.ENCODER_ONLY:
            if "encoder" not in self._variants:
                self._variants["encoder"] = extend_slots(batch, causal=False)
            return self._variants["encoder"]
        window = layer.sliding_window_size
        if window is None or window < 0:
            return self._slots
        if window not in self._variants:
            self._variants[window] = self._slots.within(window)
        return self._variants[window]


# One watch for the process, however many backends it makes.
start_watching_cores = functools.cache(watch_cores)


def warm_up(kv_like: np.ndarray) -> None:
    """Compile the kernels (or load them from numba's cache), so that no request waits for them."""
    q, k = np.zeros((1, 1, 8), np.float32), np.zeros((1, 1, 8), kv_like.dtype)
    one, zero = np.ones(1, np.int64), np.zeros(1, np.int64)
    table = np.zeros((1, 1), np.int32)
    unit = np.float32(1)
    attend(q, k, k, q.copy(), table, zero, zero, one, zero, zero, zero, unit, unit, 2)


def register() -> None:
    """Make `--attention-backend tree_cpu` known to SGLang; once in every process."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.server_args import add_attention_backend_choices

    add_attention_backend_choices([TREE_ATTENTION_BACKEND])
    register_attention_backend(TREE_ATTENTION_BACKEND)(TreeAttentionBackend)


def _encoder_lens(batch: "ForwardBatch") -> np.ndarray:
    if batch.encoder_lens is None:
        return np.zeros(batch.batch_size, np.int64)
    return _int64(batch.encoder_lens)


def _int64(tensor: torch.Tensor) -> np.ndarray:
    return tensor.numpy().astype(np.int64, copy=False)


def _rows(buffer: torch.Tensor) -> np.ndarray:
    """A layer's keys or values as the kernels take them."""
    return buffer.view(torch.uint16).numpy() if buffer.dtype == torch.bfloat16 else buffer.numpy()
