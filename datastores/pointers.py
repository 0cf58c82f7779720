"""Addresses in compiled code: arrays at them, prefetching, and counters that threads share.

numba unpacks a list of arrays slowly, counts references to arrays, and passes each in many words;
a table of addresses costs nothing, and one call serves many requests and sub-indices. Whoever
passes an address keeps its array alive until the compiled call returns.
"""

from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, njit
from numba.core import cgutils, types
from numba.extending import intrinsic

_UNBOUNDED = 1 << 40


@intrinsic
def _void_pointer(typing_context, address):
    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@intrinsic
def load(typing_context, address, index, like):
    """The element at an index of the array at an address (int64), of the type of `like`."""

    def generate(context, builder, signature, arguments):
        kind = context.get_data_type(signature.return_type)
        return builder.load(_element(builder, kind, arguments))

    return like(types.int64, types.int64, like), generate


@intrinsic
def prefetch(typing_context, address, index, like):
    """Asks for the cache line of what load() would read; it need not exist. Waits for nothing."""

    def generate(context, builder, signature, arguments):
        kind = context.get_data_type(signature.args[2])
        pointer = builder.bitcast(_element(builder, kind, arguments), cgutils.voidptr_t)
        int32 = ir.IntType(32)
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, int32, int32, int32]),
            "llvm.prefetch.p0",
        )
        # To be read, soon again, data.
        builder.call(function, [pointer, int32(0), int32(3), int32(1)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, like), generate


def _element(builder, kind, arguments):
    pointer = builder.inttoptr(arguments[0], kind.as_pointer())
    return builder.gep(pointer, [arguments[1]])


@intrinsic
def atomic_add(typing_context, address, value):
    """Adds to the int64 at an address in one step; returns what it was before."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def atomic_load(typing_context, address):
    """The int64 at an address as it is now; unlike atomic_add(address, 0) it disturbs nobody."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, "seq_cst", 8)

    return types.int64(types.int64), generate


@njit(inline="always")
def vector_at(address, dtype):
    """The one-dimensional array at an address; only the caller knows where it ends."""
    return carray(_void_pointer(address), _UNBOUNDED, dtype)


@njit(inline="always")
def matrix_at(address, columns, dtype):
    """The two-dimensional C-ordered array at an address; only the caller knows where it ends."""
    return carray(_void_pointer(address), (_UNBOUNDED, columns), dtype)


@njit(inline="always")
def array_at(address, size, dtype):
    """The one-dimensional array of `size` elements at an address."""
    return carray(_void_pointer(address), size, dtype)
