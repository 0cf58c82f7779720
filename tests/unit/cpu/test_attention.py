"""The tree backend against dense float64 attention in every mode, and bit by bit across modes."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_ext.cpu import attention

SLOTS, ROWS, WIDTH = 400, 12, 90
TOLERANCE = {"atol": 2e-6, "rtol": 1e-5}


@dataclass
class Pool:
    keys: torch.Tensor
    values: torch.Tensor
    written: list = field(default_factory=list)

    def get_key_buffer(self, layer_id):
        return self.keys

    def get_value_buffer(self, layer_id):
        return self.values

    def set_kv_buffer(self, layer, where, k, v):
        self.written.append(where.loc)
        self.keys[where.loc] = k.view(-1, *self.keys.shape[1:]).to(self.keys.dtype)
        self.values[where.loc] = v.view(-1, *self.values.shape[1:]).to(self.values.dtype)


class World:
    """A pool with scattered slots, a backend over it, and the reference."""

    def __init__(self, generator, heads=6, kv_heads=2, size=16, v_size=16, kept=torch.float32):
        self.heads, self.kv_heads, self.size, self.v_size = heads, kv_heads, size, v_size
        self.generator = generator
        self.pool = Pool(
            self.randn(SLOTS, kv_heads, size).to(kept), self.randn(SLOTS, kv_heads, v_size).to(kept)
        )
        self.table = torch.stack(
            [torch.randperm(SLOTS, generator=generator)[:WIDTH] for _ in range(ROWS)]
        ).int()
        self.backend = attention.TreeAttentionBackend(
            SimpleNamespace(
                req_to_token_pool=SimpleNamespace(req_to_token=self.table),
                token_to_kv_pool=self.pool,
                use_mla_backend=False,
                kv_cache_dtype=kept,
                model=None,
            )
        )

    def randn(self, *shape):
        return torch.randn(*shape, generator=self.generator)

    def layer(self, **settings):
        return SimpleNamespace(
            **{
                "layer_id": 0,
                "tp_q_head_num": self.heads,
                "qk_head_dim": self.size,
                "v_head_dim": self.v_size,
                "scaling": self.size**-0.5,
                "logit_cap": 0.0,
                "sliding_window_size": -1,
                "is_cross_attention": False,
                "attn_type": AttentionType.DECODER,
            }
            | settings
        )

    def run(self, batch, q, layer=None, k=None, v=None):
        self.backend.init_forward_metadata(batch)
        layer = layer or self.layer()
        return self.backend.forward(q, k, v, layer, batch, save_kv_cache=k is not None)

    def reference(self, q, seen, scale=None, cap=0.0):
        """Dense attention in float64; seen: the slots of each token, in order."""
        out = []
        group = self.heads // self.kv_heads
        for row, slots in zip(q.view(len(seen), self.heads, self.size).double(), seen, strict=True):
            k = self.pool.keys[slots].double().repeat_interleave(group, 1)
            v = self.pool.values[slots].double().repeat_interleave(group, 1)
            scores = torch.einsum("hd,nhd->hn", row, k) * (scale or self.size**-0.5)
            scores = cap * torch.tanh(scores / cap) if cap else scores
            out.append(torch.einsum("hn,nhd->hd", scores.softmax(-1), v).flatten())
        return torch.stack(out).float()


def batch_of(mode, rows, seq_lens, **more):
    rows, seq_lens = torch.tensor(rows), torch.tensor(seq_lens)
    fields = {"encoder_lens": None, "spec_info": None, "encoder_out_cache_loc": None}
    return SimpleNamespace(
        forward_mode=mode, req_pool_indices=rows, seq_lens=seq_lens, batch_size=len(rows),
        **(fields | more),
    )  # fmt: skip


def extend_batch(rows, prefix, new, **more):
    return batch_of(
        ForwardMode.EXTEND,
        rows,
        [p + n for p, n in zip(prefix, new, strict=True)],
        extend_prefix_lens=torch.tensor(prefix, dtype=torch.int32),
        extend_seq_lens=torch.tensor(new, dtype=torch.int32),
        **more,
    )


def verify_batch(rows, seq_lens, mask, out_cache_loc, **more):
    n = mask.shape[-1]
    return batch_of(
        ForwardMode.TARGET_VERIFY,
        rows,
        seq_lens,
        out_cache_loc=out_cache_loc,
        spec_info=SimpleNamespace(draft_token_num=n, custom_mask=mask.flatten()),
        **more,
    )


def tree_mask(parents):
    mask = torch.eye(len(parents), dtype=torch.bool)
    for i, parent in enumerate(parents):
        if parent >= 0:
            mask[i] |= mask[parent]
    return mask


TREES = [[-1, 0, 0, 1, 1, 2], [-1, 0, 1, 2, 3, 4], [-1, 0, 0, 0, 3, 3]]


@pytest.fixture(
    params=[
        (6, 2, 16, 16),
        (4, 4, 64, 64),
        (9, 3, 64, 32),
        (2, 1, 20, 20),
        (9, 3, 64, 32, torch.bfloat16),
        (2, 1, 20, 20, torch.bfloat16),
    ],
    ids=lambda shape: "-".join(map(str, shape)),
)
def world(request, generator):
    return World(generator, *request.param)


@pytest.mark.parametrize("lens", [[1], [5, 33, 90, 2], [64] * 12])
def test_decode(world, lens):
    rows = list(range(len(lens)))[::-1]
    q = world.randn(len(lens), world.heads * world.size)
    out = world.run(batch_of(ForwardMode.DECODE, rows, lens), q)
    seen = [world.table[r, :n] for r, n in zip(rows, lens, strict=True)]
    torch.testing.assert_close(out, world.reference(q, seen), **TOLERANCE)


@pytest.mark.parametrize("prefix, new", [([0], [40]), ([0, 17, 60, 3], [1, 20, 30, 50])])
def test_extend_after_cached_prefixes(world, prefix, new):
    rows = [4, 7, 2, 9][: len(new)]
    q = world.randn(sum(new), world.heads * world.size)
    out = world.run(extend_batch(rows, prefix, new), q)
    seen = [
        world.table[r, : p + i + 1]
        for r, p, n in zip(rows, prefix, new, strict=True)
        for i in range(n)
    ]
    torch.testing.assert_close(out, world.reference(q, seen), **TOLERANCE)


def test_verify_sees_prefix_ancestors_and_itself(world):
    rows, lens = [5, 1, 8], [30, 1, 84]
    mask = torch.stack([tree_mask(t) for t in TREES])
    slots = torch.randperm(SLOTS, generator=world.generator)[:18]
    q = world.randn(18, world.heads * world.size)
    out = world.run(verify_batch(rows, lens, mask, slots), q)
    seen = [
        torch.cat([world.table[r, :n], slots.view(3, 6)[b][mask[b, i]]])
        for b, (r, n) in enumerate(zip(rows, lens, strict=True))
        for i in range(6)
    ]
    torch.testing.assert_close(out, world.reference(q, seen), **TOLERANCE)

    chain = verify_batch(rows, lens, mask, slots)
    chain.spec_info.custom_mask = None
    chained = verify_batch(rows, lens, torch.tril(torch.ones(3, 6, 6, dtype=torch.bool)), slots)
    assert torch.equal(world.run(chain, q), world.run(chained, q))


def test_new_keys_and_values_are_written_before_they_are_read(world):
    rows, lens = [3, 6], [20, 41]
    where = torch.stack([world.table[3, 19], world.table[6, 40]]).long()
    # Strided, as a split of the fused projection is.
    wide = world.randn(2, world.kv_heads * (world.size + world.v_size))
    k, v = wide.split([world.kv_heads * world.size, world.kv_heads * world.v_size], -1)
    q = world.randn(2, world.heads * world.size)
    batch = batch_of(ForwardMode.DECODE, rows, lens, out_cache_loc=where)
    out = world.run(batch, q, k=k, v=v)
    keys, values = world.pool.keys[where], world.pool.values[where]
    assert torch.equal(keys, k.reshape(2, world.kv_heads, world.size).to(keys.dtype))
    assert torch.equal(values, v.reshape(2, world.kv_heads, world.v_size).to(values.dtype))
    seen = [world.table[3, :20], world.table[6, :41]]
    torch.testing.assert_close(out, world.reference(q, seen), **TOLERANCE)


def test_encoder_decoder(world):
    """Whisper: a row holds the encoder's slots first; cross-attention sees them all, unmasked."""
    rows, prefix, new = [2, 10], [0, 5], [4, 3]
    encoder = torch.tensor([30, 25])
    batch = extend_batch(rows, prefix, new, encoder_lens=encoder)
    q = world.randn(7, world.heads * world.size)
    cross = world.run(batch, q, world.layer(is_cross_attention=True))
    seen = [
        world.table[r, :e] for r, e, n in zip(rows, encoder, new, strict=True) for _ in range(n)
    ]
    torch.testing.assert_close(cross, world.reference(q, seen), **TOLERANCE)
    own = world.run(batch, q)
    seen = [
        world.table[r, e : e + p + i + 1]
        for r, e, p, n in zip(rows, encoder, prefix, new, strict=True)
        for i in range(n)
    ]
    torch.testing.assert_close(own, world.reference(q, seen), **TOLERANCE)

    decode = batch_of(ForwardMode.DECODE, rows, [9, 8], encoder_lens=encoder)
    q = world.randn(2, world.heads * world.size)
    seen = [world.table[2, 30:39], world.table[10, 25:33]]
    torch.testing.assert_close(world.run(decode, q), world.reference(q, seen), **TOLERANCE)
    cross = world.run(decode, q, world.layer(is_cross_attention=True))
    seen = [world.table[2, :30], world.table[10, :25]]
    torch.testing.assert_close(cross, world.reference(q, seen), **TOLERANCE)

    mask = torch.stack([tree_mask(TREES[0]), tree_mask(TREES[1])])
    slots = torch.arange(100, 112)
    verify = verify_batch(rows, [9, 8], mask, slots, encoder_lens=encoder)
    q = world.randn(12, world.heads * world.size)
    seen = [
        torch.cat([world.table[r, e : e + n], slots.view(2, 6)[b][mask[b, i]]])
        for b, (r, e, n) in enumerate(zip(rows, [30, 25], [9, 8], strict=True))
        for i in range(6)
    ]
    torch.testing.assert_close(world.run(verify, q), world.reference(q, seen), **TOLERANCE)
    cross = world.run(verify, q, world.layer(is_cross_attention=True))
    seen = [world.table[2, :30]] * 6 + [world.table[10, :25]] * 6
    torch.testing.assert_close(cross, world.reference(q, seen), **TOLERANCE)


def test_window_soft_cap_and_bidirectional_layers(world):
    q = world.randn(30, world.heads * world.size)
    batch = extend_batch([1], [12], [30])
    out = world.run(batch, q, world.layer(sliding_window_size=7))
    seen = [world.table[1, max(0, 12 + i - 7) : 12 + i + 1] for i in range(30)]
    torch.testing.assert_close(out, world.reference(q, seen), **TOLERANCE)

    out = world.run(batch, q, world.layer(logit_cap=2.0, scaling=0.7))
    seen = [world.table[1, : 12 + i + 1] for i in range(30)]
    torch.testing.assert_close(out, world.reference(q, seen, 0.7, 2.0), **TOLERANCE)

    out = world.run(batch, q, world.layer(attn_type=AttentionType.ENCODER_ONLY))
    torch.testing.assert_close(out, world.reference(q, [world.table[1, :42]] * 30), **TOLERANCE)

    mask = tree_mask([-1, 0, 1, 2, 3])[None]
    q = world.randn(5, world.heads * world.size)
    slots = torch.arange(200, 205)
    verify = verify_batch([1], [20], mask, slots)
    out = world.run(verify, q, world.layer(sliding_window_size=2))
    row = torch.cat([world.table[1, :20], slots])
    seen = [row[20 + i - 2 : 20 + i + 1] for i in range(5)]
    torch.testing.assert_close(out, world.reference(q, seen), **TOLERANCE)


def test_a_token_gets_the_same_bits_from_every_mode_and_batch(world, monkeypatch):
    """What makes greedy speculation equal plain decoding token for token."""
    row, length = 6, 80
    path = [-1, 0, 1, 2, 3, 4]
    q = world.randn(6, world.heads * world.size)
    slots = world.table[row, length : length + 6].long()  # the tree's nodes, then the sequence
    decoded = torch.cat(
        [
            world.run(batch_of(ForwardMode.DECODE, [row], [length + i + 1]), q[i : i + 1])
            for i in range(6)
        ]
    )
    extended = world.run(extend_batch([row], [length], [6]), q)
    verified = world.run(verify_batch([row], [length], tree_mask(path)[None], slots), q)
    assert torch.equal(decoded, extended)
    assert torch.equal(decoded, verified)

    # Node 5 of another tree hangs below nodes 0 and 3, among others' rows and many threads.
    tree = torch.stack([tree_mask(t) for t in (TREES[0], [-1, 0, 0, 0, 1, 3], TREES[2])])
    other = torch.randperm(SLOTS, generator=world.generator)[:18]
    alike = other.view(3, 6)[1]
    alike[[0, 3, 5]] = slots[:3]
    queries = world.randn(18, world.heads * world.size)
    queries.view(3, 6, -1)[1, [0, 3, 5]] = q[:3]
    batch = verify_batch([2, row, 4], [70, length, 83], tree, other)
    monkeypatch.setattr(attention, "_PARALLEL_FROM", 0)
    for threads in (1, 2, 3):
        world.backend._threads = threads
        mixed = world.run(batch, queries).view(3, 6, -1)[1, [0, 3, 5]]
        assert torch.equal(mixed, decoded[:3])
    # Of one request there are fewer tasks than threads, or one to share.
    alone = verify_batch([row], [length], tree_mask(path)[None], slots)
    for threads in (1, 2, 3, 4, 5, 7):
        world.backend._threads = threads
        assert torch.equal(world.run(alone, q), decoded)


def test_threads_that_sleep_are_woken_for_more_work_only(world, monkeypatch):
    world.backend._threads = 2
    monkeypatch.setattr(attention, "is_crowded", lambda: False)  # this machine may be
    assert [world.backend._threads_for(pairs) for pairs in (999, 1_000)] == [1, 2]
    monkeypatch.setattr(attention, "is_crowded", lambda: True)
    assert [world.backend._threads_for(pairs) for pairs in (9_999, 10_000)] == [1, 2]


def test_refusals():
    def runner(**settings):
        pools = {"req_to_token_pool": None, "token_to_kv_pool": None}
        return SimpleNamespace(
            **(pools | {"use_mla_backend": False, "kv_cache_dtype": torch.float32} | settings)
        )

    with pytest.raises(ValueError, match="torch_native"):
        attention.TreeAttentionBackend(runner(use_mla_backend=True))
    with pytest.raises(ValueError, match="--dtype float32"):
        attention.TreeAttentionBackend(runner(kv_cache_dtype=torch.float16))
    batch = verify_batch([0], [4], torch.ones(1, 3, 3, dtype=torch.bool), torch.arange(3))
    batch.spec_info.custom_mask = torch.ones(3 * 7, dtype=torch.bool)
    with pytest.raises(ValueError, match="expected the tree part only, batch"):
        attention.verify_slots(batch)


def test_a_token_that_sees_nothing_gets_zeros(world):
    batch = batch_of(ForwardMode.DECODE, [0, 1], [3, 4], encoder_lens=torch.tensor([0, 5]))
    q = world.randn(2, world.heads * world.size)
    out = world.run(batch, q, world.layer(is_cross_attention=True))
    assert (out[0] == 0).all()
    torch.testing.assert_close(out[1:], world.reference(q[1:], [world.table[1, :5]]), **TOLERANCE)


def test_scores_far_apart_do_not_overflow(world):
    q = world.randn(3, world.heads * world.size) * 300
    out = world.run(batch_of(ForwardMode.DECODE, [0, 1, 2], [90, 50, 7]), q)
    seen = [world.table[0, :90], world.table[1, :50], world.table[2, :7]]
    assert np.isfinite(out.numpy()).all()
    torch.testing.assert_close(out, world.reference(q, seen), atol=2e-4, rtol=1e-3)


def test_register_adds_the_choice():
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    attention.register()
    assert attention.TREE_ATTENTION_BACKEND in ATTENTION_BACKEND_CHOICES
    assert ATTENTION_BACKENDS["tree_cpu"] is attention.TreeAttentionBackend
