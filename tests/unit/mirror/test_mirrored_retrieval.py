"""Drafts that are retrieved ahead: the same trees, or none, and never a changed request."""

import threading

import numpy as np
import pytest

from datastores import Datastore, InputTrie, RetrievalConfig, SupposedDrafts
from sglang_ext.drafters import Drafter, DrafterContext, DraftRequest
from sglang_ext.drafters.sssd import RetrievalDrafter
from sglang_ext.mirror import mirrored_retrieval
from sglang_ext.mirror.exit_view import ExitView
from sglang_ext.mirror.outcomes import Outcomes, foreseen_of, likely_outcomes
from sglang_ext.options import Options
from sglang_ext.request_options import RequestOptions
from sglang_ext.step.planner import DraftPlanner
from sglang_ext.tree import TokenTree, pack
from tests.eventually import eventually

VOCAB, NODES, KAPPA = 60, 7, 4
# Something to be retrieved: cycles of different lengths.
TEXTS = [(np.arange(300) * step % 50).tolist() for step in (1, 3, 7, 11)]


def drafter(mirrored: bool = True, **options) -> RetrievalDrafter:
    given = {"bigram_seconds": 0.0, "mirror_retrieval": mirrored} | options
    made = RetrievalDrafter(DrafterContext(vocab_size=VOCAB, options=Options(**given)))
    for text in TEXTS:
        made.datastore.add(text)
    made.datastore.flush()
    return made


def request(rid: str, text: int = 0, start: int = 20, **options) -> DraftRequest:
    prompt = TEXTS[text][start - 15 : start]
    return DraftRequest(rid, prompt, [TEXTS[text][start]], options=RequestOptions(**options))


def view_of(requests, trees, candidates) -> ExitView:
    """What the exit says of these trees: `candidates` behind every node, the first likeliest."""
    packed = pack([r.output[-1] for r in requests], trees, 1 + max(map(len, trees)))
    shape = (*packed.tokens.shape, KAPPA)
    logprobs = np.broadcast_to(np.log(np.array([0.4, 0.2, 0.1, 0.05], np.float32)), shape)
    return ExitView(
        tuple(r.rid for r in requests),
        packed.tokens.astype(np.int32),
        packed.parents,
        packed.sizes.astype(np.int32),
        np.broadcast_to(np.asarray(candidates, np.int32), shape).copy(),
        logprobs.copy(),
        0.0,
    )


def path_to(view: ExitView, row: int, node: int) -> list[int]:
    """The tokens from the root's child to a node, both included; none for the root."""
    tokens: list[int] = []
    while node > 0:
        tokens.append(int(view.tokens[row, node]))
        node = int(view.parents[row, node])
    return tokens[::-1]


def ended(made: RetrievalDrafter) -> None:
    """All that the exit asked for was retrieved."""
    job = made._mirror._job
    assert job is not None
    eventually(lambda: job.done)


def same(tree: TokenTree, other: TokenTree) -> bool:
    pairs = zip(
        (tree.tokens, tree.parents, tree.probs, tree.sources),
        (other.tokens, other.parents, other.probs, other.sources),
        strict=True,
    )
    return all(np.array_equal(a, b) for a, b in pairs)


def steps(made: RetrievalDrafter, requests, outcomes) -> list[list[TokenTree]]:
    """The trees of a step and of the next one, whose outcome was (tokens,) of each request."""
    for r in requests:
        made.start(r)
    first = made.propose(requests, NODES)
    if made.uses_early_exit:
        made.early_exit(requests, view_of(requests, first, [55, 56, 57, 58]))
        ended(made)
    for r, tokens in zip(requests, outcomes, strict=True):
        r.output.extend(tokens)
    return [first, made.propose(requests, NODES)]


def three_requests():
    return [request("a"), request("b", 1), request("c", 2, datastore=False)]


def three_outcomes() -> list[list[int]]:
    """The root and 55; a right node and 56; what nobody foresees."""
    return [[55], [TEXTS[1][21], 56], [3, 3]]


def test_trees_are_those_of_retrieval_at_their_time_whether_hit_or_missed():
    mirrored, plain = drafter(), drafter(mirrored=False)
    ours = steps(mirrored, three_requests(), three_outcomes())
    theirs = steps(plain, three_requests(), three_outcomes())
    for a, b in zip([*ours[0], *ours[1]], [*theirs[0], *theirs[1]], strict=True):
        assert same(a, b)
    assert mirrored.counters["mirror_hits"] == 2
    assert mirrored.counters["mirror_misses"] == 3 + 1
    assert plain.counters == {} and not plain.uses_early_exit


def test_a_long_run_of_hits_and_misses_equals_one_without():
    made = {mirrored: [request("a", 3), request("b", 1)] for mirrored in (True, False)}
    drafters = {mirrored: drafter(mirrored) for mirrored in made}
    rng = np.random.default_rng(0)
    for mirrored, requests in made.items():
        for r in requests:
            drafters[mirrored].start(r)
    for _ in range(40):
        trees = {m: drafters[m].propose(requests, NODES) for m, requests in made.items()}
        assert all(map(same, trees[True], trees[False]))
        drafters[True].early_exit(made[True], view_of(made[True], trees[True], [55, 3, 9, 58]))
        if rng.random() < 0.7:
            ended(drafters[True])
        for b in range(2):
            tree = trees[True][b]
            right = int(rng.integers(0, min(3, len(tree)) + 1)) if len(tree) else 0
            path = path_to(view_of(made[True][b : b + 1], [tree], [0] * KAPPA), 0, right)
            tokens = [*path, int(rng.choice([55, 3, 9, 40]))]
            for requests in made.values():
                requests[b].output.extend(tokens)
    counters = drafters[True].counters
    assert counters["mirror_hits"] > 10 and counters["mirror_misses"] > 4


def test_a_request_started_anew_gets_no_tree_of_its_former_self():
    made = drafter()
    r = request("a")
    made.start(r)
    made.early_exit([r], view_of([r], made.propose([r], NODES), [55, 56, 57, 58]))
    ended(made)
    again = request("a")
    made.start(again)
    again.output.append(55)
    made.propose([again], NODES)
    assert made.counters["mirror_hits"] == 0


def test_a_step_without_a_look_is_not_mirrored_and_waits_for_the_next_look():
    made = drafter()
    r = request("a")
    made.start(r)
    made.propose([r], NODES)
    r.output.append(7)  # a plain step: what was seen lags behind
    made.early_exit([r], view_of([r], [TokenTree.empty()], [55, 56, 57, 58]))
    assert made._mirror._job is None
    r.output.append(55)
    made.propose([r], NODES)
    assert len(r.state.trie) == len(r.prompt) + len(r.output)


def test_hits_are_indexed_by_the_thread_before_it_supposes_more():
    made = drafter()
    r = request("a")
    [[_], [tree]] = steps(made, [r], [[55]])
    assert made.counters["mirror_hits"] == 1
    assert len(r.state.trie) == len(r.prompt) + 1, "the step does not wait for it"
    made.early_exit([r], view_of([r], [tree], [55, 56, 57, 58]))
    ended(made)
    assert len(r.state.trie) == len(r.prompt) + len(r.output)


@pytest.mark.parametrize("ends", [False, True])
def test_a_request_may_go_on_or_end_before_the_thread_looks_at_it(monkeypatch, ends, caplog):
    made, plain = drafter(), drafter(mirrored=False)
    entered, go_on = threading.Event(), threading.Event()
    look = made._mirrored
    monkeypatch.setattr(
        made, "_mirrored", lambda *given: (entered.set(), go_on.wait(20), look(*given))[2]
    )
    ours, theirs = request("a"), request("a")
    made.start(ours)
    plain.start(theirs)
    made.early_exit([ours], view_of([ours], made.propose([ours], NODES), [55, 56, 57, 58]))
    assert entered.wait(20)
    trie = ours.state.trie
    for r in (ours, theirs):
        r.output.extend([55, 3])
    if ends:
        made.finish(ours, True)
    go_on.set()
    ended(made)
    assert len(trie) == len(ours.prompt) + 1, "what it has seen is what the pass had"
    if not ends:
        assert same(made.propose([ours], NODES)[0], plain.propose([theirs], NODES)[0])
    assert made._mirror.works and "failed" not in caplog.text


def test_retrieval_wants_a_late_exit_and_the_earliest_that_is_wanted_is_taken():
    class Early(Drafter):
        def propose(self, requests, max_nodes):
            return [TokenTree.empty() for _ in requests]

        def early_exit(self, requests, view):
            pass

    context = DrafterContext(VOCAB, Options())

    def depth(*drafters: Drafter) -> float:
        named = {str(i): each for i, each in enumerate(drafters)}
        return DraftPlanner(context, 8, 4, None, True, drafters=named).exit_depth

    assert depth(drafter()) == 0.94
    assert depth(drafter(), Early(context)) == 0.5
    assert depth(drafter(mirrored=False)) == 0.5


def test_what_was_deleted_in_between_is_not_drafted():
    made = drafter()
    r = request("a")
    made.start(r)
    made.early_exit([r], view_of([r], made.propose([r], NODES), [21, 22, 23, 24]))
    ended(made)
    made.datastore.delete_namespace("default")
    r.output.append(22)
    plain = drafter(mirrored=False)
    plain.datastore.delete_namespace("default")
    alone = request("a")
    alone.output.append(22)
    plain.start(alone)
    assert same(made.propose([r], NODES)[0], plain.propose([alone], NODES)[0])
    assert made.counters["mirror_hits"] == 0


def test_what_joined_in_between_does_not_spoil_what_was_prepared():
    made = drafter(datastore_max_tokens=1 << 20)
    before = made.datastore.snapshot()
    r = request("a")
    made.start(r)
    made.early_exit([r], view_of([r], made.propose([r], NODES), [55, 56, 57, 58]))
    ended(made)
    grown = Datastore(vocab_size=VOCAB)
    grown._served = made.datastore._served  # the same segments, and a snapshot of its own
    now = grown.snapshot()
    assert now is not before and now.segments == before.segments
    r.output.append(55)
    prepared = made._mirror.take()
    assert prepared.trees([r.state.trie], [r.output], lambda reads: now)[0] is not None
    assert prepared.trees([r.state.trie], [r.output], lambda reads: None) == [None]


def test_a_failure_in_the_thread_is_logged_once_and_drafts_are_retrieved(caplog, monkeypatch):
    made, plain = drafter(), drafter(mirrored=False)
    monkeypatch.setattr(mirrored_retrieval, "likely_outcomes", lambda *args: 1 / 0)
    for _ in range(5):
        ours, theirs = request("a"), request("a")
        made.start(ours)
        plain.start(theirs)
        tree = made.propose([ours], NODES)[0]
        made.early_exit([ours], view_of([ours], [tree], [55, 56, 57, 58]))
        if made._mirror._job is not None:
            ended(made)
        ours.output.append(55)
        theirs.output.append(55)
        assert same(made.propose([ours], NODES)[0], plain.propose([theirs], NODES)[0])
    assert caplog.text.count("retrieval ahead failed") == 1
    assert "ZeroDivisionError" in caplog.text
    assert not made._mirror.works and made._mirror._job is None


def test_whoever_asks_has_no_more_be_made_and_keeps_what_is_there(monkeypatch):
    made, plain = drafter(), drafter(mirrored=False)
    entered, make = threading.Event(), SupposedDrafts.make

    def made_when_stopped(drafts, stop):
        with stop.working():  # as compiled code says it
            entered.set()
            eventually(stop.is_set)
        make(drafts, stop)

    monkeypatch.setattr(SupposedDrafts, "make", made_when_stopped)
    ours, theirs = request("a"), request("a")
    made.start(ours)
    plain.start(theirs)
    made.early_exit([ours], view_of([ours], made.propose([ours], NODES), [55, 56, 57, 58]))
    assert entered.wait(20)
    for r in (ours, theirs):
        r.output.append(55)
    assert same(made.propose([ours], NODES)[0], plain.propose([theirs], NODES)[0])
    assert made.counters["mirror_prepared"] == made.counters["mirror_hits"] == 0


def test_a_thread_that_never_lets_go_loses_its_requests(caplog, monkeypatch):
    monkeypatch.setattr(mirrored_retrieval, "_PATIENCE_S", 0.05)
    made, plain = drafter(), drafter(mirrored=False)
    entered, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(made, "_mirrored", lambda *given: (entered.set(), go_on.wait(20), {})[2])
    ours, theirs, other = request("a"), request("a"), request("b", 1)
    for r in (ours, other):
        made.start(r)
    plain.start(theirs)
    held = ours.state.trie, other.state.trie
    both = [ours, other]
    made.early_exit(both, view_of(both, made.propose(both, NODES), [55, 56, 57, 58]))
    assert entered.wait(20)
    for r in (ours, theirs):
        r.output.append(55)
    assert same(made.propose([ours], NODES)[0], plain.propose([theirs], NODES)[0])
    assert ours.state.trie is not held[0] and "retrieval ahead has not ended" in caplog.text
    assert other.state.trie is not held[1], "it was not asked for, and is held too"
    go_on.set()


def test_a_request_without_room_behind_it_is_not_foreseen_and_drafts_all_the_same():
    made, plain = drafter(), drafter(mirrored=False)
    ours, theirs = request("a"), request("a")
    for each, r in ((made, ours), (plain, theirs)):
        each.start(r)
        r.state.trie = InputTrie(RetrievalConfig(max_input_tokens=16))
        r.state.trie.extend(r.prompt)  # 15
    made.early_exit([ours], view_of([ours], made.propose([ours], NODES), [55, 56, 57, 58]))
    ended(made)
    plain.propose([theirs], NODES)
    for r in (ours, theirs):
        r.output.append(55)
    assert same(made.propose([ours], NODES)[0], plain.propose([theirs], NODES)[0])
    assert made.counters["mirror_prepared"] == 0 and made._mirror.works


# Outcomes


def one_view(tokens, parents, candidates, probs) -> ExitView:
    tokens, parents = np.array([tokens], np.int32), np.array([parents], np.int32)
    logprobs = np.log(np.array([probs], np.float32))
    counts = np.array([tokens.shape[1]], np.int32)
    return ExitView(("a",), tokens, parents, counts, np.array([candidates], np.int32), logprobs, 0)


def outcomes_of(view: ExitView, **given):
    made = likely_outcomes(view, 8, **given)
    n = int(made.counts[0])
    return [
        ([*path_to(view, 0, int(node)), int(token)], float(prob))
        for node, token, prob in zip(
            made.nodes[0, :n], made.tokens[0, :n], made.probs[0, :n], strict=True
        )
    ]


def test_outcomes_are_the_paths_with_the_token_that_no_child_holds_best_first():
    # The root has a child 5 (probability 0.6), which has none.
    view = one_view([1, 5], [-1, 0], [[5, 6], [7, 8]], [[0.6, 0.3], [0.5, 0.2]])
    found = outcomes_of(view)
    assert [tokens for tokens, _ in found] == [[5, 7], [6], [5, 8]]
    probs = [prob for _, prob in found]
    np.testing.assert_allclose(probs, [0.6 * 0.5, 0.3, 0.6 * 0.2], rtol=1e-5)


def test_the_drafters_estimate_counts_beside_the_proxys():
    view = one_view([1, 5], [-1, 0], [[5, 6], [7, 8]], [[0.2, 0.5], [0.9, 0.05]])
    drafted = np.array([[-1.0, 0.8]], np.float32)
    assert outcomes_of(view)[0][0] == [6]
    found = dict((tuple(tokens), prob) for tokens, prob in outcomes_of(view, drafted=drafted))
    assert found[5, 7] == pytest.approx(0.5 * 0.9)
    assert found[6,] == pytest.approx(0.5 * 0.5 / 0.8)


def test_a_child_that_the_proxy_does_not_name_is_reached_seldom_but_not_never():
    view = one_view([1, 5], [-1, 0], [[9, 6], [7, 8]], [[0.5, 0.2], [0.9, 0.05]])
    assert [tokens for tokens, _ in outcomes_of(view)] == [[9], [6], [5, 7], [5, 8]]


def test_improbable_outcomes_are_left_out():
    view = one_view([1], [-1], [[9, 6]], [[0.5, 0.01]])
    assert [tokens for tokens, _ in outcomes_of(view, least=0.05)] == [[9]]


def test_the_batchs_most_probable_outcomes_come_first_with_what_they_commit():
    # Row 0: 5 behind the root, 6 behind that. Row 2: the root alone. Row 1 is not asked about.
    tokens = np.array([[1, 5, 6], [9, 9, 9], [2, 0, 0]], np.int32)
    parents = np.array([[-1, 0, 1], [-1, -1, -1], [-1, -1, -1]], np.int32)
    counts = np.array([3, 3, 1], np.int32)
    none = np.zeros((3, 3, 1), np.int32)
    view = ExitView(("a", "b", "c"), tokens, parents, counts, none, none.astype(np.float32), 0.0)
    outcomes = Outcomes(
        np.array([[2, 0, 1], [0, 0, 0], [0, 0, 0]], np.int32),
        np.array([[70, 71, 72], [8, 8, 8], [90, 91, 0]], np.int32),
        np.array([[0.9, 0.5, 0.1], [1, 1, 1], [0.7, 0.1, 0]], np.float32),
        np.array([3, 3, 2], np.int32),
    )
    foreseen = foreseen_of(view, outcomes, [2, 0])
    made = foreseen.continuations
    assert made.whose.tolist() == [1, 0, 1, 0, 1]
    assert [row[:n].tolist() for row, n in zip(made.tokens, made.lengths, strict=True)] == [
        [5, 6, 70],
        [90],
        [71],
        [91],
        [5, 72],
    ]
    assert foreseen.places.tolist() == [[1, 3, -1], [0, 2, 4]]
