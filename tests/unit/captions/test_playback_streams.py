"""Standard input with audio of any rate and number of channels."""

import os
import threading

import numpy as np
import pytest

from sglang_ext.captions.playback import stream_blocks
from speech.audio import SAMPLE_RATE
from speech.audio_errors import AudioError
from tests.unit.speech.wav_files import wav_file


def heard(data: bytes) -> np.ndarray:
    """What comes of a pipe with this data."""
    reading, writing = os.pipe()

    def write() -> None:
        with open(writing, "wb") as pipe:
            pipe.write(data)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        return np.concatenate([np.empty(0, np.float32), *stream_blocks(reading)])
    finally:
        os.close(reading)
        writer.join()


@pytest.mark.parametrize("channels", [1, 2, 6, 8, 16, 64])
def test_a_wav_stream_of_many_channels_is_mixed(channels):
    levels = np.arange(channels, dtype=np.int16) * 100 + 1000
    samples = np.tile(levels, (SAMPLE_RATE, 1))
    mono = heard(wav_file(samples, SAMPLE_RATE))
    np.testing.assert_allclose(mono, np.full(SAMPLE_RATE, levels.mean() / 32768), atol=1e-6)


def test_a_wav_stream_of_another_rate_is_resampled():
    assert len(heard(wav_file(np.zeros((44_100, 2), np.int16), 44_100))) == SAMPLE_RATE


@pytest.mark.parametrize(
    ("rate", "channels", "said"), [(10, 1, "10 samples"), (SAMPLE_RATE, 65, "65 channels")]
)
def test_what_is_beyond_is_refused_by_name(rate, channels, said):
    with pytest.raises(AudioError, match=said):
        heard(wav_file(np.zeros((100, channels), np.int16), rate))
