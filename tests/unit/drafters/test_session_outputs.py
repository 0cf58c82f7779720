"""SSBD's table of session outputs: bounded, fair, forgetful."""

import threading
import time

import pytest

from sglang_ext.drafters.session_outputs import SessionOutputs, is_secret


def tokens_of(outputs: SessionOutputs, namespace: str, session: str) -> list[int]:
    output = outputs.get(namespace, session)
    return [] if output is None else list(output.tokens)


def test_sessions_are_bounded_and_forgotten_when_idle(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    outputs = SessionOutputs(2, 60.0)
    for name in "abc":
        outputs.put("default", name, "r", [ord(name)])
    assert outputs.get("default", "a") is None
    assert tokens_of(outputs, "default", "b") == [ord("b")]
    assert outputs.get("other", "b") is None  # another tenant's session of the same name
    now[0] += 50
    outputs.put("default", "b", "r", [7])
    now[0] += 20
    assert outputs.get("default", "c") is None
    assert tokens_of(outputs, "default", "b") == [7]
    assert len(outputs) == 1


def test_a_namespace_that_fills_the_table_pushes_out_its_own():
    outputs = SessionOutputs(10, 60.0)
    for number in range(3):
        outputs.put("small", str(number), "r", [number])
    for number in range(1000):
        outputs.put("greedy", str(number), "r", [number])
    assert [tokens_of(outputs, "small", str(n)) for n in range(3)] == [[0], [1], [2]]
    assert len(outputs) == 10
    assert [n for n in range(1000) if outputs.get("greedy", str(n))] == list(range(993, 1000))
    for number in range(9):  # who comes later gets a share too
        outputs.put("late", str(number), "r", [number])
    kept = {n: sum(key[0] == n for key in outputs._outputs) for n in ("small", "greedy", "late")}
    assert sum(kept.values()) == 10 and max(kept.values()) - min(kept.values()) <= 1, kept


def test_tokens_are_bounded_where_they_lie():
    outputs = SessionOutputs(100, 60.0, most_tokens=1000)
    outputs.put("small", "s", "r", [1] * 100)
    for number in range(20):
        outputs.put("greedy", str(number), "r", [2] * 300)
    assert tokens_of(outputs, "small", "s") == [1] * 100
    assert [n for n in range(20) if outputs.get("greedy", str(n))] == [17, 18, 19]
    outputs.forget(None)
    assert outputs._total_tokens == 0 and len(outputs) == 0
    assert not outputs._sessions and not outputs._tokens and not outputs._alive


def test_what_was_forgotten_does_not_come_back_through_a_request_that_ran():
    outputs = SessionOutputs(10, 60.0)
    outputs.put("a", "s", "r1", [1, 2, 3])
    source = outputs.get("a", "s")
    outputs.put("a", "s", "r2", [4], source)  # another request of the session, in between
    outputs.forget("a", "r1")
    assert source.forgotten and not source.tokens
    assert tokens_of(outputs, "a", "s") == [4]
    outputs.put("a", "s", "r3", [1, 2, 3, 4], source)
    assert tokens_of(outputs, "a", "s") == [4]


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("0f8fad5b-d9cb-469f-a165-70867728950e", True),
        ("0F8FAD5B-D9CB-469F-A165-70867728950E", True),
        ("0f8fad5b-d9cb-169f-a165-70867728950e", False),  # version 1: a clock's
        ("0f8fad5b-d9cb-469f-c165-70867728950e", False),  # no variant of the RFC
        ("0f8fad5bd9cb469fa16570867728950e", False),
        ("0f8fad5b-d9cb-469f-a165-70867728950e\n", False),
        ("talk-7", False),
    ],
)
def test_a_secret_name_is_a_random_uuid(name, secret):
    assert is_secret(name) is secret


def test_threads_may_forget_while_others_write():
    outputs = SessionOutputs(50, 60.0)
    done = threading.Event()
    failed = []

    def forget():
        try:
            while not done.is_set():
                outputs.forget("a")
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=forget) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(5000):
        source = outputs.get("a", str(number % 90))
        outputs.put("a", str(number % 100), "r", [number], source)
    done.set()
    for thread in threads:
        thread.join()
    assert not failed
    outputs.forget("a")
    assert len(outputs) == 0 and outputs._total_tokens == 0
