"""Threads that ask servers while a block runs."""

import threading
from abc import ABC, abstractmethod
from typing import Self


class LoadThreads(ABC):
    """Runs `run` in so many threads until the block ends.

    Attributes:
        ending: set when it ends; `run` returns then.
    """

    def __init__(self, count: int) -> None:
        self.ending = threading.Event()
        self._threads = [threading.Thread(target=self.run) for _ in range(count)]

    @abstractmethod
    def run(self) -> None:
        """What each thread does."""

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ending.set()
        for thread in self._threads:
            thread.join()
