"""Audio that is wrong in every way, against the decoding that a server does (speech/decoders.py).

Each file has a number, and with the seed the number makes the file: --offset goes on where a run
was ended, and `--offset N --files 1` does one again. A file is decoded, or it is refused with an
AudioError, which a client gets as a 400; a decoder may die of one, and only of that one. All else
is counted: the process that stands for the server ends (crashes), another exception or an answer
from 500 (5xx), samples that are none, or a valid file that no longer gives what it gave before.

With --live N, or --url, N files also go to a Whisper server's routes, class by class, and a valid
transcription is compared after each class.

    python -m scripts.fuzz_audio [--files 10000] [--seed 0] [--offset 0] [--keep DIR] [--quick]
        [--live N] [--url URL] [--model M]
"""

import argparse
import contextlib
import multiprocessing
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from io import BytesIO
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import psutil
from tqdm import tqdm

from scripts.lib.audio_mutations import CLASSES, mutant
from scripts.lib.audio_seeds import missing, seeds
from scripts.lib.figures import parser, report
from scripts.lib.fuzz_audio_live import LiveRun
from scripts.lib.server import Server
from sglang_ext.servers.processes import end_with_parent
from speech.audio import BLOCK_SAMPLES, SAMPLE_RATE
from speech.audio_errors import AudioError, DecoderDied
from speech.decoders import DecoderPool

QUICK_FILES, QUICK_LIVE = 1000, 50
MAX_SECONDS = 4 * 3600.0
_SAMPLING_S, _SAMPLING_LIVE_S = 0.01, 0.1
_MIB = 1 << 20


def main() -> int:
    made = parser(__doc__, model=False)
    made.add_argument("--files", type=int, default=10_000, help="[%(default)s]")
    made.add_argument("--seed", type=int, default=0, help="of all files [%(default)s]")
    made.add_argument("--offset", type=int, default=0, help="number of the first [%(default)s]")
    made.add_argument("--keep", type=Path, metavar="DIR", help="keep files that end a process here")
    made.add_argument("--live", type=int, default=0, help="files for a server that is started here")
    made.add_argument("--url", help="a running Whisper server for --live")
    made.add_argument("--model", default="whisper-base", help="of that server [%(default)s]")
    options = made.parse_args()
    if options.quick:
        options.files = min(options.files, QUICK_FILES)
        options.live = min(options.live, QUICK_LIVE)
    if options.files < 1 or options.live < 0:
        made.error("--files must be at least 1, --live at least 0")
    print(f"{len(seeds())} valid files; not writable here: {', '.join(missing()) or 'none'}")
    counts, peak = decode_all(options.seed, options.offset, options.files, options.keep)
    figures = figures_of(counts, peak)
    if options.live:
        live = live_run(options)
        figures |= live.figures()
        figures["5xx"] += live.errors
        figures["peak_mib"] = max(peak, live.peak_mib)
        figures["crashes"] += live.crashes
        figures["wrong_outputs"] += live.wrong
    report(figures, options.json)
    return 1 if figures["crashes"] or figures["5xx"] or figures["wrong_outputs"] else 0


def figures_of(counts: "Counter[str]", peak_mib: float) -> dict[str, float]:
    """The figures of what was decoded without a server."""
    return {
        "files": counts["files"],
        "decoded": counts["decoded"],
        "refused": counts["refused"],
        "decoder_deaths": counts["died"],
        "crashes": counts["crashed"],
        "5xx": counts["error"],
        "wrong_outputs": counts["wrong"],
        "peak_mib": peak_mib,
    }


def decode_all(
    seed: int, offset: int, files: int, keep: Path | None = None
) -> tuple["Counter[str]", float]:
    """Decode files in a process that stands for the server; if it ends, another goes on.

    Returns:
        How many ended in which way, and MiB at the most above those of an idle server.
    """
    counts: Counter[str] = Counter()
    peak, number, end = 0.0, offset, offset + files
    with tqdm(total=files, unit="file", disable=None) as bar:
        while number < end:
            for ending, grown in _from_process(seed, number, end):
                peak = max(peak, grown)
                counts["files"] += 1
                counts[ending] += 1
                if ending not in ("decoded", "refused"):
                    kind, data = mutant(seed, number)
                    bar.write(f"{ending}: --seed {seed} --offset {number} ({kind})")
                    if keep is not None:
                        keep.mkdir(parents=True, exist_ok=True)
                        (keep / f"{seed}-{number}").write_bytes(data)
                number += 1
                bar.update()
    return counts, peak


def _from_process(seed: int, start: int, end: int) -> Iterator[tuple[str, float]]:
    """How each file ended, and MiB above idle, up to the end of them or of the process."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=decode_files, args=(seed, start, end, theirs), daemon=True)
    process.start()
    theirs.close()
    number = start
    try:
        while number < end:
            try:
                told = ours.recv()
            except EOFError:
                yield "crashed", 0.0
                return
            yield told
            number += 1
    finally:
        ours.close()
        process.join(10)
        process.kill()


def decode_files(seed: int, start: int, end: int, pipe: Connection) -> None:
    """Decode files as a server does, and tell how each ended."""
    end_with_parent()
    pool = DecoderPool()
    known = _known(pool)
    with _Memory(_held_here) as memory:
        for number in range(start, end):
            ending = outcome(pool, mutant(seed, number)[1])
            last = (number + 1) % 100 == 0 or number + 1 == end
            if ending in ("decoded", "refused") and last and not _same(pool, known):
                ending = "wrong"
            pipe.send((ending, memory.most()))
    pool.close()


def outcome(pool: DecoderPool, data: bytes) -> str:
    """decoded, refused (a 400), died (a 400 too), wrong, or error (a 500)."""
    seconds = 0.0
    try:
        with pool.open(BytesIO(data), MAX_SECONDS) as audio:
            for block in audio.blocks():
                seconds += len(block) / SAMPLE_RATE
                if not np.isfinite(block).all() or np.abs(block).max(initial=0.0) > 1.0:
                    return "wrong"
                if len(block) > BLOCK_SAMPLES or seconds > MAX_SECONDS + 1.0:
                    return "wrong"
    except DecoderDied as error:
        print(error, file=sys.stderr)
        return "died"
    except AudioError as error:
        return "refused" if str(error) else "error"
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return "error"
    return "decoded"


def _known(pool: DecoderPool) -> dict[str, np.ndarray]:
    """Samples of a few valid files."""
    chosen = {seed.container: seed for seed in reversed(seeds())}
    return {seed.name: _samples(pool, seed.data) for seed in chosen.values()}


def _same(pool: DecoderPool, known: dict[str, np.ndarray]) -> bool:
    data = {seed.name: seed.data for seed in seeds()}
    return all(np.array_equal(_samples(pool, data[name]), was) for name, was in known.items())


def _samples(pool: DecoderPool, data: bytes) -> np.ndarray:
    with pool.open(BytesIO(data)) as audio:
        return np.concatenate([np.empty(0, np.float32), *audio.blocks()])


def _held_here() -> int:
    """Resident bytes of this process and of those that it started."""
    process = psutil.Process()
    return sum(each.memory_info().rss for each in (process, *process.children()))


class _Memory:
    """Samples how many bytes are held, above those that were held at first.

    Args:
        held: bytes now; psutil.Error: a process has just ended.
        every: seconds from one sample to the next.
    """

    def __init__(self, held: Callable[[], int], every: float = _SAMPLING_S) -> None:
        self._held, self._every = held, every
        self._idle = held()
        self._most = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def most(self) -> float:
        """MiB above idle, at the most so far."""
        return self._most / _MIB

    def _watch(self) -> None:
        while not self._ended.wait(self._every):
            with contextlib.suppress(psutil.Error):
                self._most = max(self._most, self._held() - self._idle)

    def __enter__(self) -> "_Memory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def live_run(options: argparse.Namespace) -> LiveRun:
    """Send --live files to a server's routes."""
    with contextlib.ExitStack() as stack:
        server = None
        if not options.url:
            server = stack.enter_context(Server(options.model, name="fuzz-audio"))
        run = LiveRun(server.base_url if server else options.url)
        memory = None
        if server:  # which has answered by now, so that its decoders are there
            memory = stack.enter_context(_Memory(server.memory_bytes, _SAMPLING_LIVE_S))
        start = time.perf_counter()
        each = -(-options.live // len(CLASSES))
        for first, kind in enumerate(CLASSES):
            numbers = range(options.offset + first, sys.maxsize, len(CLASSES))
            run.send_class(kind, (mutant(options.seed, n)[1] for n in numbers[:each]))
            run.peak_mib = memory.most() if memory else 0.0
        print(f"{run.files} files over HTTP in {time.perf_counter() - start:.0f} s")
        return run


if __name__ == "__main__":
    sys.exit(main())
