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

from dataclasses import dataclass

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
    I16,
    I32,
    I64,
    LANES,
    LEVELS,
    WORDS,
    ask_for,
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


def multiplier(bits, count):
    """The intrinsic that multiplies `count` rows by sixteen outputs' weights in 8 or 4 bits.

    Of 8 bits a weight is its level, -127 to 127, by a scale; of 4 its level, 0 to 15, by a scale,
    plus a least value. Its arguments:

    levels, scales, corrections: addresses of the rows, group by group (`quantize`):
        int8[groups, count, 32], float32[groups, count], and as many of four bytes.
    weights: address of int8[groups, 8, 16, 4], or with 4 bits uint8[groups, 4, 16, 4].
    weight_scales: address of float16[groups, 16], or with 4 bits float16[groups, 2, 16]: scales,
        then what level 0 stands for.
    groups: of 32 inputs.
    ahead: three numbers: what is asked for before it is needed, an address of weights with so
        many bytes further for each group, and an address of scales; they need not be valid.
    to, stride: address of float32[16] for the first row; so many bytes lie between two rows'.
    """
    group_of = _group_8 if bits == 8 else _group_4

    @intrinsic
    def multiply(
        typing_context, levels, scales, corrections, weights, weight_scales, groups, ahead, to,
        stride,
    ):  # fmt: skip
        def generate(context, builder, signature, args):
            tile = _Tile(context, builder, args, bits, count)
            tile.run(group_of(tile))
            return context.get_dummy_value()

        kinds = (
            levels, scales, corrections, weights, weight_scales, groups, ahead, to, stride
        )  # fmt: skip
        return types.void(*kinds), generate

    return multiply


def _group_8(tile):
    """What adds a group of weights in 8 bits."""
    builder, kernel = tile.builder, signed_dots(tile.features)

    def group(place):
        totals = [tile.start(kernel.shift, row, place) for row in range(tile.rows)]
        for quad in range(QUADS):
            made = kernel.prepare(builder, tile.weights_at(place, quad))
            for row in range(tile.rows):
                totals[row] = kernel.add(builder, totals[row], made, tile.four(row, place, quad))
        tile.add_scaled(totals, place)

    return group


def _group_4(tile):
    builder, kernel = tile.builder, unsigned_dots(tile.features)
    low, four = bytes_of(15), ir.Constant(ir.VectorType(I16, 2 * LANES), [4] * 2 * LANES)

    def group(place):
        totals = [zeros(WORDS)] * tile.rows
        for pair in range(QUADS // 2):
            both = tile.weights_at(place, pair)
            wide = builder.bitcast(both, four.type)
            high = builder.bitcast(builder.lshr(wide, four), BYTES)
            for quad, part in ((2 * pair, both), (2 * pair + 1, high)):
                made = builder.and_(part, low)
                for row in range(tile.rows):
                    four_inputs = tile.four(row, place, quad)
                    totals[row] = kernel.add(builder, totals[row], made, four_inputs)
        tile.add_scaled(totals, place)

    return group


@intrinsic
def quantize(typing_context, row, groups, bits, factor, levels, scales, corrections, beside):
    """A row to 8 bits, in groups of 32: the largest of a group becomes 127 or -127.

    A group with an infinity or a NaN gets a scale that is none either, and so do its products.

    Args:
        row: address of float32[groups * 32].
        bits: 8 or 4, of the weights that it will be multiplied by; factor: of the products.
        levels, scales: addresses of int8[32] and float32, which are written for each group.
        corrections: address of int32, which is written: with 8 bits what the levels add up to, by
            -128; with 4 the bits of a float32, what they add up to by the scale.
        beside: the rows that lie side by side, group by group: it is so many times as far from
            one group's to the next one's.
    """

    def generate(context, builder, signature, args):
        row, groups, bits, factor, levels, scales, corrections, beside = args
        is_8 = builder.icmp_signed("==", bits, ir.Constant(bits.type, 8))
        with cgutils.for_range(builder, groups) as loop:
            place = builder.mul(loop.index, beside)
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
            store(builder, scale, scales, place, 4)
            total = zeros(WORDS)
            for half, part in enumerate(parts):
                scaled = builder.fmul(part, splat(builder, FLOATS, up))
                scaled = builder.select(usable, scaled, zeros(FLOATS))
                rounded = builder.fadd(scaled, ir.Constant(FLOATS, [_ROUND] * LANES))
                whole = builder.sub(builder.bitcast(rounded, WORDS), words(_ROUND_BITS))
                to = builder.add(builder.mul(place, I64(GROUP)), I64(half * LANES))
                store(builder, builder.trunc(whole, LEVELS), levels, to, 1)
                total = builder.add(total, whole)
            added = call(builder, "llvm.vector.reduce.add.v16i32", I32, total)
            by_scale = builder.bitcast(builder.fmul(scale, builder.sitofp(added, FLOAT)), I32)
            correction = builder.select(is_8, builder.mul(added, I32(-128)), by_scale)
            store(builder, correction, corrections, place, 4)
        return context.get_dummy_value()

    kinds = (row, groups, bits, factor, levels, scales, corrections, beside)
    return types.void(*kinds), generate


@dataclass(frozen=True)
class _Place:
    """Addresses of a group's data: of its rows, of its weights, and of their scales."""

    levels: ir.Value
    scales: ir.Value
    corrections: ir.Value
    weights: ir.Value
    weight_scales: ir.Value


class _Tile:
    """The arguments of a product, and its sums in float32, one vector of 16 a row."""

    def __init__(self, context, builder, args, bits, rows):
        self.builder, self.features, self.rows = builder, features_of(context), rows
        *self._starts, self._groups, ahead, self._to, self._stride = args
        self._ahead, self._step, self._ahead_scales = (
            builder.extract_value(ahead, i) for i in range(3)
        )
        self._has_least = bits == 4
        self._bytes = BYTES_8 if bits == 8 else BYTES_4
        self._scale_bytes = 2 * LANES * (1 + self._has_least)
        self._totals = [cgutils.alloca_once(builder, FLOATS) for _ in range(rows)]

    def run(self, group):
        """Call group(its place) for each group, in order; then store the sums."""
        builder = self.builder
        for total in self._totals:
            builder.store(zeros(FLOATS), total)
        sizes = (GROUP * self.rows, 4 * self.rows, 4 * self.rows, self._bytes, self._scale_bytes)
        with cgutils.for_range(builder, self._groups) as loop:
            self._ask_ahead(loop.index)
            starts = zip(self._starts, sizes, strict=True)
            group(_Place(*(self._behind(start, loop.index, size) for start, size in starts)))
        for row, total in enumerate(self._totals):
            place = self._behind(self._to, self._stride, row)
            store(builder, builder.load(total), place, I64(0), 4)

    def _behind(self, address, count, size):
        """The address count * size bytes further; count is a value, size a number."""
        return self.builder.add(address, self.builder.mul(count, I64(size)))

    def _ask_ahead(self, g):
        """Ask for weights that are needed soon."""
        builder = self.builder
        for address, step, size in (
            (self._ahead, self._step, self._bytes),
            (self._ahead_scales, I64(self._scale_bytes), self._scale_bytes),
        ):
            start = builder.add(address, builder.mul(g, step))
            for line in range(0, size, _LINE):
                ask_for(builder, builder.add(start, I64(line)), near=2)

    def weights_at(self, place, part):
        """The part-th 64 bytes of a group's weights: <64 x i8>."""
        return load(self.builder, BYTES, place.weights, I64(part * 4 * LANES), 1)

    def start(self, shift, row, place):
        """What a group's sum starts from, where 128 was added to each weight (shift) or not."""
        if not shift:
            return zeros(WORDS)
        return splat(self.builder, WORDS, load(self.builder, I32, place.corrections, I64(row), 4))

    def four(self, row, place, quad):
        """Four levels of a row, sixteen times: <64 x i8>."""
        builder = self.builder
        word = load(builder, I32, place.levels, I64(row * QUADS + quad), 4)
        return builder.bitcast(splat(builder, WORDS, word), BYTES)

    def add_scaled(self, totals, place):
        """Add a group's integers to the sums."""
        builder = self.builder
        scale = self._halves(place.weight_scales, 0)
        least = self._halves(place.weight_scales, 2 * LANES) if self._has_least else None
        for row, integers in enumerate(totals):
            own = load(builder, FLOAT, place.scales, I64(row), 4)
            both = builder.fmul(scale, splat(builder, FLOATS, own))
            total = builder.load(self._totals[row])
            total = multiply_add(builder, builder.sitofp(integers, FLOATS), both, total)
            if least is not None:
                correction = load(builder, FLOAT, place.corrections, I64(row), 4)
                total = multiply_add(builder, least, splat(builder, FLOATS, correction), total)
            builder.store(total, self._totals[row])

    def _halves(self, address, behind):
        """Sixteen float16, so many bytes behind an address, as float32."""
        builder, offset = self.builder, I64(behind)
        if "f16c" in self.features:
            kind = ir.VectorType(ir.HalfType(), LANES)
            return builder.fpext(load(builder, kind, address, offset, 1), FLOATS)
        bits = builder.zext(load(builder, HALVES, address, offset, 1), WORDS)
        rest = builder.shl(builder.and_(bits, words(0x7FFF)), words(13))
        sign = builder.shl(builder.and_(bits, words(0x8000)), words(16))
        # The exponent's bias differs by 112; the product is exact, for subnormal numbers too.
        size = builder.fmul(builder.bitcast(rest, FLOATS), ir.Constant(FLOATS, [2.0**112] * LANES))
        return builder.bitcast(builder.or_(builder.bitcast(size, WORDS), sign), FLOATS)
