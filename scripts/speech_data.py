"""Speech for checks and benchmarks: clips with references, and more audio derived from them.

A folder of audio may hold references.tsv (columns file and reference, tab-separated, quoted as
CSV). Derived clips are clips joined with pauses, resampled to 8..48 kHz, mono or stereo, with
noise at several signal-to-noise ratios. The same folder and seed give the same samples.

    python -m scripts.speech_data OUT [--audio DIR] [--minutes 20] [--formats wav,flac,...]
"""

import argparse
import csv
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
import torchaudio  # type: ignore[import-untyped]
from tqdm import tqdm

from scripts.lib.data_folder import data_folder

FOLDER = data_folder("speech")
REFERENCES = "references.tsv"
SUFFIXES = (".wav", ".flac", ".mp3", ".ogg", ".opus", ".m4a", ".webm")
RATES = (8_000, 11_025, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000)
SNRS_DB = (None, 30, 20, 10, 5)  # None: no noise
LONGEST_S = 28.0  # Whisper reads 30 s at once
DERIVED_S = 20 * 60.0
_MOST_JOINED = 4  # most source clips in a derived one
# Container and codec by format.
FORMATS = {
    "wav": ("wav", "pcm_s16le"),
    "flac": ("flac", "flac"),
    "mp3": ("mp3", "libmp3lame"),
    "ogg": ("ogg", "libopus"),
    "m4a": ("mp4", "aac"),
    "webm": ("webm", "libopus"),
}
_OPUS_RATES = (8_000, 12_000, 16_000, 24_000, 48_000)


@dataclass(frozen=True)
class Clip:
    """Some audio.

    Attributes:
        name: of its file, or what it was derived as.
        samples: float32[channels, n], -1 to 1.
        rate: samples per second.
        reference: what is said, None where nobody has written it down.
    """

    name: str
    samples: np.ndarray
    rate: int
    reference: str | None = None

    @property
    def seconds(self) -> float:
        return self.samples.shape[1] / self.rate

    def mono(self, rate: int) -> np.ndarray:
        """float32[n] at another rate."""
        mixed = torch.from_numpy(self.samples.mean(axis=0))
        return torchaudio.functional.resample(mixed, self.rate, rate).numpy()


def read_clips(folder: Path) -> list[Clip]:
    """All audio of a folder, in the order of names.

    Raises:
        ValueError: there is none, or a reference names a file that is not there.
    """
    paths = sorted(p for p in folder.glob("*") if p.suffix.lower() in SUFFIXES)
    if not paths:
        raise ValueError(f"no audio in {folder}; expected files ending in {', '.join(SUFFIXES)}")
    references = read_references(folder)
    if missing := references.keys() - {p.name for p in paths}:
        raise ValueError(f"{folder / REFERENCES} names {', '.join(sorted(missing))}: not there")
    return [replace(read_audio(path), reference=references.get(path.name)) for path in paths]


def read_references(folder: Path) -> dict[str, str]:
    """Reference text by file name; empty without a references.tsv."""
    path = folder / REFERENCES
    if not path.is_file():
        return {}
    with path.open(encoding="utf-8", newline="") as lines:
        rows = csv.DictReader(lines, delimiter="\t")
        if not {"file", "reference"} <= set(rows.fieldnames or ()):
            raise ValueError(f"{path} must begin with a line 'file<TAB>reference'")
        return {row["file"]: row["reference"] for row in rows}


def read_audio(path: Path) -> Clip:
    """One file, in its own rate and channels."""
    with av.open(path) as container:
        stream = container.streams.audio[0]
        to_float = av.AudioResampler(format="fltp", layout=stream.layout, rate=stream.rate)
        frames = itertools.chain(container.decode(stream), [None])
        parts = [part.to_ndarray() for frame in frames for part in to_float.resample(frame)]
        return Clip(path.name, np.concatenate(parts, axis=1), stream.rate)


def windows(clip: Clip, longest_s: float = LONGEST_S) -> list[Clip]:
    """The clip in equal parts of at most `longest_s`; parts have no reference."""
    count = int(np.ceil(clip.seconds / longest_s))
    if count <= 1:
        return [clip]
    parts = np.array_split(clip.samples, count, axis=1)
    return [Clip(f"{clip.name}, part {i + 1}", part, clip.rate) for i, part in enumerate(parts)]


def derive(clips: Sequence[Clip], seconds: float = DERIVED_S, seed: int = 0) -> Iterator[Clip]:
    """Make clips of at most LONGEST_S until they last `seconds` together.

    Every rate meets every noise, and the clips are used equally often.
    """
    sources = _shuffled([part for clip in clips for part in windows(clip)], seed)
    made = 0.0
    for index in itertools.count():
        if made >= seconds:
            return
        rng = np.random.default_rng([seed, index])
        rate, snr_db = RATES[index % len(RATES)], SNRS_DB[index % len(SNRS_DB)]
        stereo = bool(index // 2 % 2)
        samples, reference = _joined(sources, rate, rng)
        channels = np.stack([samples, 0.5 * samples]) if stereo else samples[None]
        if snr_db is not None:
            channels = channels + _noise(channels, snr_db, rng)
        channels /= max(1.0, float(np.abs(channels).max()))
        noise = "clean" if snr_db is None else f"{snr_db}dB"
        name = f"derived-{index:03}-{rate}Hz-{'stereo' if stereo else 'mono'}-{noise}"
        clip = Clip(name, channels.astype(np.float32), rate, reference)
        made += clip.seconds
        yield clip


def _shuffled(clips: Sequence[Clip], seed: int) -> Iterator[Clip]:
    """All clips again and again, each time in another order."""
    rng = np.random.default_rng([seed])
    while True:
        yield from (clips[i] for i in rng.permutation(len(clips)))


def _joined(
    sources: Iterator[Clip], rate: int, rng: np.random.Generator
) -> tuple[np.ndarray, str | None]:
    """A few clips with pauses around them, float32[n], and what is said in them."""
    wanted = int(rng.integers(1, _MOST_JOINED + 1))
    parts: list[np.ndarray] = []
    said: list[str | None] = []
    length = 0.0
    while len(said) < wanted:
        clip = next(sources)
        pause = rng.uniform(0.2, 1.2)
        if parts and length + pause + clip.seconds > LONGEST_S:
            break
        length += pause + clip.seconds
        parts += [np.zeros(int(pause * rate), np.float32), clip.mono(rate)]
        said.append(clip.reference)
    samples = np.concatenate(parts)[: int(LONGEST_S * rate)]
    texts = [text for text in said if text is not None]
    return samples, " ".join(texts) if len(texts) == len(said) else None


def _noise(channels: np.ndarray, snr_db: float, rng: np.random.Generator) -> np.ndarray:
    """White noise, each channel its own, so many decibels under the signal's mean power."""
    power = np.mean(np.square(channels, dtype=np.float64)) * 10 ** (-snr_db / 10)
    return rng.normal(0.0, np.sqrt(power), channels.shape).astype(np.float32)


def joined(
    clips: Sequence[Clip], rate: int, pause_s: float
) -> tuple[Clip, list[tuple[float, float]]]:
    """The clips as one, each with a pause behind it, and where each begins and ends, in seconds
    (its pause included)."""
    pause = np.zeros(round(pause_s * rate), np.float32)
    parts = [np.concatenate([clip.mono(rate), pause]) for clip in clips]
    ends = list(itertools.accumulate((len(part) / rate for part in parts), initial=0.0))
    said = " ".join(clip.reference or "" for clip in clips)
    whole = Clip("joined", np.concatenate(parts)[None], rate, said)
    return whole, list(itertools.pairwise(ends))


def encode(clip: Clip, format: str = "wav") -> bytes:
    """The clip as a file of one of FORMATS (Opus: at the next rate that it knows)."""
    container_format, codec = FORMATS[format]
    rate = clip.rate
    if codec == "libopus":
        rate = next(r for r in _OPUS_RATES if r >= min(rate, _OPUS_RATES[-1]))
    layout = {1: "mono", 2: "stereo"}[clip.samples.shape[0]]
    pcm = np.round(clip.samples.clip(-1, 1) * 32767).astype(np.int16)
    frame = av.AudioFrame.from_ndarray(pcm.T.reshape(1, -1), format="s16", layout=layout)
    frame.rate = clip.rate
    buffer = BytesIO()
    with av.open(buffer, "w", format=container_format) as container:
        stream: Any = container.add_stream(codec, rate=rate, layout=layout)
        for part in (frame, None):
            container.mux(stream.encode(part))
    return buffer.getvalue()


def main() -> int:
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument("out", type=Path, metavar="OUT", help="folder to write to")
    args.add_argument("--audio", type=Path, default=FOLDER, metavar="DIR", help="[%(default)s]")
    args.add_argument("--minutes", type=float, default=DERIVED_S / 60, help="[%(default)g]")
    args.add_argument("--seed", type=int, default=0, help="[0]")
    args.add_argument(
        "--formats", default=",".join(FORMATS), help="the files take turns [%(default)s]"
    )
    options = args.parse_args()
    formats = options.formats.split(",")
    if unknown := set(formats) - set(FORMATS):
        args.error(f"--formats: {', '.join(unknown)}: expected some of {', '.join(FORMATS)}")
    clips = derive(read_clips(options.audio), options.minutes * 60, options.seed)
    write(options.out, clips, formats, options.minutes * 60)
    return 0


def write(folder: Path, clips: Iterator[Clip], formats: Sequence[str], seconds: float) -> None:
    """Write the clips as files, and references.tsv for those that have one."""
    folder.mkdir(parents=True, exist_ok=True)
    with (
        (folder / REFERENCES).open("w", encoding="utf-8", newline="") as lines,
        tqdm(total=round(seconds), unit="s", desc="audio") as bar,
    ):
        references = csv.writer(lines, delimiter="\t", lineterminator="\n")
        references.writerow(("file", "reference"))
        for clip, format in zip(clips, itertools.cycle(formats), strict=False):
            path = folder / f"{clip.name}.{format}"
            path.write_bytes(encode(clip, format))
            if clip.reference is not None:
                references.writerow((path.name, clip.reference))
            bar.update(round(clip.seconds))


if __name__ == "__main__":
    sys.exit(main())
