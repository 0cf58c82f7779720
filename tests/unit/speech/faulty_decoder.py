"""A decoder process whose codec has faults: the first bytes of a file say which one it meets."""

import ctypes
import os
import time
from pathlib import Path
from typing import Any

from speech import decoder_process
from speech.audio import AudioReader
from speech.audio_errors import AudioError


class FaultyReader(AudioReader):
    def __init__(self, file: Any, max_seconds: float = float("inf")):
        kind, _, argument = file.read(1000).partition(b" ")
        file.seek(0)
        match kind:
            case b"crash":
                ctypes.string_at(0)
            case b"abort":
                os.abort()
            case b"loop":
                Path(os.fsdecode(argument)).write_text(str(os.getpid()))
                while True:
                    pass
            case b"sleep":
                time.sleep(3600)
            case b"memory":
                bytearray(1 << 30)
            case b"pid":
                raise AudioError(f"pid {os.getpid()}")
            case b"fault":
                raise KeyError("a fault of ours")
        super().__init__(file, max_seconds)


if __name__ == "__main__":
    decoder_process.AudioReader = FaultyReader  # type: ignore[misc]
    decoder_process.main()
