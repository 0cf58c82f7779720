"""Processes that are started, watched and stopped together: small HTTP servers in their place."""

import os
import signal
import sys
import threading
from pathlib import Path

import httpx
import pytest

from sglang_ext.disaggregation.cluster import Cluster, ClusterError, Member
from sglang_ext.servers.processes import free_port
from tests.eventually import eventually
from tests.tiny_server import SERVER


def member(name: str) -> Member:
    port = free_port()
    return Member(name, [sys.executable, "-c", SERVER, str(port)], f"http://127.0.0.1:{port}")


def failing(name: str) -> Member:
    command = [sys.executable, "-c", "print('no model'); raise SystemExit(3)"]
    return Member(name, command, f"http://127.0.0.1:{free_port()}")


def is_up(url: str) -> bool:
    try:
        return httpx.get(url + "/health", timeout=2).is_success
    except httpx.HTTPError:
        return False


def test_all_start_and_stop_together(tmp_path: Path) -> None:
    said: list[str] = []
    members = [member("prefill 1"), member("decode 1")]
    with Cluster(members, tmp_path, said.append, restart=True) as cluster:
        cluster.wait()
        assert all(is_up(m.url) for m in members)
        pids = [m.pid for m in members]
    ready = [
        f"{m.name} is ready: {m.url} (process {pid})" for m, pid in zip(members, pids, strict=True)
    ]
    assert sorted(said) == sorted(ready)
    assert not any(is_up(m.url) for m in members)
    assert (tmp_path / "prefill-1.log").read_text() == "listening\n"


def test_a_router_is_started_when_the_servers_are_ready(tmp_path: Path) -> None:
    router, server = member("router"), member("decode 1")
    router.last = True
    started: list[str] = []

    def say(line: str) -> None:
        started.append(line.split(" is ready")[0])
        if started == ["decode 1"]:
            assert router.log == Path(os.devnull) and not router.is_running()

    with Cluster([router, server], tmp_path, say, restart=True) as cluster:
        cluster.wait()
        assert is_up(router.url)
    assert started == ["decode 1", "router"] and not is_up(router.url)


def test_one_that_does_not_start_ends_all_with_its_last_words(tmp_path: Path) -> None:
    good = member("prefill 1")
    with (
        pytest.raises(ClusterError, match=r"decode 1 did not start \(exit code 3\):\nno model"),
        Cluster([good, failing("decode 1")], tmp_path, print, restart=True) as cluster,
    ):
        cluster.wait()
    assert not is_up(good.url)


def test_the_last_line_is_the_reason(tmp_path: Path) -> None:
    words = "raise RuntimeError('no room\\nat all')"
    fails = Member("decode 1", [sys.executable, "-c", words], f"http://127.0.0.1:{free_port()}")
    noisy = Member(
        "decode 2",
        [sys.executable, "-c", "print('ValueError: no model\\nkilled'); raise SystemExit(1)"],
        fails.url,
    )
    for broken, reason in ((fails, "RuntimeError: no room"), (noisy, "ValueError: no model")):
        with (
            pytest.raises(ClusterError) as caught,
            Cluster([broken], tmp_path, print, restart=True) as cluster,
        ):
            cluster.wait()
        assert str(caught.value).splitlines()[-1] == f"{broken.name}: {reason}"


def kill_soon(members: list[Member]) -> None:
    def kill() -> None:
        os.kill(members[0].pid, signal.SIGKILL)

    threading.Timer(0.3, kill).start()


def test_one_that_ends_is_started_again(tmp_path: Path) -> None:
    said: list[str] = []
    members = [member("prefill 1"), member("decode 1")]

    def say(line: str) -> None:
        said.append(line)
        if sum(line.startswith("prefill 1 is ready: ") for line in said) == 2:
            raise KeyboardInterrupt

    with Cluster(members, tmp_path, say, restart=True) as cluster:
        cluster.wait()
        other = members[1].pid
        kill_soon(members)
        with pytest.raises(KeyboardInterrupt):
            cluster.watch()
        assert is_up(members[0].url)
        assert members[1].pid == other
    assert "prefill 1 ended (exit code -9); starting it again" in said


def test_without_restarts_all_end_with_one(tmp_path: Path) -> None:
    members = [member("prefill 1"), member("decode 1")]
    with Cluster(members, tmp_path, print, restart=False) as cluster:
        cluster.wait()
        kill_soon(members)
        with pytest.raises(ClusterError, match=r"prefill 1 ended \(exit code -9\)"):
            cluster.watch()
    assert not any(is_up(m.url) for m in members)


def test_one_that_never_comes_up_again_is_given_up(tmp_path: Path) -> None:
    members = [member("decode 1")]
    with Cluster(members, tmp_path, print, restart=True) as cluster:
        cluster.wait()
        members[0].command = failing("decode 1").command
        kill_soon(members)
        with pytest.raises(ClusterError, match="3 times before it was ready"):
            cluster.watch()


def test_a_members_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PD_TEST_HAS", "1")
    show = "import os; print(os.environ.get('PD_TEST_HAS'), os.environ.get('PD_TEST_NEW'))"
    made = Member(
        "a", [sys.executable, "-c", show], "http://127.0.0.1:1",
        env={"PD_TEST_NEW": "2"}, without=["PD_TEST_HAS"],
    )  # fmt: skip
    with Cluster([made], tmp_path, print, restart=True):
        eventually(lambda: made.tail() == "None 2")
