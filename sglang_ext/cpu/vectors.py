"""Loops over float32 vectors of 16 lanes, written as LLVM IR, for numba kernels.

Compiled loops leave the order of a sum to the compiler; here it is fixed, so that one product and
sixteen at once give the same bits: lane j sums the products j, j + 16, j + 32, ..., the lanes are
added in halves (j + 8, j + 4, j + 2, j + 1), and what is left of a length that 16 does not divide
follows one by one. LLVM splits the vectors where a processor has narrower ones.

Addresses are integers (`array.ctypes.data`), 4-byte aligned; lengths are in floats.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16

_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)
_INDEX = ir.IntType(64)
_LINE = 64


@intrinsic
def dot(typing_context, a, b, length):
    """The product of two vectors at addresses a and b: float32."""

    def generate(context, builder, signature, args):
        a, b, length = args
        total = cgutils.alloca_once_value(builder, _zeros(_VECTOR))
        with _for_whole(builder, length) as start:
            here = _load(builder, _VECTOR, a, start)
            there = _load(builder, _VECTOR, b, start)
            builder.store(_multiply_add(builder, here, there, builder.load(total)), total)
        result = cgutils.alloca_once_value(builder, _sum_of_lanes(builder, builder.load(total)))
        with _for_rest(builder, length) as d:
            here, there = _load(builder, _FLOAT, a, d), _load(builder, _FLOAT, b, d)
            builder.store(_multiply_add(builder, here, there, builder.load(result)), result)
        return builder.load(result)

    return types.float32(types.uintp, types.uintp, types.intp), generate


@intrinsic
def dots(typing_context, rows, columns, length, to):
    """Sixteen products of each row: of the vector there with each column of `columns` [length, 16].

    Args:
        rows: a tuple of addresses; `columns` is loaded once for all.
        to: address of [rows, 16].
    """

    def generate(context, builder, signature, args):
        rows, columns, length, to = args
        rows = [builder.extract_value(rows, i) for i in range(signature.args[0].count)]

        def add(d, totals):
            column = _load(builder, _VECTOR, columns, builder.mul(d, _INDEX(LANES)))
            for row, total in zip(rows, totals, strict=True):
                value = _splat(builder, _load(builder, _FLOAT, row, d))
                builder.store(_multiply_add(builder, value, column, builder.load(total)), total)

        def sums(first, step):
            """What the lanes first, first + step, ... add up to: few registers are in use."""
            if step < LANES:
                halves = zip(sums(first, 2 * step), sums(first + step, 2 * step), strict=True)
                return [builder.fadd(low, high) for low, high in halves]
            totals = [cgutils.alloca_once(builder, _VECTOR) for _ in rows]
            for total in totals:
                builder.store(_zeros(_VECTOR), total)
            with _for_whole(builder, length) as start:
                add(builder.add(start, _INDEX(first)), totals)
            return [builder.load(total) for total in totals]

        results = [cgutils.alloca_once_value(builder, total) for total in sums(0, 1)]
        with _for_rest(builder, length) as d:
            add(d, results)
        for i, result in enumerate(results):
            place = _at(builder, _VECTOR, to, _INDEX(i * LANES))
            builder.store(builder.load(result), place, align=4)
        return context.get_dummy_value()

    return types.void(rows, types.uintp, types.intp, types.uintp), generate


@intrinsic
def add_rows(typing_context, to, length, weights, rows):
    """to[d] += weights[0] * rows[0][d], then weights[1] * rows[1][d], ...; tuples of one length."""

    def generate(context, builder, signature, args):
        to, length, weights, rows = args
        pairs = [
            (builder.extract_value(weights, i), builder.extract_value(rows, i))
            for i in range(signature.args[2].count)
        ]

        def add(kind, d):
            total = _load(builder, kind, to, d)
            for weight, row in pairs:
                factor = _splat(builder, weight) if kind is _VECTOR else weight
                total = _multiply_add(builder, factor, _load(builder, kind, row, d), total)
            builder.store(total, _at(builder, kind, to, d), align=4)

        with _for_whole(builder, length) as start:
            add(_VECTOR, start)
        with _for_rest(builder, length) as d:
            add(_FLOAT, d)
        return context.get_dummy_value()

    return types.void(types.uintp, types.intp, weights, rows), generate


@intrinsic
def prefetch(typing_context, address, length):
    """Ask for the cache lines of `length` floats at an address; the address need not be valid."""

    def generate(context, builder, signature, args):
        address, length = args
        pointer = ir.PointerType(ir.IntType(8))
        kind = ir.FunctionType(ir.VoidType(), [pointer] + [ir.IntType(32)] * 3)
        call = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        floats = _LINE // 4
        with cgutils.for_range_slice(builder, _INDEX(0), length, _INDEX(floats)) as (d, _):
            line = builder.bitcast(_at(builder, _FLOAT, address, d), pointer)
            builder.call(call, [line, *(ir.IntType(32)(n) for n in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(types.uintp, types.intp), generate


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


def _zeros(kind):
    return ir.Constant(kind, [0.0] * LANES)


def _at(builder, kind, address, d):
    where = builder.add(address, builder.mul(d, _INDEX(4)))
    return builder.inttoptr(where, ir.PointerType(kind))


def _load(builder, kind, address, d):
    return builder.load(_at(builder, kind, address, d), align=4)


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


def _sum_of_lanes(builder, vector):
    width = LANES
    while width > 1:
        half = width // 2
        kind = ir.VectorType(ir.IntType(32), half)
        low = builder.shuffle_vector(vector, vector, ir.Constant(kind, list(range(half))))
        high = builder.shuffle_vector(vector, vector, ir.Constant(kind, list(range(half, width))))
        vector = builder.fadd(low, high)
        width = half
    return builder.extract_element(vector, ir.IntType(32)(0))
