"""The emulated wrappers keep and refuse what FlashInfer's own Python does.

FlashInfer's classes run here without a GPU: their compiled module only records what it is called
with. What reaches the kernel is compared with what the emulation computes from.
"""

from contextlib import nullcontext
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch
from flashinfer import decode, prefill

from scripts.emulation import flashinfer_kernels as kernels
from scripts.emulation import flashinfer_wrappers as emulated

HEADS, KV_HEADS, DIM = 4, 2, 64
CAUSAL, CUSTOM = prefill.MaskMode.CAUSAL.value, prefill.MaskMode.CUSTOM.value


class Unpinned(ModuleType):
    """torch, without pinned memory and devices."""

    cuda = SimpleNamespace(device=lambda _: nullcontext())

    def __getattr__(self, name):
        return getattr(torch, name)

    @staticmethod
    def empty(*args, **kwargs):
        return torch.empty(*args, **{k: v for k, v in kwargs.items() if k != "pin_memory"})


class Recorder:
    """A compiled module: plans nothing, and keeps the arguments of a run."""

    def __init__(self, *args):
        self.compiled_for = args

    def plan(self, *args):
        return "planned"

    def paged_run(self, *args):
        self.run = args


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch):
    torch.manual_seed(0)
    for module in (prefill, decode):
        monkeypatch.setattr(module, "torch", Unpinned("torch"))
        monkeypatch.setattr(module, "device_support_pdl", lambda device: False)
        monkeypatch.setattr(module, "_get_cache_alibi_slopes_buf", lambda *_: None)
    monkeypatch.setattr(decode, "get_batch_decode_module", Recorder)
    monkeypatch.setattr(prefill, "get_batch_prefill_module", lambda backend, *a: Recorder(*a))
    monkeypatch.setattr(
        prefill, "segment_packbits", lambda x, indptr, bitorder: kernels.segment_packbits(x, indptr)
    )


def both(bs=0, masked=True):
    """FlashInfer's wrapper and the emulated one, alike; with `bs`, for graphs of that batch."""
    made = []
    for module in (prefill, emulated):
        buffers = {}
        if bs:
            buffers = {
                "use_cuda_graph": True,
                "qo_indptr_buf": torch.zeros(bs + 1, dtype=torch.int32),
                "paged_kv_indptr_buf": torch.zeros(bs + 1, dtype=torch.int32),
                "paged_kv_indices_buf": torch.zeros(40, dtype=torch.int32),
                "paged_kv_last_page_len_buf": torch.ones(bs, dtype=torch.int32),
            }
        if bs and masked:
            buffers["custom_mask_buf"] = torch.zeros(100, dtype=torch.uint8)
            buffers["mask_indptr_buf"] = torch.zeros(bs + 1, dtype=torch.int32)
        workspace = torch.zeros(1024, dtype=torch.uint8)
        made.append(
            module.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2", **buffers)
        )
    return made


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def plan(wrapper, qo=(0, 3, 5), kv=(0, 11, 16), extra=0, mask=None, **options):
    wrapper.begin_forward(
        int32(*qo), int32(*kv), torch.arange(kv[-1] + extra).int(), int32(*[1] * (len(kv) - 1)),
        HEADS, KV_HEADS, DIM, 1, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
        custom_mask=mask, **options,
    )  # fmt: skip


MASK = torch.arange(43) % 3 > 0


def run(wrapper, rows=5, dtype=torch.bfloat16, **options):
    q = torch.randn(rows, HEADS, DIM).to(dtype)
    cache = torch.randn(40, KV_HEADS, DIM).bfloat16()
    if not isinstance(wrapper, emulated.BatchPrefillWithPagedKVCacheWrapper):
        cache = cache.unsqueeze(1)
    return wrapper.forward(q, (cache, cache), **options)


def buffers_of(wrapper):
    names = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "custom_mask", "mask_indptr")
    return [getattr(wrapper, f"_{name}_buf") for name in names]


def same(theirs, ours):
    return all(
        (a is None and b is None) or torch.equal(a, b) for a, b in zip(theirs, ours, strict=True)
    )


@pytest.mark.parametrize("bs", [0, 2])
@pytest.mark.parametrize("mask", [None, MASK])
def test_a_plan_leaves_the_same_buffers(bs, mask):
    theirs, ours = both(bs)
    for wrapper in (theirs, ours):
        plan(wrapper, extra=7, mask=mask)
    assert same(buffers_of(theirs), buffers_of(ours))


@pytest.mark.parametrize("bs", [0, 2])
def test_a_second_plan_leaves_the_same_of_the_first_behind(bs):
    theirs, ours = both(bs)
    for wrapper in (theirs, ours):
        plan(wrapper, extra=7, mask=MASK)
        plan(wrapper, qo=(0, 1, 2), kv=(0, 4, 9))
    assert same(buffers_of(theirs), buffers_of(ours))


@pytest.mark.parametrize(
    "bs, masked, mask",
    [(0, False, None), (0, False, MASK), (2, False, None), (2, True, None), (2, True, MASK)],
)
def test_a_run_has_the_mask_mode_that_the_emulation_follows(bs, masked, mask):
    theirs, ours = both(bs, masked)
    for wrapper in (theirs, ours):
        plan(wrapper, mask=mask)
        run(wrapper, causal=True, window_left=3, sm_scale=0.5, logits_soft_cap=2.0)
    arguments = theirs._cached_module.run
    assert arguments[12] == (CAUSAL if ours._custom_mask_buf is None else CUSTOM)
    assert arguments[14] == ours._window_left == 3
    assert arguments[22:24] == (ours._logits_soft_cap, ours._sm_scale) == (2.0, 0.5)
    assert same(arguments[6:9], buffers_of(ours)[:3])


@pytest.mark.parametrize("window, cap", [(-1, None), (5, None), (-1, 30.0)])
def test_the_plan_compiles_windows_and_caps_in(window, cap):
    theirs, ours = both()
    for wrapper in (theirs, ours):
        plan(wrapper, window_left=window, logits_soft_cap=cap)
    has_window, has_cap = theirs._cached_module.compiled_for[7:9]
    assert (has_window, has_cap) == (ours._has_window, ours._has_cap)


@pytest.mark.parametrize(
    "bs, masked, wrong",
    [
        (3, True, {}),  # another batch size
        (2, False, {"mask": MASK}),  # no buffer for the mask
        (2, True, {"extra": 30}),  # more indices than there is room for
        (2, True, {"qo": (0, 3, 6)}),  # more rows than at first
    ],
)
def test_what_flashinfer_refuses_is_refused(bs, masked, wrong):
    for wrapper in both(bs, masked):
        if "qo" in wrong:
            plan(wrapper)
        with pytest.raises(ValueError):
            plan(wrapper, **wrong)


@pytest.mark.parametrize("wrong", [{"rows": 4}, {"dtype": torch.float16}])
def test_a_run_that_flashinfer_refuses_is_refused(wrong):
    for wrapper in both():
        plan(wrapper)
        with pytest.raises(ValueError):
            run(wrapper, **wrong)


def decoders(graph):
    made = []
    for module in (decode, emulated):
        buffers = {
            "use_cuda_graph": True,
            "paged_kv_indptr_buffer": torch.zeros(3, dtype=torch.int32),
            "paged_kv_indices_buffer": torch.zeros(40, dtype=torch.int32),
            "paged_kv_last_page_len_buffer": torch.ones(2, dtype=torch.int32),
        }
        workspace = torch.zeros(1024, dtype=torch.uint8)
        made.append(
            module.BatchDecodeWithPagedKVCacheWrapper(
                workspace, "NHD", backend="fa2", **(buffers if graph else {})
            )
        )
    return made


def decode_plan(wrapper, kv, replan=None, **options):
    """`replan` is the module whose fast_decode_plan plans, None for the wrapper's own plan."""
    begin = wrapper.begin_forward
    if replan is not None:
        begin = partial(replan.fast_decode_plan, wrapper)
    begin(
        int32(*kv), torch.arange(kv[-1]).int() + 3, int32(*[1] * (len(kv) - 1)),
        HEADS, KV_HEADS, DIM, 1, q_data_type=torch.bfloat16, data_type=torch.bfloat16, **options,
    )  # fmt: skip


def pages_of(wrapper):
    names = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
    return [getattr(wrapper, f"_{name}_buf") for name in names]


@pytest.mark.parametrize("graph", [False, True])
def test_a_decode_plan_leaves_the_same_buffers(graph):
    theirs, ours = decoders(graph)
    for kv in ((0, 11, 16), (0, 4, 9)):
        for wrapper in (theirs, ours):
            decode_plan(wrapper, kv)
        assert same(pages_of(theirs), pages_of(ours))


def test_a_fast_decode_plan_writes_no_buffer_of_a_graph():
    theirs, ours = decoders(graph=True)
    for wrapper, module in ((theirs, decode), (ours, emulated)):
        decode_plan(wrapper, (0, 11, 16))
        wrapper._paged_kv_indptr_buf.copy_(int32(0, 4, 9))
        wrapper._paged_kv_indices_buf.copy_(torch.arange(40))
        decode_plan(wrapper, (0, 4, 9), module, global_override_indptr_cpu=int32(0, 4, 9))
        assert wrapper._paged_kv_indices_buf.tolist() == list(range(40))
    assert same(pages_of(theirs), pages_of(ours))


def test_a_decode_plan_of_another_batch_size_is_refused_in_a_graph():
    for wrapper in decoders(graph=True):
        with pytest.raises(ValueError, match="batch size"):
            decode_plan(wrapper, (0, 4, 9, 10))
