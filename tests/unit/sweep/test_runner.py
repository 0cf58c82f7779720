"""Whole sweeps over servers that can die: what is measured, in which order, and what is kept."""

import itertools
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from sglang_ext.drafters.session_outputs import is_secret
from sglang_ext.sweep import load
from sglang_ext.sweep.items import Item, Workload, as_sessions
from sglang_ext.sweep.measuring import output_sha, parts_of
from sglang_ext.sweep.methods import METHODS as CATALOGUE
from sglang_ext.sweep.methods import Method
from sglang_ext.sweep.plan import Plan, Point
from sglang_ext.sweep.results import Results
from sglang_ext.sweep.runner import Runner, SweepError
from sglang_ext.sweep.summary import summarize
from tests.unit.sweep.fake_server import FakeServers

SERVERS = {
    "plain": (),
    "ngram": ("--speculative-algorithm", "NGRAM"),
    "sssd": ("--speculative-algorithm", "SSSD"),
}
METHODS = {
    method.name: method
    for method in (
        Method("ar", "AR", "plain"),
        Method("ngram", "NGRAM", "ngram"),
        Method("cold", "Cold", "sssd", {"drafter": "sssd", "ingest": False, "datastore": False}),
        Method("live", "Live", "sssd", {"drafter": "sssd"}, corpus=True, fresh_namespace=True),
    )
}
PLAN = Plan(
    model="m", methods=("ar", "ngram", "cold", "live"), workloads=("w", "v"), batches=(1, 2),
    rates=(), repeats=2, prompts=3, max_tokens=4, seed=0, data="/d", server_flags=(),
)  # fmt: skip
TOTAL = 2 * 2 * 2 * 4
MEASURED_TOKENS, WARM_UP_TOKENS = 20, 16


def workload(name, first):
    def made(kind, start, count):
        return tuple(
            Item(f"{kind}{i}", f"category {i % 2}", (start + i, 1), MEASURED_TOKENS)
            for i in range(count)
        )

    return Workload(name, "text", made("m", first, 3), made("s", first + 50, 2))


WORKLOADS = {"w": workload("w", 1), "v": workload("v", 200)}


def sweep(folder, plan=PLAN, servers=None, say=None):
    """(runner, servers) after a sweep into a folder."""
    servers = servers or FakeServers(SERVERS)
    with Results.create_or_resume(folder, plan) as results, servers:
        runner = Runner(
            results, WORKLOADS, METHODS, servers, "/no/model",
            decode=lambda ids: " ".join(map(str, ids)), say=say or servers.said.append,
        )  # fmt: skip
        runner.run()
    return runner, servers


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(folder, runner, servers) after a sweep without incidents."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, *sweep(folder)


def is_measured(body):
    """Whether a request is one of a timed run."""
    return body["sampling_params"]["max_new_tokens"] == MEASURED_TOKENS and any(
        body["input_ids"] == list(item.input_ids)
        for workload in WORKLOADS.values()
        for item in workload.measured
    )


def namespaces(server):
    return [
        body["sampling_params"]["custom_params"]["namespace"]
        for body in server.generated()
        if "namespace" in body["sampling_params"].get("custom_params", {})
    ]


def test_everything_is_measured_once_in_the_plans_order(whole):
    folder, runner, _ = whole
    results = Results.read(folder)
    assert [(p.repeat, p.point) for p in results.points] == list(PLAN.order())
    assert len(results.points) == TOTAL
    assert runner.problems == [] and runner.left() == []
    for point in results.points:
        assert (point.requests, point.failed, point.error) == (3, 0, None)
        assert point.output_tokens == 3 * MEASURED_TOKENS
        assert point.prompt_tokens == 3 * 2
        assert point.duration_s > 0
    assert len(list(results.requests)) == TOTAL * 3
    assert set(results.environment["servers"]) == set(SERVERS)


def test_every_repeat_has_servers_of_its_own(whole):
    servers = whole[-1]
    started = [key for key, _ in servers.started]
    # In the order of the plan, which the second repeat has backwards.
    assert started == ["plain", "ngram", "sssd", "plain", "sssd", "ngram"]
    first, second = (
        [is_measured(body) for body in server.generated()]
        for key, server in servers.started
        if key == "ngram"
    )
    assert sum(first) == sum(second) == TOTAL / 4 / 2 * 3


def test_requests_are_kept_with_what_they_gave(tmp_path):
    sweep(tmp_path, replace(PLAN, workloads=("w",), batches=(2,), repeats=1))
    requests = [r for r in Results.read(tmp_path).requests if r.method == "cold"]
    assert [r.id for r in requests] == ["m0", "m1", "m2"]
    assert [r.category for r in requests] == ["category 0", "category 1", "category 0"]
    for n, request in enumerate(requests, start=1):
        assert request.output_sha == output_sha([100 * n + i for i in range(MEASURED_TOKENS)])
        assert request.output_tokens == MEASURED_TOKENS
        assert 0 < len(request.itl_s) < MEASURED_TOKENS  # without those of the first chunk
        assert request.load == 2.0 and request.mode == "batch"
    assert output_sha([1, 2]) != output_sha([2, 1])


def test_widths_and_accept_lengths_come_from_the_server(tmp_path):
    sweep(tmp_path, replace(PLAN, workloads=("w",), batches=(1,), repeats=1))
    found = {p.method: p for p in Results.read(tmp_path).points}
    assert {name: p.verify_width for name, p in found.items()} == {
        "ar": 1.0, "ngram": 12, "cold": 4.0, "live": 4.0,
    }  # fmt: skip
    assert found["ar"].accept_length is None
    # 20 tokens in chunks of 1, 2, 1, 2, ...: 14 verify steps.
    assert found["cold"].accept_length == pytest.approx(20 / 14)


def test_what_another_workload_served_is_no_corpus_where_it_is_measured(tmp_path, monkeypatch):
    measured = WORKLOADS["w"].measured[0]
    shared = replace(WORKLOADS["v"], served_before=(replace(measured, id="s0"),))
    monkeypatch.setitem(WORKLOADS, "v", shared)
    plan = replace(PLAN, methods=("ar", "live"), batches=(1,), repeats=1)
    _, servers = sweep(tmp_path, plan)
    calls = servers.server("sssd").calls
    documents = {
        body["corpus_id"]: len(body["documents"])
        for path, body in calls
        if path == "/add_external_corpus"
    }
    assert documents == {"sweep-w": 2, "sweep-v": 3}


def test_a_warm_method_has_what_was_served_before_and_nothing_of_its_own_prompts(whole):
    folder, _, servers = whole
    served = Results.read(folder).served_before("w")
    assert [(s.id, s.prompt) for s in served] == [("s0", [51, 1]), ("s1", [52, 1])]
    assert served[0].output == [5100 + i for i in range(MEASURED_TOKENS)]
    sssd = servers.server("sssd")
    loaded = [body for path, body in sssd.calls if path == "/add_external_corpus"]
    assert len(loaded) == TOTAL / 4 / 2  # of the second repeat's server
    assert {body["corpus_id"] for body in loaded} == {"sweep-w", "sweep-v"}
    texts = next(body["documents"] for body in loaded if body["corpus_id"] == "sweep-w")
    served += Results.read(folder).served_before("v")
    assert texts == [" ".join(map(str, s.output)) for s in served]
    assert sssd.corpora == {}  # all were removed
    # The corpus is there for the warm method's requests; the others are told not to read it.
    loaded = False
    for path, body in sssd.calls:
        if path == "/add_external_corpus":
            loaded = True
        elif path == "/remove_external_corpus":
            loaded = False
        elif path == "/generate" and is_measured(body):
            params = body["sampling_params"]["custom_params"]
            assert loaded and ("namespace" in params) == params.get("datastore", True)
    assert "/add_external_corpus" not in servers.server("plain").paths()


def test_each_run_of_a_live_method_has_a_namespace_of_its_own(whole):
    _, _, servers = whole
    sssd = servers.server("sssd")
    used = [name for name in namespaces(sssd) if name != "sweep-warm-up"]
    assert len(used) == TOTAL / 4 / 2 * (3 + 1)  # one is not measured, and opens it
    assert len(set(used)) == TOTAL / 4 / 2
    deleted = {path.rpartition("/")[2] for path in sssd.paths() if "/namespaces/" in path}
    assert deleted == set(used) | {"sweep-warm-up"}


def test_the_cache_is_flushed_before_each_run_and_warm_ups_are_not_repeated(whole):
    _, _, servers = whole
    plain = servers.server("plain")
    # As it is opened and before each part (of three prompts three at batch 1, one at batch 2), but
    # NGRAM, which would forget what it has learned.
    assert plain.paths().count("/flush_cache") == (1 + 3 + 1 + 1) * TOTAL / 4 / 2 / 2
    assert servers.server("ngram").paths().count("/flush_cache") == TOTAL / 4 / 2
    warm = [b for b in plain.generated() if b["sampling_params"]["max_new_tokens"] == 16]
    assert sorted(b["input_ids"][0] for b in warm) == [51, 52, 250, 251]  # never a measured one
    measured = [b for b in plain.generated() if is_measured(b)]
    assert len(measured) == TOTAL / 4 / 2 * 3


def test_a_finished_sweep_is_not_measured_again(whole):
    _, servers = sweep(whole[0])
    assert servers.started == []


def test_an_interrupted_sweep_goes_on_where_it_stopped(tmp_path):
    servers = FakeServers(SERVERS)

    def ctrl_c(line):
        servers.said.append(line)
        if line.startswith(f"9/{TOTAL}"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(tmp_path, servers=servers, say=ctrl_c)
    assert all(server.dead for _, server in servers.started)
    before = [p for p in Results.read(tmp_path).points if p.error is None]
    assert len(before) == 9
    runner, again = sweep(tmp_path)
    points = [p for p in Results.read(tmp_path).points if p.error is None]
    assert points[:9] == before
    assert [(p.repeat, p.point) for p in points] == list(PLAN.order())
    assert runner.left() == []
    assert not any(
        body["input_ids"][0] in (51, 52) and body["sampling_params"]["max_new_tokens"] == 20
        for body in again.server("plain").generated()
    )  # what was served before was kept
    assert again.prepared[1:] == servers.prepared[1:]  # KV pools of the same size


def test_a_server_that_dies_is_started_again_and_the_run_repeated(tmp_path):
    def set_up(key, server, nth):
        if key == "ngram" and nth == 0:
            seen: list = []

            def fate(body):
                seen.append(is_measured(body))
                return "die" if sum(seen) == 5 else None

            server.fate = fate

    runner, servers = sweep(tmp_path, servers=FakeServers(SERVERS, set_up=set_up))
    points = Results.read(tmp_path).points
    again = ["plain", "sssd", "ngram"]  # for the second repeat
    assert [key for key, _ in servers.started] == ["plain", "ngram", "sssd", "ngram", *again]
    (died,) = [p for p in points if p.error is not None]
    assert died.method == "ngram" and "'ngram' died" in died.error
    good = [(p.repeat, p.point) for p in points if p.error is None]
    assert sorted(good, key=str) == sorted(PLAN.order(), key=str)
    assert good.index((0, died.point)) == 7  # behind those that it took turns with
    assert runner.problems == []


def test_methods_take_turns_within_a_load(tmp_path):
    many = tuple(Item(f"m{i}", "c", (10 + i, 1), MEASURED_TOKENS) for i in range(16))
    long = Workload("w", "text", many, (Item("s", "c", (90, 1), MEASURED_TOKENS),))
    plan = replace(PLAN, methods=("ar", "cold", "live"), workloads=("w",), batches=(4,), repeats=1)
    order: list = []
    servers = FakeServers(SERVERS)

    def note(key):
        def fate(body):
            if body["input_ids"][0] < 90 and body["sampling_params"]["max_new_tokens"] > 16:
                own = body["sampling_params"].get("custom_params", {})
                order.append((key, "namespace" in own))

        return fate

    servers.set_up = lambda key, server, nth: setattr(server, "fate", note(key))
    with Results.create_or_resume(tmp_path, plan) as results, servers:
        Runner(results, {"w": long}, METHODS, servers, "/no/model", str, servers.said.append).run()
    turns = [(who, len(list(sent))) for who, sent in itertools.groupby(order)]
    ar, cold, live = ("plain", False), ("sssd", False), ("sssd", True)
    assert turns == [(ar, 8), (cold, 8), (live, 8), (cold, 8), (live, 8), (ar, 8)]
    assert any("turn 2 of 2" in line for line in servers.said)
    found = Results.read(tmp_path)
    assert [p.requests for p in found.points] == [16, 16, 16]
    for point in found.points:
        starts = [r.start_s for r in found.requests if r.method == point.method]
        assert starts[8] >= starts[7] and max(starts) < point.duration_s


def test_documents_are_read_once_for_all_methods_of_a_server(tmp_path):
    documents = tuple(
        Item(f"m{i}", "c", (10 + i // 2, i), MEASURED_TOKENS, group=f"d{i // 2}") for i in range(4)
    )
    long = Workload("w", "text", documents, (Item("s", "c", (90, 1), MEASURED_TOKENS),))
    plan = replace(PLAN, methods=("ar", "cold", "live"), workloads=("w",), batches=(1,), repeats=1)
    servers = FakeServers(SERVERS)
    with Results.create_or_resume(tmp_path, plan) as results, servers:
        Runner(results, {"w": long}, METHODS, servers, "/no/model", str, servers.said.append).run()
    for key, methods in (("plain", 1), ("sssd", 2)):
        asked = [
            "flush" if path == "/flush_cache" else (body["input_ids"], tokens)
            for path, body in servers.server(key).calls
            if path == "/flush_cache"
            or (
                path == "/generate"
                and (tokens := body["sampling_params"]["max_new_tokens"]) in (1, MEASURED_TOKENS)
                and body["input_ids"][0] < 90
            )
        ]
        read = [([10, 0], 1), ([11, 2], 1)]
        first, second = ([([10 + d, 2 * d + i], MEASURED_TOKENS) for i in (0, 1)] for d in (0, 1))
        assert asked == ["flush", *read, *first * methods, *second * methods]
    assert all(p.requests == 4 for p in Results.read(tmp_path).points)


def test_parts_keep_streams_and_documents_together():
    def items(count, **more):
        return [Item(f"i{n}", "c", (1,), 4, **more) for n in range(count)]

    def sizes(measured, load_, mode="batch"):
        parts = parts_of(Workload("w", "text", tuple(measured), ()), Point("m", "w", mode, load_))
        given = [item for part in parts for item in part]
        assert given == measured[: len(given)]
        return [len(part) for part in parts]

    # Thirty-two prompts, or four for each in flight.
    assert sizes(items(80), 1.0) == [1] * 32
    assert sizes(items(80), 2.0) == [4] * 8
    assert sizes(items(80), 4.0) == [8] * 4
    assert sizes(items(80), 8.0) == [16, 16]
    assert sizes(items(80), 16.0) == [32, 32]
    assert sizes(items(6), 2.0) == [4, 2]
    assert sizes(items(5), 2.0) == [5]
    assert sizes(items(16), 1.0, "rate") == [16]
    documents = [*items(6, group="a"), *items(5, group="b"), *items(1, group="c")]
    assert sizes(documents, 4.0) == [12]
    # Of documents eight questions.
    assert sizes(documents, 1.0) == [6, 2]
    growing = [item for s in range(9) for item in items(3, stream=f"s{s}")]
    assert sizes(growing, 2.0) == [12, 15]


def test_a_point_that_kills_its_server_twice_is_left_out(tmp_path):
    seen: list = []

    def fate(body):
        if is_measured(body) and body["input_ids"][0] >= 200:
            seen.append(body)
            return "die" if len(seen) in (1, 2) else None
        return None

    def set_up(key, server, nth):
        if key == "sssd":
            server.fate = fate

    runner, _ = sweep(tmp_path, servers=FakeServers(SERVERS, set_up=set_up))
    points = Results.read(tmp_path).points
    assert len([p for p in points if p.error is None]) == TOTAL - 1
    (problem,) = runner.problems
    assert "left out" in problem and "repeat 1, v/batch-1/" in problem
    ((repeat, left),) = runner.left()
    assert repeat == 0 and left.workload == "v"


def test_a_server_that_does_not_start_again_ends_its_methods_alone(tmp_path):
    from sglang_ext.servers.started_server import ServerError

    def set_up(key, server, nth):
        if key == "sssd" and nth == 0:
            server.fate = lambda body: "die" if is_measured(body) else None
        elif key == "sssd":
            raise ServerError("the server did not start:\nOut of memory")

    runner, _ = sweep(tmp_path, servers=FakeServers(SERVERS, set_up=set_up))
    good = [p for p in Results.read(tmp_path).points if p.error is None]
    assert {p.method for p in good} == {"ar", "ngram"}
    assert len(good) == TOTAL / 2
    (problem,) = runner.problems
    assert problem.startswith("no further runs of cold, live: the server did not start")


def test_a_server_that_never_starts_ends_the_sweep(tmp_path):
    from sglang_ext.servers.started_server import ServerError

    def set_up(key, server, nth):
        if key == "ngram":
            raise ServerError("the server did not start: no compiler")

    with pytest.raises(SweepError, match="no compiler"):
        sweep(tmp_path, servers=FakeServers(SERVERS, set_up=set_up))


def test_a_server_that_does_not_start_for_a_later_repeat_ends_its_methods_alone(tmp_path):
    from sglang_ext.servers.started_server import ServerError

    def set_up(key, server, nth):
        if key == "sssd" and nth == 1:
            raise ServerError("the server did not start:\nOut of memory")

    runner, _ = sweep(tmp_path, servers=FakeServers(SERVERS, set_up=set_up))
    good = [(p.repeat, p.method) for p in Results.read(tmp_path).points if p.error is None]
    assert {run for run in good if run[0]} == {(1, "ar"), (1, "ngram")}
    assert len(good) == TOTAL / 2 + TOTAL / 4
    (problem,) = runner.problems
    assert problem.startswith("no further runs of cold, live: the server did not start")


@pytest.fixture
def clock(monkeypatch):
    """The runner's clock: it goes on by what is added to it."""
    now = [1000.0]
    monkeypatch.setattr(
        "sglang_ext.sweep.runner.time", SimpleNamespace(monotonic=lambda: now[0], time=time.time)
    )
    return now


@pytest.mark.parametrize(
    ("minutes", "starts", "repeats"),
    # A start of both servers takes 1 minute, a repeat 2.
    [(0.5, 1, 1), (4.5, 1, 1), (5.5, 1, 2), (6.5, 2, 2), (9.5, 3, 3), (0, 4, 4)],
)
def test_no_repeat_is_begun_that_would_end_too_late(tmp_path, clock, minutes, starts, repeats):
    def say(line):
        said.append(line)
        if "tokens/s" in line:
            clock[0] += 30.0  # two methods, two batch sizes

    def set_up(key, server, nth):
        clock[0] += 30.0

    said: list[str] = []
    plan = replace(
        PLAN, methods=("ar", "cold"), workloads=("w",), repeats=4, minutes=float(minutes)
    )
    servers = FakeServers(SERVERS, set_up=set_up)
    runner, _ = sweep(tmp_path, plan, servers, say)
    points = Results.read(tmp_path).points
    assert len(points) == repeats * 4 and runner.problems == []
    assert len(servers.started) == starts * 2
    # The first repeat is what there must be.
    assert runner.missing() == []
    over = [line for line in said if "minutes are almost over" in line]
    assert len(over) == (repeats < 4)
    if over:
        assert f"{16 - 4 * repeats} more runs are left out" in over[0]
    found = summarize(Results.read(tmp_path))
    assert found.runs == found.planned == repeats * 4


def test_failed_requests_are_told_and_the_run_is_kept(tmp_path):
    plan = replace(PLAN, methods=("ar",), workloads=("w",), batches=(2,), repeats=1)

    def set_up(key, server, nth):
        server.refuse = lambda body: 400 if body["input_ids"][0] == 2 else None

    runner, _ = sweep(tmp_path, plan, FakeServers(SERVERS, set_up=set_up))
    (point,) = Results.read(tmp_path).points
    assert (point.requests, point.failed, point.error) == (3, 1, None)
    assert point.output_tokens == 2 * MEASURED_TOKENS
    (problem,) = runner.problems
    assert "1 of 3 requests failed: HTTP 400" in problem


def test_a_run_whose_requests_all_fail_has_no_result(tmp_path):
    plan = replace(PLAN, methods=("ar", "cold"), workloads=("w",), batches=(2,), repeats=1)

    def set_up(key, server, nth):
        if key == "sssd":
            server.refuse = lambda body: 400

    runner, _ = sweep(tmp_path, plan, FakeServers(SERVERS, set_up=set_up))
    found = {p.method: p for p in Results.read(tmp_path).points}
    assert found["ar"].error is None
    assert found["cold"].error.startswith("all 3 requests failed: HTTP 400")
    assert {r.method for r in Results.read(tmp_path).requests} == {"ar"}
    assert [point.method for _, point in runner.left()] == ["cold"]


def test_where_servers_do_not_fit_together_one_runs_at_a_time(tmp_path):
    most: list[int] = []
    servers = FakeServers(SERVERS, together=False)
    servers.set_up = lambda key, server, nth: most.append(
        sum(not other.dead for _, other in servers.started)
    )
    sweep(tmp_path, servers=servers)
    assert most and max(most) == 0
    points = Results.read(tmp_path).points
    assert {(p.repeat, p.point) for p in points} == set(PLAN.order())
    assert len(points) == TOTAL
    by_server = [(p.repeat, METHODS[p.method].server) for p in points]
    changes = sum(a != b for a, b in itertools.pairwise(by_server))
    assert changes == 2 * 3 - 1  # each repeat, every server once


def test_rates_are_measured_too(tmp_path, monkeypatch):
    asked: list = []

    def run_rate(url, items, rate, seed, params):
        asked.append((rate, seed))
        return load.run_rate(url, items, 100.0, seed, params)

    monkeypatch.setattr("sglang_ext.sweep.runner.run_rate", run_rate)
    plan = replace(PLAN, methods=("ar", "cold"), workloads=("w",), batches=(), rates=(0.5, 5.0))
    sweep(tmp_path, plan)
    points = Results.read(tmp_path).points
    assert [(p.mode, p.load) for p in points[:4]] == [("rate", 0.5)] * 2 + [("rate", 5.0)] * 2
    # Methods meet the same arrivals, repeats others.
    assert asked == [(0.5, 0)] * 2 + [(5.0, 0)] * 2 + [(0.5, 1)] * 2 + [(5.0, 1)] * 2


def test_progress_says_how_fast_against_ar_and_how_long(whole):
    _, _, servers = whole
    lines = [line for line in servers.said if "tokens/s" in line]
    assert len(lines) == TOTAL
    assert lines[0].startswith(f"1/{TOTAL}  repeat 1  w batch 1  ar")
    assert all("left" in line for line in lines)
    assert all("x AR" in line for line in lines if "repeat 2" in line)
    assert lines[-1].startswith(f"{TOTAL}/{TOTAL}") and "0 s left" in lines[-1]


SPECIAL_SERVERS = {
    "plain": (),
    "specasr": ("--speculative-algorithm", "SSSD"),
    "ssbd": ("--speculative-algorithm", "SSSD"),
}
GROWING = Workload(
    "grow",
    "retranslation",
    tuple(
        Item(f"s{s}-u{u}", f"update {u}", (10 * s + u, 1), MEASURED_TOKENS, stream=f"s{s}")
        for s in (1, 2)
        for u in (1, 2)
    ),
    tuple(Item(f"o-u{u}", "c", (50 + u, 1), MEASURED_TOKENS, stream="o") for u in (1, 2)),
)
CLIPS = Workload(
    "clips",
    "audio",
    (Item("a", "c", (), MEASURED_TOKENS, audio="data:a", reference="well said then"),),
    (Item("b", "c", (), MEASURED_TOKENS, audio="data:b"),),
)


def special(folder, workload, methods, decode, repeats=1):
    """(results, servers) after a sweep of one special workload."""
    plan = replace(PLAN, methods=methods, workloads=(workload.name,), repeats=repeats)
    servers = FakeServers(SPECIAL_SERVERS)
    with Results.create_or_resume(folder, plan) as results, servers:
        runner = Runner(
            results, {workload.name: workload}, CATALOGUE, servers, "/no/model", decode=decode,
            say=servers.said.append,
        )  # fmt: skip
        runner.run()
        assert runner.problems == []
    return Results.read(folder), servers


def test_growing_sources_are_sessions_that_no_other_run_goes_on_with(tmp_path):
    # By the first token of an output. The second update of s1 takes a word back.
    texts = {1100: "le chat", 1200: "le chien est", 2100: "un", 2200: "un deux"}
    methods = ("ar", "ssbd", "ssbd-plus")
    results, servers = special(
        tmp_path, GROWING, methods, lambda ids: texts.get(ids[0], "other"), repeats=2
    )
    measured = {tuple(item.input_ids): item.stream for item in GROWING.measured}
    sent = [
        body
        for key, server in servers.started
        if key == "ssbd"
        for body in server.generated()
        if tuple(body["input_ids"]) in measured
    ]
    bodies = [body["sampling_params"]["custom_params"] for body in sent]
    runs = 2 * len(PLAN.batches)
    assert len(bodies) == len(methods[1:]) * runs * 4
    for made in bodies:
        assert made["drafter"] == "ssbd"
    sessions = [made["ssbd"]["session"] for made in bodies]
    assert len(set(sessions)) == len(methods[1:]) * runs * 2  # by run and stream
    assert all(sessions.count(name) == 2 and is_secret(name) for name in sessions)
    said = {
        (name, measured[tuple(body["input_ids"])])
        for name, body in zip(sessions, sent, strict=True)
    }
    assert len(said) == len(set(sessions))  # a session is of one stream
    assert {stream for _, stream in said} == {"s1", "s2"}
    exact = [made for made in bodies if made["ssbd"]["beta"] == 0]
    assert len(exact) == runs * 4 and not any(made["ingest"] for made in exact)
    biased = [made for made in bodies if made["ssbd"]["beta"] == 0.2]
    assert all(made["ssbd"]["realign"] and made["ssbd"]["retrieve"] for made in biased)
    assert sum(made["ingest"] for made in biased) == runs * 2  # what a stream ends with
    assert all(
        "custom_params" not in body["sampling_params"]
        for body in servers.server("plain").generated()
    )
    kept = {(r.method, r.id): r.ratios for r in results.requests}
    assert kept["ar", "s1-u2"] == {"normalized_erasure": [1, 3]}
    assert kept["ssbd", "s2-u2"] == {"normalized_erasure": [0, 2]}


def test_sessions_are_warmed_up_with_a_source_that_grows(tmp_path):
    _, servers = special(tmp_path, GROWING, ("ssbd",), lambda ids: "text")
    warm = [
        body for body in servers.server("ssbd").generated()
        if body["sampling_params"]["max_new_tokens"] == WARM_UP_TOKENS
    ]  # fmt: skip
    assert [body["input_ids"][0] for body in warm] == [51, 52]
    sessions = {b["sampling_params"]["custom_params"]["ssbd"]["session"] for b in warm}
    (own,) = as_sessions([Item("o1", "c", (51,), 1, stream="o")], {"ssbd": {}}, "warm-up")
    assert sessions == {own.params["ssbd"]["session"]}


def test_speech_is_sent_and_its_word_errors_are_kept(tmp_path):
    pytest.importorskip("jiwer")
    results, servers = special(
        tmp_path, CLIPS, ("ar", "specasr-fixed", "specasr-tsp"), lambda ids: "well sad"
    )
    assert all(p.error is None and p.output_tokens == MEASURED_TOKENS for p in results.points)
    for request in results.requests:
        assert request.ratios == {"word_error_percent": [2, 3]}
        assert (request.spec_verify_ct is None) == (request.method == "ar")
    longest = 1504 + MEASURED_TOKENS
    assert servers.prepared == (["plain", "specasr"], 2 * longest, longest)
    asked = {
        body["sampling_params"]["custom_params"]["specasr"]["mode"]
        for body in servers.server("specasr").generated()
    }
    assert asked == {"fixed", "tsp"}
    assert {b["audio_data"] for b in servers.server("plain").generated()} == {"data:a", "data:b"}
