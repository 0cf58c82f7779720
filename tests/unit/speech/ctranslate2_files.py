"""Writing small CTranslate2 files for tests; the layout is told in speech/ctranslate2.py."""

import struct

import numpy as np

CODES = {"float32": 0, "int8": 1, "int16": 2, "int32": 3, "float16": 4}


def string(text: str) -> bytes:
    raw = text.encode() + b"\0"
    return struct.pack("<H", len(raw)) + raw


def variable(name: str, array: np.ndarray) -> bytes:
    head = struct.pack(f"<B{array.ndim}I", array.ndim, *array.shape)
    return (
        string(name)
        + head
        + struct.pack("<BI", CODES[array.dtype.name], array.nbytes)
        + (array.tobytes())
    )


def model_file(
    variables: dict[str, np.ndarray],
    aliases: dict[str, str] | None = None,
    spec: str = "WhisperSpec",
    version: int = 6,
) -> bytes:
    parts = [struct.pack("<I", version), string(spec), struct.pack("<II", 3, len(variables))]
    parts += [variable(name, array) for name, array in variables.items()]
    parts.append(struct.pack("<I", len(aliases or {})))
    parts += [string(alias) + string(name) for alias, name in (aliases or {}).items()]
    return b"".join(parts)
