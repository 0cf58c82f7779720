"""Figures of live speech: how long words took, and which were lost."""

import numpy as np
import pytest

from scripts.lib.live_client import (
    FORMATS,
    LiveRun,
    as_sent,
    display_delays,
    lost_words,
    wire_bytes,
)
from scripts.speech_data import Clip
from tests.unit.speech.test_wire_audio import encoded


def test_delays_are_of_the_words_that_both_heard():
    run = LiveRun(
        shown=[("And", 1.5), ("so,", 1.5), ("my", 3.0), ("fella", 3.0), ("friends.", 4.0)]
    )
    words = [(" And", 0.5), (" so", 0.9), (" my", 1.0), (" fellow", 1.5), (" Friends", 2.0)]
    assert display_delays(run, words) == pytest.approx([1.0, 0.6, 2.0, 2.0])
    assert display_delays(LiveRun(), words) == []


def test_only_runs_of_four_words_and_more_are_lost():
    text = "alpha bravo charlie delta echo foxtrot golf hotel"
    assert lost_words(LiveRun(text=text), text) == 0
    assert lost_words(LiveRun(text="alpha echo foxtrot golf hotel"), text) == 0  # three
    assert lost_words(LiveRun(text="alpha some words stand there foxtrot golf hotel"), text) == 0
    assert lost_words(LiveRun(text="alpha foxtrot golf hotel"), text) == 4
    assert lost_words(LiveRun(text=""), text) == 8


@pytest.mark.parametrize("wire", FORMATS, ids=str)
def test_a_clip_as_sent_is_the_clip(wire):
    tone = np.sin(np.arange(48_000) * 0.05).astype(np.float32)[None] / 2
    clip = as_sent(Clip("tone", tone, 48_000, "said"), wire)
    given = Clip("tone", tone, 48_000).mono(clip.rate)
    noise = np.square(clip.samples[0] - given).mean() / np.square(given).mean()
    assert clip.rate == wire.get("rate", 8_000) and clip.reference == "said"
    assert noise < (1e-6 if "rate" in wire else 1e-3)


def test_wire_bytes_are_the_formats():
    samples = np.sin(np.arange(800) / 10).astype(np.float32) / 2
    for wire in FORMATS:
        pcm = wire["type"] == "audio/pcm"
        assert len(wire_bytes(samples, wire)) == len(samples) * (2 if pcm else 1)
        if not pcm:
            close = np.frombuffer(wire_bytes(samples, wire), np.uint8)
            known = np.frombuffer(encoded(samples, wire["type"]), np.uint8)
            assert (close == known).mean() > 0.9  # rounded otherwise
