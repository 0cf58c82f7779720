"""The start-up sweep of forward costs, and its cache."""

import json
from types import SimpleNamespace

import pytest
import torch

from sglang_ext.budget import cost_sweep
from sglang_ext.budget.cost_model import NODE_READS, NODE_READS_CUDA


class Layer(torch.nn.Linear):
    """A linear layer as SGLang's are: input_size, and a quant_method that applies it."""

    def __init__(self):
        super().__init__(64, 64, bias=False)
        self.input_size = 64
        self.quant_method = self
        self.calls = 0
        self.counts = set()

    def apply(self, layer, x):
        self.calls += 1
        self.counts.add(len(x))
        return layer(x)


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setattr(cost_sweep, "default_cache_dir", lambda: tmp_path)
    return torch.nn.Sequential(Layer(), Layer())


def takes(monkeypatch, seconds):
    """Every pass takes the next of `seconds`."""
    taken = iter(seconds)
    monkeypatch.setattr(cost_sweep, "_seconds", lambda forward, device: next(taken))


def test_the_first_start_keeps_the_least_of_several_rounds(model, tmp_path):
    first = cost_sweep.forward_costs(model, {"model": "m"})
    assert tuple(first) == cost_sweep.CPU_COUNTS
    passes = cost_sweep._FIRST_ROUNDS * len(first)
    # Besides those, one layer of each shape warms up, once a count.
    assert model[0].calls + model[1].calls == 2 * passes + len(cost_sweep.WARM_COUNTS)
    (file,) = (tmp_path / "knee").glob("*.json")
    stored = json.loads(file.read_text())
    assert stored["I_knee"] >= 1 and stored["for"]["model"] == "m"
    assert stored["seconds"] == {str(n): s for n, s in first.items()}
    assert {"device", "threads"} <= set(stored["for"])


def test_a_disturbed_sweep_heals_at_later_starts(model, monkeypatch, tmp_path):
    counts = cost_sweep.CPU_COUNTS
    disturbed, quiet = [9.0, *[2.0] * (len(counts) - 1)], [1.0] * len(counts)
    takes(monkeypatch, disturbed * cost_sweep._FIRST_ROUNDS)
    assert list(cost_sweep.forward_costs(model, {"model": "m"}).values()) == disturbed
    takes(monkeypatch, quiet)  # one round
    assert list(cost_sweep.forward_costs(model, {"model": "m"}).values()) == quiet
    takes(monkeypatch, disturbed)
    assert list(cost_sweep.forward_costs(model, {"model": "m"}).values()) == quiet
    (file,) = (tmp_path / "knee").glob("*.json")
    assert set(json.loads(file.read_text())["seconds"].values()) == {1.0}


def test_a_cache_with_other_counts_is_no_start_to_go_on_from(model, tmp_path):
    first = cost_sweep.forward_costs(model, {"model": "m"})
    (file,) = (tmp_path / "knee").glob("*.json")
    stored = json.loads(file.read_text())
    del stored["seconds"]["3"]
    file.write_text(json.dumps(stored))
    calls = model[0].calls + model[1].calls
    assert cost_sweep.forward_costs(model, {"model": "m"}).keys() == first.keys()
    passes = cost_sweep._FIRST_ROUNDS * len(first)
    assert model[0].calls + model[1].calls - calls >= 2 * passes


def test_kernels_are_made_before_anything_is_timed(model, monkeypatch):
    def timed(forward, device):
        assert set(cost_sweep.CPU_COUNTS) <= model[0].counts | model[1].counts
        return 1.0

    monkeypatch.setattr(cost_sweep, "_seconds", timed)
    assert cost_sweep.forward_costs(model, {"model": "m"})


def test_a_sweep_that_takes_long_ends_early(model, monkeypatch):
    now = iter([0.0, 2.0, cost_sweep._SWEEP_S + 1])
    monkeypatch.setattr(cost_sweep.time, "monotonic", lambda: next(now))
    takes(monkeypatch, [3.0] * len(cost_sweep.CPU_COUNTS) + [2.0] * len(cost_sweep.CPU_COUNTS))
    measured = cost_sweep.measure_forward_cost(model, torch.device("cpu"), 5)
    assert measured == dict.fromkeys(cost_sweep.CPU_COUNTS, 2.0)


def test_another_model_dtype_or_thread_count_is_measured_anew(model, tmp_path):
    cost_sweep.forward_costs(model, {"model": "m"})
    cost_sweep.forward_costs(model, {"model": "m", "dtype": "float32"})
    assert len(list((tmp_path / "knee").glob("*.json"))) == 2


@pytest.mark.parametrize("damage", ["", "[]", '{"for": {}, "seconds": {"1": -1}}', '{"for"'])
def test_a_damaged_cache_is_measured_anew(damage, model, tmp_path):
    cost_sweep.forward_costs(model, {"model": "m"})
    (file,) = (tmp_path / "knee").glob("*.json")
    file.write_text(damage)
    calls = model[0].calls
    assert len(cost_sweep.forward_costs(model, {"model": "m"})) == len(cost_sweep.CPU_COUNTS)
    assert model[0].calls > calls


def test_a_cache_that_cannot_be_written_is_a_warning(model, monkeypatch, tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setattr(cost_sweep, "default_cache_dir", lambda: blocked)
    assert cost_sweep.forward_costs(model, {"model": "m"})
    assert "not kept for the next start" in caplog.text


def runner(model, device: str):
    pool = SimpleNamespace(mem_usage=1.0, size=1000)
    return SimpleNamespace(model=model, device=device, token_to_kv_pool=pool)


def test_without_a_sweep_a_gpus_costs_are_assumed_and_then_learned(model):
    weights = sum(p.nbytes for p in model.parameters())
    cost = cost_sweep.cost_model_of(runner(model, "cuda"), {})
    assert cost.cost(64) == pytest.approx(cost.cost(1)) == pytest.approx(weights / 1.5e12)
    assert cost.cost(1024) > 4 * cost.cost(1)
    # An entry of 1 GiB / 1000, read as fast as weights are.
    read_s = cost.cost(1, read=1.0) - cost.cost(1)
    assert read_s == pytest.approx(2**30 / 1000 / 1.5e12)
    for _ in range(20):
        cost.observe(1, 0.02)
    assert cost.cost(1) == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize(("device", "node_reads"), [("cpu", NODE_READS), ("cuda", NODE_READS_CUDA)])
def test_a_devices_cost_model_is_of_its_sweep_and_its_attention(device, node_reads, model):
    cost = cost_sweep.cost_model_of(runner(model, device), {1: 0.005, 64: 0.007})
    assert cost.cost(64) == pytest.approx(0.007)
    assert cost.node_reads == node_reads
