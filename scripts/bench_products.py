"""What rows cost beside each other: a pass over a model's packed weights by their number.

Random weights in the shapes of the model's decoder (Llama's: fused QKV, output, fused gate and up,
down; and the LM head), packed as servers pack them. A pass multiplies them all by 1, 2, ... 12
rows: with oneDNN by as many rows as there are, and by as many as product_rows.py finds quickest;
and with our product, in float32 and in bfloat16. They take turns, and times are medians over the
rounds. Figures: products_ratio_rows_N (oneDNN as it is by oneDNN at its quickest: 1 where the rows
are run as they are), products_vs_onednn_rows_N (oneDNN at its quickest by ours, both in float32),
products_bf16_vs_fp32_rows_N (ours in float32 by ours in bfloat16), and row_cost_N, row_cost_bf16_N
and row_cost_onednn_N (N rows by one).

    python -m scripts.bench_products [--model M] [--threads N] [--quick] [--json FILE]
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import numba
import torch
from transformers import AutoConfig

from scripts.lib.figures import parser, report
from sglang_ext.cpu.float_weights import FloatWeight
from sglang_ext.cpu.install import usable_cores
from sglang_ext.cpu.packed_weights import PackedWeight, Product
from sglang_ext.models import resolve

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 12)
KINDS = ("oneDNN, as it is", "oneDNN", "ours, fp32", "ours, bf16")


def shapes(path: str) -> list[tuple[int, int]]:
    """[N, K] of the weights that a decode step reads, layer by layer."""
    config = AutoConfig.from_pretrained(path)
    hidden, heads = config.hidden_size, config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or hidden // heads
    layer = [
        ((heads + 2 * config.num_key_value_heads) * head_size, hidden),
        (hidden, heads * head_size),
        (2 * config.intermediate_size, hidden),
        (hidden, config.intermediate_size),
    ]
    return layer * config.num_hidden_layers + [(config.vocab_size, hidden)]


def measured(weights: list[tuple[int, int]], rounds: int) -> dict[tuple[str, int], float]:
    """Seconds of a pass, by kind and rows."""
    made = [torch.randn(shape) for shape in weights]
    # Packed anew for each, as by servers of their own: none finds another's weights in a cache.
    packed: dict[str, list[Product]] = {
        kind: [pack(weight) for weight in made] for kind, pack in zip(KINDS, _PACKS, strict=True)
    }
    times: dict[tuple[str, int], list[float]] = {}
    inputs = {(n, k): torch.randn(n, k) for n in ROWS for _, k in weights}
    for number in range(1 + rounds):
        for rows in ROWS:
            xs = [inputs[rows, k] for _, k in weights]
            for kind in KINDS:
                start = time.perf_counter()
                run(xs, packed[kind])
                if number:  # in the first one kernels are made
                    taken = time.perf_counter() - start
                    times.setdefault((kind, rows), []).append(taken)
        print(f"round {number} of {rounds}", flush=True)
    return {key: statistics.median(taken) for key, taken in times.items()}


def _as_it_is(weight: torch.Tensor) -> Product:
    made = PackedWeight(weight)
    made._rows_to_run = ()
    return made


_PACKS: tuple[Callable[[torch.Tensor], Product], ...] = (
    _as_it_is,
    PackedWeight,
    partial(FloatWeight, bits=32),
    partial(FloatWeight, bits=16),
)


def run(inputs: Sequence[torch.Tensor], weights: Sequence[Product]) -> None:
    """A pass."""
    for x, weight in zip(inputs, weights, strict=True):
        weight.linear(x)


def figures(seconds: dict[tuple[str, int], float]) -> dict[str, float]:
    """What the benchmark tells."""
    plain, quickest, ours, halves = ({n: seconds[kind, n] for n in ROWS} for kind in KINDS)
    made = {f"products_ratio_rows_{n}": plain[n] / quickest[n] for n in ROWS}
    made |= {f"products_vs_onednn_rows_{n}": quickest[n] / ours[n] for n in ROWS}
    made |= {f"products_bf16_vs_fp32_rows_{n}": ours[n] / halves[n] for n in ROWS}
    for name, of in (("", ours), ("_bf16", halves), ("_onednn", quickest)):
        made |= {f"row_cost{name}_{n}": of[n] / of[1] for n in ROWS[1:]}
    return made


@torch.inference_mode()
def main() -> int:
    options = parser(__doc__)
    options.add_argument("--threads", type=int, metavar="N", help="of a product [all cores]")
    given = options.parse_args()
    threads = given.threads or usable_cores()
    numba.set_num_threads(threads)  # starts its team, and has torch take as many as that has
    torch.set_num_threads(threads)
    seconds = measured(shapes(resolve(given.model)), 5 if given.quick else 25)
    print(f"{given.model}, {threads} threads: ms of a pass over the weights")
    print("| rows | " + " | ".join(KINDS) + " |\n|" + " --- |" * (1 + len(KINDS)))
    for n in ROWS:
        print(f"| {n} | " + " | ".join(f"{1e3 * seconds[kind, n]:.1f}" for kind in KINDS) + " |")
    report(figures(seconds), given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
