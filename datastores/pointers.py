"""Array addresses for compiled code, so that one call serves many requests and sub-indices.

numba unpacks a list of arrays slowly; a table of addresses costs nothing. Whoever passes an
address keeps its array alive until the compiled call returns.
"""

from numba import carray, njit
from numba.core import cgutils, types
from numba.extending import intrinsic


@intrinsic
def _void_pointer(typing_context, address):
    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@njit(inline="always")
def array_at(address, size, like):
    """The one-dimensional array of `size` elements at an address, with the dtype of `like`."""
    return carray(_void_pointer(address), size, like.dtype)
