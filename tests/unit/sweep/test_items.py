"""Items by stream, and streams as sessions."""

import pytest

from sglang_ext.drafters.ssbd import RetranslationDrafter
from sglang_ext.sweep.items import Item, as_sessions, streams, tokens_in_flight
from sglang_ext.sweep.methods import METHODS

PARAMS = {"drafter": "ssbd", "ssbd": {"beta": 0.2}, "ingest": True}


def item(name, stream=""):
    return Item(name, "c", (1, 2), 5, stream=stream)


ITEMS = [item("a1", "a"), item("a2", "a"), item("b1", "b"), item("x"), item("y"), item("c1", "c")]


def ids(groups):
    return [[item.id for item in group] for group in groups]


def test_items_of_a_stream_keep_together_and_others_are_alone():
    assert ids(streams(ITEMS)) == [["a1", "a2"], ["b1"], ["x"], ["y"], ["c1"]]
    assert streams([]) == []


def test_each_stream_is_a_session_and_what_it_ends_with_is_ingested():
    made = as_sessions(ITEMS, PARAMS, "run")
    assert [m.id for m in made] == [i.id for i in ITEMS]
    first, second, other = (m.params["ssbd"] for m in made[:3])
    assert first == second == {"beta": 0.2, "session": first["session"]}
    assert first["session"] != other["session"]
    (again, *_) = as_sessions(ITEMS, PARAMS, "another run")
    assert again.params["ssbd"]["session"] != first["session"]
    assert [m.params["ingest"] for m in made] == [False, True, True, True, True, True]
    assert not any(m.params["ingest"] for m in as_sessions(ITEMS, PARAMS | {"ingest": False}, "r"))
    assert PARAMS["ssbd"] == {"beta": 0.2}


@pytest.mark.parametrize(
    "method", [m for m in METHODS.values() if m.sessions], ids=lambda m: m.name
)
def test_servers_take_the_sessions_of_a_method(method):
    for made in as_sessions(ITEMS, method.params, "run"):
        RetranslationDrafter.check(made.params)


def test_what_a_request_takes_in_the_servers_cache():
    assert item("a").most_tokens == 7
    assert Item("a", "c", (), 5, audio="data:").most_tokens == 1504 + 5


def test_requests_in_flight_have_the_beginning_that_they_share_in_the_cache_once():
    document = tuple(range(100))
    items = [Item(str(n), "c", (*document, 1000 + n), 10) for n in range(4)]
    assert tokens_in_flight(items, 1) == 111
    assert tokens_in_flight(items, 3) == 111 + 2 * 11
    assert tokens_in_flight(items, 16) == 111 + 3 * 11
    # The largest of all that can be in flight together, wherever they are.
    longer = Item("longer", "c", tuple(range(2000, 2300)), 10)
    assert tokens_in_flight([*items, longer], 2) == 111 + 310
    assert tokens_in_flight([], 2) == 0
