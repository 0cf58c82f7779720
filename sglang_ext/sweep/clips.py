"""Speech to transcribe: a folder of audio files, and what is said in them.

references.tsv beside them holds what is said, as far as somebody has written it down: columns file
and reference, tab-separated, quoted as CSV.
"""

import base64
import csv
import io
import wave
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sglang_ext.sweep.data_files import WorkloadError

REFERENCES = "references.tsv"
LONGEST_S = 30.0  # Whisper reads as much at once
_ENDINGS = (".wav", ".flac", ".mp3", ".ogg", ".opus", ".m4a", ".webm")


@dataclass(frozen=True)
class Clip:
    """An audio file, ready to send.

    Attributes:
        name: of its file.
        url: data URL of a WAV file, 16 kHz mono, so that no server has to resample.
        reference: what is said; "": not known.
    """

    name: str
    seconds: float
    url: str
    reference: str


def audio_files(data: Path) -> list[Path]:
    """The audio files of a folder, or the one that is given, by name.

    Raises:
        WorkloadError: there are none.
    """
    files = sorted(data.iterdir()) if data.is_dir() else [data]
    found = [path for path in files if path.suffix.lower() in _ENDINGS and path.is_file()]
    if not found:
        raise WorkloadError(
            f"{data}: workload audio needs a folder of speech: give it with --data FOLDER "
            f"(files ending in {', '.join(_ENDINGS)})"
        )
    return found


def read_references(folder: Path) -> dict[str, str]:
    """What is said, by file name; empty without a references.tsv.

    Raises:
        WorkloadError: it is damaged, or names a file that is not there.
    """
    path = folder / REFERENCES
    if not path.is_file():
        return {}
    references: dict[str, str] = {}
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.DictReader(file, delimiter="\t")
            if not {"file", "reference"} <= set(rows.fieldnames or ()):
                raise WorkloadError(f"{path}, line 1: expected the columns file and reference")
            for row in rows:
                place = f"{path}, line {rows.line_num}"
                if row["reference"] is None:
                    raise WorkloadError(f"{place}: expected a file and what is said in it")
                if not (folder / row["file"]).is_file():
                    raise WorkloadError(f"{place}: {row['file']} is not there")
                references[row["file"]] = row["reference"].strip()
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise WorkloadError(f"{path} cannot be read: {error}") from None
    return references


def read_clips(paths: list[Path], references: Mapping[str, str]) -> Iterator[Clip]:
    """The files one after the other, those longer than LONGEST_S left out.

    Raises:
        WorkloadError: one cannot be read.
    """
    from speech.audio import SAMPLE_RATE, AudioError, AudioTooLong, decode

    for path in paths:
        try:
            samples = decode(path, LONGEST_S)
        except AudioTooLong:
            continue
        except AudioError as error:
            raise WorkloadError(f"{path}: {error}") from None
        url = "data:audio/wav;base64," + base64.b64encode(_wav(samples, SAMPLE_RATE)).decode()
        yield Clip(path.name, len(samples) / SAMPLE_RATE, url, references.get(path.name, ""))


def _wav(samples: np.ndarray, rate: int) -> bytes:
    """A WAV file of float32[n] in -1..1, with 16 bits a sample."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.round(samples * 32767).astype("<i2").tobytes())
    return buffer.getvalue()
