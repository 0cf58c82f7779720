"""Sums of four products of bytes in each of 16 lanes, by what instructions a processor has.

All give the same integers: VNNI (AVX-512's or AVX's), AVX2, and plain LLVM IR for any processor.
"""

from abc import ABC, abstractmethod

from llvmlite import ir

from sglang_ext.cpu.lane_vectors import BYTES, I8, I16, I32, LANES, WORDS, bytes_of, call


class ByteDots(ABC):
    """Four products of bytes, added up in each of 16 lanes.

    Attributes:
        shift: 1 where `prepare` adds 128 to the weights, else 0.
    """

    shift = 0

    def prepare(self, builder, weights):
        """Weights <64 x i8> as `add` takes them, made once for several rows."""
        return weights

    @abstractmethod
    def add(self, builder, total, weights, inputs):
        """total <16 x i32>, plus weights by inputs <64 x i8>."""


class AnyProcessor(ByteDots):
    """In plain IR."""

    def add(self, builder, total, weights, inputs):
        for i in range(4):
            places = ir.Constant(WORDS, [4 * lane + i for lane in range(LANES)])
            here, there = (
                builder.sext(builder.shuffle_vector(x, x, places), WORDS) for x in (weights, inputs)
            )
            total = builder.add(total, builder.mul(here, there))
        return total


class Vnni(ByteDots):
    """Unsigned by signed bytes, in one instruction for `lanes` lanes."""

    def __init__(self, lanes, shift):
        self.shift, self._lanes = shift, lanes

    def prepare(self, builder, weights):
        return builder.xor(weights, bytes_of(0x80)) if self.shift else weights

    def add(self, builder, total, weights, inputs):
        name = f"llvm.x86.avx512.vpdpbusd.{32 * self._lanes}"
        words = [builder.bitcast(x, WORDS) for x in (weights, inputs)]
        return _in_parts(builder, name, self._lanes, total, *words)


class Avx2(ByteDots):
    """Unsigned by signed bytes; two products must fit 16 bits: levels to 127 and weights to 127."""

    def __init__(self, signed):
        self._signed = signed

    def prepare(self, builder, weights):
        if not self._signed:
            return weights
        return weights, call(builder, "llvm.abs.v64i8", BYTES, weights, ir.IntType(1)(0))

    def add(self, builder, total, weights, inputs):
        sizes = weights
        if self._signed:
            signs, sizes = weights
            inputs = _by_halves(builder, "llvm.x86.avx2.psign.b", I8, 32, inputs, signs)
        pairs = _by_halves(builder, "llvm.x86.avx2.pmadd.ub.sw", I16, 16, sizes, inputs)
        ones = ir.Constant(ir.VectorType(I16, 32), [1] * 32)
        fours = _by_halves(builder, "llvm.x86.avx2.pmadd.wd", I32, 8, pairs, ones)
        return builder.add(total, fours)


def signed_dots(features):
    """For weights from -127 to 127, by levels from -127 to 127."""
    return _vnni(features, 1) or (Avx2(True) if "avx2" in features else AnyProcessor())


def unsigned_dots(features):
    """For weights from 0 to 15, by levels from -127 to 127."""
    return _vnni(features, 0) or (Avx2(False) if "avx2" in features else AnyProcessor())


def _vnni(features, shift):
    if {"avx512vnni", "avx512vl"} <= features:
        return Vnni(16, shift)
    return Vnni(8, shift) if "avxvnni" in features else None


def _in_parts(builder, name, lanes, *vectors):
    """Call name(total, weights, inputs) for `lanes` of 16 lanes at a time."""
    kind = ir.VectorType(I32, lanes)
    done = []
    for start in range(0, LANES, lanes):
        places = ir.Constant(kind, list(range(start, start + lanes)))
        parts = [builder.shuffle_vector(x, x, places) for x in vectors]
        done.append(call(builder, name, kind, *parts))
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
                builder.shuffle_vector(x, x, ir.Constant(ir.VectorType(I32, size), places))
            )
        done.append(call(builder, name, ir.VectorType(to, count), *parts))
    return _joined(builder, done)


def _joined(builder, halves):
    size = 2 * halves[0].type.count
    return builder.shuffle_vector(*halves, ir.Constant(ir.VectorType(I32, size), list(range(size))))
