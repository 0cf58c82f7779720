"""Loops over float32 vectors of 16 lanes, written as LLVM IR, for numba kernels.

Compiled loops leave the order of a sum to the compiler; here it is fixed, so that one product and
several at once give the same bits: lane j sums the products j, j + 16, j + 32, ..., the lanes are
added in halves (j + 8, j + 4, j + 2, j + 1), and what is left of a length that 16 does not divide
follows one by one. LLVM splits the vectors where a processor has narrower ones.

Addresses are integers (`array.ctypes.data`), aligned to a number; lengths are in numbers. Where
rows may be of another dtype, `like` is any array of it: float32, or uint16 with the bits of
bfloat16, which are widened as they are read.
"""

import math

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sglang_ext.cpu.lane_vectors import ask_for

LANES = 16

_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)
_INDEX = ir.IntType(64)
_INT = ir.IntType(32)
_SHORT = ir.IntType(16)
_LINE = 64
ROWS_AHEAD = 12
"""Rows that are asked for so many before they are read: they lie apart."""

_LOG2E = float(np.float32(math.log2(math.e)))
# Adding and subtracting 1.5 * 2^23 rounds a float32 to the nearest integer.
_ROUND = 12582912.0
_LOWEST = -126.0
# 2^f on [-0.5, 0.5]: Chebyshev interpolation in float64, degree 6, relative error below 1e-7.
_NODES = np.cos(np.pi * (np.arange(7) + 0.5) / 7) / 2
_EXP2 = [float(np.float32(c)) for c in np.polyfit(_NODES, np.exp2(_NODES), 6)]


@intrinsic
def dot(typing_context, like, a, b, length):
    """The product of two vectors at addresses a, of `like`'s dtype, and b, float32: float32."""
    half = _is_half(like)

    def generate(context, builder, signature, args):
        _, a, b, length = args
        total = cgutils.alloca_once_value(builder, _all_floats(0.0))
        with _for_whole(builder, length) as start:
            here = _load(builder, _VECTOR, a, start, half)
            there = _load(builder, _VECTOR, b, start)
            builder.store(_multiply_add(builder, here, there, builder.load(total)), total)
        result = cgutils.alloca_once_value(
            builder, _of_lanes(builder, builder.load(total), builder.fadd)
        )
        with _for_rest(builder, length) as d:
            here, there = _load(builder, _FLOAT, a, d, half), _load(builder, _FLOAT, b, d)
            builder.store(_multiply_add(builder, here, there, builder.load(result)), result)
        return builder.load(result)

    return types.float32(like, types.uintp, types.uintp, types.intp), generate


@intrinsic
def dots(typing_context, like, rows, columns, length, to, stride, scale):
    """`scale` times `dot` of each of some rows with each of some columns.

    Args:
        like: of the rows' dtype.
        rows, columns: tuples of addresses; as many pairs of them as a power of two up to 16.
        to: address of the first column's products, one for each row; the next column's are
            `stride` bytes further.
    """
    half = _is_half(like)

    def generate(context, builder, signature, args):
        _, rows, columns, length, to, stride, scale = args
        rows, columns = _taken_apart(builder, rows), _taken_apart(builder, columns)
        pairs = [(row, column) for column in columns for row in rows]
        totals = [cgutils.alloca_once_value(builder, _all_floats(0.0)) for _ in pairs]
        with _for_whole(builder, length) as start:
            there = {column: _load(builder, _VECTOR, column, start) for column in columns}
            here = {row: _load(builder, _VECTOR, row, start, half) for row in rows}
            for (row, column), total in zip(pairs, totals, strict=True):
                more = _multiply_add(builder, here[row], there[column], builder.load(total))
                builder.store(more, total)
        sums = _sums_of_lanes(builder, [builder.load(total) for total in totals])
        results = cgutils.alloca_once_value(builder, sums)
        with _for_rest(builder, length) as d:
            here = _side_by_side(
                builder, [_load(builder, _FLOAT, row, d, half) for row, _ in pairs]
            )
            there = _side_by_side(builder, [_load(builder, _FLOAT, at, d) for _, at in pairs])
            total = _multiply_add(builder, here, there, builder.load(results))
            builder.store(total, results)
        scaled = builder.fmul(builder.load(results), _splat(builder, scale))
        for i in range(len(columns)):
            own = [_INT(i * len(rows) + row) for row in range(len(rows))]
            places = ir.Constant(ir.VectorType(_INT, len(rows)), own)
            part = builder.shuffle_vector(scaled, scaled, places)
            where = builder.add(to, builder.mul(stride, _INDEX(i)))
            place = builder.inttoptr(where, ir.PointerType(part.type))
            builder.store(part, place, align=4)
        return context.get_dummy_value()

    kinds = (like, rows, columns, types.intp, types.uintp, types.uintp, types.float32)
    return types.void(*kinds), generate


@intrinsic
def add_slots(typing_context, like, to, length, weights, stride, start, step, slots, count):
    """to[d] += weights[0] * rows[0][d], then weights[1] * rows[1][d], ...: for each `to`.

    Sums stay in registers from the first row to the last.

    Args:
        like: of the rows' dtype.
        to: a tuple of addresses, as many as registers hold two vectors of.
        length: of a row.
        weights: address of the first one's weights, one for each row; the next one's are `stride`
            bytes further.
        start, step: row i lies at start + slots[i] * step, in bytes.
        slots: address of int64[count].
    """
    half = _is_half(like)

    def generate(context, builder, signature, args):
        _, to, length, weights, stride, start, step, slots, count = args
        to = _taken_apart(builder, to)
        own = [builder.add(weights, builder.mul(stride, _INDEX(i))) for i in range(len(to))]
        last = builder.sub(count, _INDEX(1))

        def row_at(i):
            slot = builder.load(_at(builder, _INDEX, slots, i, 8), align=8)
            return builder.add(start, builder.mul(slot, step))

        def add(kind, places):
            """Add to the numbers, or vectors, that begin at these places."""
            sums = [
                [_variable(builder, _load(builder, kind, address, d)) for d in places]
                for address in to
            ]
            with _loop(builder, _INDEX(0), count, 1) as i:
                further = builder.add(i, _INDEX(ROWS_AHEAD))
                inside = builder.icmp_signed("<", further, count)
                ahead = row_at(builder.select(inside, further, last))
                row = row_at(i)
                for d in places:
                    ask_for(builder, builder.add(ahead, builder.mul(d, _INDEX(2 if half else 4))))
                loaded = [_load(builder, kind, row, d, half) for d in places]
                for sums_of, address in zip(sums, own, strict=True):
                    weight = _load(builder, _FLOAT, address, i)
                    factor = _splat(builder, weight) if kind is _VECTOR else weight
                    for total, value in zip(sums_of, loaded, strict=True):
                        more = _multiply_add(builder, factor, value, builder.load(total))
                        builder.store(more, total)
            for sums_of, address in zip(sums, to, strict=True):
                for total, d in zip(sums_of, places, strict=True):
                    builder.store(builder.load(total), _at(builder, kind, address, d), align=4)

        pairs = builder.and_(length, _INDEX(-2 * LANES))
        with _loop(builder, _INDEX(0), pairs, 2 * LANES) as d:
            add(_VECTOR, (d, builder.add(d, _INDEX(LANES))))
        with _loop(builder, pairs, builder.and_(length, _INDEX(-LANES)), LANES) as d:
            add(_VECTOR, (d,))
        with _for_rest(builder, length) as d:
            add(_FLOAT, (d,))
        return context.get_dummy_value()

    kinds = (
        like, to, types.intp, types.uintp, types.uintp, types.uintp, types.uintp, types.uintp,
        types.intp,
    )  # fmt: skip
    return types.void(*kinds), generate


@intrinsic
def exponentials(typing_context, address, length, top):
    """x = exp(x - top), for `length` floats x <= top in place; up to 15 behind are overwritten.

    Whole vectors alone: what is left of a length one by one takes longer than all that is before.
    """

    def generate(context, builder, signature, args):
        address, length, top = args
        top = _splat(builder, top)

        with _loop(builder, _INDEX(0), length, LANES) as d:
            x = builder.fsub(_load(builder, _VECTOR, address, d), top)
            place = _at(builder, _VECTOR, address, d)
            builder.store(_exponential(builder, x), place, align=4)
        return context.get_dummy_value()

    return types.void(types.uintp, types.intp, types.float32), generate


@intrinsic
def gated(typing_context, gate, up, to, length):
    """silu(gate) * up of floats at these addresses, to another; LANES divides the length."""

    def generate(context, builder, signature, args):
        gate, up, to, length = args
        none, one = _all_floats(0.0), _all_floats(1.0)
        with _loop(builder, _INDEX(0), length, LANES) as d:
            x = _load(builder, _VECTOR, gate, d)
            is_negative = builder.fcmp_ordered("<", x, none)
            # Of -|x|: that of x could be too large.
            power = _exponential(builder, builder.select(is_negative, x, builder.fneg(x)))
            share = builder.fdiv(builder.select(is_negative, power, one), builder.fadd(one, power))
            value = builder.fmul(builder.fmul(x, _load(builder, _VECTOR, up, d)), share)
            builder.store(value, _at(builder, _VECTOR, to, d), align=4)
        return context.get_dummy_value()

    return types.void(types.uintp, types.uintp, types.uintp, types.intp), generate


@intrinsic
def store_row(typing_context, like, to, start, length):
    """The floats at address `start` to address `to`, rounded to `like`'s dtype, ties to even."""
    half = _is_half(like)

    def generate(context, builder, signature, args):
        _, to, start, length = args

        def move(kind, d):
            value = _load(builder, kind, start, d)
            if half:
                value = _rounded(builder, value)
            place = _at(builder, value.type, to, d, 2 if half else 4)
            builder.store(value, place, align=2 if half else 4)

        with _for_whole(builder, length) as d:
            move(_VECTOR, d)
        with _for_rest(builder, length) as d:
            move(_FLOAT, d)
        return context.get_dummy_value()

    return types.void(like, types.uintp, types.uintp, types.intp), generate


@intrinsic
def largest(typing_context, address, length):
    """The largest of `length` floats, one at least."""

    def generate(context, builder, signature, args):
        address, length = args
        first = _load(builder, _FLOAT, address, _INDEX(0))

        def larger(a, b):
            return builder.select(builder.fcmp_ordered(">", b, a), b, a)

        return _reduced(builder, address, length, _splat(builder, first), larger)

    return types.float32(types.uintp, types.intp), generate


@intrinsic
def total(typing_context, address, length):
    """The sum of `length` floats, in the order of `dot`."""

    def generate(context, builder, signature, args):
        address, length = args
        return _reduced(builder, address, length, _all_floats(0.0), builder.fadd)

    return types.float32(types.uintp, types.intp), generate


@intrinsic
def prefetch(typing_context, like, address, length):
    """Ask for the cache lines of `length` numbers of `like`'s dtype; the address may be invalid."""
    size = 2 if _is_half(like) else 4

    def generate(context, builder, signature, args):
        _, address, length = args
        step = _INDEX(_LINE // size)
        with cgutils.for_range_slice(builder, _INDEX(0), length, step) as (d, _):
            ask_for(builder, builder.add(address, builder.mul(d, _INDEX(size))))
        return context.get_dummy_value()

    return types.void(like, types.uintp, types.intp), generate


def _for_whole(builder, length):
    """Loop over the starts of whole vectors."""
    whole = builder.and_(length, _INDEX(-LANES))
    return _loop(builder, _INDEX(0), whole, LANES)


def _for_rest(builder, length):
    return _loop(builder, builder.and_(length, _INDEX(-LANES)), length, 1)


class _loop:
    def __init__(self, builder, first, end, step):
        self._inner = cgutils.for_range_slice(builder, first, end, _INDEX(step))

    def __enter__(self):
        return self._inner.__enter__()[0]

    def __exit__(self, *error):
        return self._inner.__exit__(*error)


def _variable(builder, value):
    """A variable of this value; also within a loop, where each turn sets it anew."""
    place = cgutils.alloca_once(builder, value.type)
    builder.store(value, place)
    return place


def _all_floats(number):
    return ir.Constant(_VECTOR, [number] * LANES)


def _is_half(like):
    """Whether arrays of this numba type hold bfloat16."""
    if like.dtype not in (types.float32, types.uint16):
        raise TypeError(f"expected float32, or uint16 for bfloat16, not {like.dtype}")
    return like.dtype == types.uint16


def _at(builder, kind, address, d, size=4):
    where = builder.add(address, builder.mul(d, _INDEX(size)))
    return builder.inttoptr(where, ir.PointerType(kind))


def _load(builder, kind, address, d, half=False):
    if not half:
        return builder.load(_at(builder, kind, address, d), align=4)
    bits = builder.load(_at(builder, _as(_SHORT, kind), address, d, 2), align=2)
    words = builder.zext(bits, _as(_INT, kind))
    return builder.bitcast(builder.shl(words, _all(kind, 16)), kind)


def _rounded(builder, value):
    """Floats as the bits of bfloat16."""
    kind = value.type
    words = builder.bitcast(value, _as(_INT, kind))
    upper = _all(kind, 16)
    odd = builder.and_(builder.lshr(words, upper), _all(kind, 1))
    near = builder.add(words, builder.add(odd, _all(kind, 0x7FFF)))
    # A NaN could be carried over into a number.
    is_nan = builder.fcmp_unordered("uno", value, value)
    near = builder.select(is_nan, _all(kind, 0x7FC00000), near)
    return builder.trunc(builder.lshr(near, upper), _as(_SHORT, kind))


def _as(element, kind):
    """A number's or a vector's type with other elements."""
    return element if kind == _FLOAT else ir.VectorType(element, LANES)


def _all(kind, number):
    """A whole number as `_as(_INT, kind)`."""
    if kind == _FLOAT:
        return _INT(number)
    return ir.Constant(ir.VectorType(_INT, LANES), [number] * LANES)


def _exponential(builder, x):
    """exp(x) of a vector of numbers that are 0 at most."""
    y = builder.fmul(x, _all_floats(_LOG2E))
    y = builder.select(builder.fcmp_ordered(">", y, _all_floats(_LOWEST)), y, _all_floats(_LOWEST))
    whole = builder.fsub(builder.fadd(y, _all_floats(_ROUND)), _all_floats(_ROUND))
    rest = builder.fsub(y, whole)
    power = _all_floats(_EXP2[0])
    for coefficient in _EXP2[1:]:
        power = _multiply_add(builder, power, rest, _all_floats(coefficient))
    exponent = builder.add(builder.fptosi(whole, _as(_INT, _VECTOR)), _all(_VECTOR, 127))
    scale = builder.bitcast(builder.shl(exponent, _all(_VECTOR, 23)), _VECTOR)
    return builder.fmul(power, scale)


def _splat(builder, value):
    vector = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), value, ir.IntType(32)(0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    return builder.shuffle_vector(vector, ir.Constant(_VECTOR, ir.Undefined), zeros)


def _multiply_add(builder, a, b, c):
    """a * b + c, rounded once where the processor has such an instruction."""
    name = "llvm.fmuladd." + ("f32" if a.type == _FLOAT else f"v{LANES}f32")
    kind = ir.FunctionType(a.type, [a.type] * 3)
    call = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(call, [a, b, c])


def _taken_apart(builder, tupled):
    return [builder.extract_value(tupled, i) for i in range(len(tupled.type))]


def _side_by_side(builder, numbers):
    """Numbers as the first lanes of a vector; zeros follow."""
    vector = _all_floats(0.0)
    for i, number in enumerate(numbers):
        vector = builder.insert_element(vector, number, _INT(i))
    return vector


def _reduced(builder, address, length, start, join):
    """join of all floats there: lane by lane, then in halves, then what is left one by one."""
    lanes = cgutils.alloca_once_value(builder, start)
    with _for_whole(builder, length) as first:
        here = _load(builder, _VECTOR, address, first)
        builder.store(join(builder.load(lanes), here), lanes)
    result = cgutils.alloca_once_value(builder, _of_lanes(builder, builder.load(lanes), join))
    with _for_rest(builder, length) as d:
        builder.store(join(builder.load(result), _load(builder, _FLOAT, address, d)), result)
    return builder.load(result)


def _of_lanes(builder, vector, join):
    """join of all lanes, in halves."""
    width = LANES
    while width > 1:
        half = width // 2
        kind = ir.VectorType(_INT, half)
        low = builder.shuffle_vector(vector, vector, ir.Constant(kind, list(range(half))))
        high = builder.shuffle_vector(vector, vector, ir.Constant(kind, list(range(half, width))))
        vector = join(low, high)
        width = half
    return builder.extract_element(vector, _INT(0))


def _sums_of_lanes(builder, vectors):
    """`_of_lanes` of up to 16 vectors' sums at once: a vector of them, in their order."""
    width = LANES
    while width > 1:
        half = width // 2
        # A vector holds LANES / width of them. Each pair becomes one, of halves that are added.
        starts = range(0, 2 * LANES, width)
        low, high = (
            ir.Constant(
                ir.VectorType(_INT, LANES),
                [start + first + i for start in starts for i in range(half)],
            )
            for first in (0, half)
        )
        pairs = [
            (vectors[i], vectors[min(i + 1, len(vectors) - 1)]) for i in range(0, len(vectors), 2)
        ]
        vectors = [
            builder.fadd(builder.shuffle_vector(a, b, low), builder.shuffle_vector(a, b, high))
            for a, b in pairs
        ]
        width = half
    return vectors[0]
