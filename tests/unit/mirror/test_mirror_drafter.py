"""The drafter `mirror` with a target that is its own draft model, and an executor that dies."""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest

from sglang_ext.drafters import (
    Drafter,
    DrafterContext,
    DrafterError,
    DraftRequest,
    overrides,
)
from sglang_ext.drafters.mirror import MirrorDrafter
from sglang_ext.mirror import pacing, text_keys
from sglang_ext.mirror.exit_view import ExitView
from sglang_ext.mirror.messages import Kind
from sglang_ext.mirror.pacing import Pacing
from sglang_ext.mirror.shared_ring import Record
from sglang_ext.options import Options
from sglang_ext.request_options import RequestOptions
from sglang_ext.step.planner import DraftPlanner
from sglang_ext.tree import TokenTree
from tests.eventually import eventually
from tests.unit.mirror.tiny_lms import VOCAB, Reference, write_lm
from tests.unit.step.test_planner import request as sglang_request

WINDOW, KAPPA, OUTPUT = 5, 4, 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_lm(tmp_path_factory.mktemp("lm"))


@pytest.fixture(scope="module")
def reference(folder) -> Reference:
    return Reference(folder)


def options(folder: Path, **changes) -> Options:
    given = {"draft_model": str(folder), "mirror_weights": "fp32", "mirror_window": WINDOW}
    return Options(drafter="mirror", **(given | changes))


@pytest.fixture(scope="module")
def drafter(folder) -> Iterator[MirrorDrafter]:
    made = MirrorDrafter(DrafterContext(VOCAB, options(folder)))
    first = psutil.Process(executor_pid(made))
    # It gives way to the target's processes.
    assert first.nice() == min(19, psutil.Process().nice() + 10)
    yield made
    made.close()
    assert not first.is_running() and made._client.pid is None


@pytest.fixture(autouse=True)
def patient(drafter, monkeypatch):
    """What pays is another test's business: here every draft is waited for."""
    drafter._pacing = Pacing()
    monkeypatch.setattr(pacing, "FIRST_WAIT_S", 60.0)
    monkeypatch.setattr(pacing, "MOST_WAIT_S", 60.0)


class Target:
    """Verifies greedily, as the worker does: what is accepted is the target's own text."""

    def __init__(self, reference: Reference, exit_says: str) -> None:
        self._reference = reference
        self._exit_says = exit_says
        self._known: dict[tuple[int, ...], int] = {}
        self.accept_lengths: list[int] = []

    def next(self, text: Sequence[int]) -> int:
        if tuple(text) not in self._known:
            self._known[tuple(text)] = self._reference.best(text)[0]
        return self._known[tuple(text)]

    def serve(self, drafter: MirrorDrafter, requests: Sequence[DraftRequest], tokens: int) -> None:
        """Decode until each has so many tokens."""
        drafter.prefill(requests)
        for request in requests:
            request.output.append(self.next(request.prompt))
            drafter.start(request)
        while running := [r for r in requests if len(r.output) < tokens]:
            drafter._pacing = Pacing()
            trees = drafter.propose(running, 15)
            self.verify(drafter, running, trees)
        for request in requests:
            drafter.finish(request, True)

    def verify(
        self,
        drafter: MirrorDrafter,
        requests: Sequence[DraftRequest],
        trees: Sequence[TokenTree],
    ) -> None:
        committed = [
            self.accepted([*request.prompt, *request.output], tree)
            for request, tree in zip(requests, trees, strict=True)
        ]
        if self._exit_says:
            drafter.early_exit(requests, self._view(requests, trees))
        if self._exit_says == "right":
            # The target's suffix takes as long as the executor needs, however busy the machine is.
            ready = partial(drafted_ahead, drafter, requests, committed)
            eventually(ready, 120, "the outcome that the exit named is drafted for")
        for request, tree, more in zip(requests, trees, committed, strict=True):
            tree.check(VOCAB)
            self.accept_lengths.append(len(more))
            request.output.extend(more)
            drafter.observe(request, more)

    def accepted(self, text: list[int], tree: TokenTree) -> list[int]:
        """The target's own tokens as far as a chain foresees them, and the one behind."""
        more: list[int] = []
        for token in [*tree.tokens.tolist(), -1]:
            more.append(self.next(text + more))
            if more[-1] != token:
                break
        return more

    def _view(self, requests: Sequence[DraftRequest], trees: Sequence[TokenTree]) -> ExitView:
        width = 1 + max(map(len, trees))
        tokens = np.zeros((len(requests), width), np.int32)
        parents = np.full((len(requests), width), -1, np.int32)
        candidates = np.zeros((len(requests), width, KAPPA), np.int32)
        for row, (request, tree) in enumerate(zip(requests, trees, strict=True)):
            text = [*request.prompt, *request.output]
            tokens[row, : 1 + len(tree)] = [text[-1], *tree.tokens]
            parents[row, 1 : 1 + len(tree)] = tree.parents + 1
            for node in range(1 + len(tree)):
                said = self.next(text + tree.tokens[:node].tolist())
                right = said if self._exit_says == "right" else (said + 1) % VOCAB
                candidates[row, node] = [right, *((right + 2 + np.arange(KAPPA - 1)) % VOCAB)]
        logprobs = np.log(np.tile(np.float32([0.7, 0.1, 0.05, 0.05]), (*tokens.shape, 1)))
        counts = np.array([1 + len(tree) for tree in trees], np.int32)
        rids = tuple(request.rid for request in requests)
        began = time.perf_counter()
        return ExitView(rids, tokens, parents, counts, candidates, logprobs, began)


def drafted_ahead(
    drafter: MirrorDrafter, requests: Sequence[DraftRequest], committed: Sequence[Sequence[int]]
) -> bool:
    """Whether something is drafted behind each outcome that an executor was told of."""
    if drafter._heard() is None:
        return True  # nobody drafts
    return all(
        text_keys.of_text(more, text._key) in text._drafted
        for text, more in zip((r.state for r in requests), committed, strict=True)
        if text.view is not None
    )


def request(rid: str, length: int = 9) -> DraftRequest:
    rng = np.random.default_rng(int(rid))
    return DraftRequest(rid, rng.integers(0, VOCAB, length).tolist(), [])


@pytest.mark.parametrize("exit_says", ["", "right", "wrong"])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_drafter_that_is_the_target_is_always_right(drafter, reference, exit_says, batch):
    target = Target(reference, exit_says)
    requests = [request(str(10 * batch + i), 6 + 5 * i) for i in range(batch)]
    before = dict(drafter.counters)
    target.serve(drafter, requests, OUTPUT)
    for one in requests:
        assert one.output == reference.continued(one.prompt, len(one.output))
        assert one.state is None
    assert drafter.counters["late"] == before["late"]
    # Every draft was right, so that a step gives all of it and the bonus token.
    assert set(target.accept_lengths) == {WINDOW + 1}
    hits = drafter.counters["hits"] - before["hits"]
    fallbacks = drafter.counters["fallbacks"] - before["fallbacks"]
    if exit_says == "right":  # only the first draft of each is made while nobody verifies
        assert hits >= batch == fallbacks, (hits, fallbacks)
    if not exit_says:
        assert not hits and fallbacks >= batch


def test_an_exit_is_passed_on_without_a_wait_for_the_executor(drafter, reference, monkeypatch):
    target, stopped = Target(reference, "right"), executor_pid(drafter)
    requests = [request(str(i)) for i in range(8)]
    for one in requests:
        one.output.append(1)
        drafter.start(one)
    view = target._view(requests, [TokenTree.chain([3, 4, 5, 6, 7])] * 8)
    waits: list[float] = []
    os.kill(stopped, signal.SIGSTOP)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(drafter._client.connection.channel, "wait", waits.append)
            for _ in range(20):
                drafter.early_exit(requests, view)
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert not waits
    for one in requests:
        drafter.finish(one, False)


@pytest.mark.parametrize(("budget", "waits_on"), [("auto", False), ("fixed", True), (None, False)])
def test_unsure_drafts_are_waited_for_no_longer_unless_all_is_to_be_verified(
    drafter, monkeypatch, budget, waits_on
):
    asked = request("95")
    asked.options = RequestOptions(budget=budget)
    text = drafter._open(asked)
    key = text_keys.of_text(asked.prompt)
    sent: list[Record] = []
    monkeypatch.setattr(drafter, "_send", lambda _, records: sent.extend(records) or True)
    drafter._pacing.step_s, drafter._pacing.token_s, text.ask = 0.3, 0.02, 7
    for prob, done in ((0.9, False), (0.05, not waits_on)):
        text.take(key, text.length + len(text.chain(WINDOW)[0]), 3, prob)
        key = text_keys.extended(key, 3)
        drafter._stop_asking(None, [text], [text], WINDOW, 0.0)
        assert (text.ask == 0) == done == bool(sent)
    assert [(r.kind, r.items) for r in sent] == [(Kind.ASK, 0)] * (not waits_on)


def test_requests_ask_for_fewer_candidates_or_for_none(drafter, reference, monkeypatch):
    target, sent = Target(reference, "right"), []
    for params in ({}, {"kappa": 2}, {"exit": False}):
        one = request("95")
        one.params = {"mirror": params}
        one.output.append(target.next(one.prompt))
        drafter.start(one)
        assert drafter.wants_early_exit(one) == params.get("exit", True)
        with monkeypatch.context() as patch:
            patch.setattr(drafter, "_send", lambda _, records: sent.extend(records))
            drafter.early_exit([one], target._view([one], [TokenTree.empty()]))
        drafter.finish(one, False)
    assert [record.number for record in sent] == [KAPPA, 2, KAPPA]


def test_outcomes_that_the_exit_named_are_counted(drafter, reference):
    named = {}
    for exit_says in ("right", "wrong", ""):
        before = dict(drafter.counters)
        Target(reference, exit_says).serve(drafter, [request("97")], 12)
        after = drafter.counters
        named[exit_says] = [
            after[name] - before[name] for name in ("outcomes", "foreseen_top1", "foreseen_top4")
        ]
    outcomes, first, _ = named["right"]
    assert outcomes == first > 1
    assert named["wrong"][0] >= named["wrong"][2] >= named["wrong"][1] == 0
    assert named[""] == [0, 0, 0]


def test_the_executor_forgets_requests_that_leave_whichever_way(drafter, reference):
    finished, retracted = request("90"), request("91")
    target = Target(reference, "")
    for one in (finished, retracted):
        one.output.append(target.next(one.prompt))
        drafter.start(one)
    drafter.propose([finished, retracted], 15)
    eventually(lambda: drafter._heard() and drafter.counters["texts"] >= 2, 60)
    drafter.finish(finished, False)
    retracted.state = None  # as the scheduler drops it, no hook being called
    eventually(lambda: drafter._heard() and drafter.counters["texts"] == 0, 60)


def test_the_planner_drives_it_as_any_drafter(drafter, reference):
    context = DrafterContext(VOCAB, Options(drafter="mirror", budget="fixed"))
    plan = DraftPlanner(context, 16, 4, None, active=True, drafters={"mirror": drafter})
    requests = [sglang_request(rid, [], ignore=1) for rid in "ab"]
    target, outputs = Target(reference, ""), []
    for number, req in enumerate(requests):
        req.origin_input_ids_unpadded = request(str(80 + number)).prompt
        req.sampling_params.ignore_eos = True
    plan.prefill(requests)
    for req in requests:
        req.output_ids.append(target.next(req.origin_input_ids_unpadded))
    for _ in range(4):
        drafter._pacing = Pacing()
        running = plan.requests.update(requests, None)
        trees, width = plan.plan(running)
        assert width == WINDOW + 1
        for req, tree in zip(requests, trees, strict=True):
            text = [*req.origin_input_ids_unpadded, *req.output_ids]
            req.output_ids += target.accepted(text, tree)
    for req in requests:
        outputs.append(list(req.output_ids))
        req.output_ids_through_stop = list(req.output_ids)
        plan.finish(req.rid)
        expected = reference.continued(req.origin_input_ids_unpadded, len(req.output_ids))
        assert req.output_ids == expected
    assert [len(output) for output in outputs] == [1 + 4 * (WINDOW + 1)] * 2
    counters = drafter.counters
    assert counters["draft_tokens"] > 0 and counters["hits"] + counters["fallbacks"] > 0


def executor_pid(drafter: MirrorDrafter) -> int:
    """The draft process itself, below its supervisor."""
    [child] = psutil.Process(drafter._client.pid).children()
    return child.pid


def test_an_executor_that_is_killed_costs_nothing_but_its_drafts(drafter, reference, caplog):
    one = request("50")
    target = Target(reference, "right")
    drafter.prefill([one])
    one.output.append(target.next(one.prompt))
    drafter.start(one)
    killed = executor_pid(drafter)
    restarts = drafter._client.restarts
    for step in range(12):
        if step == 3:
            os.kill(killed, signal.SIGKILL)
        begun = time.monotonic()
        target.verify(drafter, [one], drafter.propose([one], 15))
        assert time.monotonic() - begun < 20
    assert one.output == reference.continued(one.prompt, len(one.output))
    eventually(lambda: drafter._client.restarts > restarts, 300, "it is started again")
    said = [r.message for r in caplog.records if "decoding goes on without it" in r.message]
    assert len(said) == 1, said
    # The request that was running is drafted for again.
    assert executor_pid(drafter) != killed
    for _ in range(6):
        drafter._pacing = Pacing()
        target.verify(drafter, [one], drafter.propose([one], 15))
    assert max(target.accept_lengths[-3:]) == WINDOW + 1
    assert one.output == reference.continued(one.prompt, len(one.output))
    drafter.finish(one, True)


def test_a_stopped_executor_is_waited_for_no_longer_than_it_pays(drafter, reference, monkeypatch):
    monkeypatch.setattr(pacing, "FIRST_WAIT_S", 0.25)
    one, target = request("70"), Target(reference, "")
    one.output.append(target.next(one.prompt))
    drafter.start(one)
    drafter.propose([one], 15)
    stopped = executor_pid(drafter)
    os.kill(stopped, signal.SIGSTOP)
    try:
        for _ in range(4):
            drafter._pacing = Pacing()
            begun = time.monotonic()
            target.verify(drafter, [one], drafter.propose([one], 15))
            assert time.monotonic() - begun < 5
        begun, waited = time.monotonic(), drafter.counters["waited_seconds"]
        drafter.propose([one], 15)  # nothing is asked while an answer is missing
        assert drafter.counters["waited_seconds"] == waited
        assert time.monotonic() - begun < 0.2
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert one.output == reference.continued(one.prompt, len(one.output))
    drafter.finish(one, True)


def test_garbage_from_the_executor_breaks_its_channel_only(drafter, reference):
    connection = drafter._client.connection
    os.kill(executor_pid(drafter), signal.SIGSTOP)  # or it would write over the garbage
    os.pwrite(connection.channel._descriptor, b"\xff" * 8, 64 + 192 + 4096 * 1024)
    one = request("60")
    target = Target(reference, "")
    target.serve(drafter, [one], 12)
    assert one.output == reference.continued(one.prompt, len(one.output))
    assert "broken its channel" in connection.broken
    # That it is started again, the test before has seen; the fixture waits for its end.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft_model": ""}, "--draft-model is missing"),
        ({"draft_model": "nothing-of-that-name"}, "nothing-of-that-name"),
        ({"mirror_streams": "nowhere"}, "nowhere holds no streams: it has no streams.json"),
        ({"mirror_device": "cpu:3-1"}, "3-1 runs backwards"),
        ({"mirror_device": "cpu:4095"}, "did not start: exit status 2"),
    ],
)
def test_what_cannot_draft_ends_the_start(folder, changes, message):
    with pytest.raises(DrafterError, match=message):
        MirrorDrafter(DrafterContext(VOCAB, options(folder, **changes)))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "mirror must be an object"),
        ({"depth": 3}, "mirror.'depth' is unknown; known: exit, retrieval, streams, kappa"),
        ({"exit": 1}, "mirror.exit must be true or false"),
        ({"kappa": 0}, "mirror.kappa must be a whole number of 1 to 64"),
    ],
)
def test_what_a_request_cannot_ask_for_is_refused_by_name(given, message):
    with pytest.raises(ValueError, match=message):
        MirrorDrafter.check({"mirror": given})


def test_without_its_exit_it_is_ordinary_speculative_decoding(drafter):
    assert drafter.uses_early_exit and overrides(drafter, Drafter.early_exit)
    drafter._mirrors = False
    assert not drafter.uses_early_exit
    drafter._mirrors = True
