"""Draft trees: against a direct reading of the estimator, and the properties callers rely on."""

import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from datastores import Bigrams, DatastoreError, Draft, InputTrie, RetrievalConfig, retrieve
from datastores.retrieval import (
    SOURCE_BIGRAM,
    SOURCE_LIVE,
    SOURCE_PROMPT,
    SOURCE_SELF_OUTPUT,
    SOURCE_STATIC,
)
from datastores.segment import Document, Segment, Snapshot, build_segments

VOCAB = 7
ids = st.integers(0, VOCAB - 1)
histories = st.lists(ids, min_size=1, max_size=50)
corpora = st.lists(st.lists(ids, min_size=1, max_size=30), min_size=0, max_size=6)
configs = st.builds(
    RetrievalConfig,
    prefix_length=st.integers(1, 6),
    max_match_length=st.integers(6, 9),
    branch_length=st.integers(1, 5),
    min_matches=st.sampled_from([1, 3, 1000]),
)


@st.composite
def bigrams(draw: st.DrawFn) -> Bigrams:
    """Up to three followers of some of the tokens, known ones first."""
    tokens = np.full((VOCAB, 3), -1, np.int32)
    probs = np.zeros((VOCAB, 3), np.float32)
    for token in range(VOCAB):
        followers = draw(st.lists(ids, max_size=3, unique=True))
        tokens[token, : len(followers)] = followers
        probs[token, : len(followers)] = draw(st.sampled_from([0.01, 0.2, 0.3]))
    return Bigrams(tokens, probs)


def segments_of(
    corpus: Sequence[Sequence[int]], vocab_size: int = VOCAB, segment_tokens: int = 1 << 20
) -> tuple[Segment, ...]:
    documents = [Document(np.array(document, np.int32)) for document in corpus]
    return tuple(build_segments(documents, vocab_size, segment_tokens))


def static(corpus: Sequence[Sequence[int]], vocab_size: int = VOCAB) -> Snapshot:
    return Snapshot((), segments_of(corpus, vocab_size), vocab_size)


def trie_of(tokens: list[int], config: RetrievalConfig | None = None) -> InputTrie:
    trie = InputTrie(config)
    trie.extend(tokens)
    return trie


def paths(draft: Draft) -> dict[tuple[int, ...], tuple[float, int]]:
    """Token path from the root -> (probability, source)."""
    result: dict[tuple[int, ...], tuple[float, int]] = {}
    by_node: list[tuple[int, ...]] = []
    for token, parent, prob, source in zip(
        draft.tokens.tolist(), draft.parents.tolist(), draft.probs, draft.sources, strict=True
    ):
        path = (*(by_node[parent] if parent >= 0 else ()), token)
        by_node.append(path)
        assert path not in result, "a path was proposed twice"
        result[path] = float(prob), int(source)
    return result


def naive_paths(
    history: list[int],
    split: int,
    static_corpus: list[list[int]],
    live_corpus: list[list[int]],
    config: RetrievalConfig,
    table: Bigrams | None = None,
) -> dict[tuple[int, ...], tuple[float, int]]:
    """The estimator of RetrievalConfig, from all occurrences, without sampling."""
    branch = config.branch_length

    def match(document: list[int], end: int) -> int:
        length = 0
        while (
            length < min(config.max_match_length, end, len(history))
            and document[end - 1 - length] == history[-1 - length]
        ):
            length += 1
        return length

    # Match length, continuation, the source of each of its tokens.
    found: list[list[tuple[int, list[int], list[int]]]] = [[], []]
    origins = [SOURCE_PROMPT] * split + [SOURCE_SELF_OUTPUT] * (len(history) - split)
    for end in range(1, len(history)):
        if length := match(history, end):
            found[0].append((length, history[end : end + branch], origins[end : end + branch]))
    for corpus, origin in ((static_corpus, SOURCE_STATIC), (live_corpus, SOURCE_LIVE)):
        for document in corpus:
            for end in range(1, len(document) + 1):
                if length := match(document, end):
                    found[1].append((length, document[end : end + branch], [origin] * branch))
    for m in range(
        config.prefix_length, 0, -1
    ):  # shorter prefixes only while there are few matches
        if sum(length >= m for length, _, _ in found[1]) >= config.min_matches:
            found[1] = [o for o in found[1] if o[0] >= m]
            break

    result: dict[tuple[int, ...], tuple[float, int]] = {}

    def visit(path: tuple[int, ...], path_prob: float) -> None:
        depth = len(path)
        onward = [
            [
                (m, rest[depth], origin[depth])
                for m, rest, origin in source
                if tuple(rest[:depth]) == path and rest[depth:]
            ]
            for source in found
        ]
        powers = (config.input_power, config.datastore_power)
        novelties = (
            (config.input_novelty, config.input_novelty_power),
            (config.datastore_novelty, config.datastore_novelty_power),
        )
        scales, unseen, total = [1.0, 0.0], [0.0], 0.0
        for s in (0, 1):
            if not onward[s]:
                continue
            best = max(m for m, _, _ in onward[s])
            weight = (best / 4) ** powers[s]
            n = sum((m / 4) ** powers[s] for m, _, _ in onward[s])
            if s == 1:
                scales[1] = config.datastore_weight * min(1.0, config.datastore_cap * weight / n)
            unseen.append(scales[s] * weight * novelties[s][0] * (best + depth) ** -novelties[s][1])
            total += scales[s] * n
        novel, likely = max(unseen), {}
        if table is not None and depth == 0:
            row = zip(table.tokens[history[-1]], table.probs[history[-1]], strict=True)
            likely = {int(token): float(prob) for token, prob in row if token >= 0}
            if total == 0.0:
                novel = 1.0
        for token in {token for source in onward for _, token, _ in source} | likely.keys():
            mass = novel * likely.get(token, 0.0)
            sources = SOURCE_BIGRAM if token in likely else 0
            for s in (0, 1):
                hits = [(m, origin) for m, t, origin in onward[s] if t == token]
                mass += scales[s] * sum((m / 4) ** powers[s] for m, _ in hits)
                for _, origin in hits:
                    sources |= origin
            prob = path_prob * mass / (total + novel)
            result[(*path, token)] = prob, sources
            visit((*path, token), prob)

    visit((), 1.0)
    return result


def one_bigram(token: int, follower: int, prob: float) -> Bigrams:
    tokens, probs = np.full((VOCAB, 3), -1, np.int32), np.zeros((VOCAB, 3), np.float32)
    tokens[token, 0], probs[token, 0] = follower, prob
    return Bigrams(tokens, probs)


def assert_well_formed(draft: Draft, vocab_size: int) -> None:
    n = len(draft)
    assert draft.tokens.dtype == draft.parents.dtype == np.int32
    assert draft.probs.dtype == np.float32
    assert draft.sources.dtype == np.int8
    assert (draft.parents < np.arange(n)).all()
    assert (draft.parents >= -1).all()
    assert ((draft.tokens >= 0) & (draft.tokens < vocab_size)).all()
    assert (np.diff(draft.probs) <= 0).all()
    assert ((draft.probs > 0) & (draft.probs < 1)).all()
    for parent in range(-1, n):
        above = 1.0 if parent < 0 else draft.probs[parent]
        assert draft.probs[draft.parents == parent].sum() <= above * (1 + 1e-5)
    paths(draft)


@settings(max_examples=200, deadline=None)
@given(
    history=histories,
    split=st.integers(0, 50),
    corpus=corpora,
    live=corpora,
    config=configs,
    table=st.none() | bigrams(),
)
@example(
    history=[1, 0, 1],
    split=0,
    corpus=[],
    live=[],
    config=RetrievalConfig(branch_length=2),
    table=one_bigram(1, 0, 0.01),
)
def test_probabilities_and_sources_equal_the_naive_estimator(
    history: list[int],
    split: int,
    corpus: list[list[int]],
    live: list[list[int]],
    config: RetrievalConfig,
    table: Bigrams | None,
) -> None:
    """With more nodes than there are, the draft is the whole tree."""
    config = replace(config, max_samples=1000, max_input_samples=1000)
    split = min(split, len(history))
    trie = trie_of(history[:split], config)
    trie.extend(history[split:])
    store = Snapshot(segments_of(live), segments_of(corpus), VOCAB)
    (draft,) = retrieve([trie], store, 10_000, config, bigrams=table)
    assert_well_formed(draft, VOCAB)
    ours, expected = paths(draft), naive_paths(history, split, corpus, live, config, table)
    # float32 underflow aside, the same paths with the same probabilities.
    assert {p for p, (prob, _) in expected.items() if prob > 1e-30} <= ours.keys()
    assert ours.keys() <= expected.keys()
    for path, (prob, source) in ours.items():
        assert prob == pytest.approx(expected[path][0], rel=1e-4)
        assert source == expected[path][1]


@settings(max_examples=100, deadline=None)
@given(history=histories, corpus=corpora, config=configs, nodes=st.integers(0, 40))
def test_smaller_draft_is_a_prefix_of_a_larger(
    history: list[int], corpus: list[list[int]], config: RetrievalConfig, nodes: int
) -> None:
    store = static(corpus)
    trie = trie_of(history, config)
    (small,) = retrieve([trie], store, nodes, config)
    (large,) = retrieve([trie], store, 40, config)
    n = min(nodes, len(large))
    assert len(small) == n
    for name in ("tokens", "parents", "probs", "sources"):
        np.testing.assert_array_equal(getattr(small, name), getattr(large, name)[:n])


@pytest.mark.parametrize("threads", [1, 3])
@settings(max_examples=30, deadline=None)
@given(
    histories=st.lists(histories, min_size=1, max_size=40), corpora=st.lists(corpora, max_size=3)
)
def test_batch_equals_one_by_one(
    threads: int, histories: list[list[int]], corpora: list[list[list[int]]]
) -> None:
    """Budgets and snapshots of their own, one or more threads."""
    stores = [None, *map(static, corpora)]
    tries = [trie_of(history) for history in histories]
    budgets = np.arange(len(tries)) * 3
    snapshots = [stores[i % len(stores)] for i in range(len(tries))]
    batch = retrieve(tries, snapshots, budgets, threads=threads)
    for trie, snapshot, budget, draft in zip(tries, snapshots, budgets, batch, strict=True):
        (alone,) = retrieve([trie], snapshot, int(budget))
        assert paths(draft) == paths(alone)


def test_each_request_reads_its_own_snapshot_only() -> None:
    shared = segments_of([[1, 2, 3]])
    mine = Snapshot(segments_of([[1, 2, 4]]), shared, VOCAB)
    yours = Snapshot(segments_of([[1, 2, 5]]), shared, VOCAB)
    tries = [trie_of([1, 2]) for _ in range(3)]
    drafts = retrieve(tries, [mine, yours, None], 10)
    assert [sorted(draft.tokens.tolist()) for draft in drafts] == [[3, 4], [3, 5], []]
    assert dict(zip(drafts[0].tokens.tolist(), drafts[0].sources.tolist(), strict=True)) == {
        3: SOURCE_STATIC,
        4: SOURCE_LIVE,
    }


def test_callers_in_many_threads_share_the_helpers() -> None:
    rng = np.random.default_rng(0)
    store = static(rng.integers(0, VOCAB, (200, 50)))
    tries = [trie_of(rng.integers(0, VOCAB, 40).tolist()) for _ in range(48)]
    expected = [paths(draft) for draft in retrieve(tries, store, 20, threads=1)]
    wrong: list[int] = []

    def call() -> None:
        for _ in range(50):
            drafts = retrieve(tries, store, 20, threads=4)
            wrong.extend(i for i, d in enumerate(drafts) if paths(d) != expected[i])

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_what_was_never_seen_is_drafted_from_bigrams() -> None:
    table = Bigrams(
        np.array([[2, 1], [-1, -1], [1, -1]], np.int32),
        np.array([[0.5, 0.25], [0.0, 0.0], [0.9, 0.0]], np.float32),
    )
    tries = [trie_of([0]), trie_of([1]), trie_of([2]), trie_of([3]), InputTrie()]
    drafts = retrieve(tries, None, 10, bigrams=table)
    assert paths(drafts[0]) == {(2,): (0.5, SOURCE_BIGRAM), (1,): (0.25, SOURCE_BIGRAM)}
    # Nothing is known after 1, 3 is behind the table's end, and the last has no token yet.
    assert [len(draft) for draft in drafts] == [2, 0, 1, 0, 0]
    (narrow,) = retrieve([trie_of([0])], None, 1, RetrievalConfig(max_samples=0), bigrams=table)
    assert paths(narrow) == {(2,): (0.5, SOURCE_BIGRAM)}


def test_bigrams_make_a_token_that_was_seen_likelier() -> None:
    table = Bigrams(np.array([[1]] * 3, np.int32), np.array([[0.5]] * 3, np.float32))
    trie = trie_of([0, 1, 0, 2, 0])
    before = paths(retrieve([trie], None, 10)[0])
    after = paths(retrieve([trie], None, 10, bigrams=table)[0])
    unseen = 1 - before[1,][0] - before[2,][0]
    assert after[1,][0] == pytest.approx(before[1,][0] + unseen / 2)
    assert after[1,][1] == SOURCE_PROMPT | SOURCE_BIGRAM
    assert after[2,] == before[2,]


@pytest.mark.parametrize(
    ("tokens", "probs", "message"),
    [
        ([[0], [2]], [[0.1], [0.1]], "below 2"),
        ([[0], [-2]], [[0.1], [0.1]], "-1 or below"),
        ([[0], [1]], [[0.1], [1.1]], "from 0 to 1"),
        ([[0], [1]], [[0.1], [float("nan")]], "from 0 to 1"),
        ([[0], [1]], [[0.1]], "one shape"),
        ([[0] * 9] * 2, [[0.1] * 9] * 2, "1 to 8 columns"),
        ([0, 1], [0.1, 0.1], "matrix"),
    ],
)
def test_bigrams_that_do_not_fit_are_refused(tokens, probs, message) -> None:
    with pytest.raises(DatastoreError, match=message):
        Bigrams(np.array(tokens, np.int32), np.array(probs, np.float32))


def test_arrays_of_a_batch_hold_the_same_as_its_drafts() -> None:
    tries = [trie_of([1, 2, 3, 1, 2]), InputTrie(), trie_of([4, 4, 4])]
    drafts = retrieve(tries, None, [2, 5, 5])
    assert drafts.tokens.shape == drafts.parents.shape == drafts.probs.shape == (3, 5)
    assert drafts.sizes.tolist() == [2, 0, 2]
    assert [len(draft) for draft in drafts] == [2, 0, 2]
    assert drafts.tokens[0, :2].tolist() == drafts[0].tokens.tolist() == [3, 1]
    assert [d.tokens.tolist() for d in drafts[1:]] == [[], drafts[-1].tokens.tolist()]


def test_a_node_with_thousands_of_children() -> None:
    """Each child is found again: continuations come twice, and then by another route."""
    vocab_size = 5000
    documents = [[0, token, 4999] for token in range(1, 3000)]
    segments = segments_of([*documents, *documents], vocab_size)
    config = RetrievalConfig(max_samples=4096, max_input_samples=4096, prefix_length=1)
    trie = trie_of([x for token in range(1, 3000) for x in (0, token, 4998)] + [0], config)
    for store in (Snapshot(segments, (), vocab_size), Snapshot(segments, segments, vocab_size)):
        (draft,) = retrieve([trie], store, 20_000, config)
        assert_well_formed(draft, vocab_size)
        assert sorted(draft.tokens[draft.parents < 0].tolist()) == list(range(1, 3000))


def test_damaged_suffixes_are_skipped() -> None:
    """Positions where there are no tokens are not read, nor what lies beyond the tokens."""
    rng = np.random.default_rng(1)
    (whole,) = segments_of(rng.integers(0, VOCAB, (100, 50)))
    tries = [trie_of(rng.integers(0, VOCAB, 40).tolist()) for _ in range(20)]
    size = whole.tokens.size
    for bad in (-1, size, size - 1, 1 << 30, -(1 << 31)):
        suffixes = whole.suffixes.copy()
        suffixes[rng.random(suffixes.size) < 0.5] = bad
        damaged = replace(whole, suffixes=suffixes)
        for draft in retrieve(tries, Snapshot((damaged,), (), VOCAB), 30):
            assert_well_formed(draft, VOCAB)
    short = replace(whole, tokens=whole.tokens[: size // 2], suffixes=whole.suffixes[:99])
    for draft in retrieve(tries, Snapshot((short,), (), VOCAB), 30):
        assert_well_formed(draft, VOCAB)


def test_min_prob_cuts_the_tail_only() -> None:
    trie = trie_of([1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2])
    (all_nodes,) = retrieve([trie], None, 50)
    threshold = float(all_nodes.probs[len(all_nodes) // 2])
    (cut,) = retrieve([trie], None, 50, min_prob=threshold)
    assert 0 < len(cut) < len(all_nodes)
    assert (cut.probs >= np.float32(threshold)).all()
    assert paths(cut).items() <= paths(all_nodes).items()


def test_nothing_crosses_a_document_boundary() -> None:
    """Every continuation of 1 ends its document; what begins the next is never proposed."""
    store = static([[1], [2, 3, 1], [4, 1], [5, 6]] * 50)
    (draft,) = retrieve([trie_of([0, 1])], store, 100)
    assert len(draft) == 0
    (draft,) = retrieve([trie_of([2])], store, 100)
    assert draft.tokens.tolist() == [3, 1]


def test_largest_id_is_proposed_and_told_from_the_separator() -> None:
    for vocab_size in (65_535, 65_536, 1 << 20):
        top = vocab_size - 1
        store = static([[3, top, 4], [3, top]], vocab_size)
        (draft,) = retrieve([trie_of([3])], store, 10)
        assert draft.tokens.tolist() == [top, 4]


def test_longest_match_decides() -> None:
    store = static([[1, 2, 3, 4, 5]] + [[0, 4, 6]] * 30)
    (draft,) = retrieve([trie_of([1, 2, 3, 4])], store, 1)
    assert draft.tokens.tolist() == [5]
    (draft,) = retrieve([trie_of([6, 6, 0, 4])], store, 1)
    assert draft.tokens.tolist() == [6]


def test_sampling_keeps_the_proportions() -> None:
    """10,000 matches in sub-indices of unlike size, 100 samples: shares within two samples."""
    documents = [[1, 2, 3 + (i % 10 >= 7)] for i in range(10_000)]
    segments = segments_of(documents, segment_tokens=9_000)
    assert len(segments) > 2
    store = Snapshot(segments[:1], segments[1:], VOCAB)
    config = RetrievalConfig(prefix_length=2)
    (draft,) = retrieve([trie_of([1, 2])], store, 2, config)
    assert draft.tokens.tolist() == [3, 4]
    shares = draft.probs / draft.probs.sum()
    assert shares[0] == pytest.approx(0.7, abs=0.02)
    assert draft.probs.sum() > 0.95


def test_sources_can_be_turned_off() -> None:
    store = static([[1, 2, 5]])
    trie = trie_of([1, 2, 6, 1, 2])
    (both,) = retrieve([trie], store, 20)
    (only_input,) = retrieve([trie], store, 20, RetrievalConfig(max_samples=0))
    (only_store,) = retrieve([trie], store, 20, RetrievalConfig(max_input_samples=0))
    assert set(both.sources.tolist()) == {SOURCE_PROMPT, SOURCE_STATIC}
    assert set(only_input.sources.tolist()) == {SOURCE_PROMPT}
    assert set(only_store.sources.tolist()) == {SOURCE_STATIC}
    assert paths(only_input) == paths(retrieve([trie], None, 20)[0])


def test_nothing_seen_or_nothing_wanted() -> None:
    store = static([[1, 2, 3]])
    assert len(retrieve([], store, 5)) == 0
    assert [len(d) for d in retrieve([InputTrie(), trie_of([1])], store, [5, 0])] == [0, 0]
    assert len(retrieve([trie_of([1])], Snapshot((), (), VOCAB), 5)[0]) == 0


def test_ids_beyond_the_vocabulary_only_fail_to_match() -> None:
    """A request may hold ids that the datastore's vocabulary lacks (images, added tokens)."""
    store = static([[1, 2, 3]])
    (draft,) = retrieve([trie_of([VOCAB, VOCAB + 5, 1])], store, 5)
    assert draft.tokens.tolist() == [2, 3]
    store = static([[1], [2, 3]])
    assert len(retrieve([trie_of([1, VOCAB])], store, 5)[0]) == 0
    assert len(retrieve([trie_of([1, VOCAB, 2])], store, 5)[0]) == 1


def test_snapshots_that_do_not_fit_are_refused() -> None:
    tries = [trie_of([1]), trie_of([2])]
    with pytest.raises(DatastoreError, match="one per request"):
        retrieve(tries, [static([[1]])], 5)
    with pytest.raises(DatastoreError, match="vocabulary"):
        retrieve(tries, [static([[1]]), static([[1]], 100)], 5)


@pytest.mark.parametrize("max_nodes", [-1, 1 << 20, [1, 2], "four"])
def test_bad_budgets_are_refused(max_nodes: object) -> None:
    with pytest.raises(DatastoreError, match="max_nodes"):
        retrieve([trie_of([1])], None, max_nodes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "value"),
    [("prefix_length", 0), ("prefix_length", 13), ("branch_length", 0), ("max_samples", -1),
     ("max_match_length", 7),
     ("max_samples", 1.5), ("datastore_weight", 0.0), ("input_power", float("nan")),
     ("input_novelty", "much"), ("datastore_cap", True), ("max_input_tokens", 1)],
)  # fmt: skip
def test_bad_options_are_refused_by_name(option: str, value: object) -> None:
    with pytest.raises(DatastoreError, match=option):
        RetrievalConfig(**{option: value})  # type: ignore[arg-type]
