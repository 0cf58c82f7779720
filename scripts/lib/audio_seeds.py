"""Small valid audio files of every container and codec that PyAV can write here, for fuzzing."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from typing import Any

import av
import numpy as np

SECONDS = 0.3
_LAYOUTS = ("mono", "stereo", "5.1")
# Container, codec, and the rates that the codec knows, where they are few.
_WRITABLE: tuple[tuple[str, str, tuple[int, ...]], ...] = (
    *(("wav", codec, ()) for codec in (
        "pcm_s16le", "pcm_u8", "pcm_s24le", "pcm_f32le", "pcm_f64le", "pcm_alaw", "pcm_mulaw",
        "adpcm_ima_wav", "adpcm_ms", "adpcm_yamaha", "mp2", "ac3",
    )),
    ("wav", "adpcm_swf", (44_100,)), ("wav", "g722", (16_000,)),
    ("w64", "pcm_s16le", ()), ("flac", "flac", ()),
    ("mp3", "libmp3lame", (8_000, 16_000, 44_100)),
    ("ogg", "libopus", (8_000, 48_000)), ("ogg", "vorbis", ()), ("ogg", "flac", ()),
    ("mp4", "aac", ()), ("mp4", "alac", ()), ("mp4", "libopus", (48_000,)), ("mp4", "flac", ()),
    ("mov", "pcm_s16le", ()), ("mov", "pcm_s24be", ()), ("ipod", "aac", ()), ("3gp", "aac", ()),
    ("webm", "libopus", (48_000,)), ("webm", "vorbis", ()),
    ("matroska", "flac", ()), ("matroska", "aac", ()), ("matroska", "pcm_s16le", ()),
    ("matroska", "ac3", (48_000,)), ("matroska", "wavpack", ()), ("matroska", "tta", ()),
    ("adts", "aac", (16_000, 48_000)), ("aiff", "pcm_s16be", ()), ("aiff", "pcm_f32be", ()),
    ("au", "pcm_s16be", ()), ("au", "pcm_mulaw", ()), ("caf", "pcm_s16le", ()),
    ("caf", "alac", ()), ("mpegts", "aac", (48_000,)), ("mpegts", "mp2", (48_000,)),
    ("mpeg", "mp2", (44_100,)), ("mpegts", "eac3", (48_000,)), ("mpegts", "ac3", (48_000,)),
    ("mov", "mp2", (44_100,)), ("mov", "adpcm_ima_qt", ()), ("caf", "adpcm_ima_qt", ()),
    ("matroska", "eac3", (48_000,)), ("matroska", "libmp3lame", (44_100,)),
    ("mp4", "libmp3lame", (44_100,)),
)  # fmt: skip
_RATES = (8_000, 16_000, 44_100)


@dataclass(frozen=True)
class Seed:
    """A valid file.

    Attributes:
        name: its container, codec, rate and layout.
    """

    name: str
    data: bytes

    @property
    def container(self) -> str:
        return self.name.partition("/")[0]


@cache
def seeds() -> tuple[Seed, ...]:
    """All that can be written here; what cannot is left out (see `missing`)."""
    return tuple(seed for seed in _written() if seed.data)


def missing() -> list[str]:
    """Containers and codecs of which no file could be written."""
    wanted = {f"{container}/{codec}" for container, codec, _ in _WRITABLE}
    return sorted(wanted - {"/".join(seed.name.split("/")[:2]) for seed in seeds()})


def _written() -> Iterator[Seed]:
    for container, codec, rates in _WRITABLE:
        for number, layout in enumerate(_LAYOUTS):
            known = rates or _RATES
            rate = known[number % len(known)]
            try:
                data = written(container, codec, rate, layout)
            except (av.FFmpegError, ValueError, TypeError):
                continue  # this codec knows no such layout, or there is no such encoder
            yield Seed(f"{container}/{codec}/{rate}/{layout}", data)


def written(container: str, codec: str, rate: int, layout: str, seconds: float = SECONDS) -> bytes:
    """A file of a tone in noise, other in each channel.

    Raises:
        av.FFmpegError, ValueError, TypeError: it cannot be written.
    """
    count = av.AudioLayout(layout).nb_channels
    rng = np.random.default_rng(count)
    times = np.arange(int(seconds * rate)) / rate
    tones = np.sin(2 * np.pi * times[:, None] * (300 + 100 * np.arange(count)))
    samples = (8000 * tones + rng.normal(0, 500, tones.shape)).astype(np.int16)
    frame = av.AudioFrame.from_ndarray(samples.reshape(1, -1), "s16", layout)
    frame.sample_rate = rate
    if codec == "flac" != container:  # whose muxers want the codec's header first
        return _repacked(written("flac", codec, rate, layout, seconds), container)
    buffer = BytesIO()
    with av.open(buffer, "w", format=container) as file:
        stream: Any = file.add_stream(codec, rate=rate, layout=layout)
        stream.codec_context.options = {"strict": "experimental"}  # FFmpeg's own Vorbis
        for part in (frame, None):
            file.mux(stream.encode(part))
    return buffer.getvalue()


def _repacked(data: bytes, container: str) -> bytes:
    """The same packets in another container."""
    buffer = BytesIO()
    with av.open(BytesIO(data)) as source, av.open(buffer, "w", format=container) as file:
        stream = file.add_stream_from_template(source.streams.audio[0])
        for packet in source.demux(audio=0):
            if packet.dts is not None:
                packet.stream = stream
                file.mux(packet)
    return buffer.getvalue()
