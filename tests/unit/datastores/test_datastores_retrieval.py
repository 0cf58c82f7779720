"""Draft trees: against a direct reading of the estimator, and the properties callers rely on."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datastores import Datastore, DatastoreError, Draft, InputTrie, RetrievalConfig, retrieve

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
    history: list[int], corpus: list[list[int]], config: RetrievalConfig
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

    found: list[list[tuple[int, list[int]]]] = [[], []]
    for end in range(1, len(history)):
        if length := match(history, end):
            found[0].append((length, history[end : end + branch]))
    for document in corpus:
        for end in range(1, len(document) + 1):
            if length := match(document, end):
                found[1].append((length, document[end : end + branch]))
    for m in range(
        config.prefix_length, 0, -1
    ):  # shorter prefixes only while there are few matches
        if sum(length >= m for length, _ in found[1]) >= config.min_matches:
            found[1] = [o for o in found[1] if o[0] >= m]
            break

    result: dict[tuple[int, ...], tuple[float, int]] = {}

    def visit(path: tuple[int, ...], path_prob: float) -> None:
        depth = len(path)
        onward = [
            [(m, rest[depth]) for m, rest in source if tuple(rest[:depth]) == path and rest[depth:]]
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
            best = max(m for m, _ in onward[s])
            weight = (best / 4) ** powers[s]
            n = sum((m / 4) ** powers[s] for m, _ in onward[s])
            if s == 1:
                scales[1] = config.datastore_weight * min(1.0, config.datastore_cap * weight / n)
            unseen.append(scales[s] * weight * novelties[s][0] * (best + depth) ** -novelties[s][1])
            total += scales[s] * n
        for token in {token for source in onward for _, token in source}:
            mass, sources = 0.0, 0
            for s in (0, 1):
                hits = [m for m, t in onward[s] if t == token]
                mass += scales[s] * sum((m / 4) ** powers[s] for m in hits)
                sources += (s + 1) * bool(hits)
            prob = path_prob * mass / (total + max(unseen))
            result[(*path, token)] = prob, sources
            visit((*path, token), prob)

    visit((), 1.0)
    return result


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
@given(history=histories, corpus=corpora, config=configs)
def test_probabilities_equal_the_naive_estimator(
    history: list[int], corpus: list[list[int]], config: RetrievalConfig
) -> None:
    """With more nodes than there are, the draft is the whole tree."""
    config = replace(config, max_samples=1000, max_input_samples=1000)
    store = Datastore.build(corpus, VOCAB)
    (draft,) = retrieve([trie_of(history, config)], store, 10_000, config)
    assert_well_formed(draft, VOCAB)
    ours, expected = paths(draft), naive_paths(history, corpus, config)
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
    store = Datastore.build(corpus, VOCAB)
    trie = trie_of(history, config)
    (small,) = retrieve([trie], store, nodes, config)
    (large,) = retrieve([trie], store, 40, config)
    n = min(nodes, len(large))
    assert len(small) == n
    for name in ("tokens", "parents", "probs", "sources"):
        np.testing.assert_array_equal(getattr(small, name), getattr(large, name)[:n])


@settings(max_examples=60, deadline=None)
@given(histories=st.lists(histories, min_size=1, max_size=6), corpus=corpora)
def test_batch_equals_one_by_one(histories: list[list[int]], corpus: list[list[int]]) -> None:
    store = Datastore.build(corpus, VOCAB)
    tries = [trie_of(history) for history in histories]
    budgets = np.arange(len(tries)) * 3
    batch = retrieve(tries, store, budgets)
    for trie, budget, draft in zip(tries, budgets, batch, strict=True):
        (alone,) = retrieve([trie], store, int(budget))
        assert paths(draft) == paths(alone)


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
    store = Datastore.build([[1], [2, 3, 1], [4, 1], [5, 6]] * 50, VOCAB)
    (draft,) = retrieve([trie_of([0, 1])], store, 100)
    assert len(draft) == 0
    (draft,) = retrieve([trie_of([2])], store, 100)
    assert draft.tokens.tolist() == [3, 1]


def test_largest_id_is_proposed_and_told_from_the_separator() -> None:
    for vocab_size in (65_535, 65_536, 1 << 20):
        top = vocab_size - 1
        store = Datastore.build([[3, top, 4], [3, top]], vocab_size)
        (draft,) = retrieve([trie_of([3])], store, 10)
        assert draft.tokens.tolist() == [top, 4]


def test_longest_match_decides() -> None:
    store = Datastore.build([[1, 2, 3, 4, 5]] + [[0, 4, 6]] * 30, VOCAB)
    (draft,) = retrieve([trie_of([1, 2, 3, 4])], store, 1)
    assert draft.tokens.tolist() == [5]
    (draft,) = retrieve([trie_of([6, 6, 0, 4])], store, 1)
    assert draft.tokens.tolist() == [6]


def test_sampling_keeps_the_proportions() -> None:
    """10,000 matches in sub-indices of unlike size, 100 samples: shares within two samples."""
    documents = [[1, 2, 3 + (i % 10 >= 7)] for i in range(10_000)]
    store = Datastore.build(documents, VOCAB, max_tokens=8 * 9_000)
    assert len(store.snapshot().segments) > 2
    config = RetrievalConfig(prefix_length=2)
    (draft,) = retrieve([trie_of([1, 2])], store, 2, config)
    assert draft.tokens.tolist() == [3, 4]
    shares = draft.probs / draft.probs.sum()
    assert shares[0] == pytest.approx(0.7, abs=0.02)
    assert draft.probs.sum() > 0.95


def test_sources_can_be_turned_off() -> None:
    store = Datastore.build([[1, 2, 5]], VOCAB)
    trie = trie_of([1, 2, 6, 1, 2])
    (both,) = retrieve([trie], store, 20)
    (only_input,) = retrieve([trie], store, 20, RetrievalConfig(max_samples=0))
    (only_store,) = retrieve([trie], store, 20, RetrievalConfig(max_input_samples=0))
    assert set(both.sources.tolist()) == {1, 2}
    assert set(only_input.sources.tolist()) == {1}
    assert set(only_store.sources.tolist()) == {2}
    assert paths(only_input) == paths(retrieve([trie], None, 20)[0])


def test_nothing_seen_or_nothing_wanted() -> None:
    store = Datastore.build([[1, 2, 3]], VOCAB)
    assert retrieve([], store, 5) == []
    assert [len(d) for d in retrieve([InputTrie(), trie_of([1])], store, [5, 0])] == [0, 0]
    assert len(retrieve([trie_of([1])], Datastore(VOCAB), 5)[0]) == 0


def test_ids_beyond_the_vocabulary_only_fail_to_match() -> None:
    """A request may hold ids that the datastore's vocabulary lacks (images, added tokens)."""
    store = Datastore.build([[1, 2, 3]], VOCAB)
    (draft,) = retrieve([trie_of([VOCAB, VOCAB + 5, 1])], store, 5)
    assert draft.tokens.tolist() == [2, 3]
    store = Datastore.build([[1], [2, 3]], VOCAB)
    assert len(retrieve([trie_of([1, VOCAB])], store, 5)[0]) == 0
    assert len(retrieve([trie_of([1, VOCAB, 2])], store, 5)[0]) == 1


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
