"""Audio files that are wrong in ways that a decoder may not expect: seeded, one for each number."""

import struct
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from scripts.lib.audio_seeds import Seed, seeds

Rng = np.random.Generator
T = TypeVar("T")
_LARGEST = 1 << 19  # bytes of a mutant
_HOSTILE = (0, 1, 2, 7, 8, 9, 16, 40, 63, 64, 65, 100, 127, 128, 255, 256, 999, 1000, 8000, 32767,
            32768, 65534, 65535, 65536, 768_000, 768_001, 2**24, 2**31 - 1, 2**31,
            2**32 - 1)  # fmt: skip
_CHANNELS = (0, 1, 2, 6, 7, 8, 9, 12, 16, 24, 40, 63, 64, 65, 100, 255, 256, 1024, 65535)
_RATES = (0, 1, 2, 10, 100, 999, 1000, 4000, 8000, 16_000, 44_100, 192_000, 655_350, 768_000,
          768_001, 1_048_575, 2**31 - 1, 2**31, 2**32 - 1)  # fmt: skip
# WAVE_FORMAT_*: none, PCM, ADPCM, float, A-law, mu-law, IMA, Yamaha, GSM, G.723, G.726, MP2, MP3,
# AC-3, AAC, WMA, extensible, and two that there are not.
_TAGS = (0, 1, 2, 3, 6, 7, 0x11, 0x20, 0x31, 0x42, 0x45, 0x50, 0x55, 0x92, 0xFF, 0x161, 0xFFFE,
         0x1234, 0xFFFF)  # fmt: skip
# What precedes a header's fields, in any container.
_MARKS = (b"fmt ", b"data", b"ds64", b"fact", b"RIFF", b"fLaC", b"OpusHead", b"\x01vorbis", b"OggS",
          b"ftyp", b"moov", b"mvhd", b"tkhd", b"mdhd", b"stsd", b"mp4a", b"alac", b"esds", b"dOps",
          b"dfLa", b"stts", b"stsc", b"stsz", b"stco", b"elst", b"\x1aE\xdf\xa3", b"\x9f\x81",
          b"\xb5\x88", b"\xe1", b"\xae", b"Xing", b"Info", b"ID3", b"COMM", b"SSND", b"desc",
          b"pakt", b"kuki", b".snd", b"\xff\xfb", b"\xff\xf1", b"\xff\xf8", b"wvpk", b"TTA1",
          b"\x0b\x77", b"G@")  # fmt: skip


def mutant(seed: int, number: int) -> tuple[str, bytes]:
    """The class and the bytes of one file; the same for the same numbers."""
    rng = np.random.default_rng([seed, number])
    name = CLASSES[number % len(CLASSES)]
    return name, _MAKERS[name](rng)[:_LARGEST]


def _base(rng: Rng) -> Seed:
    return seeds()[rng.integers(len(seeds()))]


def _valid(rng: Rng) -> bytes:
    return _base(rng).data


def _wav_header(rng: Rng) -> bytes:
    """A WAV file of any fields; most fields fit together."""

    def either(fitting: int, bits: int) -> int:
        return fitting if rng.random() < 0.8 else _hostile(rng) & (1 << bits) - 1

    channels, rate = _choice(rng, _CHANNELS), _choice(rng, _RATES)
    width = _choice(rng, (1, 2, 3, 4, 8))
    align = channels * width
    tag = _choice(rng, (1, 1, 3, 0xFFFE) if rng.random() < 0.6 else _TAGS)
    fields = struct.pack(
        "<HHIIHH", tag, channels, rate, either(rate * align & 0xFFFFFFFF, 32),
        either(align & 0xFFFF, 16), either(8 * width, 16),
    )  # fmt: skip
    if tag == 0xFFFE:
        mask = int(rng.integers(1 << 18)) if rng.random() < 0.5 else 0
        kind = _choice(rng, (1, 3, 0x55, 0x92))
        guid = struct.pack("<H", kind) + bytes.fromhex("000000001000800000aa00389b71")
        fields += struct.pack("<HHI", 22, 8 * width, mask) + guid
    data = rng.bytes(min(max(align, 1) * int(rng.integers(1, 2000)), _LARGEST // 2))
    body = b"WAVEfmt " + struct.pack("<I", either(len(fields), 32)) + fields
    body += b"data" + struct.pack("<I", either(len(data), 32)) + data
    return b"RIFF" + struct.pack("<I", either(len(body), 32)) + body


def _flac_header(rng: Rng) -> bytes:
    """A FLAC file of constant frames of any size, with right checksums."""
    rate = _choice(rng, _RATES) & 0xFFFFF
    channels, samples = int(rng.integers(1, 9)), int(rng.integers(16, 65_536))
    bits = _choice(rng, (4, 8, 16, 24, 32))
    total = _choice(rng, (0, samples, 1, 2**35, 2**36 - 1))
    info = struct.pack(">HH", samples, samples) + bytes(6)
    info += (rate << 44 | channels - 1 << 41 | bits - 1 << 36 | total).to_bytes(8, "big")
    head = b"fLaC\x80\x00\x00\x22" + info + bytes(16)
    return head + b"".join(
        _flac_frame(number, samples, channels, bits) for number in range(int(rng.integers(1, 9)))
    )


def _flac_frame(number: int, samples: int, channels: int, bits: int) -> bytes:
    """A frame of the file's own rate and width (RFC 9639, section 9), every channel silent."""
    frame = bytes([0xFF, 0xF8, 0x70, channels - 1 << 4, number])
    frame += struct.pack(">H", samples - 1)
    frame += bytes([_crc(frame, 8, 0x07)])
    subframes = "".join("0" * 8 + "0" * bits for _ in range(channels))
    frame += int(subframes, 2).to_bytes(-(-len(subframes) // 8), "big")
    return frame + _crc(frame, 16, 0x8005).to_bytes(2, "big")


def _fields(rng: Rng) -> bytes:
    """Header fields behind a mark, overwritten with hostile values."""
    seed = _base(rng)
    data = bytearray(seed.data)
    places = [at for mark in _MARKS if (at := data.find(mark)) >= 0]
    for _ in range(int(rng.integers(1, 5))):
        at = _choice(rng, places) if places else 0
        width = _choice(rng, (1, 2, 4, 8))
        value = (_hostile(rng) & (1 << 8 * width) - 1).to_bytes(width, "big")
        value = value if rng.random() < 0.5 else value[::-1]
        first = at + int(rng.integers(0, 48))
        data[first : first + width] = value[: max(0, len(data) - first)]
    return _repaired(bytes(data)) if rng.random() < 0.8 else bytes(data)


def _bits(rng: Rng) -> bytes:
    data = bytearray(_base(rng).data)
    # Most of what decides is in the beginning.
    end = len(data) if rng.random() < 0.5 else min(len(data), 512)
    for _ in range(1 << int(rng.integers(0, 7))):
        data[rng.integers(end)] ^= 1 << int(rng.integers(8))
    return _repaired(bytes(data)) if rng.random() < 0.5 else bytes(data)


def _truncated(rng: Rng) -> bytes:
    data = _base(rng).data
    return data[: rng.integers(len(data) + 1)]


def _spliced(rng: Rng) -> bytes:
    """The head of one file and the tail of another, of its kind where there is one."""
    one = _base(rng)
    alike = [seed for seed in seeds() if seed.container == one.container]
    other = _choice(rng, alike) if rng.random() < 0.7 else _base(rng)
    spliced = one.data[: rng.integers(len(one.data))] + other.data[rng.integers(len(other.data)) :]
    return _repaired(spliced) if rng.random() < 0.5 else spliced


def _chunks(rng: Rng) -> bytes:
    """Chunks, boxes, pages or blocks in another order, doubled or left out."""
    parts = _parts(_base(rng).data, rng)
    for _ in range(int(rng.integers(1, 4))):
        i, j = (int(rng.integers(len(parts))) for _ in range(2))
        match int(rng.integers(4)):
            case 0:
                parts[i], parts[j] = parts[j], parts[i]
            case 1:
                parts.insert(j, parts[i])
            case 2 if len(parts) > 1:
                del parts[i]
            case _:
                parts[i] = parts[i] * int(rng.integers(2, 6))
    return b"".join(parts)


def _parts(data: bytes, rng: Rng) -> list[bytes]:
    if data[:4] == b"OggS":
        return [b"OggS" + page for page in data.split(b"OggS")[1:]]
    if data[:4] == b"RIFF":
        return _sized_parts(data, 12, "<I", 4, 8)
    if data[4:8] == b"ftyp":
        return _sized_parts(data, 0, ">I", 0, 0)
    size = 1 << int(rng.integers(5, 12))
    return [data[at : at + size] for at in range(0, len(data), size)]


def _sized_parts(data: bytes, at: int, size: str, offset: int, header: int) -> list[bytes]:
    """The head, and the parts that say how long they are (without `header` bytes of it)."""
    parts = [data[:at]] if at else []
    while at < len(data):
        field = data[at + offset : at + offset + 4]
        length = struct.unpack(size, field)[0] + header if len(field) == 4 else 0
        length = length if length >= 8 else len(data)
        parts.append(data[at : at + length])
        at += length
    return parts


def _grown(rng: Rng) -> bytes:
    """A piece of the file again and again, or zeros, at any place."""
    data = _base(rng).data
    at = int(rng.integers(len(data)))
    piece = data[at : at + int(rng.integers(1, 4096))] if rng.random() < 0.7 else bytes(64)
    return data[:at] + piece * int(rng.integers(2, 200)) + data[at:]


def _garbage(rng: Rng) -> bytes:
    """Random bytes behind the beginning of a file."""
    head = _base(rng).data[: int(rng.integers(4, 64))]
    return head + rng.bytes(int(rng.integers(1, 20_000)))


def _repaired(data: bytes) -> bytes:
    """With right checksums in Ogg pages (RFC 3533, section 6), which are not looked into else."""
    if data[:4] != b"OggS":
        return data
    pages = []
    for page in data.split(b"OggS")[1:]:
        page = b"OggS" + page
        if len(page) >= 27:
            page = page[:22] + bytes(4) + page[26:]
            page = page[:22] + _crc(page, 32, 0x04C11DB7).to_bytes(4, "little") + page[26:]
        pages.append(page)
    return b"".join(pages)


def _crc(data: bytes, bits: int, polynomial: int) -> int:
    """A checksum of the given width, most significant bit first, from 0."""
    table = _table(bits, polynomial)
    value, mask = 0, (1 << bits) - 1
    for byte in data:
        value = (value << 8 & mask) ^ table[value >> bits - 8 ^ byte]
    return value


_tables: dict[tuple[int, int], list[int]] = {}


def _table(bits: int, polynomial: int) -> list[int]:
    if (bits, polynomial) not in _tables:
        table = []
        for byte in range(256):
            value = byte << bits - 8
            for _ in range(8):
                value = value << 1 ^ (polynomial if value >> bits - 1 & 1 else 0)
                value &= (1 << bits) - 1
            table.append(value)
        _tables[bits, polynomial] = table
    return _tables[bits, polynomial]


def _hostile(rng: Rng) -> int:
    return _choice(rng, _HOSTILE) if rng.random() < 0.8 else int(rng.integers(1 << 32))


def _choice(rng: Rng, items: Sequence[T]) -> T:
    return items[int(rng.integers(len(items)))]


_MAKERS: dict[str, Callable[[Rng], bytes]] = {
    "valid": _valid,
    "wav_header": _wav_header,
    "flac_header": _flac_header,
    "fields": _fields,
    "bits": _bits,
    "truncated": _truncated,
    "spliced": _spliced,
    "chunks": _chunks,
    "grown": _grown,
    "garbage": _garbage,
}
CLASSES = tuple(_MAKERS)
"""Kinds of mutants; number n is of kind n modulo their count."""
