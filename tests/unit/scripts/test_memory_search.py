"""The search for tokens in what an object holds finds them in every form that the code uses."""

from array import array
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest

from scripts.lib.memory_search import holders

TOKENS = [4001, 17, 4002, 9000]
WHOLE = [1, 2, *TOKENS, 3]


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


@pytest.mark.parametrize(
    "value",
    [
        WHOLE,
        tuple(WHOLE),
        deque(WHOLE),
        array("i", WHOLE),
        np.array(WHOLE, dtype=np.uint16),
        np.array(WHOLE, dtype=np.int64).reshape(1, 7),
        np.array(WHOLE, dtype=np.int32)[:2],  # the rest is behind it still
        np.array(WHOLE, dtype="<u2").tobytes(),
        bytearray(np.array(WHOLE, dtype="<u4").tobytes()),
        [np.int32(token) for token in WHOLE],
    ],
    ids=lambda value: type(value).__name__,
)
def test_tokens_are_found_in_every_form_and_place(value):
    for root in (value, {"a": [value]}, SimpleNamespace(x=Slotted(value))):
        assert holders(root, TOKENS)


@pytest.mark.parametrize("value", [TOKENS[:3], TOKENS[::-1], array("d", WHOLE), "4001 17", {4001}])
def test_other_tokens_and_other_orders_are_not_found(value):
    assert not holders([value], TOKENS)
