"""The executor's drafts are transformers' greedy text, whatever was committed before."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sglang_ext.mirror import lm_loading, messages, payoff, rollouts, text_keys
from sglang_ext.mirror.causal_lm import NAMED
from sglang_ext.mirror.channel import Channel
from sglang_ext.mirror.executor import Executor
from sglang_ext.mirror.hypothesis_tree import ROOT, HypothesisTree
from sglang_ext.mirror.messages import Kind
from sglang_ext.mirror.payoff import RowCosts
from sglang_ext.mirror.shared_ring import Record
from sglang_ext.mixture import MixtureWeight
from tests.unit.mirror.tiny_lms import VOCAB, Reference, write_lm

WINDOW = 4
PROMPT = [5, 17, 99, 3, 42, 8, 8, 61, 150, 2]


@pytest.fixture(autouse=True)
def follow_everything(monkeypatch):
    # A random model is sure of nothing.
    monkeypatch.setattr(rollouts, "_LEAST_BELIEF", 0.0)
    monkeypatch.setattr(payoff, "_TAKEN", 0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_lm(tmp_path_factory.mktemp("lm"), "llama")


@pytest.fixture(scope="module")
def reference(folder) -> Reference:
    return Reference(folder)


@dataclasses.dataclass
class Bench:
    """An executor in this process, and what it has drafted, by the text's key."""

    executor: Executor
    channel: Channel
    drafted: dict[int, int] = dataclasses.field(default_factory=dict)
    others: list[Record] = dataclasses.field(default_factory=list)

    def rows_ride_along(self) -> None:
        """Have all passes cost the same, whatever the machine does."""
        self.executor._rollouts._costs = RowCosts(lambda rows: 1.0)
        self.executor._rollouts._costs.observe = lambda rows, seconds: None

    def tell(self, *records: Record) -> None:
        for record in records:
            self.executor._take(record)

    def work(self, steps: int = 200) -> int:
        """Let it draft until it has nothing to do; the passes that it took."""
        before = self.executor._rollouts.totals.steps
        for _ in range(steps):
            if not self.executor.step():
                break
            self.hear()
        self.hear()
        return self.executor._rollouts.totals.steps - before

    def hear(self) -> None:
        for record in self.channel.receive():
            if record.kind == Kind.NODES:
                for key, _, token, prob in messages.nodes_of(record).tolist():
                    assert 0 <= prob <= 1
                    self.drafted[key] = token
            else:
                self.others.append(record)

    def chain(self, text, most: int = 99) -> list[int]:
        """What it has drafted behind a text."""
        key, tokens = text_keys.of_text(text), []
        while key in self.drafted and len(tokens) < most:
            tokens.append(self.drafted[key])
            key = text_keys.extended(key, tokens[-1])
        return tokens


def made(folder: Path, guesses: bool = False, cache_mb: float = 64.0) -> Iterator[Bench]:
    channel = Channel.create()
    other = Channel.open(channel.path)
    model = lm_loading.load(folder, "fp32")
    yield Bench(Executor(other, model, WINDOW, guesses, cache_mb), channel)
    other.close()
    channel.close()


@pytest.fixture(params=[False, True], ids=["plain", "guesses"])
def bench(request, folder) -> Iterator[Bench]:
    yield from made(folder, request.param)


def text(number: int, tokens, first: int = 0, flags: int = 0) -> list[Record]:
    return list(messages.text_records(number, tokens, first, flags))


def ask(number: int, length: int, wanted: int, name: int = 1) -> Record:
    return Record(Kind.ASK, number, length=length, number=name, items=wanted)


def view(number: int, length: int, nodes, candidates, logprobs) -> list[Record]:
    """nodes: (token, parent) of each, the root first."""
    tokens, parents = np.array(nodes, dtype=np.int32).T
    ids = np.array(candidates, dtype=np.int32)
    probs = np.array(logprobs, dtype=np.float32)
    return list(messages.view_records(number, length, tokens, parents, ids, probs, 0.0))


def test_an_ask_is_answered_with_the_models_own_text(bench, reference):
    bench.tell(*text(1, PROMPT), ask(1, len(PROMPT), WINDOW))
    bench.work()
    assert bench.chain(PROMPT, WINDOW) == reference.continued(PROMPT, WINDOW)
    assert [(r.kind, r.number) for r in bench.others] == [(Kind.DONE, 1)]


def test_what_is_waited_for_no_more_is_drafted_no_longer(bench, reference):
    bench.tell(*text(1, PROMPT), ask(1, len(PROMPT), WINDOW))
    while not bench.chain(PROMPT):
        assert bench.executor.step()
        bench.hear()
    begun = len(bench.chain(PROMPT))
    bench.tell(ask(1, len(PROMPT), 0, 2))
    bench.work()
    assert bench.others[-1].kind == Kind.DONE and bench.others[-1].number == 2
    assert len(bench.chain(PROMPT)) == begun < WINDOW
    bench.tell(ask(1, len(PROMPT), WINDOW, 3))
    bench.work()
    assert bench.chain(PROMPT, WINDOW) == reference.continued(PROMPT, WINDOW)


def test_prompts_are_read_before_anything_is_asked(bench):
    long = np.random.default_rng(0).integers(0, VOCAB, 200).tolist()
    bench.tell(*text(1, long))
    assert bench.work() == 4  # passes of 64 rows
    bench.tell(ask(1, len(long), 1))
    assert bench.work() == 0 and bench.others[-1].kind == Kind.DONE


@pytest.mark.parametrize("accepted", [0, 1, 2, WINDOW])
def test_after_any_acceptance_drafts_are_the_models_text_again(bench, reference, accepted):
    output: list[int] = []
    for number in range(4):
        now = PROMPT + output
        if not number:
            bench.tell(*text(1, now))
        bench.tell(ask(1, len(now), WINDOW, number))
        bench.work()
        chain = bench.chain(now, WINDOW)
        assert chain == reference.continued(now, WINDOW)
        more = [*chain[:accepted], (7 * number + 11) % VOCAB]
        bench.tell(*text(1, more, len(now)))
        output += more


def test_likely_outcomes_are_drafted_before_one_of_them_comes(bench, reference):
    bench.tell(*text(1, PROMPT), ask(1, len(PROMPT), WINDOW))
    bench.work()
    window = bench.chain(PROMPT, WINDOW)
    nodes = [(PROMPT[-1], -1), *((token, i) for i, token in enumerate(window))]
    # The proxy: the window's own token, or one of two others; behind the leaf any of three.
    named = [[token, 20 + i, 40 + i] for i, token in enumerate(window)] + [[77, 78, 79]]
    logprobs = np.log([[0.6, 0.3, 0.1]] * len(nodes))
    bench.tell(*view(1, len(PROMPT), nodes, named, logprobs))
    bench.work()
    outcomes = [[*window[:r], 20 + r] for r in range(WINDOW)] + [[*window, 77]]
    for outcome in outcomes:
        expected = reference.continued(PROMPT + outcome, WINDOW)
        assert bench.chain(PROMPT + outcome, WINDOW) == expected
    # One of them comes: nothing of it is read again, and the draft goes on behind it.
    done = bench.executor._rollouts.totals
    rows = done.rows
    bench.tell(*text(1, outcomes[2], len(PROMPT)))
    assert not bench.executor._texts[1].unread
    bench.work()
    after = PROMPT + outcomes[2]
    assert bench.chain(after, 2 * WINDOW) == reference.continued(after, 2 * WINDOW)
    # Chains behind what the draft model holds possible where it is verified next, and its own.
    assert done.rows - rows <= (3 + (WINDOW + 1) * (NAMED - 1)) * WINDOW


def test_the_models_own_next_choices_are_drafted_for_before_the_exit_speaks(bench, reference):
    bench.tell(*text(1, PROMPT), ask(1, len(PROMPT), WINDOW))
    bench.work()
    window = bench.chain(PROMPT, WINDOW)
    nodes = [(PROMPT[-1], -1), *((token, i) for i, token in enumerate(window))]
    other = [token for token in (77, 78, 79, 80, 81) if token not in window][:1]
    shown = view(1, len(PROMPT), nodes, [other] * len(nodes), [[-0.1]] * len(nodes))
    bench.tell(*shown)  # from now on drafting is to be hidden
    bench.work()
    outcome = [*window[:1], reference.likeliest([*PROMPT, *window[:1]], 3)[0][1]]
    after = PROMPT + outcome
    bench.tell(*text(1, outcome, len(PROMPT)))
    assert bench.chain(after, WINDOW) == reference.continued(after, WINDOW)
    bench.work()
    # No exit has spoken of what is verified now: the draft model's chain, and its other choices.
    again = bench.chain(after, WINDOW)
    for accepted in range(WINDOW + 1):
        path = after + again[:accepted]
        for choice in reference.likeliest(path, NAMED)[0]:
            expected = reference.continued([*path, choice], 2)
            assert bench.chain([*path, choice], 2) == expected, (accepted, choice)


def test_the_likeliest_outcomes_come_first(folder, reference):
    [bench] = [next(made(folder))]
    bench.executor._trust.weight = 1.0  # in the exit
    bench.tell(*text(1, PROMPT), ask(1, len(PROMPT), 1))
    bench.work()
    [first] = bench.chain(PROMPT, 1)
    nodes = [(PROMPT[-1], -1), (first, 0)]
    named = [[first, 30, 31], [32, 33, 34]]
    bench.tell(*view(1, len(PROMPT), nodes, named, np.log([[0.1, 0.85, 0.01], [0.5, 0.2, 0.1]])))
    bench.executor._rollouts._costs = lambda rows: float(rows)  # nothing rides along
    bench.executor._rollouts._costs.observe = lambda rows, seconds: None
    for _ in range(WINDOW):
        bench.executor.step()
    bench.hear()
    assert bench.chain([*PROMPT, 30]), "the outcome of probability 0.85"
    assert not bench.chain([*PROMPT, 31]), "the outcome of probability 0.01"


def test_who_foresees_more_is_trusted_more():
    trust = MixtureWeight()
    for _ in range(200):
        trust.note(0.9, 0.1)
    assert trust.weight < 0.05
    for _ in range(200):
        trust.note(0.1, 0.9)
    assert trust.weight > 0.9
    tree = HypothesisTree(1, text_keys.of_text([1]), trust)
    child = tree.predict(ROOT, [(5, 0.6), (6, 0.3)])
    assert tree.conds[child] == 0.6 and tree.child(ROOT, 6) is None, "the exit has said nothing"
    shown = np.zeros(2, messages.view_dtype(2))
    shown["token"], shown["parent"] = [1, 5], [-1, 0]
    shown["candidates"], shown["logprobs"] = [[6, 7], [8, 9]], np.log([[0.8, 0.1], [0.5, 0.4]])
    tree.show(shown)
    six, seven = tree.child(ROOT, 6), tree.child(ROOT, 7)
    assert six is not None and seven is not None
    assert tree.conds[six] == pytest.approx(trust.mixed(0.3, 0.8))
    assert tree.conds[seven] == pytest.approx(trust.mixed(0.1 / 8, 0.1))
    assert tree.conds[child] == pytest.approx(trust.mixed(0.6, 0.1 / 8))
    before = trust.weight
    tree.learn([6])
    assert trust.weight > before


def test_requests_share_passes_and_each_gets_its_own_text(bench, reference):
    rng = np.random.default_rng(3)
    texts = {i: rng.integers(0, VOCAB, 5 + 3 * i).tolist() for i in range(5)}
    for i, tokens in texts.items():
        bench.tell(*text(i, tokens), ask(i, len(tokens), WINDOW, 100 + i))
    passes = bench.work()
    for tokens in texts.values():
        assert bench.chain(tokens, WINDOW) == reference.continued(tokens, WINDOW)
    assert passes <= WINDOW + 1
    assert sorted(r.number for r in bench.others) == [100, 101, 102, 103, 104]


def test_retrieval_saves_passes_where_the_text_repeats_itself(folder, reference):
    # A text that the model continues in a circle, so that its own past tells what follows.
    output = reference.continued(PROMPT, 120)
    passes = {}
    for guesses, flags in ((False, 0), (True, messages.NO_RETRIEVAL), (True, 0)):
        bench = next(made(folder, guesses))
        bench.rows_ride_along()
        bench.tell(*text(1, PROMPT + output, flags=flags))
        bench.work()
        totals = bench.executor._rollouts.totals
        assert totals.asked_steps == totals.asked_tokens == 0 < totals.reading_seconds
        bench.tell(ask(1, len(PROMPT + output), WINDOW))
        took = bench.work()
        assert bench.chain(PROMPT + output, WINDOW) == reference.continued(PROMPT + output, WINDOW)
        # The last chunk of the text has said the first token before it was asked for.
        assert totals.asked_steps == took and totals.asked_tokens >= WINDOW - 1
        if flags:
            assert took == passes[False], "its request does without retrieval"
        passes[guesses and not flags] = took
    assert passes[True] <= passes[False], passes
    tail = output[-60:]
    if any(tail[i:] == tail[: 60 - i] for i in range(1, 30)):
        assert passes[True] < passes[False], passes


def test_what_cannot_be_followed_is_said(bench):
    bench.tell(*text(1, [VOCAB]), *text(2, [5], first=3), *text(3, [0] * 600))
    bench.hear()
    unknown = {r.request: r.number for r in bench.others if r.kind == Kind.UNKNOWN}
    assert unknown == {1: 1, 2: 0, 3: 0} or unknown == {1: 1, 2: 0, 3: 1}
    bench.tell(ask(9, 5, 3, name=44))
    bench.hear()
    assert (Kind.DONE, 44) in [(r.kind, r.number) for r in bench.others]


def test_an_ask_that_the_text_has_overtaken_is_answered_too(bench):
    bench.tell(*text(1, PROMPT), ask(1, len(PROMPT), WINDOW, 7))
    bench.tell(*text(1, [9], len(PROMPT)))
    bench.hear()
    assert [(r.kind, r.number) for r in bench.others] == [(Kind.DONE, 7)]


def test_a_view_of_another_text_or_of_impossible_tokens_changes_nothing(bench, reference):
    bench.tell(*text(1, PROMPT))
    bench.work()
    good = [(PROMPT[-1], -1), (3, 0)]
    named, logprobs = [[1, 2]] * 2, [[-1.0, -2.0]] * 2
    bench.tell(*view(1, 5, good, named, logprobs))
    bench.tell(*view(1, len(PROMPT), [(4, -1), (3, 0)], named, logprobs))
    bench.tell(*view(1, len(PROMPT), good, [[1, VOCAB]] * 2, logprobs))
    bench.tell(*view(1, len(PROMPT), [(PROMPT[-1], -1), (3, 1)], named, logprobs))
    bench.tell(*view(1, len(PROMPT), good, named, [[float("nan"), 0.0]] * 2))
    assert bench.work() == 0
    bench.tell(ask(1, len(PROMPT), WINDOW))
    bench.work()
    assert bench.chain(PROMPT, WINDOW) == reference.continued(PROMPT, WINDOW)


def test_keys_and_values_stay_within_their_bytes(folder, reference):
    bench = next(made(folder, cache_mb=0.5))
    one = 2 * 3 * 2 * 128 * 16 * 4 / (1 << 20)  # MiB of a cache's first capacity
    for i in range(12):
        bench.tell(*text(i, PROMPT[: 3 + i % 5]))
    bench.work()
    held = sum(t.cache.nbytes for t in bench.executor._texts.values()) / (1 << 20)
    assert one <= held <= 0.5
    gone = {r.request for r in bench.others if r.kind == Kind.UNKNOWN}
    assert gone and gone | set(bench.executor._texts) == set(range(12))
    assert max(bench.executor._texts) == 11, "the oldest go first"


def test_random_commits_and_views_never_lead_astray(bench, reference):
    rng = np.random.default_rng(5)
    tokens = list(PROMPT)
    bench.tell(*text(1, tokens))
    for number in range(12):
        if rng.random() < 0.7:
            bench.tell(ask(1, len(tokens), int(rng.integers(1, WINDOW + 1)), number))
            bench.work(int(rng.integers(1, 6)))
        window = bench.chain(tokens, WINDOW)
        nodes = [(tokens[-1], -1), *((t, i) for i, t in enumerate(window))]
        named = rng.integers(0, VOCAB, (len(nodes), 4))
        logprobs = np.log(rng.dirichlet(np.ones(4), len(nodes)) + 1e-6)
        bench.tell(*view(1, len(tokens), nodes, named, logprobs))
        bench.work(int(rng.integers(0, 8)))
        kept = int(rng.integers(0, len(window) + 1))
        correction = int(named[kept][rng.integers(0, 4)]) if rng.random() < 0.8 else 1
        more = [*window[:kept], correction]
        bench.tell(*text(1, more, len(tokens)))
        tokens += more
        chain = bench.chain(tokens, WINDOW)
        assert chain == reference.continued(tokens, len(chain))
    bench.tell(ask(1, len(tokens), WINDOW, 99))
    bench.work()
    assert bench.chain(tokens, WINDOW) == reference.continued(tokens, WINDOW)


def test_keys_are_the_same_token_by_token_and_at_once():
    tokens = np.random.default_rng(0).integers(0, 1 << 17, 500).tolist()
    one_by_one = text_keys.EMPTY
    for token in tokens:
        one_by_one = text_keys.extended(one_by_one, token)
    assert text_keys.of_text(tokens) == one_by_one
    assert text_keys.of_text(tokens[100:], text_keys.of_text(tokens[:100])) == one_by_one
    assert len({text_keys.of_text(tokens[:n]) for n in range(500)}) == 500


def test_who_has_enough_already_is_answered_beside_one_who_waits(bench, reference):
    bench.tell(*text(1, PROMPT), ask(1, len(PROMPT), WINDOW, 1))
    bench.work()
    bench.tell(ask(1, len(PROMPT), WINDOW, 2), *text(2, PROMPT[:4]), ask(2, 4, WINDOW, 3))
    bench.work()
    assert [r.number for r in bench.others] == [1, 2, 3]
    assert bench.chain(PROMPT[:4], WINDOW) == reference.continued(PROMPT[:4], WINDOW)
