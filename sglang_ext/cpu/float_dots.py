"""Products of float32 rows with float32 or bfloat16 weights, as LLVM IR for numba kernels.

A pass over weights multiplies as many rows as registers hold sums of, so that up to a dozen rows
take little longer than reading the weights from memory does. Each of sixteen outputs, a lane each,
adds up its products in the order of the inputs: a row's result does not depend on the number of
rows beside it. A bfloat16 is the upper half of a float32, and is widened when it is read.

Addresses are integers (`array.ctypes.data`).
"""

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sglang_ext.cpu.lane_vectors import (
    FLOAT,
    FLOATS,
    HAS_WIDE_REGISTERS,
    I64,
    LANES,
    WORDS,
    ask_for,
    load,
    multiply_add,
    splat,
    words,
    zeros,
)

MOST_ROWS, BLOCKS = (12, 2) if HAS_WIDE_REGISTERS else (4, 1)
"""Rows that a pass multiplies at most, and blocks of sixteen outputs that it does so by."""

_LINE = 4 * LANES
# Of weights that come from memory: so many lines before they are needed they are asked for.
_AHEAD = 64 * _LINE


def _multiplier(bits: int, from_memory: bool) -> Any:
    """An intrinsic for weights of so many bits, 32 or 16; they are asked for if from memory."""

    @intrinsic  # type: ignore[untyped-decorator]
    def multiply(typing_context, count, x, x_stride, weights, stride, lines, bias, out, out_stride):
        """Products of `count` rows, 1 to MOST_ROWS, with the weights of BLOCKS blocks, plus bias.

        Args:
            x, x_stride: address of float32[count, inputs], and a row's bytes.
            weights, stride: address of [BLOCKS, lines, 16] words of 32 bits, and a block's bytes; a
                word is a float32 or two inputs' bfloat16, the even one's bits in the lower half.
            lines: of a block.
            bias: address of float32[BLOCKS * 16]; 0: none.
            out, out_stride: address of float32[count, BLOCKS * 16], which is written, and a row's
                bytes.
        """

        def generate(context, builder, signature, args):
            count, *others = args
            end = builder.append_basic_block("multiplied")
            switch = builder.switch(count, end)
            for rows in range(1, MOST_ROWS + 1):
                switch.add_case(rows, builder.append_basic_block(f"rows_{rows}"))
                builder.position_at_end(builder.function.blocks[-1])
                _multiply(builder, rows, bits, from_memory, *others)
                builder.branch(end)
            builder.position_at_end(end)
            return context.get_dummy_value()

        given = (count, x, x_stride, weights, stride, lines, bias, out, out_stride)
        return types.void(*given), generate

    return multiply


MULTIPLY = {(bits, here): _multiplier(bits, here) for bits in (32, 16) for here in (False, True)}
"""By the bits of the weights, and whether they come from memory."""


def _multiply(
    builder: Any, count: int, bits: int, from_memory: bool, x: Any, x_stride: Any, weights: Any,
    stride: Any, lines: Any, bias: Any, out: Any, out_stride: Any,
) -> None:  # fmt: skip
    """Append what multiplies `count` rows."""
    rows, outs = (
        _addresses(builder, x, x_stride, count),
        _addresses(builder, out, out_stride, count),
    )
    blocks = _addresses(builder, weights, stride, BLOCKS)
    sums = [[_zeroed(builder) for _ in blocks] for _ in rows]
    with cgutils.for_range(builder, lines) as loop:
        widened = [_weights(builder, block, loop.index, bits, from_memory) for block in blocks]
        inputs = len(widened[0])
        for number in range(inputs):
            place = builder.add(builder.mul(loop.index, I64(inputs)), I64(number))
            for row, own in zip(rows, sums, strict=True):
                value = splat(builder, FLOATS, load(builder, FLOAT, row, place, 4))
                for weight, total in zip(widened, own, strict=True):
                    added = multiply_add(builder, weight[number], value, builder.load(total))
                    builder.store(added, total)
    with builder.if_then(builder.icmp_unsigned("!=", bias, I64(0))):
        for block in range(BLOCKS):
            more = load(builder, FLOATS, builder.add(bias, I64(block * _LINE)), I64(0), 1)
            for own in sums:
                builder.store(builder.fadd(builder.load(own[block]), more), own[block])
    for own, where in zip(sums, outs, strict=True):
        for block, total in enumerate(own):
            to = builder.add(where, I64(block * _LINE))
            pointer = builder.inttoptr(to, ir.PointerType(FLOATS))
            builder.store(builder.load(total), pointer, align=4)


def _weights(builder: Any, block: Any, line: Any, bits: int, from_memory: bool) -> Sequence[Any]:
    """FLOATS of a line of a block's weights, for one input after the other."""
    address = builder.add(block, builder.mul(line, I64(_LINE)))
    if from_memory:
        ask_for(builder, builder.add(address, I64(_AHEAD)), near=2)
    if bits == 32:
        return (builder.load(builder.inttoptr(address, ir.PointerType(FLOATS)), align=4),)
    both = builder.load(builder.inttoptr(address, ir.PointerType(WORDS)), align=4)
    halves = builder.shl(both, words(16)), builder.and_(both, words(0xFFFF0000))
    return [builder.bitcast(half, FLOATS) for half in halves]


def _addresses(builder: Any, first: Any, stride: Any, count: int) -> Sequence[Any]:
    return [builder.add(first, builder.mul(stride, I64(number))) for number in range(count)]


def _zeroed(builder: Any) -> Any:
    place = cgutils.alloca_once(builder, FLOATS)
    builder.store(zeros(FLOATS), place)
    return place
