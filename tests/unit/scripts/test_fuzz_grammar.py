"""The fuzzer's requests: the same for a number, and all of them can be sent."""

import pytest

from scripts.lib.fuzz_client import encoded
from scripts.lib.fuzz_grammar import FuzzRequest, block, classes, shortened

CLASSES = classes("m")


@pytest.mark.parametrize("kind", CLASSES)
def test_a_number_always_makes_the_same_requests(kind):
    first, again = block(CLASSES[kind], 7, 20), block(CLASSES[kind], 7, 20)
    assert repr(first) == repr(again)
    assert len(first) == 20
    assert repr(block(CLASSES[kind], 8, 20)) != repr(first)
    for request in first:
        assert isinstance(encoded(shortened(request, 16)), bytes)


def test_long_outputs_are_cut_and_wrong_ones_are_not():
    body = {"sampling_params": {"max_new_tokens": 1000}, "max_tokens": 1 << 31, "n": 1000}
    cut = shortened(FuzzRequest("generate", "POST", "/generate", body), 16).body
    assert cut == {"sampling_params": {"max_new_tokens": 16}, "max_tokens": 1 << 31, "n": 1000}


def test_what_is_nested_deep_is_left_alone():
    deep = 1
    for _ in range(900):
        deep = [deep]
    cut = shortened(FuzzRequest("chat", "POST", "/", {"x": deep}), 16).body["x"]
    for _ in range(900):
        cut = cut[0]
    assert cut == 1
