"""Products of 8-bit rows with 8- or 4-bit weights in groups of 32, as LLVM IR for numba kernels.

A group's 32 products are summed in integers, which is exact in any order; groups are added in
float32, one after the other. A row's result is therefore the same beside any number of other rows,
and on every processor with fused multiply-adds.

Sixteen outputs are computed at once, one a lane. LANES x GROUP weights lie together: of each four
inputs in turn, four bytes for each lane. Of 4 bits, a byte holds a weight of four inputs (low half)
and one of the next four.

A group of a row has a correction beside its levels and scale, made once for all outputs: where an
instruction takes signed weights as unsigned ones, 128 times the levels' sum is taken off; where
weights have a least value, that times the sum is added.

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
# Adding 1.5 * 2^23 to a float32 rounds it to the nearest integer, in the lowest bits.
_ROUND, _ROUND_BITS = 12582912.0, 0x4B400000
_LINE = 64  # bytes that memory gives at once
BYTES_8, BYTES_4 = LANES * GROUP, LANES * GROUP // 2


@intrinsic
def multiply_8(
    typing_context, rows, scales, corrections, weights, weight_scales, groups, ahead, to
):  # fmt: skip
    """Products of rows with sixteen outputs' weights in 8 bits, -127 to 127.

    Args:
        rows: a tuple of addresses: int8[groups * 32] each.
        scales, corrections: as many: float32[groups], int32[groups] (`quantize`).
        weights: address of int8[groups, 8, 16, 4].
        weight_scales: address of float16[groups, 16].
        ahead: three numbers: what is asked for before it is needed, an address of weights with so
            many bytes further for each group, and an address of scales; they need not be valid.
        to: a tuple of addresses, float32[16] each.
    """

    def generate(context, builder, signature, args):
        tile = _Tile(context, builder, signature, args, BYTES_8, 2 * LANES)
        kernel = signed_dots(features_of(context))

        def group(g):
            totals = [tile.start(kernel.shift, row, g) for row in range(tile.rows)]
            for quad in range(QUADS):
                offset = builder.add(builder.mul(g, I64(BYTES_8)), I64(quad * 4 * LANES))
                made = kernel.prepare(builder, load(builder, BYTES, tile.weights, offset, 1))
                for row in range(tile.rows):
                    totals[row] = kernel.add(builder, totals[row], made, tile.four(row, g, quad))
            tile.add_scaled(totals, g, 1)

        tile.run(group)
        return context.get_dummy_value()

    kinds = (rows, scales, corrections, weights, weight_scales, groups, ahead, to)
    return types.void(*kinds), generate


@intrinsic
def multiply_4(
    typing_context, rows, scales, corrections, weights, weight_scales, groups, ahead, to
):  # fmt: skip
    """`multiply_8` with weights in 4 bits: a weight is its level, 0 to 15, by a scale and a least.

    Args:
        weights: address of uint8[groups, 4, 16, 4].
        weight_scales: address of float16[groups, 2, 16]: scales, then what level 0 stands for.
        corrections: float32[groups].
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

    kinds = (rows, scales, corrections, weights, weight_scales, groups, ahead, to)
    return types.void(*kinds), generate


@intrinsic
def quantize(typing_context, row, groups, bits, factor, levels, scales, corrections):
    """A row to 8 bits, in groups of 32: the largest of a group becomes 127 or -127.

    A group with an infinity or a NaN gets a scale that is none either, and so do its products.

    Args:
        row: address of float32[groups * 32].
        bits: 8 or 4, of the weights that it will be multiplied by; factor: of the products.
        levels, scales: addresses of int8[groups * 32] and float32[groups], which are written.
        corrections: address of int32[groups], which is written: with 8 bits what the levels add up
            to, by -128; with 4 the bits of a float32, what they add up to by the scale.
    """

    def generate(context, builder, signature, args):
        row, groups, bits, factor, levels, scales, corrections = args
        is_8 = builder.icmp_signed("==", bits, ir.Constant(bits.type, 8))
        with cgutils.for_range(builder, groups) as loop:
            starts = [
                builder.add(builder.mul(loop.index, I64(GROUP)), I64(half * LANES))
                for half in range(2)
            ]
            parts = [load(builder, FLOATS, row, start, 4) for start in starts]
            # As integers: the order is the same without signs, and NaN is above infinity.
            sizes = [
                builder.and_(builder.bitcast(part, WORDS), words(0x7FFFFFFF)) for part in parts
            ]
            larger = call(builder, "llvm.smax.v16i32", WORDS, *sizes)
            most = call(builder, "llvm.vector.reduce.smax.v16i32", I32, larger)
            most = builder.bitcast(most, FLOAT)
            usable = builder.and_(
                builder.fcmp_ordered(">", most, FLOAT(_LEAST_SIZE)),
                builder.fcmp_ordered("<", most, FLOAT(float("inf"))),
            )
            up = builder.select(usable, builder.fdiv(FLOAT(_MOST_LEVEL), most), FLOAT(0.0))
            scale = builder.fmul(builder.fdiv(most, FLOAT(_MOST_LEVEL)), factor)
            store(builder, scale, scales, loop.index, 4)
            total = zeros(WORDS)
            for start, part in zip(starts, parts, strict=True):
                scaled = builder.fmul(part, splat(builder, FLOATS, up))
                scaled = builder.select(usable, scaled, zeros(FLOATS))
                rounded = builder.fadd(scaled, ir.Constant(FLOATS, [_ROUND] * LANES))
                whole = builder.sub(builder.bitcast(rounded, WORDS), words(_ROUND_BITS))
                store(builder, builder.trunc(whole, LEVELS), levels, start, 1)
                total = builder.add(total, whole)
            added = call(builder, "llvm.vector.reduce.add.v16i32", I32, total)
            by_scale = builder.bitcast(builder.fmul(scale, builder.sitofp(added, FLOAT)), I32)
            correction = builder.select(is_8, builder.mul(added, I32(-128)), by_scale)
            store(builder, correction, corrections, loop.index, 4)
        return context.get_dummy_value()

    kinds = (row, groups, bits, factor, levels, scales, corrections)
    return types.void(*kinds), generate


class _Tile:
    """The arguments of a product, and its sums in float32, one vector of 16 a row."""

    def __init__(self, context, builder, signature, args, group_bytes, scale_bytes):
        self._builder, self._features = builder, features_of(context)
        self._bytes, self._scale_bytes = group_bytes, scale_bytes
        self.rows = signature.args[0].count
        pick = builder.extract_value
        self._levels, self._scales, self._corrections, self._to = (
            [pick(tupled, i) for i in range(self.rows)]
            for tupled in (args[0], args[1], args[2], args[7])
        )
        self._ahead, self._step, self._ahead_scales = (pick(args[6], i) for i in range(3))
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
        """Ask for weights that are needed soon."""
        builder = self._builder
        kind = ir.FunctionType(ir.VoidType(), [ir.PointerType(I8)] + [I32] * 3)
        prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        for address, step, size in (
            (self._ahead, self._step, self._bytes),
            (self._ahead_scales, I64(self._scale_bytes), self._scale_bytes),
        ):
            start = builder.add(address, builder.mul(g, step))
            for line in range(0, size, _LINE):
                pointer = builder.inttoptr(builder.add(start, I64(line)), ir.PointerType(I8))
                builder.call(prefetch, [pointer, I32(0), I32(3), I32(1)])

    def start(self, shift, row, g):
        """What a group's sum starts from, where 128 was added to each weight (shift) or not."""
        if not shift:
            return zeros(WORDS)
        return splat(self._builder, WORDS, load(self._builder, I32, self._corrections[row], g, 4))

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
                correction = load(builder, FLOAT, self._corrections[row], g, 4)
                total = multiply_add(builder, least, splat(builder, FLOATS, correction), total)
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
