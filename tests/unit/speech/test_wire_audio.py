"""Audio of live protocols, compared with FFmpeg's decoders and with what was encoded."""

import io

import av
import numpy as np
import pytest

from speech.audio import SAMPLE_RATE
from speech.wire_audio import ALAW, G711_RATE, PCM, ULAW, WireDecoder, WireFormat

CODECS = {ULAW: "pcm_mulaw", ALAW: "pcm_alaw"}


def encoded(samples: np.ndarray, kind: str) -> bytes:
    """float32[n] as PCM, or as G.711 by FFmpeg's encoder."""
    pcm = (samples.clip(-1, 1) * 32767).astype("<i2")
    if kind == PCM:
        return pcm.tobytes()
    codec = av.CodecContext.create(CODECS[kind], "w")
    codec.sample_rate, codec.layout, codec.format = G711_RATE, "mono", "s16"
    frame = av.AudioFrame.from_ndarray(pcm[None], format="s16", layout="mono")
    frame.sample_rate = G711_RATE
    return b"".join(bytes(packet) for f in (frame, None) for packet in codec.encode(f))


@pytest.mark.parametrize("kind", [ULAW, ALAW])
def test_every_code_of_g711_is_ffmpegs(kind):
    codes = bytes(range(256))
    file = io.BytesIO()
    with av.open(file, "w", format="mulaw" if kind == ULAW else "alaw") as container:
        stream = container.add_stream(CODECS[kind], rate=G711_RATE)
        stream.layout = "mono"
        packet = av.Packet(codes)
        packet.stream = stream
        container.mux(packet)
    file.seek(0)
    options = {"sample_rate": str(G711_RATE)}
    name = "mulaw" if kind == ULAW else "alaw"
    with av.open(file, "r", format=name, options=options) as container:
        known = np.concatenate([f.to_ndarray()[0] for f in container.decode(audio=0)])
    decoder = WireDecoder(WireFormat(kind, SAMPLE_RATE))  # at 16 kHz nothing is resampled
    assert np.array_equal(decoder.push(codes), known.astype(np.float32) / 32768)


@pytest.mark.parametrize(
    ("kind", "rate"), [(PCM, 16_000), (PCM, 24_000), (PCM, 48_000), (ULAW, 8_000), (ALAW, 8_000)]
)
def test_a_tone_in_pieces_comes_out_as_it_went_in_and_at_once(kind, rate):
    def tone(rate):
        return (0.5 * np.sin(2 * np.pi * 440 * np.arange(2 * rate) / rate)).astype(np.float32)

    wire = WireFormat(kind, rate)
    data, decoder = encoded(tone(rate), kind), WireDecoder(wire)
    size = rate // 50 * wire.sample_bytes
    parts = [decoder.push(data[i : i + size]) for i in range(0, len(data), size)]
    sizes = np.cumsum([len(part) for part in parts])
    expected = np.arange(1, len(parts) + 1) * SAMPLE_RATE // 50
    assert (expected - sizes).max() <= SAMPLE_RATE * 0.005  # 5 ms behind at most
    made = np.concatenate(parts)
    error = made[2000:30_000] - tone(SAMPLE_RATE)[2000:30_000]
    assert np.sqrt(np.mean(error**2)) < 0.01  # of 0.35


def test_half_a_sample_is_refused_and_nothing_is_nothing():
    decoder = WireDecoder(WireFormat())
    with pytest.raises(ValueError, match="3 bytes"):
        decoder.push(bytes(3))
    assert len(decoder.push(b"")) == 0
