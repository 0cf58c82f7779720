"""Any usual format, rate and channels become the same 16 kHz mono samples; the rest is refused."""

import io
import wave
from pathlib import Path

import numpy as np
import pytest

from scripts.speech_data import FORMATS, Clip, encode
from speech.audio import BLOCK_SAMPLES, SAMPLE_RATE, AudioError, AudioReader, AudioTooLong, decode

SECONDS = 2.0
TONE_HZ = 440.0


def tone(rate: int, channels: int = 1, seconds: float = SECONDS) -> Clip:
    times = np.arange(int(seconds * rate)) / rate
    samples = 0.3 * np.sin(2 * np.pi * TONE_HZ * times).astype(np.float32)
    return Clip("tone", np.tile(samples, (channels, 1)), rate)


@pytest.mark.parametrize("format", sorted(FORMATS))
@pytest.mark.parametrize("rate", [8_000, 16_000, 44_100, 48_000])
@pytest.mark.parametrize("channels", [1, 2])
def test_a_tone_keeps_its_pitch_length_and_loudness(format, rate, channels):
    samples = decode(io.BytesIO(encode(tone(rate, channels), format)))
    assert samples.dtype == np.float32
    assert len(samples) / SAMPLE_RATE == pytest.approx(SECONDS, abs=0.3)  # codecs pad
    middle = samples[SAMPLE_RATE // 2 : SAMPLE_RATE * 3 // 2]
    spectrum = np.abs(np.fft.rfft(middle))
    assert np.argmax(spectrum) * SAMPLE_RATE / len(middle) == pytest.approx(TONE_HZ, abs=2)
    assert np.sqrt(np.mean(middle**2)) == pytest.approx(0.3 / np.sqrt(2), rel=0.1)


def test_16_khz_mono_comes_through_unchanged():
    clip = tone(SAMPLE_RATE)
    expected = np.round(clip.samples[0] * 32767) / 32768
    np.testing.assert_allclose(decode(io.BytesIO(encode(clip))), expected, atol=1e-6)


def test_blocks_are_equal_and_lose_nothing():
    clip = tone(SAMPLE_RATE, seconds=40)
    with AudioReader(io.BytesIO(encode(clip))) as reader:
        blocks = list(reader.blocks())
        assert reader.seconds_read == pytest.approx(40)
        assert reader.duration == pytest.approx(40)
    assert [len(b) for b in blocks] == [BLOCK_SAMPLES, BLOCK_SAMPLES, 40 * 16_000 % BLOCK_SAMPLES]
    np.testing.assert_array_equal(np.concatenate(blocks), decode(io.BytesIO(encode(clip))))


def test_no_samples_are_no_error_here():
    assert len(decode(io.BytesIO(encode(tone(SAMPLE_RATE, seconds=0.5))))) == 8_000
    empty = io.BytesIO()
    with wave.open(empty, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE)
    empty.seek(0)
    assert len(decode(empty)) == 0


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"This is text and no audio at all.\n" * 50,
        bytes(range(256)) * 64,
        encode(tone(SAMPLE_RATE), "wav")[:20],
        encode(tone(SAMPLE_RATE), "m4a")[:200],
        encode(tone(SAMPLE_RATE), "webm")[:100],
    ],
    ids=["empty", "text", "bytes", "wav header", "m4a header", "webm header"],
)
def test_what_is_no_audio_is_refused(data):
    with pytest.raises(AudioError, match=r"supported|no audio track"):
        decode(io.BytesIO(data))


def test_playlists_open_no_other_files(tmp_path: Path):
    (tmp_path / "secret.wav").write_bytes(encode(tone(SAMPLE_RATE)))
    playlist = (
        f"#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:2,\n{tmp_path}/secret.wav\n#EXT-X-ENDLIST"
    )
    concat = f"ffconcat version 1.0\nfile '{tmp_path}/secret.wav'\n"
    for data in (playlist, concat):
        with pytest.raises(AudioError):
            decode(io.BytesIO(data.encode()))


def test_a_file_cut_short_gives_what_is_there():
    data = encode(tone(SAMPLE_RATE, seconds=10), "flac")
    samples = decode(io.BytesIO(data[: len(data) // 2]))
    assert 3 < len(samples) / SAMPLE_RATE < 7


def test_damage_in_the_middle_is_passed_over():
    data = bytearray(encode(tone(44_100, seconds=10), "mp3"))
    data[len(data) // 2 : len(data) // 2 + 500] = b"\x00" * 500
    assert len(decode(io.BytesIO(bytes(data)))) / SAMPLE_RATE == pytest.approx(10, abs=1)


def test_too_long_audio_is_refused_by_its_header_and_by_its_samples():
    clip = tone(SAMPLE_RATE, seconds=30)
    with pytest.raises(AudioTooLong, match="longer than the 29 seconds"):
        AudioReader(io.BytesIO(encode(clip)), max_seconds=29)
    # An MP3's duration is a guess until it is decoded.
    mp3 = io.BytesIO(encode(clip, "mp3"))
    with AudioReader(mp3, max_seconds=29) as reader, pytest.raises(AudioTooLong):
        list(reader.blocks())


def test_samples_that_are_no_numbers_become_silence():
    pcm = np.array([0.5, np.nan, np.inf, -np.inf, 7.0], np.float32)
    header = b"RIFF" + (36 + pcm.nbytes).to_bytes(4, "little") + b"WAVEfmt \x10\0\0\0\x03\0\x01\0"
    header += SAMPLE_RATE.to_bytes(4, "little") + (SAMPLE_RATE * 4).to_bytes(4, "little")
    header += b"\x04\0\x20\0data" + pcm.nbytes.to_bytes(4, "little")
    samples = decode(io.BytesIO(header + pcm.tobytes()))
    np.testing.assert_array_equal(samples, np.array([0.5, 0, 1, -1, 1], np.float32))
