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

LANES, GROUP = 16, 32
QUADS = GROUP // 4
_MOST_LEVEL = 127.0
_LEAST_SIZE = 1e-36  # what is less has no reciprocal in float32; it counts as 0
BYTES_8, BYTES_4 = LANES * GROUP, LANES * GROUP // 2

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_FLOAT = ir.FloatType()
_BYTES = ir.VectorType(_I8, 4 * LANES)
_WORDS = ir.VectorType(_I32, LANES)
_FLOATS = ir.VectorType(_FLOAT, LANES)
_LEVELS = ir.VectorType(_I8, LANES)
_HALVES = ir.VectorType(_I16, LANES)


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
        tile = _Tile(context, builder, signature, args)
        kernel = _kernel_8(_features(context))

        def group(g):
            totals = [tile.start(kernel.shift * 128, row, g) for row in range(tile.rows)]
            for quad in range(QUADS):
                offset = builder.add(builder.mul(g, _I64(BYTES_8)), _I64(quad * 4 * LANES))
                made = kernel.prepare(builder, _load(builder, _BYTES, tile.weights, offset, 1))
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
        tile = _Tile(context, builder, signature, args)
        kernel = _kernel_4(_features(context))
        low, four = _bytes(15), ir.Constant(ir.VectorType(_I16, 2 * LANES), [4] * 2 * LANES)

        def group(g):
            totals = [_zeros(_WORDS)] * tile.rows
            for pair in range(QUADS // 2):
                offset = builder.add(builder.mul(g, _I64(BYTES_4)), _I64(pair * 4 * LANES))
                both = _load(builder, _BYTES, tile.weights, offset, 1)
                wide = builder.bitcast(both, four.type)
                high = builder.bitcast(builder.lshr(wide, four), _BYTES)
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
                builder.add(builder.mul(loop.index, _I64(GROUP)), _I64(half * LANES))
                for half in range(2)
            ]
            parts = [_load(builder, _FLOATS, row, start, 4) for start in starts]
            sizes = [_call(builder, "llvm.fabs.v16f32", _FLOATS, part) for part in parts]
            larger = _call(builder, "llvm.maximum.v16f32", _FLOATS, *sizes)
            most = _call(builder, "llvm.vector.reduce.fmaximum.v16f32", _FLOAT, larger)
            usable = builder.and_(
                builder.fcmp_ordered(">", most, _FLOAT(_LEAST_SIZE)),
                builder.fcmp_ordered("<", most, _FLOAT(float("inf"))),
            )
            up = builder.select(usable, builder.fdiv(_FLOAT(_MOST_LEVEL), most), _FLOAT(0.0))
            _store(builder, builder.fdiv(most, _FLOAT(_MOST_LEVEL)), scales, loop.index, 4)
            total = _zeros(_WORDS)
            for start, part in zip(starts, parts, strict=True):
                scaled = builder.fmul(part, _splat(builder, _FLOATS, up))
                nearest = _call(builder, "llvm.rint.v16f32", _FLOATS, scaled)
                whole = _call(builder, "llvm.fptosi.sat.v16i32.v16f32", _WORDS, nearest)
                _store(builder, builder.trunc(whole, _LEVELS), levels, start, 1)
                total = builder.add(total, whole)
            added = _call(builder, "llvm.vector.reduce.add.v16i32", _I32, total)
            _store(builder, added, sums, loop.index, 4)
        return context.get_dummy_value()

    return types.void(row, groups, levels, scales, sums), generate


class _Tile:
    """The arguments of a product, and its sums in float32, one vector of 16 a row."""

    def __init__(self, context, builder, signature, args):
        self._builder, self._features = builder, _features(context)
        self.rows = signature.args[0].count
        pick = builder.extract_value
        self._levels, self._scales, self._sums, self._to = (
            [pick(tupled, i) for i in range(self.rows)]
            for tupled in (args[0], args[1], args[2], args[6])
        )
        self.weights, self._weight_scales, self._groups = args[3:6]
        self._totals = [cgutils.alloca_once(builder, _FLOATS) for _ in range(self.rows)]

    def run(self, group):
        """Call group(index) for each group, in order; then store the sums."""
        builder = self._builder
        for total in self._totals:
            builder.store(_zeros(_FLOATS), total)
        with cgutils.for_range(builder, self._groups) as loop:
            group(loop.index)
        for total, to in zip(self._totals, self._to, strict=True):
            place = builder.inttoptr(to, ir.PointerType(_FLOATS))
            builder.store(builder.load(total), place, align=4)

    def start(self, shift, row, g):
        """What a group's sum starts from, where `shift` was added to each weight."""
        if not shift:
            return _zeros(_WORDS)
        here = _load(self._builder, _I32, self._sums[row], g, 4)
        return _splat(self._builder, _WORDS, self._builder.mul(here, _I32(-shift)))

    def four(self, row, g, quad):
        """Four levels of a row, sixteen times: <64 x i8>."""
        builder = self._builder
        index = builder.add(builder.mul(g, _I64(QUADS)), _I64(quad))
        word = _load(builder, _I32, self._levels[row], index, 4)
        return builder.bitcast(_splat(builder, _WORDS, word), _BYTES)

    def add_scaled(self, totals, g, parts):
        """Add a group's integers to the sums; parts: vectors of weight scales to a group."""
        builder = self._builder
        first = builder.mul(g, _I64(parts * 2 * LANES))
        scale = self._halves(first)
        least = self._halves(builder.add(first, _I64(2 * LANES))) if parts == 2 else None
        for row, integers in enumerate(totals):
            own = _load(builder, _FLOAT, self._scales[row], g, 4)
            both = builder.fmul(scale, _splat(builder, _FLOATS, own))
            total = builder.load(self._totals[row])
            total = _multiply_add(builder, builder.sitofp(integers, _FLOATS), both, total)
            if least is not None:
                level_sum = builder.sitofp(_load(builder, _I32, self._sums[row], g, 4), _FLOAT)
                offset = _splat(builder, _FLOATS, builder.fmul(own, level_sum))
                total = _multiply_add(builder, least, offset, total)
            builder.store(total, self._totals[row])

    def _halves(self, offset):
        """Sixteen float16 as float32."""
        builder = self._builder
        if "f16c" in self._features:
            kind = ir.VectorType(ir.HalfType(), LANES)
            return builder.fpext(_load(builder, kind, self._weight_scales, offset, 1), _FLOATS)
        bits = builder.zext(_load(builder, _HALVES, self._weight_scales, offset, 1), _WORDS)
        rest = builder.shl(builder.and_(bits, _words(0x7FFF)), _words(13))
        sign = builder.shl(builder.and_(bits, _words(0x8000)), _words(16))
        # The exponent's bias differs by 112; the product is exact, for subnormal numbers too.
        size = builder.fmul(
            builder.bitcast(rest, _FLOATS), ir.Constant(_FLOATS, [2.0**112] * LANES)
        )
        return builder.bitcast(builder.or_(builder.bitcast(size, _WORDS), sign), _FLOATS)


class _Dot:
    """Sums of four products of bytes in each of 16 lanes: what weights are made to once, and how.

    `shift`: 1 where `prepare` adds 128 to weights.
    """

    shift = 0

    def prepare(self, builder, weights):
        return weights

    def add(self, builder, total, weights, inputs):
        """total <16 x i32>, plus weights by inputs <64 x i8>."""
        raise NotImplementedError


class _AnyProcessor(_Dot):
    """Signed bytes by signed bytes, in plain IR."""

    def add(self, builder, total, weights, inputs):
        for i in range(4):
            places = ir.Constant(_WORDS, [4 * lane + i for lane in range(LANES)])
            here, there = (
                builder.sext(builder.shuffle_vector(x, x, places), _WORDS)
                for x in (weights, inputs)
            )
            total = builder.add(total, builder.mul(here, there))
        return total


class _Vnni(_Dot):
    """Unsigned by signed bytes, in one instruction for `lanes` lanes."""

    def __init__(self, lanes, shift):
        self.shift, self._lanes = shift, lanes

    def prepare(self, builder, weights):
        return builder.xor(weights, _bytes(0x80)) if self.shift else weights

    def add(self, builder, total, weights, inputs):
        name = f"llvm.x86.avx512.vpdpbusd.{32 * self._lanes}"
        words = [builder.bitcast(x, _WORDS) for x in (weights, inputs)]
        return _in_parts(builder, name, self._lanes, total, *words)


class _Avx2(_Dot):
    """Unsigned by signed bytes; two products must fit 16 bits: levels to 127 and weights to 127."""

    def __init__(self, signed):
        self._signed = signed

    def prepare(self, builder, weights):
        if not self._signed:
            return weights
        return weights, _call(builder, "llvm.abs.v64i8", _BYTES, weights, ir.IntType(1)(0))

    def add(self, builder, total, weights, inputs):
        sizes = weights
        if self._signed:
            signs, sizes = weights
            inputs = _by_halves(builder, "llvm.x86.avx2.psign.b", _I8, 32, inputs, signs)
        pairs = _by_halves(builder, "llvm.x86.avx2.pmadd.ub.sw", _I16, 16, sizes, inputs)
        ones = ir.Constant(ir.VectorType(_I16, 32), [1] * 32)
        fours = _by_halves(builder, "llvm.x86.avx2.pmadd.wd", _I32, 8, pairs, ones)
        return builder.add(total, fours)


def _features(context):
    return {name[1:] for name in context.codegen().magic_tuple()[2].split(",") if name[:1] == "+"}


def _kernel_8(features):
    return _vnni(features, 1) or (_Avx2(True) if "avx2" in features else _AnyProcessor())


def _kernel_4(features):
    return _vnni(features, 0) or (_Avx2(False) if "avx2" in features else _AnyProcessor())


def _vnni(features, shift):
    if {"avx512vnni", "avx512vl"} <= features:
        return _Vnni(16, shift)
    return _Vnni(8, shift) if "avxvnni" in features else None


def _in_parts(builder, name, lanes, *vectors):
    """Call name(total, weights, inputs) for `lanes` of 16 lanes at a time."""
    kind = ir.VectorType(_I32, lanes)
    done = []
    for start in range(0, LANES, lanes):
        places = ir.Constant(kind, list(range(start, start + lanes)))
        parts = [builder.shuffle_vector(x, x, places) for x in vectors]
        done.append(_call(builder, name, kind, *parts))
    return done[0] if len(done) == 1 else _joined(builder, done)


def _by_halves(builder, name, to, count, *vectors):
    """Call an AVX2 function on each half of 512-bit vectors; it gives `count` of type `to`."""
    done = []
    for half in range(2):
        parts = []
        for x in vectors:
            size = x.type.count // 2
            places = list(range(half * size, (half + 1) * size))
            parts.append(
                builder.shuffle_vector(x, x, ir.Constant(ir.VectorType(_I32, size), places))
            )
        done.append(_call(builder, name, ir.VectorType(to, count), *parts))
    return _joined(builder, done)


def _joined(builder, halves):
    size = 2 * halves[0].type.count
    return builder.shuffle_vector(
        *halves, ir.Constant(ir.VectorType(_I32, size), list(range(size)))
    )


def _call(builder, name, result, *args):
    kind = ir.FunctionType(result, [x.type for x in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def _multiply_add(builder, a, b, c):
    return _call(builder, f"llvm.fmuladd.v{LANES}f32", _FLOATS, a, b, c)


def _load(builder, kind, address, offset, unit):
    """Load from address + offset * unit bytes."""
    where = builder.add(address, builder.mul(offset, _I64(unit)))
    aligned = 4 if kind in (_I32, _FLOAT) else 1
    return builder.load(builder.inttoptr(where, ir.PointerType(kind)), align=aligned)


def _store(builder, value, address, offset, unit):
    where = builder.add(address, builder.mul(offset, _I64(unit)))
    builder.store(value, builder.inttoptr(where, ir.PointerType(value.type)), align=unit)


def _splat(builder, kind, value):
    vector = builder.insert_element(ir.Constant(kind, ir.Undefined), value, _I32(0))
    return builder.shuffle_vector(vector, ir.Constant(kind, ir.Undefined), _zeros(_WORDS))


def _zeros(kind):
    return ir.Constant(kind, [0.0 if kind is _FLOATS else 0] * kind.count)


def _words(value):
    return ir.Constant(_WORDS, [value] * LANES)


def _bytes(value):
    return ir.Constant(_BYTES, [value] * 4 * LANES)
