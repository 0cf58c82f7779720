"""Any number of channels and any rate become 16 kHz mono, in bounded memory, or are refused."""

import io
import tracemalloc

import av
import numpy as np
import pytest

from speech.audio import BLOCK_SAMPLES, AudioReader, decode
from speech.audio_errors import AudioError, AudioTooLong
from speech.mono import MonoResampler, downmix_weights
from tests.unit.speech.wav_files import wav_file

RATE = 16_000
SURROUND_51, SURROUND_71 = 0x3F, 0x63F


def constant(levels: list[int], samples: int = 1600) -> np.ndarray:
    """int16[samples, channels], each channel at its level."""
    return np.tile(np.array(levels, np.int16), (samples, 1))


def frame(rate: int, channels: int = 1, samples: int = 64, layout: str = "") -> av.AudioFrame:
    data = np.zeros((1, samples * channels), np.float32)
    made = av.AudioFrame.from_ndarray(data, "flt", layout or f"{channels} channels")
    made.sample_rate = rate
    return made


def test_surround_goes_into_mono_by_bs_775():
    names = ("FL", "FR", "FC", "LFE", "SL", "SR")
    expected = np.array([0.7071, 0.7071, 1, 0, 0.5, 0.5]) / (2 * 0.7071 + 2)
    np.testing.assert_allclose(downmix_weights(names), expected, atol=1e-4)
    np.testing.assert_allclose(downmix_weights(("FL", "FR")), [0.5, 0.5])
    np.testing.assert_allclose(downmix_weights(("FC",)), [1])


@pytest.mark.parametrize("names", [("NONE",) * 5, ("FL", "FR", "AMBI3"), ("LFE", "LFE2")])
def test_channels_without_names_go_in_alike(names):
    np.testing.assert_allclose(downmix_weights(names), np.full(len(names), 1 / len(names)))


def test_a_centre_is_louder_than_a_surround_and_the_low_frequencies_are_left_out():
    def level(loud: int) -> float:
        levels = [0] * 8
        levels[loud] = 16_384
        return float(decode(io.BytesIO(wav_file(constant(levels), RATE, SURROUND_71)))[800])

    left, _, centre, low, *surround = map(level, range(8))
    assert centre == pytest.approx(0.5 / (1 + 2 * np.sqrt(0.5) + 4 * 0.5), rel=1e-3)
    assert left == pytest.approx(centre * np.sqrt(0.5), rel=1e-3)
    assert surround == pytest.approx([centre / 2] * 4, rel=1e-3)
    assert low == 0


@pytest.mark.parametrize("channels", [1, 2, 3, 6, 7, 8, 9, 16, 40, 64])
@pytest.mark.parametrize("rate", [RATE, 44_100])
@pytest.mark.parametrize("codec", ["wav", "planar"])
def test_up_to_64_channels_are_mixed(channels, rate, codec):
    rng = np.random.default_rng(channels)
    samples = rng.integers(-8000, 8000, (rate, channels)).astype(np.int16)
    if codec == "wav":
        mono = decode(io.BytesIO(wav_file(samples, rate)))
    else:
        packed = av.AudioFrame.from_ndarray(samples.reshape(1, -1), "s16", f"{channels} channels")
        packed.sample_rate = rate
        planar = av.AudioResampler(format="fltp").resample(packed)
        resampler = MonoResampler()
        mono = np.concatenate([*resampler.push(planar[0]), *resampler.flush()])
    assert len(mono) == pytest.approx(RATE, abs=20)
    if rate == RATE:
        np.testing.assert_allclose(mono, samples.mean(axis=1) / 32768, atol=1e-5)
    else:
        assert mono.std() == pytest.approx(samples.mean(axis=1).std() / 32768, rel=0.5)


@pytest.mark.parametrize(
    ("rate", "channels", "said"),
    [
        (RATE, 65, "65 channels; expected 1 to 64"),
        (RATE, 255, "255 channels"),
        (10, 1, "10 samples per second; expected 1000 to 768000"),
        (999, 2, "999 samples per second"),
        (768_001, 1, "768001 samples per second"),
        (2**31 - 1, 1, "2147483647 samples per second"),
    ],
)
def test_what_is_beyond_is_refused_by_name(rate, channels, said):
    with pytest.raises(AudioError, match=said):
        decode(io.BytesIO(wav_file(constant([0] * channels), rate)))
    with pytest.raises(AudioError, match=said):
        list(MonoResampler().push(frame(rate, channels)))


def test_a_codec_that_nobody_knows_is_refused_by_name():
    data = wav_file(constant([0]), RATE).replace(b"fmt \x10\0\0\0\x01\0", b"fmt \x10\0\0\0\x34\x12")
    with pytest.raises(AudioError, match="names no codec"):
        decode(io.BytesIO(data))


def test_audio_that_changes_on_the_way_is_refused():
    for other in (frame(8_000), frame(RATE, 2), frame(RATE, layout="mono")):
        mono = MonoResampler()
        list(mono.push(frame(RATE)))
        with pytest.raises(AudioError, match="changes"):
            list(mono.push(other))


def flac(rate: int, samples: int, total: int = 0) -> bytes:
    """A FLAC file of one constant frame; total: what its header says, 0 for unknown.

    The frame's header says where to look up its rate: in the file's.
    """
    info = (samples << 16 | samples).to_bytes(4, "big") + bytes(6)
    info += (rate << 44 | 15 << 36 | total).to_bytes(8, "big") + bytes(16)
    head = b"fLaC\x80" + len(info).to_bytes(3, "big") + info
    body = bytes([0xFF, 0xF8, 0x70, 0x08, 0]) + (samples - 1).to_bytes(2, "big")
    body += bytes([crc(body, 8, 0x07)]) + b"\x00\x00\x00"
    return head + body + crc(body, 16, 0x8005).to_bytes(2, "big")


def crc(data: bytes, bits: int, polynomial: int) -> int:
    value, top = 0, 1 << bits - 1
    for byte in data:
        value ^= byte << bits - 8
        for _ in range(8):
            value = (value << 1 ^ polynomial if value & top else value << 1) & 2 * top - 1
    return value


def test_a_low_rate_makes_no_hours_of_a_few_bytes():
    good = decode(io.BytesIO(flac(RATE, 20_000)))
    assert len(good) == 20_000  # so that the others are refused for their rate
    with pytest.raises(AudioError, match="10 samples per second"):
        decode(io.BytesIO(flac(10, 20_000)))


def test_a_frame_that_is_too_long_is_refused_before_it_is_resampled(monkeypatch):
    pushed: list[object] = []
    monkeypatch.setattr(MonoResampler, "push", lambda _, frame: pushed.append(frame) or iter(()))
    for total in (0, 60_000):
        with (
            pytest.raises(AudioTooLong),
            AudioReader(io.BytesIO(flac(1_000, 60_000, total)), max_seconds=59) as reader,
        ):
            list(reader.blocks())
    assert not pushed


def test_a_long_frame_is_resampled_in_pieces():
    long = frame(1_000, samples=600_000)  # 10 minutes, 38 MB at 16 kHz
    tracemalloc.start()
    mono, count = MonoResampler(), 0
    for part in mono.push(long):
        count += len(part)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == pytest.approx(600 * RATE, rel=0.01)
    assert peak < 4 * 600_000 * 3 + 8 * 4 * BLOCK_SAMPLES
