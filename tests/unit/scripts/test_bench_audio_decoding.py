"""The benchmark of decoding in another process."""

import json

import numpy as np
import pytest

from scripts import bench_audio_decoding
from scripts.bench_audio_decoding import FILES, least_times


def test_every_format_is_measured_both_ways(monkeypatch, tmp_path):
    path = tmp_path / "figures"
    argv = ["bench", "--seconds", "0.5", "--rounds", "2", "--json", str(path)]
    monkeypatch.setattr("sys.argv", argv)
    assert bench_audio_decoding.main() == 0
    figures = json.loads(path.read_text())["figures"]
    for _, codec in FILES:
        here, there = figures[f"{codec}_here_ms"], figures[f"{codec}_there_ms"]
        assert here > 0 and figures[f"{codec}_added_ms"] == pytest.approx(there - here)


def test_ways_that_differ_are_not_compared():
    with pytest.raises(RuntimeError, match="differ"):
        least_times(lambda: np.zeros(2), lambda: np.ones(2), 1)
