"""Addresses of arrays' rows as integers, for kernels whose loops are LLVM IR."""

import numba
import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


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


@numba.njit(nogil=True)
def four_addresses(array, row, offset):
    """The addresses of four rows, `offset` bytes into each."""
    first = address_of(array, row) + np.uintp(offset)
    step = np.uintp(array.strides[0])
    return (first, first + step, first + step * np.uintp(2), first + step * np.uintp(3))
