"""The lens: a ridge regression, fitted on what the target reads, kept and read again."""

import numpy as np
import pytest
import torch

from sglang_ext.mirror import lens as lens_module
from sglang_ext.mirror import lens_fit
from sglang_ext.mirror.lens import Lens, RidgeSums, kept_lens, read_lens, write_lens
from sglang_ext.mirror.lens_fit import Fitted, fitted, lens_from, lens_of
from sglang_ext.mirror.proxy import Proxy
from sglang_ext.mirror.target_parts import ExitError, parts_of
from tests.unit.mirror.layered_model import DEPTH, SIZE, VOCAB, CapturingLayer, LayeredModel


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(lens_module, "default_cache_dir", lambda: tmp_path)
    return tmp_path


def data(n: int = 500):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, SIZE)).astype(np.float32)
    y = x @ rng.normal(size=(SIZE, SIZE)).astype(np.float32) + 3 + 0.1 * rng.normal(size=(n, SIZE))
    return x, y.astype(np.float32)


def test_without_a_penalty_it_is_numpys_least_squares_whatever_the_chunks():
    x, y = data()
    sums = RidgeSums(SIZE)
    for start in range(0, len(x), 64):
        sums.add(torch.from_numpy(x[start : start + 64]), torch.from_numpy(y[start : start + 64]))
    lens = sums.solve(ridge=0.0)
    expected, *_ = np.linalg.lstsq(np.pad(x, ((0, 0), (0, 1)), constant_values=1), y, rcond=None)
    np.testing.assert_allclose(lens.weight, expected[:SIZE], atol=1e-4)
    np.testing.assert_allclose(lens.bias, expected[SIZE], atol=1e-4)
    assert lens.tokens == len(x)
    torch.testing.assert_close(lens(torch.from_numpy(x)), torch.from_numpy(y), atol=0.5, rtol=0)


def test_the_penalty_is_that_of_ridge_regression_and_spares_the_bias():
    x, y = data()
    sums = RidgeSums(SIZE)
    sums.add(torch.from_numpy(x), torch.from_numpy(y))
    penalty = 0.3 * (x.astype(np.float64) ** 2).sum(0).mean()
    rows = np.vstack([np.pad(x, ((0, 0), (0, 1)), constant_values=1),
                      np.sqrt(penalty) * np.eye(SIZE, SIZE + 1)])  # fmt: skip
    expected, *_ = np.linalg.lstsq(rows, np.vstack([y, np.zeros((SIZE, SIZE))]), rcond=None)
    np.testing.assert_allclose(sums.solve(ridge=0.3).weight, expected[:SIZE], atol=1e-3)


def test_nothing_cannot_be_fitted_on():
    with pytest.raises(ValueError, match="needs tokens"):
        RidgeSums(SIZE).solve()


def model_and_reader():
    model = LayeredModel(CapturingLayer)
    passes = []

    def read(texts):
        passes.append(sum(map(len, texts)))
        model(torch.cat([torch.tensor(text) for text in texts]))

    return Proxy(parts_of(model, DEPTH, VOCAB), 4), read, passes


def texts(n: int) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, VOCAB, rng.integers(3, 20)).tolist() for _ in range(n)]


def test_a_fitted_lens_foresees_more_than_the_head_by_itself():
    proxy, read, passes = model_and_reader()
    made = fitted(read, texts(60), proxy, 2, 60.0, pass_tokens=64)
    assert made.lensed > made.head and made.held_back > 0
    assert made.lens.tokens + made.held_back == sum(passes) and max(passes) <= 64
    # Its hooks are gone.
    assert not proxy.parts.norm._forward_hooks and not proxy.parts.layers[2]._forward_pre_hooks


def test_too_few_tokens_make_no_lens():
    proxy, read, _ = model_and_reader()
    with pytest.raises(ExitError, match="needs 24 tokens"):
        fitted(read, texts(1), proxy, 2, 60.0)
    with pytest.raises(ExitError, match="and some held back"):
        fitted(read, texts(60), proxy, 2, 0.0, pass_tokens=32)


def test_a_pass_that_shows_no_state_makes_none():
    proxy, _, _ = model_and_reader()
    with pytest.raises(ExitError, match="did not show its states"):
        fitted(lambda texts: None, texts(5), proxy, 2, 60.0)
    assert not proxy.parts.norm._forward_hooks


def some_lens(tokens: int = 9) -> Lens:
    return Lens(torch.randn(SIZE, SIZE), torch.randn(SIZE), tokens)


def test_a_lens_is_fitted_once_and_kept_by_model_and_layer():
    made, asked = some_lens(), []

    def fit():
        asked.append(1)
        return Fitted(made, 100, 0.2, 0.7, 1.0)

    for identity in ({"model": "a", "exit_layer": 2}, {"model": "a", "exit_layer": 2}):
        lens = lens_of(identity, SIZE, fit)
        torch.testing.assert_close((lens.weight, lens.bias), (made.weight, made.bias))
    assert len(asked) == 1
    lens_of({"model": "b", "exit_layer": 2}, SIZE, fit)
    lens_of({"model": "a", "exit_layer": 3}, SIZE, fit)
    assert len(asked) == 3


def test_another_sizes_lens_and_a_damaged_file_are_not_used():
    kept = kept_lens({"model": "a"})
    write_lens(kept, some_lens())
    assert read_lens(kept.path, SIZE).tokens == 9
    assert read_lens(kept.path, SIZE + 1) is None
    kept.path.write_bytes(kept.path.read_bytes()[:100])
    assert kept.read(lambda path: read_lens(path, SIZE)) is None


def test_a_lens_that_foresees_no_more_than_the_head_is_not_used_or_kept(cache):
    fit = lambda: Fitted(some_lens(), 100, 0.7, 0.6, 1.0)  # noqa: E731
    assert lens_of({"model": "a"}, SIZE, fit) is None
    assert not list(cache.rglob("*.npz"))


def test_a_named_file_that_cannot_be_used_says_so(tmp_path):
    with pytest.raises(ExitError, match=r"--mirror-lens .*none\.npz"):
        lens_from(str(tmp_path / "none.npz"), SIZE)
    kept = kept_lens({"model": "a"})
    write_lens(kept, some_lens())
    assert lens_from(str(kept.path), SIZE).tokens == 9
    with pytest.raises(ExitError, match="not of 99 numbers"):
        lens_from(str(kept.path), 99)
    broken = Lens(torch.full((SIZE, SIZE), float("nan")), torch.zeros(SIZE), 1)
    write_lens(kept, broken)
    with pytest.raises(ExitError, match="numbers that are none"):
        lens_from(str(kept.path), SIZE)


def test_texts_are_read_in_groups_that_fit_a_pass():
    groups = list(lens_fit._grouped([[1] * 5, [2] * 4, [3] * 30, [4]], 10))
    assert [[len(text) for text in group] for group in groups] == [[5, 4], [10], [1]]
