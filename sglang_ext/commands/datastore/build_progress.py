"""Progress of long work on standard error: a bar on a terminal, a line now and then elsewhere."""

import sys
import threading
import time
from typing import TextIO

from tqdm import tqdm

LINE_EVERY_S = 10.0
_BAR = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}B [{elapsed}<{remaining}{postfix}]"


class BuildProgress:
    """Bytes read of all bytes, tokens made of them, their rate, and the time left."""

    def __init__(self, total: int, done: int = 0, file: TextIO | None = None) -> None:
        """total: bytes there are to read. done: bytes that an earlier run has read."""
        self.file = file or sys.stderr
        self._total, self._done, self._first = max(total, 1), done, done
        self._tokens = 0
        self._started = self._shown = time.monotonic()
        self._bar: tqdm | None = None
        if self.file.isatty():
            # smoothing=0: stops for sorting belong to the rate.
            self._bar = tqdm(
                total=self._total, initial=done, unit_scale=True, bar_format=_BAR, smoothing=0,
                file=self.file, dynamic_ncols=True, leave=False,
            )  # fmt: skip

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def update(self, done: int, tokens: int) -> None:
        """done: bytes read, those of earlier runs included. tokens: made in this run."""
        done, self._tokens = min(done, self._total), tokens
        if self._bar is not None:
            self._bar.set_postfix_str(self._rate(), refresh=False)
            self._bar.update(done - self._done)
        elif time.monotonic() - self._shown >= LINE_EVERY_S:
            self._shown = time.monotonic()
            self.say(self._line(done))
        self._done = done

    def busy(self, doing: str) -> None:
        """Says what it is doing while nothing is read."""
        if self._bar is not None:
            self._bar.set_postfix_str(f"{self._rate()}, {doing}")

    def say(self, line: str) -> None:
        """Prints a line, above the bar."""
        if self._bar is not None:
            self._bar.write(line, file=self.file)
        else:
            print(line, file=self.file, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _rate(self) -> str:
        return f"{short(self._tokens)} tokens, {short(self._tokens / self.seconds)} tokens/s"

    def _line(self, done: int) -> str:
        left = (self._total - done) * self.seconds / max(1, done - self._first)
        return (
            f"{100 * done // self._total}%: {short(done)}B of {short(self._total)}B read, "
            f"{self._rate()}, about {left:.0f} s left"
        )


class Waiting:
    """Says every LINE_EVERY_S seconds how long something has been going on, while in the block."""

    def __init__(self, doing: str, file: TextIO | None = None) -> None:
        self._doing, self.file = doing, file or sys.stderr
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Waiting":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        started = time.monotonic()
        while not self._over.wait(LINE_EVERY_S):
            seconds = time.monotonic() - started
            print(f"{self._doing}: {seconds:.0f} s so far", file=self.file, flush=True)


def short(number: float) -> str:
    """A number in three or four digits with k, M, G or T: 12345678 -> "12.3 M"."""
    for unit in ("", " k", " M", " G"):
        if number < 1000:
            return f"{number:.0f}{unit}" if not unit or number >= 100 else f"{number:.1f}{unit}"
        number /= 1000
    return f"{number:.1f} T"
