"""Drafts for what requests might go on with, made in another thread until they are asked for.

The requests do not change: what they might go on with is written behind what they have seen, and
never becomes part of it. Compiled, in one call without the GIL, so that whoever asks does not wait
for more than one draft.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence

import numpy as np
from numba import njit, types

from .bigrams import Bigrams
from .config import DatastoreError, RetrievalConfig
from .input_trie import InputTrie
from .kernel import STOP_SET, STOP_WORDS, STOP_WORKING, drafts_placed
from .pointers import atomic_load
from .retrieval import Call, Continuations
from .segment import Snapshot

# Whoever waits looks so often before each of so many times that it lets others run, among them the
# thread that it waits for, which may need this core. Then it sleeps in between.
_LOOKS, _YIELDS = 200, 200
_NAP_S = 1e-4
_sched_yield = types.ExternalFunction("sched_yield", types.intc())


class Stop:
    """Ends another thread's work on inputs, and tells when it has let go of them."""

    def __init__(self) -> None:
        self._words = np.zeros(STOP_WORDS, np.int64)
        self.address = int(self._words.ctypes.data)

    def set(self) -> None:
        """Have nothing more be begun."""
        self._words[STOP_SET] = 1

    def is_set(self) -> bool:
        """Whether it was set."""
        return bool(self._words[STOP_SET])

    @contextlib.contextmanager
    def working(self) -> Iterator[bool]:
        """Hold the inputs; whether that is still wanted."""
        self._words[STOP_WORKING] += 1
        try:
            yield not self.is_set()
        finally:
            self._words[STOP_WORKING] -= 1

    def wait(self, seconds: float) -> bool:
        """Whether, once it was set, nobody works on the inputs any more, or within so long."""
        if _wait(self.address + 8 * STOP_WORKING, _YIELDS):
            return True
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(_NAP_S)
            if _wait(self.address + 8 * STOP_WORKING, 1):
                return True
        return False


class SupposedDrafts:
    """A draft for each continuation, rooted at its last token, made from the first one on.

    What is made for one is what `retrieve` gives when the request has seen its tokens.

    Args:
        tries: what the requests have seen. Nobody may extend it while drafts are made.
        snapshots: what each may read.
        continuations: of these requests.
        max_nodes: most nodes of a draft.
        config, bigrams: as `retrieve` takes them.

    Attributes:
        drafts: of all continuations; those from len(self) on are not made yet.

    Raises:
        DatastoreError: continuations of other requests, of ids below 0, or longer than an input's
            `room`.
    """

    def __init__(
        self,
        tries: Sequence[InputTrie],
        snapshots: Sequence[Snapshot | None],
        continuations: Continuations,
        max_nodes: int,
        config: RetrievalConfig | None = None,
        bigrams: Bigrams | None = None,
    ) -> None:
        _check(tries, continuations)
        self._call = Call(tries, snapshots, max_nodes, config, bigrams, continuations=continuations)
        self.drafts = self._call.drafts

    def __len__(self) -> int:
        """How many are made; at first none."""
        return drafts_placed(self._call.state)

    def make(self, stop: Stop | None = None) -> None:
        """Make them, one after the other, until it is stopped."""
        self._call.run(threads=1, stop_at=0 if stop is None else stop.address)


def _check(tries: Sequence[InputTrie], continuations: Continuations) -> None:
    """Raise DatastoreError if these are no continuations of the requests."""
    whose, lengths = continuations.whose, continuations.lengths
    if not len(whose):
        return
    if not 0 <= whose.min() <= whose.max() < len(tries):
        raise DatastoreError(f"continuations must be of the {len(tries)} requests given")
    if continuations.tokens.min(initial=0) < 0:
        raise DatastoreError("a continuation's token ids must be at least 0")
    rooms = np.array([trie.room for trie in tries], np.int64)
    if (lengths > rooms[whose]).any():
        raise DatastoreError("a continuation has more tokens than its input has room for")


@njit(cache=True, nogil=True)
def _wait(word_at, yields):
    """Whether the int64 at an address is 0, or is before this thread has yielded so often."""
    for _ in range(yields):
        for _ in range(_LOOKS):
            if atomic_load(word_at) == 0:
                return True
        _sched_yield()
    return False
