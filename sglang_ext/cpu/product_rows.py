"""How many rows to run oneDNN's packed product with: what that does to its bits and to its time.

oneDNN picks its kernel by shape. For some weights a single row is summed in another order than
the same row among several (576 x 1536, for one), and few rows may take longer than a few more: on
an AMD EPYC with AVX-512, two rows take longer than five (scripts/bench_products.py). Both depend
on the processor, so both are tried out on random numbers when a model is loaded, which takes some
0.2 s for each shape of weight.

For each number of rows and shape of weight oneDNN compiles a kernel of some 0.6 MiB, and it and
torch keep 1,024 of them each: prompts of all lengths took 1.2 GiB. So many rows run as one of few
numbers of rows.
"""

import functools
import logging
import math
import time
from collections.abc import Sequence

import torch

logger = logging.getLogger(__name__)

# Rows to check a packed product with: single rows, SIMD tails, several blocks.
_PROBE_ROWS = (1, 2, 3, 4, 5, 8, 13, 16, 33, 64)
# Row counts up to this one are timed, in so many rounds, of which the least time counts.
_MOST_TIMED, _ROUNDS = 8, 5
# Weights are read from memory, as in a model: copies of one are timed that no cache holds, unless
# the weight is so small that its products do not matter.
_COLD_BYTES, _MOST_COPIES = 48 << 20, 64
# More rows than needed are run for at least this gain.
_LEAST_GAIN = 1.1
# Up to so many, rows run as they are: that many a step of decoding has.
_EACH_COUNT_UP_TO = 64
# From there on, so many numbers of rows between one power of two and the next.
_COUNTS_PER_OCTAVE = 16


def pack(weight: torch.Tensor) -> torch.Tensor:
    """A weight [N, K] in oneDNN's layout."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, None)


def product(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [M, K] @ weight.T + bias, [M, N], with a weight of `pack`."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


@functools.cache
def rows_to_run(rows: int, columns: int, dtype: torch.dtype, threads: int) -> tuple[int, ...]:
    """By the number of rows that are there, how many to run the product with.

    At least so many that a row's bits do not depend on the others, and more where that is quicker.
    What is not listed runs as it is.

    Args:
        rows, columns: of the weight.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator).to(dtype)
    fewest = fewest_rows(weight)
    seconds = _seconds_by_rows(weight)
    return (0, *(_quickest(seconds, max(n, fewest)) for n in range(1, _MOST_TIMED + 1)))


def rounded_up(rows: int) -> int:
    """The number of rows that a product of `rows` runs with, so that few kernels are compiled.

    At most a sixteenth more, and none up to 64.
    """
    if rows <= _EACH_COUNT_UP_TO:
        return rows
    step = (1 << (rows - 1).bit_length() - 1) // _COUNTS_PER_OCTAVE
    return -(-rows // step) * step


def fewest_rows(weight: torch.Tensor) -> int:
    """The row count from which on a row's bits do not depend on the others; 1 to 8.

    Where eight do not suffice there is a warning, and 1.
    """
    packed = pack(weight)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(max(_PROBE_ROWS), weight.shape[1], generator=generator).to(weight.dtype)
    full = product(x, packed, None)
    unequal = [n for n in _PROBE_ROWS if not torch.equal(product(x[:n], packed, None), full[:n])]
    if not unequal:
        return 1
    if max(unequal) >= _MOST_TIMED:
        logger.warning(
            "products with a %d x %d weight (%s) depend on the number of rows on this CPU: greedy "
            "output may differ between batch sizes where two tokens are almost equally likely.",
            *weight.shape,
            weight.dtype,
        )
        return 1
    return max(unequal) + 1


def _seconds_by_rows(weight: torch.Tensor) -> list[float]:
    """Of a product of 1, 2, ... rows."""
    count = min(_MOST_COPIES, math.ceil(_COLD_BYTES / weight.nbytes))
    copies = [pack(weight) for _ in range(count)]
    inputs = [weight.new_ones(n, weight.shape[1]) for n in range(1, _MOST_TIMED + 1)]
    for x in inputs:
        product(x, copies[0], None)  # oneDNN makes its kernel
    least = [math.inf] * len(inputs)
    for _ in range(_ROUNDS):
        # The counts take turns, so that a disturbance does not hit one of them alone.
        for i, x in enumerate(inputs):
            start = time.perf_counter()
            for packed in copies:
                product(x, packed, None)
            least[i] = min(least[i], time.perf_counter() - start)
    return least


def _quickest(seconds: Sequence[float], rows: int) -> int:
    """The count to run `rows` rows with, given the seconds of 1, 2, ... rows."""
    best = min(range(rows, len(seconds) + 1), key=lambda n: seconds[n - 1])
    return best if seconds[best - 1] * _LEAST_GAIN < seconds[rows - 1] else rows
