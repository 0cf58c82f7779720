"""What it costs to decode audio in another process (speech/decoders.py) rather than in one's own.

Files of 10 s, 16 kHz, mono. Both ways take turns, and the least times of each are compared: other
work on the machine only adds to them.

    python -m scripts.bench_audio_decoding [--seconds 10] [--rounds 200] [--quick]
"""

import sys
import time
from collections.abc import Callable
from io import BytesIO

import numpy as np

from scripts.lib.audio_seeds import written
from scripts.lib.figures import parser, report
from speech.audio import SAMPLE_RATE, decode
from speech.decoders import DecoderPool

FILES = (("wav", "pcm_s16le"), ("flac", "flac"), ("mp3", "libmp3lame"), ("ipod", "aac"))
_QUICK_ROUNDS = 20


def main() -> int:
    made = parser(__doc__, model=False)
    made.add_argument("--seconds", type=float, default=10.0, help="of audio [%(default)g]")
    made.add_argument("--rounds", type=int, default=200, help="[%(default)s]")
    options = made.parse_args()
    rounds = min(options.rounds, _QUICK_ROUNDS) if options.quick else options.rounds
    pool = DecoderPool(1)
    figures: dict[str, float] = {}
    try:
        start = time.perf_counter()
        in_process(pool, written("wav", "pcm_s16le", SAMPLE_RATE, "mono"))
        figures["first_ms"] = 1e3 * (time.perf_counter() - start)
        for container, codec in FILES:
            data = written(container, codec, SAMPLE_RATE, "mono", options.seconds)
            here, there = least_times(
                lambda data=data: decode(BytesIO(data)),  # type: ignore[misc]
                lambda data=data: in_process(pool, data),  # type: ignore[misc]
                rounds,
            )
            figures[f"{codec}_here_ms"] = here
            figures[f"{codec}_there_ms"] = there
            figures[f"{codec}_added_ms"] = there - here
    finally:
        pool.close()
    report(figures, options.json)
    return 0


def in_process(pool: DecoderPool, data: bytes) -> np.ndarray:
    """The samples of a file, decoded by the pool."""
    with pool.open(BytesIO(data)) as audio:
        return np.concatenate([np.empty(0, np.float32), *audio.blocks()])


def least_times(
    here: Callable[[], np.ndarray], there: Callable[[], np.ndarray], rounds: int
) -> tuple[float, float]:
    """Milliseconds of both, which must give the same."""
    if not np.array_equal(here(), there()):
        raise RuntimeError("the samples differ")
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for work, taken in zip((here, there), times, strict=True):
            start = time.perf_counter()
            work()
            taken.append(1e3 * (time.perf_counter() - start))
    return min(times[0]), min(times[1])


if __name__ == "__main__":
    sys.exit(main())
