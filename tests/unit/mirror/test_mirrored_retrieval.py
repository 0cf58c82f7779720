"""Drafts that are retrieved ahead: the same trees, or none, and never a changed request."""

import threading

import numpy as np
import pytest

from datastores import Datastore
from sglang_ext.drafters import Drafter, DrafterContext, DraftRequest
from sglang_ext.drafters.sssd import RetrievalDrafter
from sglang_ext.mirror import mirrored_retrieval
from sglang_ext.mirror.exit_view import ExitView
from sglang_ext.mirror.outcomes import Outcomes, likely_outcomes, path_to
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


def ended(made: RetrievalDrafter) -> None:
    """All that the exit asked for was retrieved."""
    job = made._mirror._job
    assert job is not None and job.done.wait(20)


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
        made, "_mirrored", lambda drafted: (entered.set(), go_on.wait(20), look(drafted))[2]
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

    assert depth(drafter()) == 0.9
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
    assert made._mirror.take().tree("a", r.state.trie, r.output, now) is not None
    assert made._mirror.take().tree("a", r.state.trie, r.output, None) is None


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


def test_whoever_asks_waits_for_a_few_retrievals_only_and_keeps_what_is_there():
    made = drafter()
    entered, go_on = threading.Event(), threading.Event()
    retrieve, calls = made._mirror._retrieve, []

    def slow(supposed, snapshots, max_nodes):
        drafts = retrieve(supposed, snapshots, max_nodes)
        calls.append(len(supposed))
        if len(calls) == 2:
            entered.set()
            assert go_on.wait(20)
        return drafts

    made._mirror._retrieve = slow
    r = request("a")
    made.start(r)
    made.early_exit([r], view_of([r], made.propose([r], NODES), [55, 56, 57, 58]))
    assert entered.wait(20)
    job = made._mirror._job
    threading.Thread(target=lambda: (eventually(lambda: job.stopped), go_on.set())).start()
    r.output.append(55)
    made.propose([r], NODES)
    assert len(calls) == 2 and made.counters["mirror_prepared"] == 2


def test_a_thread_that_never_lets_go_loses_its_requests(caplog, monkeypatch):
    monkeypatch.setattr(mirrored_retrieval, "_PATIENCE_S", 0.05)
    made, plain = drafter(), drafter(mirrored=False)
    entered, go_on = threading.Event(), threading.Event()
    made._mirror._retrieve = lambda *args: (entered.set(), go_on.wait(20))
    ours, theirs = request("a"), request("a")
    made.start(ours)
    plain.start(theirs)
    held = ours.state.trie
    made.early_exit([ours], view_of([ours], made.propose([ours], NODES), [55, 56, 57, 58]))
    assert entered.wait(20)
    ours.output.append(55)
    theirs.output.append(55)
    assert same(made.propose([ours], NODES)[0], plain.propose([theirs], NODES)[0])
    assert ours.state.trie is not held and "retrieval ahead has not ended" in caplog.text
    go_on.set()


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


def test_the_batchs_most_probable_outcomes_come_first_and_a_request_once_at_a_time(monkeypatch):
    monkeypatch.setattr(mirrored_retrieval, "_AT_ONCE", 2)
    probs = np.array([[0.9, 0.8, 0.1], [0.5, 0.4, 0.3], [0.7, 0.0, 0.0]], np.float32)
    nothing = np.zeros((3, 3), np.int32)
    outcomes = Outcomes(nothing, nothing, probs, np.array([3, 3, 1], np.int32))
    groups = list(mirrored_retrieval.best_first(outcomes, [0, 1, 2]))
    assert groups == [[(0, 0), (2, 0)], [(0, 1), (1, 0)], [(1, 1), (0, 2)], [(1, 2)]]
    assert list(mirrored_retrieval.best_first(outcomes, [2])) == [[(2, 0)]]
