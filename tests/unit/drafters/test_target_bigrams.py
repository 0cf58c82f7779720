"""The target's own bigrams: asked in bounded time, kept, and asked on."""

import itertools

import numpy as np
import pytest
import torch

from sglang_ext.drafters import target_bigrams, target_reader

VOCAB = 40


class Target:
    """Says token + 1 most, then + 2, ...; notes what it was asked."""

    def __init__(self):
        self.passes = []

    def __call__(self, tokens):
        self.passes.append(list(tokens))
        distance = (torch.arange(VOCAB) - torch.tensor(self.passes[-1])[:, None] - 1) % VOCAB
        return -distance.float()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(target_bigrams, "default_cache_dir", lambda: tmp_path)
    return tmp_path / "bigrams"


@pytest.fixture
def clock(monkeypatch):
    """Every look at the clock is a second later."""
    ticks = itertools.count()
    monkeypatch.setattr(target_bigrams.time, "monotonic", lambda: float(next(ticks)))


def ask_on(target, seconds, **identity):
    return target_bigrams.asked_on(target, VOCAB, {"model": "m"} | identity, seconds, 16)


def test_every_token_is_asked_once_and_the_likeliest_are_kept():
    target = Target()
    table = ask_on(target, 60.0)
    assert list(itertools.chain(*target.passes)) == list(range(VOCAB))
    assert max(map(len, target.passes)) <= 16
    followers = (np.arange(VOCAB)[:, None] + 1 + np.arange(target_bigrams.FOLLOWERS)) % VOCAB
    np.testing.assert_array_equal(table.tokens, followers)
    weights = np.exp(-np.arange(VOCAB))
    np.testing.assert_allclose(table.probs[0], (weights / weights.sum())[:4], rtol=1e-5)
    assert table.known == VOCAB
    again = Target()
    np.testing.assert_array_equal(ask_on(again, 60.0).tokens, followers)
    assert again.passes == []  # all of it was kept


def test_a_start_stops_in_time_and_the_next_goes_on(clock):
    first, second = Target(), Target()
    table = ask_on(first, 5.0)
    assert 0 < table.known < VOCAB
    assert table.known == sum(map(len, first.passes))
    ask_on(second, 5.0)
    assert second.passes[0][0] == table.known


def test_passes_grow_only_while_they_are_quick(clock):
    slow, quick = Target(), Target()
    ask_on(slow, 15.0)  # a pass takes a second, a fifteenth
    assert {len(tokens) for tokens in slow.passes} == {8}
    ask_on(quick, 60.0, model="other")
    assert [len(tokens) for tokens in quick.passes] == [8, 16, 16]


def test_another_model_has_another_table(cache):
    ask_on(Target(), 60.0)
    other = Target()
    ask_on(other, 60.0, weights="others")
    assert other.passes
    assert len(list(cache.glob("*.npz"))) == 2


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 cut off"])
def test_a_damaged_file_is_asked_afresh(cache, content):
    ask_on(Target(), 60.0)
    (file,) = cache.glob("*.npz")
    file.write_bytes(content)
    target = Target()
    assert ask_on(target, 60.0).known == VOCAB
    assert target.passes


def test_a_table_of_another_vocabulary_is_not_read(cache):
    ask_on(Target(), 60.0)
    (file,) = cache.glob("*.npz")
    with file.open("wb") as out:
        np.savez(out, tokens=np.zeros((3, 4), np.int32), probs=np.zeros((3, 4), np.float32))
    target = Target()
    ask_on(target, 60.0)
    assert target.passes


def test_a_folder_that_cannot_be_written_costs_the_cache_only(monkeypatch, tmp_path, caplog):
    (tmp_path / "bigrams").write_text("a file, no folder")
    assert ask_on(Target(), 60.0).known == VOCAB
    assert "not kept for the next start" in caplog.text


def test_ranks_follow_the_first_ones_clock():
    """What rank 0 says counts: here it says that there is no time."""
    target = Target()

    def agree(values):
        return values if isinstance(values[0], np.ndarray) else [0]

    table = target_bigrams.asked_on(target, VOCAB, {"model": "m"}, 60.0, 16, agree)
    assert target.passes == [] and table.known == 0


def test_weights_in_the_same_folder_are_told_apart():
    layer = torch.nn.Linear(4, 4)
    before = target_reader.weights_hash(layer)
    assert target_reader.weights_hash(layer) == before
    with torch.no_grad():
        layer.weight[0, 0] += 1
    assert target_reader.weights_hash(layer) != before
