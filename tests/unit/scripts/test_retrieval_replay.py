"""Replay: counts that can be worked out by hand, and calibration where the truth is known."""

import numpy as np
import pytest

from datastores import DatastoreError, RetrievalConfig, Snapshot
from datastores.segment import Document, build_segment
from scripts.lib.retrieval_replay import replay

VOCAB = 1000


def snapshot_of(documents: list[np.ndarray]) -> Snapshot:
    return Snapshot((build_segment([Document(d) for d in documents], VOCAB),), (), VOCAB)


def test_without_a_source_each_step_gives_one_token() -> None:
    result = replay([list(range(300))], None, s_q=8, prompt_tokens=100, max_new_tokens=150)
    assert result.tokens == result.steps == 150
    assert result.accept_length == 1.0
    assert result.proposed == 0
    assert result.seconds.size == 150


def test_a_stored_answer_comes_in_full_drafts() -> None:
    answer = np.random.default_rng(0).permutation(VOCAB)[:181]
    store = snapshot_of([answer])
    result = replay([answer], store, s_q=9, prompt_tokens=1)
    assert (result.steps, result.tokens) == (20, 180)  # 8 nodes and the bonus token
    assert replay([answer], store, s_q=4, prompt_tokens=1).steps == 45
    assert replay([answer], store, s_q=1, prompt_tokens=1).accept_length == 1.0
    off = RetrievalConfig(max_samples=0)
    assert replay([answer], store, off, s_q=9, prompt_tokens=1).accept_length == 1.0


def test_the_last_step_commits_no_more_than_is_left() -> None:
    answer = np.arange(12)
    result = replay([answer], snapshot_of([np.arange(40)]), s_q=9, prompt_tokens=2)
    assert (result.steps, result.tokens) == (2, 10)


def test_prompts_of_their_own_length() -> None:
    result = replay([range(50), range(30)], None, prompt_tokens=[40, 30])
    assert result.tokens == 10


def markov_documents(count: int, seed: int) -> list[np.ndarray]:
    """Each of 1000 tokens has four successors, of probability 0.55, 0.25, 0.15 and 0.05."""
    rng = np.random.default_rng(seed)
    successors = np.random.default_rng(99).integers(0, VOCAB, (VOCAB, 4))
    documents = []
    for _ in range(count):
        document = [int(rng.integers(VOCAB))]
        for choice in rng.choice(4, 120, p=[0.55, 0.25, 0.15, 0.05]):
            document.append(int(successors[document[-1], choice]))
        documents.append(np.array(document))
    return documents


def test_probabilities_are_honest_on_a_known_source() -> None:
    store = snapshot_of(markov_documents(2000, 0))
    config = RetrievalConfig(prefix_length=2, max_match_length=2, max_input_samples=0)
    result = replay(markov_documents(40, 1), store, config, s_q=8, prompt_tokens=5)
    assert result.accept_length > 2.0
    assert result.calibration_error < 0.05
    for nodes, predicted, observed in result.calibration:
        if nodes > 500:
            assert observed == pytest.approx(predicted, abs=0.1)
    assert sum(nodes for nodes, _, _ in result.calibration) == result.proposed
    assert len(result.table().splitlines()) == 1 + len(result.calibration)


def test_bad_s_q_is_refused() -> None:
    with pytest.raises(DatastoreError, match="s_q"):
        replay([[1, 2, 3]], None, s_q=0)
