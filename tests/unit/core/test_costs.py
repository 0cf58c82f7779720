"""The start-up sweep of forward costs, and its cache."""

import json

import pytest
import torch

from sglang_ext import costs


class Layer(torch.nn.Linear):
    """A linear layer as SGLang's are: input_size, and a quant_method that applies it."""

    def __init__(self):
        super().__init__(64, 64, bias=False)
        self.input_size = 64
        self.quant_method = self
        self.calls = 0

    def apply(self, layer, x):
        self.calls += 1
        return layer(x)


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setattr(costs, "default_cache_dir", lambda: tmp_path)
    # Layers this small take microseconds, which are all disturbance.
    monkeypatch.setattr(costs, "_DISTURBED", float("inf"))
    return torch.nn.Sequential(Layer(), Layer())


def test_a_restart_reads_the_costs_from_the_cache(model, tmp_path):
    first = costs.forward_costs(model, {"model": "m"})
    calls = model[0].calls + model[1].calls
    assert tuple(first) == costs.CPU_COUNTS and calls >= 2 * len(first)
    assert costs.forward_costs(model, {"model": "m"}) == first
    # One layer of each shape warms up, once a count.
    assert model[0].calls + model[1].calls == calls + len(costs.WARM_COUNTS)
    (file,) = (tmp_path / "knee").glob("*.json")
    stored = json.loads(file.read_text())
    assert stored["I_knee"] >= 1 and stored["for"]["model"] == "m"
    assert {"device", "threads"} <= set(stored["for"])


def test_another_model_dtype_or_thread_count_is_measured_anew(model, tmp_path):
    costs.forward_costs(model, {"model": "m"})
    costs.forward_costs(model, {"model": "m", "dtype": "float32"})
    assert len(list((tmp_path / "knee").glob("*.json"))) == 2


@pytest.mark.parametrize("damage", ["", "[]", '{"for": {}, "seconds": {"1": -1}}', '{"for"'])
def test_a_damaged_cache_is_measured_anew(damage, model, tmp_path):
    costs.forward_costs(model, {"model": "m"})
    (file,) = (tmp_path / "knee").glob("*.json")
    file.write_text(damage)
    calls = model[0].calls
    assert len(costs.forward_costs(model, {"model": "m"})) == len(costs.CPU_COUNTS)
    assert model[0].calls > calls


def test_a_cache_that_cannot_be_written_is_a_warning(model, monkeypatch, tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setattr(costs, "default_cache_dir", lambda: blocked)
    assert costs.forward_costs(model, {"model": "m"})
    assert "not kept for the next start" in caplog.text


def test_what_costs_more_than_more_of_it_was_disturbed():
    assert not costs.is_disturbed({1: 2.0, 4: 1.8, 16: 3.0})
    assert costs.is_disturbed({1: 17.0, 2: 17.0, 4: 6.5, 8: 7.9})
    assert costs.is_disturbed({1: 1.0, 2: 9.0, 4: 2.0})


def clock_of(monkeypatch, seconds):
    """Every pass takes the next of `seconds`, and a second of the clock."""
    now = iter(range(10_000))
    taken = iter(seconds)
    monkeypatch.setattr(costs, "_DISTURBED", 1.3)
    monkeypatch.setattr(costs.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(costs, "_seconds", lambda forward, device: next(taken))


def test_a_disturbed_sweep_goes_on_until_it_is_not(model, monkeypatch):
    counts = costs.CPU_COUNTS
    disturbed, quiet = [9.0] + [1.0] * (len(counts) - 1), [1.0] * len(counts)
    clock_of(monkeypatch, disturbed * 6 + quiet + [None])
    measured = costs.measure_forward_cost(model, torch.device("cpu"))
    assert measured == dict.fromkeys(counts, 1.0)


def test_a_sweep_that_stays_disturbed_is_used_but_not_kept(model, monkeypatch, tmp_path, caplog):
    counts = costs.CPU_COUNTS
    clock_of(monkeypatch, ([9.0] + [1.0] * (len(counts) - 1)) * 100)
    assert costs.forward_costs(model, {"model": "m"})[1] == 9.0
    assert "disturbed" in caplog.text
    assert not list((tmp_path / "knee").glob("*.json"))
