"""In an archive of the GPU kit: in place of SGLang's file of this name, which Hopper never runs.

SGLang imports its Blackwell kernel while it builds a model on any GPU, and with it NVIDIA's CuTe
DSL, which is larger than what can be carried. Its own answer on Hopper is that it can't be used.
"""

from enum import IntEnum

MAX_DUAL_GEMM_DECODE_TOKENS = 16


class DualGemmQuantMode(IntEnum):
    """SGLang's names of what the kernel would do."""

    STATIC_PER_TENSOR = 0
    STATIC_PER_TOKEN = 1
    DYNAMIC_PER_TENSOR = 2
    DYNAMIC_PER_TOKEN = 3
    UNQUANT = 4


def can_use_dual_gemm(*_: object) -> bool:
    """False, as SGLang's own says where there is no SM100."""
    return False
