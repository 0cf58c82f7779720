"""Addresses of arrays' rows as integers, for kernels whose loops are LLVM IR."""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


def caller_of(signature: Any) -> Any:
    """What calls a function of this signature, a `numba.cfunc`, by its address in this process.

    A kernel that is given the address does not compile the function anew, which takes seconds for
    large ones, in each of a kernel's parallel loops.

    Args:
        signature: numba's, of no result.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def call(typing_context, function, *args):  # type: ignore[no-untyped-def]
        def generate(context, builder, _, given):  # type: ignore[no-untyped-def]
            values = [
                context.cast(builder, value, have, want)
                for value, have, want in zip(
                    cgutils.unpack_tuple(builder, given[1]), args, signature.args, strict=True
                )
            ]
            kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
            builder.call(builder.inttoptr(given[0], ir.PointerType(kind)), values)
            return context.get_dummy_value()

        return types.void(function, types.StarArgTuple.from_types(args)), generate

    return call


@intrinsic
def pointer_to(typing_context, address):
    """An address as a pointer, for numba.carray."""

    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


@numba.njit(nogil=True, inline="always")
def address_of(array, i):
    """The address of array[i], C-contiguous."""
    return np.uintp(array.ctypes.data) + np.uintp(i * array.strides[0])
