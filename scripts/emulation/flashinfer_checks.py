"""Attention through SGLang's real FlashInfer backend against dense attention, on the CPU.

The backend plans as it would on a GPU, over emulated wrappers (flashinfer_wrappers.py); the masks
and the verify input are the product's. `attention_errors` is everything that a server may do with
FlashInfer, `window_error` shows why targets with sliding windows are kept away from it.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scripts.emulation.attention_bench import (
    DIM,
    HEADS,
    KV_HEADS,
    SCALE,
    Bench,
    Graph,
    Requests,
    forward_batch,
    layer,
    verify_batch,
    verify_error,
)
from scripts.emulation.flashinfer_bench import bench
from scripts.emulation.verify_cases import Step, dense, worst

WIDTHS = (2, 4, 8, 16, 32)
BATCHES = (1, 2, 3, 5, 8)
_PADDED = 8  # requests that the captured graphs have room for
_ENCODER = 60  # tokens of a capture's dummy encoder


def attention_errors(seed: int = 0) -> dict[str, float]:
    """The largest absolute error of each case, values being of size 1; about 5 s.

    Returns:
        error by case: verify steps over full attention and beside an encoder, eager and in graphs
        padded to a larger batch, widths 2 to 32, batches 1 to 8; prefills and plain decode steps.
    """
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    return (
        _full_attention(rng)
        | _beside_an_encoder(rng)
        | _plain_steps(encoder_decoder=False)
        | _plain_steps(encoder_decoder=True)
        | _prefill_behind_a_prefix()
    )


def window_error(window: int = 32, graph: bool = False, seed: int = 0) -> float:
    """How far a verify step of a target with a sliding window is off, past the window.

    The backend shortens the window layers' keys to the last `window` and passes a verify input no
    start (flashinfer_backend.py: update_sliding_window, call_begin_forward), so it reads the first
    `window` under a mask of full-length rows.

    Args:
        window: positions that a layer looks back; requests here have 5, 37 and 90 tokens.
    """
    torch.manual_seed(seed)
    step = Step.random(np.random.default_rng(seed), [37, 5, 90], 8)
    with bench(window=window) as made:
        requests = Requests.stored(made, step.lens, step.width)
        batch = verify_batch(requests, step)
        if graph:
            Graph(made, _PADDED, step.width).replay(batch)
        else:
            made.backend.init_forward_metadata(batch)
        rows = (_PADDED if graph else len(step.lens)) * step.width
        return verify_error(made, requests, step, batch, rows, window=window)


def _full_attention(rng: np.random.Generator) -> dict[str, float]:
    from sglang_ext.cuda.flashinfer_plan import install

    errors = {}
    for width in WIDTHS:
        with bench() as made:
            install(made.backend)
            graph = Graph(made, _PADDED, width)
            for bs in BATCHES:
                step = Step.random(rng, rng.integers(1, 90, bs).tolist(), width)
                requests = Requests.stored(made, step.lens, width)
                for kind, error in _both_ways(made, graph, requests, step).items():
                    errors[f"verify, width {width}, batch {bs}, {kind}"] = error
    return errors


def _beside_an_encoder(rng: np.random.Generator) -> dict[str, float]:
    from sglang_ext.cuda.encoder_tokens import install

    errors = {}
    for width in WIDTHS:
        with bench(encoder_decoder=True) as made:
            install(made.backend)
            graph = Graph(made, _PADDED, width, _ENCODER)
            for bs in BATCHES:
                step = Step.random(rng, rng.integers(1, 90, bs).tolist(), width)
                # Whisper's are all alike; other models' are not.
                encoder = [_ENCODER] * bs if bs % 2 else rng.integers(1, _ENCODER, bs).tolist()
                requests = Requests.stored(made, step.lens, width, encoder)
                for kind, error in _both_ways(made, graph, requests, step).items():
                    errors[f"encoder-decoder verify, width {width}, batch {bs}, {kind}"] = error
    return errors


def _both_ways(made: Bench, graph: Graph, requests: Requests, step: Step) -> dict[str, float]:
    """A verify step's errors, eager and in the graph, by layer where there are two kinds."""
    layers = {"self": False, "cross": True} if any(requests.encoder_lens) else {"self": False}
    errors = {}
    for way, rows in (("eager", len(step.lens)), ("graph", _PADDED)):
        batch = verify_batch(requests, step)
        if way == "graph":
            batch = graph.replay(batch)
        else:
            made.backend.init_forward_metadata(batch)
        for name, cross in layers.items():
            errors[f"{way}, {name}"] = verify_error(
                made, requests, step, batch, rows * step.width, cross
            )
    return errors


def _plain_steps(encoder_decoder: bool) -> dict[str, float]:
    """Decode steps, eager and in a padded graph, and the extend that precedes them."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from sglang_ext.cuda.encoder_tokens import install

    name = "encoder-decoder " if encoder_decoder else ""
    errors = {}
    with bench(encoder_decoder=encoder_decoder) as made:
        if encoder_decoder:
            install(made.backend)
        graph = Graph(made, _PADDED, 1, _ENCODER if encoder_decoder else 0)
        for lens in ([37, 5, 70], [12, 3]):
            encoder = [_ENCODER, 20, 41][: len(lens)] if encoder_decoder else []
            requests = Requests.stored(made, lens, 1, encoder)
            batch = forward_batch(requests, ForwardMode.DECODE, [n + 1 for n in lens])
            for way, rows in (("eager", len(lens)), ("graph", _PADDED)):
                if way == "graph":
                    graph.replay(batch)
                else:
                    made.backend.init_forward_metadata(batch)
                for cross in (False, True) if encoder_decoder else (False,):
                    case = f"{name}decode, batch {len(lens)}, {way}, {'cross' if cross else 'self'}"
                    errors[case] = _row_errors(
                        made.backend.forward_decode, requests, batch, cross, [1] * len(lens), rows
                    )
            if encoder_decoder:
                batch = _extend_batch(requests, lens, [0] * len(lens))
                made.backend.init_forward_metadata(batch)
                for cross in (False, True):
                    case = f"extend beside an encoder, batch {len(lens)}, cross {cross}"
                    errors[case] = _row_errors(
                        made.backend.forward_extend, requests, batch, cross, lens, sum(lens)
                    )
    return errors


def _row_errors(
    forward: Any, requests: Requests, batch: Any, cross: bool, new: list[int], rows: int
) -> float:
    """The error of each request's `new` last rows of seq_lens, causal or over the encoder."""
    q = torch.randn(rows, HEADS, DIM)
    got = forward(q, None, None, layer(cross), batch).view(-1, HEADS, DIM)
    errors, at = [], 0
    for i, (count, length) in enumerate(zip(new, batch.seq_lens.tolist(), strict=True)):
        rows_of = slice(at, at + count)
        at += count
        k, v = requests.encoder(i) if cross else (part[:length] for part in requests.decoder(i))
        seen = torch.ones(count, len(k)).tril(length - count).bool()
        if cross:
            seen = torch.ones_like(seen)
        errors.append(worst(got[rows_of], dense(q[rows_of], k, v, seen, SCALE)))
    return max(errors)


def _extend_batch(requests: Requests, lens: list[int], prefixes: list[int]) -> Any:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return forward_batch(
        requests,
        ForwardMode.EXTEND,
        lens,
        extend_prefix_lens=torch.tensor(prefixes),
        extend_prefix_lens_cpu=prefixes,
    )


def _prefill_behind_a_prefix() -> dict[str, float]:
    """The ragged path: a chunk over its own keys, merged with the paged prefix, or without one."""
    errors = {}
    for name, prefixes in (("nothing", [0, 0, 0]), ("a prefix", [20, 0, 64])):
        with bench() as made:
            new = 7
            requests = Requests.stored(made, prefixes, new)
            batch = _extend_batch(requests, [n + new for n in prefixes], prefixes)
            made.backend.init_forward_metadata(batch)
            q = torch.randn(3 * new, HEADS, DIM)
            k, v = torch.randn(2, 3 * new, KV_HEADS, DIM)
            got = made.backend.forward_extend(q, k, v, layer(), batch).view(-1, HEADS, DIM)
            stored = worst(made.pool.k[requests.new_slots], k)
            for i, prefix in enumerate(prefixes):
                rows = slice(i * new, i * new + new)
                keys = torch.cat([requests.k[i][:prefix], k[rows]])
                values = torch.cat([requests.v[i][:prefix], v[rows]])
                seen = torch.ones(new, prefix + new).tril(prefix).bool()
                error = worst(got[rows], dense(q[rows], keys, values, seen, SCALE))
                errors[f"extend behind {name}, request {i}"] = max(error, stored)
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the errors to this file")
    args = parser.parse_args()
    errors = attention_errors()
    window = {"eager": window_error(), "graph": window_error(graph=True)}
    print(f"{len(errors)} cases, largest error {max(errors.values()):.2e}")
    print(f"past a sliding window, which FlashInfer never gets: {window}")
    if args.json:
        report = {"attention_max_error": max(errors.values()), "cases": errors, "window": window}
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    from sglang_ext.cpu.install import install as use_cpu

    use_cpu()
    main()
