"""What running products with more rows gains: a pass over a model's packed weights, both ways.

Random weights in the shapes of the model's decoder (Llama's: fused QKV, output, fused gate and up,
down; and the LM head), packed as the server packs them. A pass multiplies them all by 1, 2, ... 8
rows, once with as many rows as there are and once with as many as product_rows.py finds quickest,
in turns. products_ratio_rows_N is the median over the rounds of the one's time by the other's: 1
where the rows are run as they are.

    python -m scripts.bench_products [--model M] [--quick] [--json FILE]
"""

import statistics
import sys
import time
from collections.abc import Sequence

import torch
from transformers import AutoConfig

from scripts.lib.figures import parser, report
from sglang_ext.cpu.install import usable_cores
from sglang_ext.cpu.packed_weights import PackedWeight, Product
from sglang_ext.models import resolve

ROWS = (1, 2, 3, 4, 5, 6, 7, 8)


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


def ratios(weights: list[tuple[int, int]], rounds: int) -> dict[int, float]:
    """By rows, the seconds of a pass run as it is by those of one run as is quickest."""
    made = [torch.randn(shape) for shape in weights]
    # Packed twice, as two servers would: neither finds the other's weights in a cache.
    plain, chosen = ([PackedWeight(weight) for weight in made] for _ in range(2))
    for weight in plain:
        weight._rows_to_run = ()
    found: dict[int, list[float]] = {rows: [] for rows in ROWS}
    inputs = {(n, k): torch.randn(n, k) for n in ROWS for _, k in weights}
    for number in range(1 + rounds):
        for rows in ROWS:
            xs = [inputs[rows, k] for _, k in weights]
            start = time.perf_counter()
            run(xs, plain)
            middle = time.perf_counter()
            run(xs, chosen)
            if number:  # in the first one kernels are made
                found[rows].append((middle - start) / (time.perf_counter() - middle))
        print(f"round {number} of {rounds}", flush=True)
    return {rows: statistics.median(times) for rows, times in found.items()}


def run(inputs: Sequence[torch.Tensor], weights: Sequence[Product]) -> None:
    """A pass."""
    for x, weight in zip(inputs, weights, strict=True):
        weight.linear(x)


@torch.inference_mode()
def main() -> int:
    options = parser(__doc__).parse_args()
    torch.set_num_threads(usable_cores())
    found = ratios(shapes(resolve(options.model)), 5 if options.quick else 25)
    report({f"products_ratio_rows_{rows}": ratio for rows, ratio in found.items()}, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
