"""Folders of speech: which files are read, and what is wrong with one."""

import wave

import numpy as np
import pytest

from sglang_ext.sweep.clips import audio_files, read_clips, read_references
from sglang_ext.sweep.data_files import WorkloadError


def write_clip(path, seconds, rate=16_000):
    """A WAV file of a tone."""
    samples = 0.3 * np.sin(2 * np.pi * 440 * np.arange(int(seconds * rate)) / rate)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((samples * 32767).astype("<i2").tobytes())
    return path


def test_files_come_by_name_and_one_file_is_a_folder_of_one(tmp_path):
    paths = [write_clip(tmp_path / name, 0.1) for name in ("b.wav", "a.WAV")]
    (tmp_path / "c.wav").mkdir()
    assert audio_files(tmp_path) == paths[::-1]
    assert audio_files(paths[0]) == [paths[0]]


def test_clips_have_their_length_and_what_is_said(tmp_path):
    paths = [write_clip(tmp_path / "a.wav", 0.5), write_clip(tmp_path / "b.wav", 30.5)]
    (clip,) = read_clips(paths, {"a.wav": "well"})
    assert (clip.name, clip.reference) == ("a.wav", "well")
    assert clip.seconds == pytest.approx(0.5, rel=0.01)


def test_what_is_said(tmp_path):
    assert read_references(tmp_path) == {}
    write_clip(tmp_path / "a.wav", 0.1)
    (tmp_path / "references.tsv").write_text('file\treference\na.wav\t"He said ""no"""\n')
    assert read_references(tmp_path) == {"a.wav": 'He said "no"'}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"name\ttext\na.wav\tb\n", "line 1: expected the columns file and reference"),
        (b"", "line 1: expected the columns"),
        (b"file\treference\nno.wav\tb\n", "line 2: no.wav is not there"),
        (b"file\treference\na.wav\n", "line 2: expected a file and what is said in it"),
        (b"file\treference\na.wav\t\xff\n", "cannot be read"),
    ],
)
def test_damaged_references(tmp_path, content, message):
    write_clip(tmp_path / "a.wav", 0.1)
    (tmp_path / "references.tsv").write_bytes(content)
    with pytest.raises(WorkloadError, match=message):
        read_references(tmp_path)


def test_a_damaged_clip_is_named(tmp_path):
    (tmp_path / "bad.wav").write_bytes(b"no audio at all")
    with pytest.raises(WorkloadError, match=r"bad\.wav: the file is empty, damaged"):
        list(read_clips([tmp_path / "bad.wav"], {}))
