"""Room for servers, and servers that run already."""

import pytest

from sglang_ext.servers.started_server import ServerError
from sglang_ext.sweep.servers import ControlError, RunningServer, Servers, plan_room
from tests.unit.sweep.fake_server import FakeServer

GB = 1e9
KV = 46_080  # SmolLM2-135M in float32
FLAGS = {"plain": (), "sssd": ("--speculative-algorithm", "SSSD")}


def room(servers, available, needed=20_000, longest=1000):
    return plan_room(servers, needed, longest, 0.54 * GB, KV, available * GB)


def test_all_run_together_where_memory_allows():
    assert room(3, 64).together
    assert room(3, 64).kv_tokens == 20_480  # what is needed, rounded up
    assert not room(3, 10).together
    assert room(1, 10).together


def test_a_smaller_pool_comes_before_one_server_at_a_time():
    small = room(3, 18, needed=100_000)
    assert small.together and 16_384 <= small.kv_tokens < 100_000
    alone = room(3, 12, needed=100_000)
    assert not alone.together and alone.kv_tokens > small.kv_tokens


def test_a_pool_is_no_larger_than_the_largest_batch():
    small = room(2, 64, needed=3000, longest=1700)
    assert small.together and small.kv_tokens == 4096
    assert room(2, 9, needed=3000, longest=1700).together
    assert not room(2, 9).together


def test_a_pool_holds_two_of_the_longest_requests():
    assert room(3, 64, needed=30_000, longest=12_000).kv_tokens >= 24_000
    assert room(1, 1, longest=12_000).kv_tokens >= 24_000


@pytest.fixture
def fake():
    server = FakeServer("SSSD")
    yield server
    server.die()


def test_a_running_server_is_taken_and_left_running(fake):
    with Servers("m", FLAGS, urls={"sssd": fake.url}, say=lambda line: None) as servers:
        servers.prepare(["sssd"], "/no/model", 100, 10)
        server = servers.get("sssd")
        assert server is servers.get("sssd")
        assert server.answers() and server.width is None
        assert server.cpu_seconds() is None and server.memory_mb() is None
        assert servers.describe() == {"sssd": {"url": fake.url, "flags": []}}
        assert not servers.is_started_here("sssd")
    assert server.answers()


def test_a_server_that_decodes_otherwise_is_refused(fake):
    with Servers("m", FLAGS, urls={"plain": fake.url}) as servers:
        with pytest.raises(ServerError, match="SSSD, expected none"):
            servers.get("plain")
        assert servers.describe() == {}


def test_no_server_at_a_url():
    gone = FakeServer()
    gone.die()
    with (
        Servers("m", FLAGS, urls={"plain": gone.url}) as servers,
        pytest.raises(ServerError, match="no SGLang server answers"),
    ):
        servers.get("plain")


def test_a_corpus_takes_the_place_of_one_of_its_name(fake):
    server = RunningServer(fake.url, ())
    server.add_corpus("c", ["a"])
    server.add_corpus("c", ["b"])
    assert fake.corpora == {"c": ["b"]}
    server.remove_corpus("c")
    with pytest.raises(ControlError, match=r"/remove_external_corpus: HTTP 400"):
        server.remove_corpus("c")


def test_widths(fake):
    server = RunningServer(fake.url, ())
    fake.width_sum, fake.width_count = 24, 6
    assert server.widths() == (24.0, 6.0)
    fake.algorithm = None  # one without such a metric
    assert server.widths() == (0.0, 0.0)
