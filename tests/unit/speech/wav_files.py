"""WAV files with any header."""

import struct

import numpy as np

_PCM_GUID = bytes.fromhex("0100000000001000800000aa00389b71")


def wav_file(samples: np.ndarray, rate: int, mask: int | None = None) -> bytes:
    """s16 samples in a WAV file.

    Args:
        samples: int16[n, channels].
        mask: which speakers the channels are for (WAVEFORMATEXTENSIBLE); None: not said.
    """
    channels = samples.shape[1]
    # Fields of 16 and 32 bits wrap round, as they do in files with more than fits.
    align, speed = 2 * channels & 0xFFFF, 2 * channels * rate & 0xFFFFFFFF
    kind = 1 if mask is None else 0xFFFE
    header = struct.pack("<HHIIHH", kind, channels, rate, speed, align, 16)
    if mask is not None:
        header += struct.pack("<HHI", 22, 16, mask) + _PCM_GUID
    data = samples.astype("<i2").tobytes()
    body = b"WAVEfmt " + struct.pack("<I", len(header)) + header
    body += b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body
