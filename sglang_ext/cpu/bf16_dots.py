"""Products of float32 rows with bfloat16 weights, as LLVM IR for numba kernels.

A weight is widened when it is read: a bfloat16 is the upper half of a float32. Each of sixteen
outputs, a lane each, adds up the products of even inputs and those of odd ones, in the order of the
inputs, so that a row's result does not depend on the number of rows beside it.

Addresses are integers (`array.ctypes.data`).
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sglang_ext.cpu.lane_vectors import (
    FLOAT,
    FLOATS,
    I64,
    LANES,
    WORDS,
    load,
    multiply_add,
    splat,
    words,
    zeros,
)


@intrinsic
def multiply_bf16(typing_context, rows, weights, pairs, to):
    """Products of rows with sixteen outputs' weights.

    Args:
        rows: a tuple of addresses: float32[2 * pairs] each.
        weights: address of uint32[pairs, 16]: two inputs' bfloat16 in a word, the even one's
            bits in the lower half.
        pairs: of inputs.
        to: a tuple of addresses, float32[16] each, which are written.
    """

    def generate(context, builder, signature, args):
        rows, weights, pairs, to = args
        count = signature.args[0].count
        rows, to = ([builder.extract_value(x, i) for i in range(count)] for x in (rows, to))
        sums = [[_zeroed(builder) for _ in range(2)] for _ in range(count)]
        with cgutils.for_range(builder, pairs) as loop:
            both = load(builder, WORDS, weights, loop.index, 4 * LANES)
            even = builder.shl(both, words(16))
            odd = builder.and_(both, words(0xFFFF0000))
            for half, bits in enumerate((even, odd)):
                wide = builder.bitcast(bits, FLOATS)
                place = builder.add(builder.mul(loop.index, I64(2)), I64(half))
                for row, own in zip(rows, sums, strict=True):
                    value = splat(builder, FLOATS, load(builder, FLOAT, row, place, 4))
                    total = multiply_add(builder, wide, value, builder.load(own[half]))
                    builder.store(total, own[half])
        for (first, second), where in zip(sums, to, strict=True):
            total = builder.fadd(builder.load(first), builder.load(second))
            builder.store(total, builder.inttoptr(where, ir.PointerType(FLOATS)), align=4)
        return context.get_dummy_value()

    return types.void(rows, weights, pairs, to), generate


def _zeroed(builder):
    place = cgutils.alloca_once(builder, FLOATS)
    builder.store(zeros(FLOATS), place)
    return place
