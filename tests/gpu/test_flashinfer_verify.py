"""On a GPU: FlashInfer under our tree mask, and SGLang in process against itself without drafts.

The kit (docs/gpu.md) does the same at length; this is the part of it that pytest can run.
"""

import itertools
import json
import os
import subprocess
import sys

import pytest

from scripts.gpu_kit.attention_checks import RELATIVE_ERROR, FlashInferVerify, Verify, triton_verify
from scripts.gpu_kit.kit import Kit
from scripts.gpu_kit.lines import FAILED_CASES, KIT_VARIABLE, PASSED
from scripts.gpu_kit.phase_runner import PARTS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("lens", "width"), [([37, 5, 120], 8), ([4000, 900], 16), ([700] * 64, 4)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_tree_mask_through_flashinfer_and_triton_equals_dense_attention(lens, width, head_dim):
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    step = Verify.random(lens, width, 8, 2, head_dim, "cuda")
    kernel = FlashInferVerify(BatchPrefillWithPagedKVCacheWrapper, "cuda")
    kernel.plan(step)
    for got in (kernel.run(step.q, step.k, step.v), triton_verify(step)):
        error, one_wrong_bit = step.errors(got)
        assert error <= RELATIVE_ERROR < one_wrong_bit


@pytest.fixture(scope="module")
def kit(tmp_path_factory) -> Kit:
    """One folder of results for the parts of the phase, which read each other's notes."""
    import torch

    folder = str(tmp_path_factory.mktemp("lossless"))
    return Kit(folder, folder, "1b", 0, False, torch.cuda.get_device_name(0))


@pytest.mark.parametrize("part", PARTS["lossless"])
def test_answers_are_plain_sglangs_up_to_ties(kit, part):
    run = subprocess.run(
        [sys.executable, "-m", "scripts.gpu_kit.part", "lossless", part],
        input="600\n", text=True, capture_output=True, timeout=600,
        env=os.environ | {KIT_VARIABLE: kit.as_json()},
    )  # fmt: skip
    failed = [line for line in kit.lines().read() if line["status"] != PASSED]
    assert run.returncode in (0, FAILED_CASES), run.stderr[-2000:]
    assert not failed, "\n".join(map(json.dumps, itertools.islice(failed, 5)))
