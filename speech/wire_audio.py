"""Audio as live protocols send it (PCM of 16 bits, G.711) -> 16 kHz samples, piece by piece."""

from dataclasses import dataclass
from functools import cache

import av
import numpy as np

from speech.mono import SAMPLE_RATE, MonoResampler

PCM, ULAW, ALAW = "audio/pcm", "audio/pcmu", "audio/pcma"
"""OpenAI's names: 16 bits little-endian; G.711 mu-law and A-law."""

PCM_RATES = (16_000, 24_000, 48_000)
G711_RATE = 8_000


@dataclass(frozen=True)
class WireFormat:
    """How audio is written, mono.

    Attributes:
        kind: PCM, ULAW or ALAW.
        rate: samples per second.
    """

    kind: str = PCM
    rate: int = 24_000

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample."""
        return 2 if self.kind == PCM else 1


DEFAULT_FORMAT = WireFormat()
"""OpenAI's."""


class WireDecoder:
    """Decodes and resamples one stream of audio; what comes out lags by less than a millisecond."""

    def __init__(self, wire: WireFormat):
        self._wire = wire
        # At once: whoever speaks waits for it.
        self._mono = MonoResampler(least_samples=0)

    def push(self, data: bytes) -> np.ndarray:
        """The samples that come out, float32[n] in -1..1 at 16 kHz.

        Args:
            data: whole samples.

        Raises:
            ValueError: it ends within a sample.
        """
        if len(data) % self._wire.sample_bytes:
            raise ValueError(f"{len(data)} bytes are no whole number of 16-bit samples")
        samples = self._decoded(data)
        if self._wire.rate == SAMPLE_RATE or not len(samples):
            return samples
        frame = av.AudioFrame.from_ndarray(samples[None], format="fltp", layout="mono")
        frame.sample_rate = self._wire.rate
        parts = list(self._mono.push(frame))
        return np.concatenate(parts) if parts else np.empty(0, np.float32)

    def _decoded(self, data: bytes) -> np.ndarray:
        if self._wire.kind == PCM:
            return np.frombuffer(data, "<i2").astype(np.float32) / 32768
        table = _ulaw() if self._wire.kind == ULAW else _alaw()
        return table[np.frombuffer(data, np.uint8)]


@cache
def _ulaw() -> np.ndarray:
    """float32[256]: the samples of mu-law's codes (ITU-T G.711, table 2a/2b)."""
    code = ~np.arange(256, dtype=np.uint8)
    segment, step = (code >> 4 & 7).astype(int), (code & 15).astype(int)
    magnitude = (((step << 3) + 0x84) << segment) - 0x84
    return (np.where(code & 0x80, -magnitude, magnitude) / 32768).astype(np.float32)


@cache
def _alaw() -> np.ndarray:
    """float32[256]: the samples of A-law's codes (ITU-T G.711, table 1a/1b)."""
    code = np.arange(256, dtype=np.uint8) ^ 0x55
    segment, step = (code >> 4 & 7).astype(int), (code & 15).astype(int)
    high = ((step << 4) + 0x108) << np.maximum(segment - 1, 0)
    magnitude = np.where(segment == 0, (step << 4) + 8, high)
    return (np.where(code & 0x80, magnitude, -magnitude) / 32768).astype(np.float32)
