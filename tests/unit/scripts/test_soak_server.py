"""What the soak makes of its samples, and what its requests take for an error."""

import asyncio
import os
import random
import time

import aiohttp
import pytest
from aiohttp import web

from scripts.lib.soak_client import Soak
from scripts.lib.soak_requests import Traffic
from scripts.lib.spec_bench import Prompt
from scripts.soak_server import LIMITS, Clients, Sample, growth_figures, limits_broken, table


def samples(rss) -> list[Sample]:
    return [
        Sample(n / 10, {7: rss(n / 10)}, {7: 50 + (n > 70)}, 100, 20 + n, at_rest=n % 5 == 0)
        for n in range(100)
    ]


def test_memory_that_levels_off_has_no_slope_and_a_leak_has_its_own():
    flat = growth_figures(samples(lambda minute: 1000 + min(300, 100 * minute)))
    assert flat["rss_slope_mib_per_minute_second_half"] == pytest.approx(0)
    leak = growth_figures(samples(lambda minute: 1000 + 3 * minute))
    assert leak["rss_slope_mib_per_minute_second_half"] == pytest.approx(3)
    assert leak["rss_growth_mib"] == pytest.approx(12)
    assert leak["threads_growth"] == 1 and leak["files_growth"] == 0
    assert leak["sockets_growth"] == 40


def test_a_process_that_comes_and_goes_is_no_leak():
    at_end = [
        Sample(
            n / 10,
            {7: 1000.0} | ({8: 180.0} if n > 80 else {}),
            {7: 50} | ({8: 5} if n > 80 else {}),
            100,
            20,
            n % 3 == 0,
        )
        for n in range(100)
    ]
    figures = growth_figures(at_end)
    assert figures["rss_slope_mib_per_minute_second_half"] == pytest.approx(0)
    assert figures["rss_mib_end"] == 1180 and figures["threads_growth"] == 0


def test_requests_under_way_are_no_slope_but_a_leak_beneath_them_is():
    rng = random.Random(1)

    def slope(leak: float) -> float:
        run = []
        for n in range(1000):
            at_rest = n % 50 == 0
            under_way = 0 if at_rest else rng.uniform(0, n)  # ever more of them
            rss = {7: 6000 + leak * n / 30 + under_way}
            run.append(Sample(n / 30, rss, {7: 50}, 9, 9, at_rest))
        return growth_figures(run)["rss_slope_mib_per_minute_second_half"]

    assert slope(0) == pytest.approx(0)
    assert slope(3) == pytest.approx(3)


def test_clients_rest_when_the_last_answer_is_there_and_go_on(monkeypatch):
    monkeypatch.setattr("scripts.soak_server.TRIM_S", 0.01)
    started, ended, asked = [], [], []

    class Counting:
        rng = random.Random(0)

        async def call(self, method, path, body):
            asked.append(path)
            return 200, {}

    async def one():
        started.append(1)
        await asyncio.sleep(0.01)
        ended.append(1)

    async def run():
        clients = Clients([one] * 3, time.monotonic() + 1, Counting())
        await asyncio.sleep(0.05)
        await clients.rest()
        at_rest = len(started)
        assert at_rest == len(ended) > 0 and asked == ["/generate"] * 3
        await asyncio.sleep(0.3)
        assert len(started) == at_rest
        clients.go()
        await clients.done
        assert len(started) == len(ended) > at_rest

    asyncio.run(run())


def test_each_limit_that_is_broken_is_named():
    figures = growth_figures(samples(lambda minute: 3 * minute))
    figures |= {"soak_minutes": 60, "unprovoked_errors": 1, "wrong_outputs": 0}
    assert [line.split()[0] for line in limits_broken(figures)] == [
        "rss_slope_mib_per_minute_second_half", "unprovoked_errors", "sockets_growth",
    ]  # fmt: skip
    assert not limits_broken({"soak_minutes": 60, **dict.fromkeys(LIMITS, 0.0)})


def test_caches_may_fill_in_a_short_run_and_a_leak_is_found_in_it():
    def broken(slope: float, minutes: float) -> bool:
        figures = {**dict.fromkeys(LIMITS, 0.0), "soak_minutes": minutes}
        return bool(limits_broken({**figures, "rss_slope_mib_per_minute_second_half": slope}))

    assert broken(4, 60) and not broken(4, 5)
    assert broken(11, 5)


def test_a_sample_sees_this_process_and_the_table_shows_it():
    sample = Sample.of(os.getpid(), 0.5)
    assert sample.rss_mib > 1 and sample.threads >= 1 and sample.files >= 3
    with open(os.devnull) as _, open(os.devnull) as _:
        assert Sample.of(os.getpid(), 1).files == sample.files + 2
    assert len(table([sample] * 40).splitlines()) == 13


def traffic_against(answer, kind: str, times: int):
    """The tally after so many requests of a kind to a server that answers by `answer`."""

    async def run():
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        async with aiohttp.ClientSession() as http:
            soak = Soak(f"http://127.0.0.1:{port}", http, random.Random(0))
            traffic = Traffic(soak, [Prompt("c", "", (1, 2))], "m")
            traffic.kinds = {getattr(traffic, kind): 1}
            for _ in range(times):
                await traffic.one()
        await runner.cleanup()
        return soak.tally.counts

    return asyncio.run(run())


def test_a_greedy_output_that_changes_is_wrong():
    outputs = iter([[5, 6], [5, 6], [5, 7]])

    async def answer(request):
        return web.json_response({"output_ids": next(outputs)})

    counts = traffic_against(answer, "greedy", 3)
    assert counts["wrong_outputs"] == 1 and counts["unprovoked_errors"] == 1


@pytest.mark.parametrize(
    ("kind", "status", "errors"),
    [("flush", 400, 0), ("flush", 500, 2), ("varied", 400, 2), ("delete", 500, 2)],
)
def test_what_is_provoked_is_no_error(kind, status, errors):
    async def answer(request):
        return web.json_response({}, status=status)

    assert traffic_against(answer, kind, 2)["unprovoked_errors"] == errors
