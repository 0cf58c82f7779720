"""Vectors of 16 lanes in LLVM IR, for group_dots.py and vectors.py: types, what is done with them.

Addresses are integers.
"""

from llvmlite import ir
from numba.core import cgutils
from numba.core.registry import cpu_target

LANES = 16

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
FLOAT = ir.FloatType()
BYTES = ir.VectorType(I8, 4 * LANES)  # four for each lane
WORDS = ir.VectorType(I32, LANES)
FLOATS = ir.VectorType(FLOAT, LANES)
LEVELS = ir.VectorType(I8, LANES)
HALVES = ir.VectorType(I16, LANES)


def features_of(context):
    """The instruction sets of the processor that numba compiles for, by LLVM's names."""
    return {name[1:] for name in context.codegen().magic_tuple()[2].split(",") if name[:1] == "+"}


HAS_WIDE_REGISTERS = "avx512f" in features_of(cpu_target.target_context)
"""Whether sixteen lanes are one register, of which there are 32."""


def call(builder, name, result, *args):
    """Call an LLVM function that gives `result`, a type."""
    kind = ir.FunctionType(result, [x.type for x in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def multiply_add(builder, a, b, c):
    """a * b + c of FLOATS, rounded once where the processor has such an instruction."""
    return call(builder, f"llvm.fmuladd.v{LANES}f32", FLOATS, a, b, c)


def ask_for(builder, address, near=3):
    """Ask for the cache line there, which is needed soon; the address may be invalid.

    Args:
        near: the level of the cache: 3 is the first, which waits for few lines at once; 2 the
            second.
    """
    pointer = builder.inttoptr(address, ir.PointerType(I8))
    call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, I32(0), I32(near), I32(1))


def load(builder, kind, address, offset, unit):
    """Load from address + offset * unit bytes."""
    where = builder.add(address, builder.mul(offset, I64(unit)))
    aligned = 4 if kind in (I32, FLOAT) else 1
    return builder.load(builder.inttoptr(where, ir.PointerType(kind)), align=aligned)


def store(builder, value, address, offset, unit):
    """Store to address + offset * unit bytes."""
    where = builder.add(address, builder.mul(offset, I64(unit)))
    builder.store(value, builder.inttoptr(where, ir.PointerType(value.type)), align=unit)


def splat(builder, kind, value):
    """A number in all lanes of `kind`, FLOATS or WORDS."""
    vector = builder.insert_element(ir.Constant(kind, ir.Undefined), value, I32(0))
    return builder.shuffle_vector(vector, ir.Constant(kind, ir.Undefined), zeros(WORDS))


def zeros(kind):
    """Zeros of a kind of vector."""
    return ir.Constant(kind, [0.0 if kind is FLOATS else 0] * kind.count)


def words(value):
    """WORDS, each of them `value`."""
    return ir.Constant(WORDS, [value] * LANES)


def bytes_of(value):
    """BYTES, each of them `value`."""
    return ir.Constant(BYTES, [value] * 4 * LANES)
