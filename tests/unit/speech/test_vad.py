"""The batched detector says what silero-vad says, in whatever pieces the audio comes."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from scripts.speech_data import FOLDER
from speech.audio import SAMPLE_RATE, decode
from speech.vad import FRAME_SAMPLES, SpeechDetector, default_detector, runs, speech_mask

needs_clips = pytest.mark.skipif(not FOLDER.is_dir(), reason="the speech clips are not here")


def probabilities(samples: np.ndarray, piece: int | None = None) -> np.ndarray:
    stream = default_detector().stream()
    piece = piece or max(1, len(samples))
    parts = [stream.push(samples[i : i + piece]) for i in range(0, len(samples), piece)]
    return np.concatenate([*parts, stream.push(np.empty(0, np.float32), last=True)])


@needs_clips
def test_equals_the_package_frame_by_frame():
    samples = decode(FOLDER / "jfk.flac")
    samples = samples[: len(samples) // FRAME_SAMPLES * FRAME_SAMPLES]
    package = find_spec("silero_vad")
    assert package is not None and package.submodule_search_locations
    model = torch.jit.load(Path(package.submodule_search_locations[0]) / "data" / "silero_vad.jit")
    frames = torch.from_numpy(samples).split(FRAME_SAMPLES)
    expected = [model(frame, SAMPLE_RATE).item() for frame in frames]
    np.testing.assert_allclose(probabilities(samples), expected, atol=1e-4)


@needs_clips
def test_pieces_of_any_length_give_the_same():
    samples = decode(FOLDER / "LJ001-0002.flac")
    np.testing.assert_allclose(probabilities(samples, 777), probabilities(samples), atol=1e-4)


@pytest.mark.parametrize(
    "sound",
    [
        np.zeros(10 * SAMPLE_RATE, np.float32),
        np.random.default_rng(0).normal(0, 0.1, 10 * SAMPLE_RATE).astype(np.float32),
        (0.3 * np.sin(np.arange(10 * SAMPLE_RATE) * 0.17)).astype(np.float32),
    ],
    ids=["silence", "noise", "tone"],
)
def test_no_speech_where_there_is_none(sound):
    assert not speech_mask(probabilities(sound)).any()


def test_the_last_frame_is_filled_up():
    assert len(probabilities(np.zeros(FRAME_SAMPLES + 1, np.float32))) == 2
    assert len(probabilities(np.empty(0, np.float32))) == 0


def test_mask_bridges_short_silences_and_drops_short_sounds():
    p = np.array([0.0] * 10 + [0.9] * 20 + [0.1] * 2 + [0.9] * 20 + [0.0] * 10 + [0.9] + [0.0] * 9)
    assert runs(speech_mask(p)) == [(10, 52)]


def test_speech_ends_below_where_it_begins():
    p = np.array([0.45] * 5 + [0.6] * 5 + [0.4] * 5 + [0.3] * 5)
    assert runs(speech_mask(p, threshold=0.5)) == [(5, 15)]
    assert not speech_mask(np.empty(0, np.float32)).any()


def test_loading_it_leaves_torchs_threads_alone():
    before = torch.get_num_threads()
    SpeechDetector()
    assert torch.get_num_threads() == before
