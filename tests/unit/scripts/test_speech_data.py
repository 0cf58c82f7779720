"""Derived audio: the same every time, of the rates, channels and noise that its name says."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from scripts.speech_data import (
    FORMATS,
    LONGEST_S,
    RATES,
    Clip,
    derive,
    encode,
    read_audio,
    read_clips,
    windows,
)


def tone(name: str, hertz: float, seconds: float, rate: int = 16_000, reference=None) -> Clip:
    samples = 0.3 * np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate)
    return Clip(name, samples[None].astype(np.float32), rate, reference)


CLIPS = [tone(f"{i}", 300 + 100 * i, 2 + i, reference=f"words of {i}") for i in range(4)]


def dominant_hertz(samples: np.ndarray, rate: int) -> float:
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(samples.size)))
    return float(np.argmax(spectrum) * rate / samples.size)


@pytest.mark.parametrize("rate", [8_000, 44_100])
@pytest.mark.parametrize("format", FORMATS)
def test_every_format_holds_the_sound(tmp_path, format, rate):
    clip = tone("tone", 440, 2, rate)
    stereo = Clip("tone", np.concatenate([clip.samples, 0.5 * clip.samples]), rate)
    path = tmp_path / f"tone.{format}"
    path.write_bytes(encode(stereo, format))
    read = read_audio(path)
    assert read.samples.shape[0] == 2
    assert read.seconds == pytest.approx(2, abs=0.2)  # AAC at 8 kHz has long frames
    for channel, amplitude in zip(read.samples, (0.3, 0.15), strict=True):
        middle = channel[read.rate // 2 : -read.rate // 2]
        assert dominant_hertz(middle, read.rate) == pytest.approx(440, abs=2)
        assert np.sqrt(2 * np.mean(middle**2)) == pytest.approx(amplitude, rel=0.1)


def test_wav_keeps_every_sample(tmp_path):
    clip = derived(60)[1]
    (tmp_path / "a.wav").write_bytes(encode(clip))
    read = read_audio(tmp_path / "a.wav")
    assert read.rate == clip.rate
    np.testing.assert_allclose(read.samples, clip.samples, atol=1 / 32000)


def derived(seconds: float, seed: int = 0) -> list[Clip]:
    return list(derive(CLIPS, seconds, seed))


def test_derived_audio_is_the_same_every_time_and_another_with_another_seed():
    first, second, other = derived(60), derived(60), derived(60, seed=1)
    assert [c.name for c in first] == [c.name for c in second]
    for a, b in zip(first, second, strict=True):
        assert a.samples.tobytes() == b.samples.tobytes()
    assert first[0].samples.tobytes() != other[0].samples.tobytes()


def test_derived_audio_lasts_and_covers_all_rates_and_channels():
    clips = derived(300)
    total = sum(clip.seconds for clip in clips)
    assert 300 <= total < 300 + LONGEST_S
    assert max(clip.seconds for clip in clips) <= LONGEST_S
    assert {clip.rate for clip in clips} == set(RATES)
    assert {clip.samples.shape[0] for clip in clips} == {1, 2}
    for clip in clips:
        assert f"-{clip.rate}Hz-" in clip.name
        assert ("stereo" in clip.name) == (clip.samples.shape[0] == 2)
        assert np.abs(clip.samples).max() <= 1


def test_sources_are_used_equally_often_and_said_in_order():
    said = [clip.reference.split("words of ")[1:] for clip in derived(300)]
    counts = Counter(word.strip() for words in said for word in words)
    assert set(counts) == {"0", "1", "2", "3"}
    assert max(counts.values()) - min(counts.values()) <= 2
    assert max(map(len, said)) > 1


def test_reference_is_missing_where_part_of_it_is():
    silent = [tone("unknown", 500, 2)]
    assert all(clip.reference is None for clip in derive(silent, 20))


def test_noise_is_as_loud_as_the_name_says():
    loud = tone("loud", 440, 25)
    for clip in derive([loud], 5 * 25):
        if not clip.name.endswith("mono-5dB"):
            continue
        spectrum = np.abs(np.fft.rfft(clip.samples[0])) ** 2
        at = round(440 * clip.samples.shape[1] / clip.rate)
        # All but the tone's own bins is noise, whatever its pauses smear.
        signal = spectrum[at - 60 : at + 60].sum()
        assert 10 * np.log10(signal / (spectrum.sum() - signal)) == pytest.approx(5, abs=0.5)
        return
    raise AssertionError("no clip with 5 dB among the first")


def test_long_clips_are_cut_without_loss():
    clip = tone("long", 440, 60.5)
    parts = windows(clip)
    assert max(part.seconds for part in parts) <= LONGEST_S
    assert np.array_equal(np.concatenate([p.samples for p in parts], axis=1), clip.samples)
    assert windows(CLIPS[0]) == [CLIPS[0]]


def test_a_folder_is_read_with_its_references(tmp_path):
    for clip in CLIPS:
        (tmp_path / f"{clip.name}.flac").write_bytes(encode(clip, "flac"))
    (tmp_path / "references.tsv").write_text('file\treference\n2.flac\t"say ""two"""\n')
    clips = read_clips(tmp_path)
    assert [clip.name for clip in clips] == ["0.flac", "1.flac", "2.flac", "3.flac"]
    assert [clip.reference for clip in clips] == [None, None, 'say "two"', None]


@pytest.mark.parametrize(
    ("content", "message"),
    [("file\treference\nb.wav\thi\n", "names b.wav: not there"), ("a\tb\n", "must begin with")],
)
def test_wrong_references_are_told(tmp_path: Path, content, message):
    (tmp_path / "a.wav").write_bytes(encode(CLIPS[0]))
    (tmp_path / "references.tsv").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_clips(tmp_path)


def test_a_folder_without_audio_is_told(tmp_path):
    with pytest.raises(ValueError, match="no audio"):
        read_clips(tmp_path)
