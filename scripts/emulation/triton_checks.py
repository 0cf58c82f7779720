"""Attention through SGLang's real Triton backend against dense attention, in Triton's interpreter.

`python -m scripts.emulation.triton_checks --json FILE`: a process of its own, since Triton takes
its interpreter or not while it is imported.
"""

import argparse
import json
import os
from pathlib import Path

import numpy as np
import torch

from scripts.emulation.attention_bench import (
    DIM,
    HEADS,
    ROWS,
    SCALE,
    Graph,
    Requests,
    forward_batch,
    layer,
    verify_batch,
    verify_error,
)
from scripts.emulation.flashinfer_kernels import KvIndicesLauncher
from scripts.emulation.triton_bench import bench
from scripts.emulation.verify_cases import Step, dense, worst

_LENS = [37, 5, 70]
_PADDED = 4  # requests that the captured graphs have room for
_WIDTH, _WINDOW = 8, 16


def triton_errors(seed: int = 0) -> dict[str, float]:
    """The largest absolute error of each case, values being of size 1; under a minute.

    Returns:
        error by case: verify steps of width 2 to 32 over full attention, within sliding windows,
        with attention sinks, eager and in padded graphs; of index and mask kernels, entries wrong.
    """
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    errors = _index_errors() | _mask_errors(rng)
    for width in (2, _WIDTH, 32):
        errors |= _verify_errors(Step.random(rng, _LENS, width))
    # Shorter than the window, as long, and longer.
    lens = [5, _WINDOW, _WINDOW + 1, 70]
    errors |= _verify_errors(Step.random(rng, lens, _WIDTH), _WINDOW)
    return errors


def flipped_bit_error(seed: int = 0) -> float:
    """The error where one bit of a verify step's mask is wrong: node 3 and the root."""
    torch.manual_seed(seed)
    step = Step.random(np.random.default_rng(seed), _LENS, _WIDTH)
    with bench(_WIDTH) as made:
        requests = Requests.stored(made, step.lens, step.width)
        batch = verify_batch(requests, step)
        batch.spec_info.custom_mask[3 * (_LENS[0] + _WIDTH) + _LENS[0]] ^= True
        made.backend.init_forward_metadata(batch)
        return verify_error(made, requests, step, batch, len(_LENS) * _WIDTH)


def unmended_window_error(seed: int = 0) -> float:
    """How far SGLang's backend is off past a window by itself, without cuda/windows.py."""
    torch.manual_seed(seed)
    step = Step.random(np.random.default_rng(seed), _LENS, _WIDTH)
    with bench(_WIDTH, _WINDOW) as made:
        requests = Requests.stored(made, step.lens, step.width)
        batch = verify_batch(requests, step)
        made.backend.init_forward_metadata(batch)
        rows = len(_LENS) * _WIDTH
        return verify_error(made, requests, step, batch, rows, window=_WINDOW)


def decode_window_errors(seed: int = 0) -> dict[int, float]:
    """A plain decode step's error by the number of keys that its window is taken to have.

    Extends see the window and the token itself; SGLang's Triton decode counts the token as one of
    the window (update_sliding_window_buffer), and so sees one key less.
    """
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    torch.manual_seed(seed)
    errors = {}
    with bench(_WIDTH, _WINDOW) as made:
        requests = Requests.stored(made, [40, 30], 1)
        batch = forward_batch(requests, ForwardMode.DECODE, [41, 31])
        made.backend.init_forward_metadata(batch)
        q = torch.randn(2, HEADS, DIM)
        k, v = torch.zeros(2, 2, 2, DIM)  # in the pool already, and not stored again
        got = made.backend.forward_decode(q, k, v, layer(window=_WINDOW), batch, False)
        got = got.view(2, HEADS, DIM)
        for keys in (_WINDOW, _WINDOW + 1):
            seen = torch.ones(1, keys, dtype=torch.bool)
            errors[keys] = max(
                worst(
                    got[i : i + 1],
                    dense(q[i : i + 1], requests.k[i][-keys:], requests.v[i][-keys:], seen, SCALE),
                )
                for i in range(2)
            )
    return errors


def _verify_errors(step: Step, window: int | None = None) -> dict[str, float]:
    from sglang_ext.cuda import windows

    errors = {}
    with bench(step.width, window) as made:
        windows.install(made.backend)
        graph = Graph(made, _PADDED, step.width)
        requests = Requests.stored(made, step.lens, step.width)
        for way in ("eager", "graph"):
            batch = verify_batch(requests, step)
            if way == "graph":
                batch = graph.replay(batch)
            else:
                made.backend.init_forward_metadata(batch)
            rows = len(batch.seq_lens) * step.width
            for reach in (-1, window) if window else (-1,):
                for sinks in (None, torch.randn(HEADS)):
                    kind = "full attention" if reach < 0 else f"window {reach}"
                    if window and reach < 0:
                        kind = "full attention of a target with windows"
                    case = f"{kind}, width {step.width}, {way}" + (
                        "" if sinks is None else ", attention sinks"
                    )
                    errors[case] = verify_error(
                        made, requests, step, batch, rows, window=reach, sinks=sinks
                    )
    return errors


def _index_errors() -> dict[str, float]:
    """Wrong entries of SGLang's KV index kernel, and of what stands for it under FlashInfer."""
    from sglang.kernels.ops.attention.kv_indices import create_flashinfer_kv_indices_triton

    table = torch.randperm(ROWS * 1200).int().view(ROWS, 1200)
    rows, lens = torch.tensor([5, 2, 7]), torch.tensor([37, 1, 1030])  # across blocks of 512
    starts = torch.tensor([50, 0, 9])
    indptr = torch.zeros(4, dtype=torch.int32)
    indptr[1:] = torch.cumsum(lens, 0)
    errors = {}
    for name, first in (("whole rows", None), ("rows from an offset on", starts)):
        begin = [0, 0, 0] if first is None else first.tolist()
        want = torch.cat(
            [table[r, b : b + n] for r, b, n in zip(rows, begin, lens.tolist(), strict=True)]
        )
        for kind, launcher, blocks in (
            ("Triton", create_flashinfer_kv_indices_triton, 1),
            ("Triton in two blocks", create_flashinfer_kv_indices_triton, 2),
            ("emulated", KvIndicesLauncher(), 1),
        ):
            out = torch.full((int(indptr[-1]),), -1, dtype=torch.int32)
            launcher[(3, blocks)](
                table, rows, lens, indptr, first, out, 1200, TOKEN_BLOCK_PARALLEL=blocks > 1
            )
            errors[f"KV indices, {name}, {kind}"] = float((out != want).sum())
    return errors


def _mask_errors(rng: np.random.Generator) -> dict[str, float]:
    """Wrong entries of the product's mask kernel, beside the same mask made without it."""
    from sglang_ext.cuda.mask_kernel import write_tree_columns
    from sglang_ext.cuda.staging import mask_starts

    errors = {}
    for width in (2, 13, 32):
        step = Step.random(rng, _LENS, width)
        want = step.mask()
        out = torch.ones_like(want)
        lens = torch.tensor(_LENS)
        starts = torch.from_numpy(mask_starts(lens.numpy(), width))
        block = 1 << (width * width - 1).bit_length()
        tree = torch.from_numpy(step.packed.mask)
        write_tree_columns[(len(_LENS),)](tree, lens, starts, out, width, BLOCK=block)
        errors[f"full mask kernel, width {width}"] = float((out != want).sum())
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the errors to this file")
    args = parser.parse_args()
    errors = triton_errors()
    report = {
        "triton_max_error": max(errors.values()),
        "cases": errors,
        "flipped_bit_error": flipped_bit_error(),
        "unmended_window_error": unmended_window_error(),
        "decode_window_errors": decode_window_errors(),
    }
    print(f"{len(errors)} cases, largest error {report['triton_max_error']:.2e}")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
    from sglang_ext.cpu.install import install as use_cpu

    use_cpu()
    main()
