"""What a decode server's worker and drafters are told of requests that others prefill."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.disaggregation import arrivals, handoff, on_cpu

STRIDE = 4


@pytest.fixture
def spec(monkeypatch):
    from sglang.srt import runtime_context

    monkeypatch.setattr(
        runtime_context, "get_spec", lambda: SimpleNamespace(speculative_num_draft_tokens=STRIDE)
    )


def batch(overlap: bool) -> Any:
    return SimpleNamespace(
        reqs=[object(), object()],
        device="cpu",
        seq_lens=torch.tensor([7, 9]),
        req_pool_indices=torch.tensor([1, 3]),
        enable_overlap=overlap,
    )


class FutureMap:
    def __init__(self) -> None:
        self.published: Any = None
        self.stashed: Any = None

    def publish(self, indices, seq_lens) -> None:
        self.published = indices.tolist(), seq_lens.tolist()

    def stash(self, indices, payload) -> None:
        self.stashed = indices.tolist(), payload


@pytest.mark.parametrize("overlap", [False, True])
def test_the_first_step_starts_from_the_prefills_token(spec, overlap):
    relay = FutureMap()
    made = handoff.first_draft_input(batch(overlap), torch.tensor([50, 60]), relay)
    assert made.draft_token_num == STRIDE
    assert made.new_seq_lens.tolist() == [7, 9]
    assert made.accept_tokens.view(2, STRIDE)[:, 0].tolist() == [50, 60]
    # They are in output_ids already, and must not be taken for pending ones.
    assert made.accept_lens.tolist() == [0, 0]
    if overlap:
        assert relay.published == ([1, 3], [7, 9])
        assert relay.stashed[0] == [1, 3]
        assert relay.stashed[1].accept_lens.tolist() == [0, 0]
    else:
        assert relay.published is None


class Worker:
    def __init__(self, broken: bool = False) -> None:
        self.arrived: list[Any] = []
        self._broken = broken

    def note_arrival(self, req: Any) -> None:
        if self._broken:
            raise RuntimeError("no state")
        self.arrived.append(req)


def request(finished: bool = False) -> Any:
    return SimpleNamespace(rid="r", finished=lambda: finished)


def test_new_requests_are_told_of_and_others_not():
    worker = Worker()
    queue = SimpleNamespace(scheduler=SimpleNamespace(draft_worker=worker))
    new = request()
    arrivals._arrived(None, queue, new)
    arrivals._arrived(None, queue, request(), is_retracted=True)
    arrivals._arrived(None, queue, request(), is_rebootstrap=True)
    arrivals._arrived(None, queue, request(finished=True))
    assert worker.arrived == [new]


def test_a_worker_that_fails_costs_nothing(caplog):
    queue = SimpleNamespace(scheduler=SimpleNamespace(draft_worker=Worker(broken=True)))
    arrivals._arrived(None, queue, request())
    assert "the arrival of request r was not noted" in caplog.text


def test_on_a_cpu_mooncake_uses_tcp_unless_told_otherwise():
    env = {"MC_FORCE_TCP": "0"}
    on_cpu.prepare_environment(env)
    assert env == {
        "MC_FORCE_TCP": "0",
        "MOONCAKE_PROTOCOL": "tcp",
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    }


@pytest.mark.parametrize(("fails_at", "code", "sent"), [(None, 0, [3, 3, 2]), (1, -1, [3, 3])])
def test_no_more_pieces_are_sent_at_once_than_the_queue_takes(fails_at, code, sent, monkeypatch):
    monkeypatch.setattr(on_cpu, "_pieces_at_once", lambda: 3)
    parts: list[tuple[list[int], list[int], list[int]]] = []

    def send(engine, session, buffers, addresses, lengths):
        assert (engine, session) == ("engine", "session")
        parts.append((buffers, addresses, lengths))
        return -1 if len(parts) - 1 == fails_at else 0

    pieces = [list(range(start, start + 8)) for start in (0, 100, 200)]
    assert on_cpu._send_in_parts(send, "engine", "session", *pieces) == code
    assert [len(buffers) for buffers, _, _ in parts] == sent
    together = [[piece for part in parts for piece in part[kind]] for kind in range(3)]
    assert together == [kind[: sum(sent)] for kind in pieces]


@pytest.mark.parametrize(("queue", "most"), [("65535", 16383), ("2", 1), ("many", 256)])
def test_sending_threads_share_the_queue(queue, most, monkeypatch):
    monkeypatch.setenv("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", queue)
    on_cpu._pieces_at_once.cache_clear()
    try:
        assert on_cpu._pieces_at_once() == most
    finally:
        on_cpu._pieces_at_once.cache_clear()


def test_senders_wait_for_no_cuda_event(monkeypatch):
    monkeypatch.setattr(on_cpu, "_prepare_scheduler", lambda: None)
    sender = type("Sender", (), {"supports_host_tensor_indices": True})
    receiver = type("Receiver", (), {"supports_host_tensor_indices": True})
    on_cpu._got_kv_class(sender, None, SimpleNamespace(value="sender"))
    on_cpu._got_kv_class(receiver, None, SimpleNamespace(value="receiver"))
    assert not sender.supports_host_tensor_indices and receiver.supports_host_tensor_indices


@pytest.mark.parametrize(("idle", "rests"), [(False, [on_cpu._REST_S]), (True, [])])
def test_a_scheduler_that_waits_for_kv_leaves_the_core_to_others(idle, rests, monkeypatch):
    slept: list[float] = []
    monkeypatch.setattr(on_cpu.time, "sleep", slept.append)
    on_cpu._rest(None, SimpleNamespace(is_fully_idle=lambda: idle))
    assert slept == rests
