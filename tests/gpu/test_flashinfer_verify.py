"""On a GPU: FlashInfer under our tree mask, and whole servers against plain SGLang."""

import numpy as np
import pytest
import torch

from sglang_ext.tree import TokenTree, pack
from tests.server.conftest import MODEL, prompts  # noqa: F401  (a fixture)

pytestmark = pytest.mark.gpu


def random_tree(rng: np.random.Generator, nodes: int) -> TokenTree:
    return TokenTree(
        rng.integers(0, 100, nodes),
        np.array([rng.integers(-1, i) for i in range(nodes)], dtype=np.int32),
        np.ones(nodes, dtype=np.float32),
    )


def test_full_mask_through_flashinfer_equals_dense_attention():
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    from sglang_ext.worker import SpeculativeWorker

    rng = np.random.default_rng(0)
    lens, width, heads, kv_heads, dim = [37, 5, 120], 8, 8, 2, 64
    packed = pack([1, 2, 3], [random_tree(rng, n) for n in (7, 3, 0)], width)
    batch = type("Batch", (), {"seq_lens_cpu": torch.tensor(lens)})
    mask = torch.from_numpy(packed.mask).cuda()
    full = SpeculativeWorker._full_mask(batch, mask)

    totals = [n + width for n in lens]
    q = torch.randn(3 * width, heads, dim, dtype=torch.float16, device="cuda")
    cache = torch.randn(sum(totals), 2, 1, kv_heads, dim, dtype=torch.float16, device="cuda")
    indptr = torch.tensor([0, *np.cumsum(totals)], dtype=torch.int32, device="cuda")
    wrapper = BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(128 << 20, dtype=torch.uint8, device="cuda"), "NHD"
    )
    wrapper.plan(
        torch.arange(0, 4, dtype=torch.int32, device="cuda") * width,
        indptr,
        torch.arange(sum(totals), dtype=torch.int32, device="cuda"),
        torch.ones(3, dtype=torch.int32, device="cuda"),
        heads, kv_heads, dim, 1, custom_mask=full,
    )  # fmt: skip
    got = wrapper.run(q, cache)
    start = 0
    for row, total in enumerate(totals):
        k, v = cache[start : start + total, :, 0].float().unbind(1)
        k, v = (x.repeat_interleave(heads // kv_heads, 1).transpose(0, 1) for x in (k, v))
        seen = torch.ones(width, total, dtype=torch.bool, device="cuda")
        seen[:, lens[row] :] = mask[row]
        rows = slice(row * width, (row + 1) * width)
        expected = torch.nn.functional.scaled_dot_product_attention(
            q[rows].float().transpose(0, 1), k, v, attn_mask=seen
        ).transpose(0, 1)
        torch.testing.assert_close(got[rows].float(), expected, atol=5e-3, rtol=5e-3)
        start += total


@pytest.mark.parametrize("flags", [[], ["--disable-cuda-graph"], ["--disable-overlap-schedule"]])
def test_server_answers_as_plain_sglang(flags, prompts):  # noqa: F811
    from scripts.client import generate_all
    from scripts.server import Server

    common = ["--attention-backend", "flashinfer", "--dtype", "float32", *flags]
    ids = [p.input_ids for p in prompts]
    run = {"max_new_tokens": 64, "ignore_eos": True}
    with Server(MODEL, common, name="plain") as server:
        expected = generate_all(server.base_url, ids, **run)
    sssd = ["--speculative-algorithm", "SSSD", "--drafters", "random"]
    with Server(MODEL, [*common, *sssd], name="sssd") as server:
        for drafter in ("sssd", "random"):
            got = generate_all(server.base_url, ids, params={"drafter": drafter}, **run)
            assert [a.token_ids for a in got] == [a.token_ids for a in expected]
