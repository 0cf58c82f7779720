"""Reading CTranslate2's model files (binary version 6, and 5, which is the same but for revision).

Layout, little-endian (OpenNMT/CTranslate2, python/ctranslate2/specs/model_spec.py, `_serialize`):
u32 version; string spec; u32 revision; u32 count; per variable: string name, u8 rank, u32 dims,
u8 dtype, u32 bytes, data; u32 count of aliases; per alias: string alias, string variable.
A string is a u16 length, then that many bytes, the last of them NUL.
"""

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

_VERSIONS = (5, 6)
# CTranslate2's DataType enumeration; bfloat16 (5) is left out, for numpy has no such type.
_DTYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}


@dataclass(frozen=True)
class CTranslate2Model:
    """A model file's content.

    Attributes:
        spec: name of the specification, such as "WhisperSpec".
        revision: of that specification.
        variables: arrays by name, such as "encoder/conv1/weight"; aliases share theirs.
    """

    spec: str
    revision: int
    variables: dict[str, np.ndarray]


def read_model(path: Path) -> CTranslate2Model:
    """Read a model.bin whole.

    Raises:
        ValueError: it is not such a file, it ends early, or something follows its end.
    """
    with path.open("rb") as file:
        reader = _Reader(file, path)
        version = reader.number("I")
        if version not in _VERSIONS:
            raise reader.error(f"binary version {version}, expected 5 or 6")
        spec, revision = reader.string(), reader.number("I")
        variables: dict[str, np.ndarray] = {}
        for _ in range(reader.number("I")):
            name = reader.string()
            variables[name] = reader.array(name)
        for _ in range(reader.number("I")):
            alias, name = reader.string(), reader.string()
            if name not in variables:
                raise reader.error(f"alias {alias!r} of {name!r}, which is not there")
            variables[alias] = variables[name]
        if reader.left():
            raise reader.error(f"{reader.left()} bytes after the last alias")
    return CTranslate2Model(spec, revision, variables)


class _Reader:
    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file = file
        self._path = path
        self._size = os.fstat(file.fileno()).st_size

    def error(self, what: str) -> ValueError:
        return ValueError(f"{self._path} is not a CTranslate2 model, or is damaged: {what}")

    def left(self) -> int:
        return self._size - self._file.tell()

    def take(self, count: int) -> bytes:
        # Compared before reading: a damaged count must not ask for gigabytes.
        if count > self.left():
            raise self.error(
                f"ends at byte {self._size}, where {count} bytes from {self._file.tell()} are due"
            )
        return self._file.read(count)

    def number(self, code: str) -> int:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def string(self) -> str:
        raw = self.take(self.number("H"))
        if not raw.endswith(b"\0"):
            raise self.error(f"a string without its final NUL before byte {self._file.tell()}")
        try:
            return raw[:-1].decode("utf-8")
        except UnicodeDecodeError:
            raise self.error(f"a string that is not UTF-8 at {self._file.tell()}") from None

    def array(self, name: str) -> np.ndarray:
        shape = tuple(self.number("I") for _ in range(self.number("B")))
        code, size = self.number("B"), self.number("I")
        if code not in _DTYPES:
            raise self.error(f"{name} has data type {code}, expected one of {sorted(_DTYPES)}")
        dtype = np.dtype(_DTYPES[code])
        if size != math.prod(shape) * dtype.itemsize:
            raise self.error(f"{name} of shape {shape} and {dtype} cannot take {size} bytes")
        return np.frombuffer(self.take(size), dtype.newbyteorder("<")).reshape(shape)
