"""Audio files of any usual format -> 16 kHz mono samples, block by block.

PyAV carries FFmpeg's libraries in its wheel, so nothing else need be installed. Only a block is
ever in memory, however long the audio. A server decodes what clients send in other processes
(speech/decoders.py).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import av
import numpy as np

from speech.audio_errors import AudioError, AudioTooLong
from speech.mono import SAMPLE_RATE, MonoResampler, check_format

if TYPE_CHECKING:
    import torch

WINDOW_SAMPLES = 30 * SAMPLE_RATE
"""Samples that Whisper's encoder reads at once."""

BLOCK_SAMPLES = 1 << 18
"""Samples of a decoded block, 16.4 s."""

# OpenAI's list and what is near it. Playlists (hls, concat, dash) stay out: they make FFmpeg open
# other files and addresses.
_CONTAINERS = (
    "wav,w64,flac,mp3,ogg,mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,aac,aiff,au,caf,amr,mpeg,mpegts"
)
_GUESSED = ("mp3", "aac")  # without a header that states the duration
# A frame of damage in a long file is left out; nothing but damage is no audio.
_MAX_BAD_PACKETS = 1000


class AudioReader:
    """The samples of an audio file.

    Args:
        file: path, or a seekable binary file, which stays open.
        max_seconds: longest audio to accept.

    Raises:
        AudioError: it is empty, no audio, damaged, or too long by what it says of itself.
    """

    def __init__(self, file: str | Path | IO[bytes], max_seconds: float = float("inf")):
        self._max_seconds = max_seconds
        self._read = 0
        try:
            self._container = av.open(
                str(file) if isinstance(file, Path) else file,
                "r",  # temporary files say "w+b" of themselves
                metadata_errors="ignore",
                options={"format_whitelist": _CONTAINERS},
            )
        except (av.FFmpegError, OSError, ValueError, EOFError) as error:
            raise _unreadable(error) from None
        try:
            self._stream = self._audio_stream()
            self.duration = self._stated_duration()
            guessed = self._container.format.name in _GUESSED
            if self.duration is not None and not guessed and self.duration > max_seconds:
                raise _too_long(max_seconds)
        except BaseException:
            self._container.close()
            raise

    @property
    def seconds_read(self) -> float:
        """Seconds of audio decoded so far; after the last block, the audio's duration."""
        return self._read / SAMPLE_RATE

    def blocks(self) -> Iterator[np.ndarray]:
        """float32[n] in -1..1; n is BLOCK_SAMPLES but for the last one.

        Raises:
            AudioError: nothing can be decoded, or the audio is too long.
        """
        waiting: list[np.ndarray] = []
        count = 0
        for part in self._decoded():
            waiting.append(part)
            count += len(part)
            self._read += len(part)
            if self._read > self._max_seconds * SAMPLE_RATE:
                raise _too_long(self._max_seconds)
            if count >= BLOCK_SAMPLES:
                joined = np.concatenate(waiting)
                whole = count - count % BLOCK_SAMPLES
                yield from np.split(joined[:whole], whole // BLOCK_SAMPLES)
                waiting, count = [joined[whole:].copy()], count - whole
        if count:
            yield np.concatenate(waiting)

    def close(self) -> None:
        """Free the decoder."""
        self._container.close()

    def __enter__(self) -> "AudioReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _audio_stream(self) -> Any:
        streams = self._container.streams.audio
        if not streams:
            raise AudioError("the file holds no audio track")
        stream = streams[0]
        if stream.codec_context is None:
            raise AudioError("the audio track names no codec that can be decoded here")
        check_format(stream.codec_context.sample_rate, stream.codec_context.layout.nb_channels)
        stream.thread_type = "NONE"  # requests run side by side already
        return stream

    def _stated_duration(self) -> float | None:
        """Seconds by the file's own account, None where it gives none."""
        if self._container.duration:
            return self._container.duration / av.time_base
        if self._stream.duration and self._stream.time_base:
            return float(self._stream.duration * self._stream.time_base)
        return None

    def _decoded(self) -> Iterator[np.ndarray]:
        mono = MonoResampler()
        seconds = 0.0
        try:
            for frame in self._frames():
                # Before it is resampled: at a low rate a short frame lasts for hours.
                seconds += frame.samples / max(frame.sample_rate, 1)
                if seconds > self._max_seconds:
                    raise _too_long(self._max_seconds)
                yield from mono.push(frame)
            yield from mono.flush()
        except (av.FFmpegError, ValueError) as error:
            raise error if isinstance(error, AudioError) else _unreadable(error) from None

    def _frames(self) -> Iterator[Any]:
        """Decoded frames; damaged packets are passed over."""
        bad, good, last = 0, False, None
        packets = self._container.demux(self._stream)
        while bad < _MAX_BAD_PACKETS:
            try:
                packet = next(packets)
                frames = packet.decode()
            except StopIteration:
                break
            except (av.FFmpegError, EOFError) as error:
                bad, last = bad + 1, error
                continue
            good = good or bool(frames)
            yield from frames
        if last is not None and not good:
            raise _unreadable(last)


def decode(file: str | Path | IO[bytes], max_seconds: float = float("inf")) -> np.ndarray:
    """All samples of an audio file, float32[n] at 16 kHz.

    Raises:
        AudioError: as AudioReader.
    """
    with AudioReader(file, max_seconds) as reader:
        return np.concatenate([np.empty(0, np.float32), *reader.blocks()])


def log_mels(samples: np.ndarray, bins: int) -> "torch.Tensor":
    """openai-whisper's features of up to 30 s, padded with silence: float32[bins, 3000]."""
    from whisper.audio import log_mel_spectrogram  # loads torch, which reading files needs not

    return log_mel_spectrogram(samples, bins, padding=WINDOW_SAMPLES - len(samples))


def _unreadable(error: Exception) -> AudioError:
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return AudioError(
        "the file is empty, damaged, or in a format that is not supported "
        f"(expected flac, m4a, mp3, mp4, mpeg, mpga, ogg, opus, wav or webm): {reason}"
    )


def _too_long(max_seconds: float) -> AudioTooLong:
    return AudioTooLong(
        f"the audio is longer than the {max_seconds:g} seconds that this server accepts"
    )
