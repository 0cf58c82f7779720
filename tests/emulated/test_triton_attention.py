"""Verify steps through SGLang's real Triton backend equal dense attention."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from scripts.emulation.verify_cases import Step
from sglang_ext.cuda import windows


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """What the checks find in a process of their own, whose Triton is its interpreter."""
    path = tmp_path_factory.mktemp("triton") / "report.json"
    command = [sys.executable, "-W", "ignore", "-m", "scripts.emulation.triton_checks"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--json", str(path)], check=True, env=environment, timeout=600)
    return json.loads(path.read_text())


def test_every_case_equals_dense_attention(report):
    cases = report["cases"]
    assert max(cases.values()) < 1e-5
    for width in (2, 8, 32):
        for way in ("eager", "graph"):
            for sinks in ("", ", attention sinks"):
                assert f"full attention, width {width}, {way}{sinks}" in cases
    for way in ("eager", "graph"):
        assert f"window 16, width 8, {way}, attention sinks" in cases


def test_kernels_of_indices_and_masks_write_every_entry_right(report):
    kernels = {name: e for name, e in report["cases"].items() if "kernel" in name or "KV" in name}
    assert len(kernels) == 9 and set(kernels.values()) == {0.0}


def test_one_wrong_bit_of_the_mask_is_seen(report):
    assert report["flipped_bit_error"] > 1e-3


def test_sglang_alone_takes_rows_for_positions_within_windows(report):
    assert report["unmended_window_error"] > 0.1


def test_a_plain_decode_step_of_sglang_sees_one_key_less_than_an_extend(report):
    assert report["decode_window_errors"]["16"] < 1e-5
    assert report["decode_window_errors"]["17"] > 0.1


@pytest.mark.parametrize("window", [8, 20, 200])
def test_the_mask_hides_what_lies_before_each_nodes_window(window):
    step = Step.random(np.random.default_rng(0), [5, 8, 9, 20, 70, 31], 8)
    mask = step.mask()
    lens = torch.tensor(step.lens)
    windows.hide_beyond_window(mask, step.positions().view(-1, 8), lens, window)
    for i, part in enumerate(mask.split((8 * (lens + 8)).tolist())):
        seen = step.seen(i, window)
        first = max(step.lens[i] - window, 0)  # a window layer reads no earlier column
        got = part.view(8, -1)[: len(seen), first : seen.shape[1]]
        assert torch.equal(got, seen[:, first:])


def test_a_tree_larger_than_the_window_is_refused():
    step = Step.random(np.random.default_rng(0), [30], 8)
    with pytest.raises(ValueError, match=r"window of 8; .*--speculative-num-draft-tokens 7"):
        windows.hide_beyond_window(
            step.mask(), step.positions().view(-1, 8), torch.tensor(step.lens), 7
        )


def made(**fields):
    """A Triton backend of which only these fields are set."""
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    backend = object.__new__(TritonAttnBackend)
    backend.__dict__.update({"enable_deterministic": False, "extend_attention_fwd": print} | fields)
    return backend


@pytest.mark.parametrize("window", [None, -1, 0])
def test_a_backend_without_windows_stays_as_it_is(window):
    backend = made(sliding_window_size=window)
    before = dict(vars(backend))
    windows.install(backend)
    assert vars(backend) == before


def test_another_backend_than_tritons_stays_as_it_is():
    backend = SimpleNamespace(sliding_window_size=16, extend_attention_fwd=print)
    windows.install(backend)
    assert backend.extend_attention_fwd is print


def test_of_two_backends_in_one_each_is_installed():
    from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend

    both = object.__new__(HybridAttnBackend)
    both.prefill_backend, both.decode_backend = (made(sliding_window_size=16) for _ in range(2))
    windows.install(both)
    assert both.prefill_backend.extend_attention_fwd is not print
    assert both.decode_backend.extend_attention_fwd is not print


def test_installing_twice_is_installing_once():
    backend = made(sliding_window_size=16)
    windows.install(backend)
    assert backend.extend_attention_fwd is not print
    before = dict(vars(backend))
    windows.install(backend)
    assert vars(backend) == before


def test_deterministic_inference_within_windows_is_refused():
    with pytest.raises(ValueError, match="--enable-deterministic-inference"):
        windows.install(made(sliding_window_size=16, enable_deterministic=True))
