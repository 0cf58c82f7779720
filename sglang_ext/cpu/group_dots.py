"""Products of 8-bit rows with 8- or 4-bit weights in groups of 32, as LLVM IR for numba kernels.

A group's 32 products are summed in integers, which is exact in any order; groups are added in
float32, one after the other. A row's result is therefore the same beside any number of other rows,
and on every processor with fused multiply-adds.

Sixteen outputs are computed at once, one a lane. LANES x GROUP weights lie together: of each four
inputs in turn, four bytes for each lane. Of 4 bits, a byte holds a weight of four inputs (low half)
and one of the next four.

Addresses are integers (`array.ctypes.data`).
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sglang_ext.cpu.byte_dots import signed_dots, unsigned_dots
from sglang_ext.cpu.lane_vectors import (
    BYTES,
    FLOAT,
    FLOATS,
    HALVES,
    I8,
    I16,
    I32,
    I64,
    LANES,
    LEVELS,
    WORDS,
    bytes_of,
    call,
    features_of,
    load,
    multiply_add,
    splat,
    store,
    words,
    zeros,
)  # fmt: skip

GROUP = 32
QUADS = GROUP // 4
_MOST_LEVEL = 127.0
_LEAST_SIZE = 1e-36  # what is less has no reciprocal in float32; it counts as 0
# Whose weights are asked for, so many groups ahead: a processor's own prefetching ends at a page.
AHEAD = 8
BYTES_8, BYTES_4 = LANES * GROUP, LANES * GROUP // 2


@intrinsic
def multiply_8(typing_context, rows, scales, sums, weights, weight_scales, groups, to):
    """Products of rows with sixteen outputs' weights in 8 bits, -127 to 127.

    Args:
        rows: a tuple of addresses: int8[groups * 32] each.
        scales, sums: as many: float32[groups], and int32[groups], what a group's levels add up to.
        weights: address of int8[groups, 8, 16, 4].
        weight_scales: address of float16[groups, 16].
        to: a tuple of addresses, float32[16] each.
    """

    def generate(context, builder, signature, args):
        tile = _Tile(context, builder, signature, args, BYTES_8, 2 * LANES)
        kernel = signed_dots(features_of(context))

        def group(g):
            totals = [tile.start(kernel.shift * 128, row, g) for row in range(tile.rows)]
            for quad in range(QUADS):
                offset = builder.add(builder.mul(g, I64(BYTES_8)), I64(quad * 4 * LANES))
                made = kernel.prepare(builder, load(builder, BYTES, tile.weights, offset, 1))
                for row in range(tile.rows):
                    totals[row] = kernel.add(builder, totals[row], made, tile.four(row, g, quad))
            tile.add_scaled(totals, g, 1)

        tile.run(group)
        return context.get_dummy_value()

    return types.void(rows, scales, sums, weights, weight_scales, groups, to), generate


@intrinsic
def multiply_4(typing_context, rows, scales, sums, weights, weight_scales, groups, to):
    """`multiply_8` with weights in 4 bits: a weight is its level, 0 to 15, by a scale and a least.

    Args:
        weights: address of uint8[groups, 4, 16, 4].
        weight_scales: address of float16[groups, 2, 16]: scales, then what level 0 stands for.
    """

    def generate(context, builder, signature, args):
        tile = _Tile(context, builder, signature, args, BYTES_4, 4 * LANES)
        kernel = unsigned_dots(features_of(context))
        low, four = bytes_of(15), ir.Constant(ir.VectorType(I16, 2 * LANES), [4] * 2 * LANES)

        def group(g):
            totals = [zeros(WORDS)] * tile.rows
            for pair in range(QUADS // 2):
                offset = builder.add(builder.mul(g, I64(BYTES_4)), I64(pair * 4 * LANES))
                both = load(builder, BYTES, tile.weights, offset, 1)
                wide = builder.bitcast(both, four.type)
                high = builder.bitcast(builder.lshr(wide, four), BYTES)
                for quad, part in ((2 * pair, both), (2 * pair + 1, high)):
                    made = builder.and_(part, low)
                    for row in range(tile.rows):
                        four_inputs = tile.four(row, g, quad)
                        totals[row] = kernel.add(builder, totals[row], made, four_inputs)
            tile.add_scaled(totals, g, 2)

        tile.run(group)
        return context.get_dummy_value()

    return types.void(rows, scales, sums, weights, weight_scales, groups, to), generate


@intrinsic
def quantize(typing_context, row, groups, levels, scales, sums):
    """A row to 8 bits, in groups of 32: the largest of a group becomes 127 or -127.

    A group with an infinity or a NaN gets a scale that is none either, and so do its products.

    Args:
        row: address of float32[groups * 32].
        levels, scales, sums: addresses of int8[groups * 32], float32[groups] and int32[groups],
            which are written: levels, what they are multiplied with, what they add up to.
    """

    def generate(context, builder, signature, args):
        row, groups, levels, scales, sums = args
        with cgutils.for_range(builder, groups) as loop:
            starts = [
                builder.add(builder.mul(loop.index, I64(GROUP)), I64(half * LANES))
                for half in range(2)
            ]
            parts = [load(builder, FLOATS, row, start, 4) for start in starts]
            sizes = [call(builder, "llvm.fabs.v16f32", FLOATS, part) for part in parts]
            larger = call(builder, "llvm.maximum.v16f32", FLOATS, *sizes)
            most = call(builder, "llvm.vector.reduce.fmaximum.v16f32", FLOAT, larger)
            usable = builder.and_(
                builder.fcmp_ordered(">", most, FLOAT(_LEAST_SIZE)),
                builder.fcmp_ordered("<", most, FLOAT(float("inf"))),
            )
            up = builder.select(usable, builder.fdiv(FLOAT(_MOST_LEVEL), most), FLOAT(0.0))
            store(builder, builder.fdiv(most, FLOAT(_MOST_LEVEL)), scales, loop.index, 4)
            total = zeros(WORDS)
            for start, part in zip(starts, parts, strict=True):
                scaled = builder.fmul(part, splat(builder, FLOATS, up))
                nearest = call(builder, "llvm.rint.v16f32", FLOATS, scaled)
                whole = call(builder, "llvm.fptosi.sat.v16i32.v16f32", WORDS, nearest)
                store(builder, builder.trunc(whole, LEVELS), levels, start, 1)
                total = builder.add(total, whole)
            added = call(builder, "llvm.vector.reduce.add.v16i32", I32, total)
            store(builder, added, sums, loop.index, 4)
        return context.get_dummy_value()

    return types.void(row, groups, levels, scales, sums), generate


class _Tile:
    """The arguments of a product, and its sums in float32, one vector of 16 a row."""

    def __init__(self, context, builder, signature, args, group_bytes, scale_bytes):
        self._builder, self._features = builder, features_of(context)
        self._bytes, self._scale_bytes = group_bytes, scale_bytes
        self.rows = signature.args[0].count
        pick = builder.extract_value
        self._levels, self._scales, self._sums, self._to = (
            [pick(tupled, i) for i in range(self.rows)]
            for tupled in (args[0], args[1], args[2], args[6])
        )
        self.weights, self._weight_scales, self._groups = args[3:6]
        self._totals = [cgutils.alloca_once(builder, FLOATS) for _ in range(self.rows)]

    def run(self, group):
        """Call group(index) for each group, in order; then store the sums."""
        builder = self._builder
        for total in self._totals:
            builder.store(zeros(FLOATS), total)
        with cgutils.for_range(builder, self._groups) as loop:
            self._ask_ahead(loop.index)
            group(loop.index)
        for total, to in zip(self._totals, self._to, strict=True):
            place = builder.inttoptr(to, ir.PointerType(FLOATS))
            builder.store(builder.load(total), place, align=4)

    def _ask_ahead(self, g):
        """Ask for the weights of a group to come; the address need not be valid."""
        builder = self._builder
        kind = ir.FunctionType(ir.VoidType(), [ir.PointerType(I8)] + [I32] * 3)
        prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        for address, size in (
            (self.weights, self._bytes),
            (self._weight_scales, self._scale_bytes),
        ):
            start = builder.mul(builder.add(g, I64(AHEAD)), I64(size))
            for line in range(0, size, 64):
                where = builder.add(address, builder.add(start, I64(line)))
                pointer = builder.inttoptr(where, ir.PointerType(I8))
                builder.call(prefetch, [pointer, I32(0), I32(3), I32(1)])

    def start(self, shift, row, g):
        """What a group's sum starts from, where `shift` was added to each weight."""
        if not shift:
            return zeros(WORDS)
        here = load(self._builder, I32, self._sums[row], g, 4)
        return splat(self._builder, WORDS, self._builder.mul(here, I32(-shift)))

    def four(self, row, g, quad):
        """Four levels of a row, sixteen times: <64 x i8>."""
        builder = self._builder
        index = builder.add(builder.mul(g, I64(QUADS)), I64(quad))
        word = load(builder, I32, self._levels[row], index, 4)
        return builder.bitcast(splat(builder, WORDS, word), BYTES)

    def add_scaled(self, totals, g, parts):
        """Add a group's integers to the sums; parts: vectors of weight scales to a group."""
        builder = self._builder
        first = builder.mul(g, I64(parts * 2 * LANES))
        scale = self._halves(first)
        least = self._halves(builder.add(first, I64(2 * LANES))) if parts == 2 else None
        for row, integers in enumerate(totals):
            own = load(builder, FLOAT, self._scales[row], g, 4)
            both = builder.fmul(scale, splat(builder, FLOATS, own))
            total = builder.load(self._totals[row])
            total = multiply_add(builder, builder.sitofp(integers, FLOATS), both, total)
            if least is not None:
                level_sum = builder.sitofp(load(builder, I32, self._sums[row], g, 4), FLOAT)
                offset = splat(builder, FLOATS, builder.fmul(own, level_sum))
                total = multiply_add(builder, least, offset, total)
            builder.store(total, self._totals[row])

    def _halves(self, offset):
        """Sixteen float16 as float32."""
        builder = self._builder
        if "f16c" in self._features:
            kind = ir.VectorType(ir.HalfType(), LANES)
            return builder.fpext(load(builder, kind, self._weight_scales, offset, 1), FLOATS)
        bits = builder.zext(load(builder, HALVES, self._weight_scales, offset, 1), WORDS)
        rest = builder.shl(builder.and_(bits, words(0x7FFF)), words(13))
        sign = builder.shl(builder.and_(bits, words(0x8000)), words(16))
        # The exponent's bias differs by 112; the product is exact, for subnormal numbers too.
        size = builder.fmul(builder.bitcast(rest, FLOATS), ir.Constant(FLOATS, [2.0**112] * LANES))
        return builder.bitcast(builder.or_(builder.bitcast(size, WORDS), sign), FLOATS)
