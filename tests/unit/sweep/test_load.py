"""The load generator against a server whose every token is known."""

import itertools

import pytest

from sglang_ext.sweep.load import ServerGone, _answer, _Raw, arrivals, run_batch, run_rate
from sglang_ext.sweep.workloads import Item
from tests.unit.sweep.fake_server import FakeServer


@pytest.fixture
def server():
    server = FakeServer("SSSD")
    yield server
    server.die()


def items(count, tokens=6):
    return [Item(f"i{n}", "c", (n + 1, 7, 7), tokens) for n in range(count)]


@pytest.mark.parametrize("incremental", [True, False])
def test_answers_hold_the_outputs_in_the_items_order(server, incremental):
    server.incremental = incremental
    load = run_batch(server.url, items(5), in_flight=2)
    assert [a.id for a in load.answers] == ["i0", "i1", "i2", "i3", "i4"]
    for n, answer in enumerate(load.answers, start=1):
        assert answer.error is None
        assert answer.output_ids == [100 * n + i for i in range(6)]
        assert answer.prompt_tokens == 3
        assert answer.spec_verify_ct == 4  # chunks of 1, 2, 1, 2
        assert answer.start_s >= 0 and 0 < answer.ttft_s <= answer.e2e_s
        assert answer.start_s + answer.e2e_s <= load.duration_s + 1e-6
    assert min(a.start_s for a in load.answers) == 0
    assert load.output_tokens == 30


def test_no_more_than_asked_for_are_in_flight(server):
    server.pause_s = 0.02
    run_batch(server.url, items(9), in_flight=3)
    assert server.most_at_once == 3


def test_requests_are_greedy_and_carry_custom_params(server):
    run_batch(server.url, items(1), 1, {"drafter": "sssd"})
    run_batch(server.url, items(1), 1, {})
    with_params, without = server.generated()
    assert with_params["sampling_params"]["custom_params"] == {"drafter": "sssd"}
    assert "custom_params" not in without["sampling_params"]
    assert without["sampling_params"]["temperature"] == 0
    assert without["sampling_params"]["ignore_eos"] is False
    assert without["input_ids"] == [1, 7, 7]
    assert without["stream"] is True


def test_times_are_those_at_which_chunks_came():
    raw = _Raw(Item("i", "c", (1, 2), 9), b"", start=10.0, end=15.0, status=200)

    def event(ids, completion):
        meta = f'{{"completion_tokens": {completion}, "prompt_tokens": 2}}'
        return f'data: {{"output_ids": {ids}, "meta_info": {meta}}}\n\n'.encode()

    second = event([5, 6], 3)
    raw.chunks = [
        (11.0, event([4], 1)),
        (12.0, second[:20]),  # an event counts when all of it is there
        (13.0, second[20:]),
        (14.0, event([7], 4) + event([8], 5) + b"data: [DONE]\n\n"),  # one chunk of two tokens
    ]
    answer = _answer(raw, begin=9.0)
    assert answer.error is None
    assert answer.start_s == 1.0
    assert answer.ttft_s == 1.0
    assert answer.itl_s == [1.0, 1.0, 0.5, 0.5]
    assert answer.e2e_s == 5.0
    assert answer.output_ids == [4, 5, 6, 7, 8]


def test_one_requests_failure_is_its_own(server):
    fates = {2: "error", 3: "abort", 4: "break"}
    server.refuse = lambda body: 400 if body["input_ids"][0] == 1 else None
    server.fate = lambda body: fates.get(body["input_ids"][0])
    refused, error, abort, broken, fine = run_batch(server.url, items(5), 2).answers
    assert refused.error == 'HTTP 400: {"error": {"message": "provoked"}}'
    assert refused.ttft_s is None and refused.output_ids == []
    assert error.error == "provoked"
    assert abort.error == "aborted: no room"
    assert broken.error
    assert fine.error is None
    assert len(fine.output_ids) == 6


def test_failed_requests_count_no_tokens(server):
    server.fate = lambda body: "abort" if body["input_ids"][0] == 1 else None
    assert run_batch(server.url, items(2), 1).output_tokens == 6


@pytest.mark.parametrize("drive", [run_batch, lambda u, i, n: run_rate(u, i, 100.0, 0)])
def test_a_server_that_dies_ends_the_run(server, drive):
    server.fate = lambda body: "die" if body["input_ids"][0] == 3 else None
    with pytest.raises(ServerGone, match=server.url):
        drive(server.url, items(8), 2)


def test_a_server_that_is_not_there():
    server = FakeServer()
    server.die()
    with pytest.raises(ServerGone):
        run_batch(server.url, items(2), 2)


def test_arrivals_are_poisson_and_repeatable():
    at = arrivals(4000, 2.0, seed=3)
    assert at == arrivals(4000, 2.0, seed=3) != arrivals(4000, 2.0, seed=4)
    assert at[0] == 0.0 and at == sorted(at) and len(at) == 4000
    gaps = [b - a for a, b in itertools.pairwise(at)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((g - mean) ** 2 for g in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(0.5, rel=0.1)
    assert spread == pytest.approx(mean, rel=0.1)  # of an exponential distribution
    assert arrivals(1, 1.0, 0) == [0.0]
    assert arrivals(0, 1.0, 0) == []


def test_a_rate_does_not_wait_for_answers(server):
    server.pause_s = 0.1  # a request takes 0.4 s
    load = run_rate(server.url, items(6), 40.0, seed=1)
    assert server.most_at_once > 2
    for answer, at in zip(load.answers, arrivals(6, 40.0, seed=1), strict=True):
        assert answer.start_s == pytest.approx(at, abs=0.5)  # however busy the machine is


def test_no_items():
    assert run_batch("http://127.0.0.1:1", [], 2).answers == []


def growing(streams, updates):
    return [
        Item(f"s{s}-u{u}", "c", (10 * s + u + 1, 7), 4, stream=f"s{s}")
        for s in range(streams)
        for u in range(updates)
    ]


@pytest.mark.parametrize("drive", [run_batch, lambda u, i, n: run_rate(u, i, 200.0, 0)])
def test_a_streams_requests_wait_for_one_another(server, drive):
    server.pause_s = 0.02
    load = drive(server.url, growing(4, 3), 2)
    assert [a.id for a in load.answers] == [i.id for i in growing(4, 3)]
    assert server.most_at_once > 1
    for start in range(0, 12, 3):
        for before, after in itertools.pairwise(load.answers[start : start + 3]):
            assert after.start_s >= before.start_s + before.e2e_s


def test_no_more_streams_than_asked_for_are_under_way(server):
    server.pause_s = 0.02
    run_batch(server.url, growing(5, 2), 2)
    assert server.most_at_once == 2


def test_a_stream_goes_on_behind_a_failed_request(server):
    server.refuse = lambda body: 400 if body["input_ids"][0] == 1 else None
    first, second = run_batch(server.url, growing(1, 2), 1).answers
    assert first.error and second.error is None


def test_requests_have_params_of_their_own(server):
    own = Item("i", "c", (1,), 2, params={"ingest": False, "ssbd": {"session": "a"}})
    run_batch(server.url, [own], 1, {"drafter": "ssbd", "ingest": True})
    (body,) = server.generated()
    assert body["sampling_params"]["custom_params"] == {
        "drafter": "ssbd", "ingest": False, "ssbd": {"session": "a"}
    }  # fmt: skip


def test_audio_is_sent_with_the_servers_own_prompt(server):
    clip = Item("a.wav", "c", (), 5, audio="data:audio/wav;base64,AAAA")
    (answer,) = run_batch(server.url, [clip], 1, {"drafter": "specasr"}).answers
    (body,) = server.generated()
    assert (body["text"], body["modalities"]) == ("", ["audio"])
    assert body["audio_data"] == clip.audio and "input_ids" not in body
    assert body["sampling_params"]["custom_params"] == {"drafter": "specasr"}
    assert answer.error is None and answer.ttft_s > 0
    assert len(answer.output_ids) == 5 and answer.spec_verify_ct == 4
