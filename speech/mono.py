"""Decoded frames of any sample format, channel layout and rate -> 16 kHz mono samples.

The channels are mixed before the rate is changed, and the rate is changed piece by piece, so that
neither many channels nor a low rate make much of little: memory is bounded by the frame that came.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import av
import numpy as np

from speech.audio_errors import AudioError

SAMPLE_RATE = 16_000
"""Samples per second that Whisper and the VAD read."""

MIN_RATE, MAX_RATE = 1_000, 768_000
"""Samples per second that audio may have: below is no speech, and above no format in use."""

MAX_CHANNELS = 64
"""Most channels of audio, those of FFmpeg's libswresample (SWR_CH_MAX)."""

_PLANES = 7  # that PyAV 18 can hand over: it looks for the end of eight past their array

_PIECE_SAMPLES = 1 << 18  # of output, at most, from one call of the resampler
_LEAST_SAMPLES = 1 << 13  # of input that are worth a call

_SIDE, _SURROUND = np.sqrt(0.5), 0.5
# Channel names are FFmpeg's (libavutil/channel_layout.c).
_WEIGHTS = {
    "FC": 1.0,
    **dict.fromkeys(("FL", "FR", "FLC", "FRC", "WL", "WR", "DL", "DR"), _SIDE),
    **dict.fromkeys(("SL", "SR", "BL", "BR", "BC", "SDL", "SDR", "TC"), _SURROUND),
    **dict.fromkeys(("TFL", "TFC", "TFR", "TBL", "TBC", "TBR", "TSL", "TSR"), _SURROUND),
    **dict.fromkeys(("BFL", "BFC", "BFR"), _SURROUND),
    **dict.fromkeys(("LFE", "LFE2"), 0.0),
}


def downmix_weights(channels: Sequence[str]) -> np.ndarray:
    """float32[channels] that sum to 1: what of each channel goes into mono.

    ITU-R BS.775-4, downward mixing to mono (1/0): centre 1, left and right 0.7071, surrounds 0.5,
    no low-frequency effects. Front channels that it does not list count as left and right, all
    others as surrounds. Their sum is brought to 1, so that nothing clips and stereo is the mean of
    its channels.

    Args:
        channels: FFmpeg's names ("FL", "LFE", ...). If one is unknown, as in files that do not
            say what their channels are, the mix is the mean of all.
    """
    weights = np.array([_WEIGHTS.get(name, np.nan) for name in channels])
    total = weights.sum()
    if not total > 0:  # NaN too
        weights, total = np.ones(len(channels)), len(channels)
    return (weights / total).astype(np.float32)


def check_format(rate: int, channels: int) -> None:
    """Refuse what has no samples, or more than a server should be made to work for.

    Raises:
        AudioError: it names the value and what is accepted.
    """
    if not rate or not channels:
        raise AudioError("the audio track has no sample rate or no channels: a damaged header")
    if not MIN_RATE <= rate <= MAX_RATE:
        raise AudioError(
            f"the audio has {rate} samples per second; expected {MIN_RATE} to {MAX_RATE}"
        )
    if not 1 <= channels <= MAX_CHANNELS:
        raise AudioError(f"the audio has {channels} channels; expected 1 to {MAX_CHANNELS}")


class MonoResampler:
    """Mixes and resamples the frames of one audio track.

    Args:
        least_samples: so many are gathered before they are resampled; 0: each frame at once.

    Raises, while it does:
        AudioError: a frame's rate or channels are not accepted, or not those of the first frame.
        av.FFmpegError: FFmpeg cannot convert it.
    """

    def __init__(self, least_samples: int = _LEAST_SAMPLES) -> None:
        self._least_samples = least_samples
        self._unpack: _Graph | None = None
        self._resample: _Graph | None = None
        self._kind: tuple[str, str, int] | None = None
        self._weights = np.ones(1, np.float32)
        self._waiting: list[np.ndarray] = []

    def push(self, frame: Any) -> Iterator[np.ndarray]:
        """The samples that come out so far, float32[n] in -1..1 at SAMPLE_RATE.

        Args:
            frame: av.AudioFrame, decoded.
        """
        if not frame.samples:
            return
        if self._kind is None:
            self._start(frame)
        elif _kind(frame) != self._kind:
            raise AudioError("the audio changes its sample rate or its channels on the way")
        for channels in self._channels(frame):
            yield from self._resampled(self._mixed(channels))

    def flush(self) -> Iterator[np.ndarray]:
        """What the resampler has kept back, after the last frame."""
        if self._resample is not None:
            if self._waiting:
                yield from self._pieces(_joined(self._waiting))
            yield from map(_samples, self._resample.push(None))

    def _start(self, frame: Any) -> None:
        layout = frame.layout
        check_format(frame.sample_rate, layout.nb_channels)
        self._kind = _kind(frame)
        self._weights = downmix_weights([channel.name for channel in layout.channels])
        if frame.format.name != "fltp" or layout.nb_channels > _PLANES:
            self._unpack = _Graph(
                frame.format.name, layout.name, frame.sample_rate, sample_fmts="flt"
            )
        if frame.sample_rate != SAMPLE_RATE:
            self._resample = _Graph(
                "flt", "mono", frame.sample_rate, sample_rates=str(SAMPLE_RATE), sample_fmts="flt"
            )

    def _channels(self, frame: Any) -> Iterator[np.ndarray]:
        """float32[channels, n] of a decoded frame."""
        if self._unpack is None:
            yield _safe(frame.to_ndarray())
            return
        for packed in self._unpack.push(frame):
            yield _samples(packed).reshape(-1, len(self._weights)).T

    def _mixed(self, channels: np.ndarray) -> np.ndarray:
        return channels[0] if len(channels) == 1 else self._weights @ channels

    def _resampled(self, mono: np.ndarray) -> Iterator[np.ndarray]:
        if self._resample is None:
            yield mono
            return
        self._waiting.append(mono)
        if sum(map(len, self._waiting)) >= self._least_samples:
            joined, self._waiting = _joined(self._waiting), []
            yield from self._pieces(joined)

    def _pieces(self, mono: np.ndarray) -> Iterator[np.ndarray]:
        assert self._resample is not None and self._kind is not None
        rate = self._kind[2]
        size = _PIECE_SAMPLES * rate // SAMPLE_RATE
        for first in range(0, len(mono), size):
            piece = np.ascontiguousarray(mono[None, first : first + size])
            frame = av.AudioFrame.from_ndarray(piece, format="flt", layout="mono")
            frame.sample_rate = rate
            yield from map(_samples, self._resample.push(frame))


class _Graph:
    """One conversion by FFmpeg's libswresample, in the thread that asks for it.

    av.AudioResampler makes the same graph, but one with a thread for every processor.
    """

    def __init__(self, sample_format: str, layout: str, rate: int, **output: str):
        self._graph = av.filter.Graph()
        self._graph.threads = 1
        source = self._graph.add(
            "abuffer",
            sample_rate=str(rate),
            sample_fmt=sample_format,
            channel_layout=layout,
            time_base=f"1/{rate}",
        )
        conversion = self._graph.add("aformat", **output)
        sink = self._graph.add("abuffersink")
        source.link_to(conversion)
        conversion.link_to(sink)
        self._graph.configure()

    def push(self, frame: Any) -> Iterator[Any]:
        """The frames that come out; None pushes the end."""
        self._graph.push(frame)
        while True:
            try:
                converted = self._graph.pull()
            except (av.BlockingIOError, EOFError):
                return
            yield converted


def _kind(frame: Any) -> tuple[str, str, int]:
    return frame.format.name, frame.layout.name, frame.sample_rate


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if len(parts) > 1 else parts[0]


def _samples(frame: Any) -> np.ndarray:
    """float32[samples * channels] of a packed frame."""
    return _safe(frame.to_ndarray().reshape(-1))


def _safe(samples: np.ndarray) -> np.ndarray:
    """Clip samples to -1..1 in place, what is no number to silence; returns the array."""
    np.nan_to_num(samples, copy=False, nan=0.0, posinf=1.0, neginf=-1.0)
    return np.clip(samples, -1.0, 1.0, out=samples)
