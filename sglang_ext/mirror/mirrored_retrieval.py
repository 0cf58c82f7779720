"""Drafts retrieved for a step's likely outcomes while the second half of its pass runs.

A thread of its own retrieves, without the GIL, for one likely outcome after another, the most
probable ones of the batch first, until the drafts are asked for. The requests themselves do not
change: what they might go on with is supposed (`datastores.supposed`). Whatever fails or comes too
late is retrieved when it is asked for, as without this.
"""

import logging
import queue
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from datastores import (
    Continuations,
    Drafts,
    InputTrie,
    Snapshot,
    Stop,
    SupposedDrafts,
)
from sglang_ext.mirror.exit_view import ExitView
from sglang_ext.mirror.outcomes import UNKNOWN, Foreseen, foreseen_of, likely_outcomes
from sglang_ext.tree import TokenTree

logger = logging.getLogger(__name__)

# Outcomes less probable than this are hardly ever right.
_LEAST = 0.005
# Waiting longer than this for one draft means that the thread is gone.
_PATIENCE_S = 5.0
_MOST_FAILURES = 3

# Of a step's requests by their rows of its view: what is searched for each.
Look = Callable[[], Mapping[int, "Mirrored"]]
# Drafts of at most so many nodes for what requests might go on with, each with what it may read.
Suppose = Callable[
    [Sequence[InputTrie], Sequence[Snapshot | None], Continuations, int], SupposedDrafts
]


@dataclass(frozen=True)
class Mirrored:
    """A request in the step whose outcome is foreseen.

    Attributes:
        trie: what it has seen, its whole output included.
        length: of its output.
        reads: says what it may read of the datastore.
        snapshot: that; None: nothing.
        drafted: what was proposed for the step; None: nothing.
    """

    trie: InputTrie
    length: int
    reads: Hashable
    snapshot: Snapshot | None
    drafted: TokenTree | None = None


@dataclass(frozen=True)
class _Made:
    """Drafts for what the outcomes of some requests commit; those asked for as they are made.

    Attributes:
        requests: whose outcomes were foreseen, in the order of `foreseen.places`.
        rows: their numbers, by the ids of their tries.
        read: what each kind of request has read.
    """

    requests: Sequence[Mirrored]
    rows: Mapping[int, int]
    read: Mapping[Hashable, Snapshot | None]
    foreseen: Foreseen
    drafts: SupposedDrafts


@dataclass
class _Job:
    """A step's work for the thread.

    Attributes:
        look: gives what is searched for, by rows of the view.
        made: None as long as nothing is.
        stop: is set when nobody waits for more.
        done: the thread is through with it.
    """

    view: ExitView
    look: Look
    max_nodes: int
    made: _Made | None = None
    stop: Stop = field(default_factory=Stop)
    done: bool = False


class Prepared:
    """What was retrieved for a step's outcomes by the time that it was asked for.

    Attributes:
        count: of the trees.
    """

    def __init__(self, made: _Made | None) -> None:
        self._made = made
        self.count = 0 if made is None else len(made.drafts)

    def trees(
        self,
        tries: Sequence[InputTrie],
        outputs: Sequence[Sequence[int]],
        current: Callable[[Any], Snapshot | None],
    ) -> list[TokenTree | None]:
        """The trees for what requests' steps have committed; None where there is none.

        Args:
            tries: what the requests had seen.
            outputs: of them, whole.
            current: what may be read now, by Mirrored.reads; where that lacks any of what was read,
                a deletion may be the reason, and there is no tree.
        """
        made = self._made
        if made is None or not self.count:
            return [None] * len(tries)
        known = self._unspoilt(made, current)
        rows = [known.get(id(trie), -1) for trie in tries]
        ends, committed = list[int](), list[int]()
        for row, output in zip(rows, outputs, strict=True):
            if row >= 0:
                committed += output[made.requests[row].length :]
            ends.append(len(committed))
        drafts, foreseen = made.drafts.drafts, made.foreseen
        found = _find(
            np.array(rows), np.array(ends), np.array(committed, np.int64), foreseen.places,
            self.count, foreseen.continuations.tokens, foreseen.continuations.lengths,
            drafts.tokens, drafts.parents, drafts.probs, drafts.sources, drafts.sizes,
        )  # fmt: skip
        return _trees(*found)

    @staticmethod
    def _unspoilt(made: _Made, current: Callable[[Any], Snapshot | None]) -> Mapping[int, int]:
        """made.rows, without those whose requests have read what they may not read now."""
        spoilt = {
            reads
            for reads, snapshot in made.read.items()
            if not _still_holds(snapshot, current(reads))
        }
        if not spoilt:
            return made.rows
        return {at: i for at, i in made.rows.items() if made.requests[i].reads not in spoilt}


NOTHING = Prepared(None)


def _still_holds(before: Snapshot | None, now: Snapshot | None) -> bool:
    """Whether all that was read is still there."""
    if before is now:
        return True
    if before is None or now is None:
        return False
    present = set(map(id, now.segments))
    return all(id(segment) in present for segment in before.segments)


class MirroredRetrieval:
    """The thread that retrieves ahead, and what it hands over. Called from one other thread.

    Args:
        suppose: prepares drafts for what requests might go on with.
        outcomes: of a step that are retrieved for, per request.

    Attributes:
        prepared: trees that were retrieved ahead so far.
    """

    def __init__(self, suppose: Suppose, outcomes: int) -> None:
        self._suppose = suppose
        self._outcomes = outcomes
        self._queue: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._job: _Job | None = None
        self._prepared = NOTHING
        self._failures = 0
        self.prepared = 0
        _warm_up()
        threading.Thread(target=self._run, name="mirrored-retrieval", daemon=True).start()

    @property
    def works(self) -> bool:
        """Whether it still takes work; after some failures it does not."""
        return self._failures < _MOST_FAILURES

    def begin(self, view: ExitView, look: Look, max_nodes: int) -> None:
        """Retrieve for the likely outcomes of a view, from now until `take`.

        Until then nobody may extend what the requests have seen.

        Args:
            look: called in the thread, as the pass waits here.
            max_nodes: most nodes of a draft.
        """
        self.take()
        self._prepared = NOTHING
        if self.works:
            self._job = _Job(view, look, max_nodes)
            self._queue.put(self._job)

    def take(self) -> Prepared:
        """What was retrieved since `begin`; the thread has let go of the requests then.

        Asked again, it is the same until the next `begin`.

        Raises:
            TimeoutError: it has not, and holds them still. Whoever goes on with these requests
                needs new tries.
        """
        job, self._job = self._job, None
        if job is None:
            return self._prepared
        job.stop.set()
        if not job.stop.wait(_PATIENCE_S):
            self._failures = _MOST_FAILURES
            raise TimeoutError(f"retrieval ahead has not ended in {_PATIENCE_S:g} s")
        self._prepared = Prepared(job.made)
        self.prepared += self._prepared.count
        return self._prepared

    def _run(self) -> None:
        while True:
            job = self._queue.get()
            try:
                self._prepare(job)
            except Exception:
                self._failures += 1
                if self._failures == 1:
                    logger.error(
                        "retrieval ahead failed; drafts are retrieved when they are needed",
                        exc_info=True,
                    )
            finally:
                job.done = True

    def _prepare(self, job: _Job) -> None:
        width = job.view.tokens.shape[1]
        with job.stop.working() as wanted:
            if not wanted:
                return
            rows = {row: r for row, r in job.look().items() if r.trie.room >= width}
        requests = list(rows.values())
        outcomes = likely_outcomes(job.view, self._outcomes, _LEAST, _acceptance(job.view, rows))
        foreseen = foreseen_of(job.view, outcomes, list(rows))
        drafts = self._suppose(
            [r.trie for r in requests], [r.snapshot for r in requests], foreseen.continuations,
            job.max_nodes,
        )  # fmt: skip
        read = {r.reads: r.snapshot for r in requests}
        numbers = {id(r.trie): i for i, r in enumerate(requests)}
        job.made = _Made(requests, numbers, read, foreseen, drafts)
        drafts.make(job.stop)


def trees_of(drafts: Drafts) -> list[TokenTree]:
    """Drafts as the worker takes them."""
    tokens = drafts.tokens.astype(np.int64)
    trees = _trees(tokens, drafts.parents, drafts.probs, drafts.sources, drafts.sizes)
    return trees  # type: ignore[return-value]  # no size is negative


def _trees(
    tokens: npt.NDArray[np.int64],
    parents: npt.NDArray[np.int32],
    probs: npt.NDArray[np.float32],
    sources: npt.NDArray[np.int8],
    sizes: npt.NDArray[np.int64],
) -> list[TokenTree | None]:
    """A tree of the first sizes[i] nodes of each row; None where it is negative."""
    width = tokens.shape[1]
    made: list[TokenTree | None] = []
    for t, p, q, s, n in zip(tokens, parents, probs, sources, sizes.tolist(), strict=True):
        if n == width:
            made.append(TokenTree(t, p, q, s))
        else:
            made.append(None if n < 0 else TokenTree(t[:n], p[:n], q[:n], s[:n]))
    return made


def _acceptance(view: ExitView, rows: Mapping[int, Mirrored]) -> npt.NDArray[np.float32]:
    """float32[bs, width]: the drafter's estimate that each node follows its parent."""
    given = np.full(view.tokens.shape, UNKNOWN, np.float32)
    drafted = [(row, request.drafted) for row, request in rows.items() if request.drafted]
    if drafted:
        of_rows, trees = zip(*drafted, strict=True)
        _estimate(
            np.array(of_rows), np.array([len(tree) for tree in trees]),
            np.concatenate([tree.tokens for tree in trees]),
            np.concatenate([tree.parents for tree in trees]),
            np.concatenate([tree.probs for tree in trees]),
            view.tokens, view.parents, view.counts, given,
        )  # fmt: skip
    return given


@numba.njit(cache=True, nogil=True)
def _estimate(rows, sizes, tokens, parents, probs, verified, above, counts, given):
    """Estimates of trees, one behind the other, where they are what a view's rows verify."""
    first = 0
    for row, size in zip(rows, sizes):  # noqa: B905 (compiled)
        n = counts[row] - 1
        same = n <= size
        for i in range(n if same else 0):  # nodes may have been left out in between
            node = first + i
            if tokens[node] != verified[row, i + 1] or parents[node] + 1 != above[row, i + 1]:
                same = False
        for i in range(n if same else 0):
            parent = parents[first + i]
            of_parent = np.float32(1) if parent < 0 else probs[first + parent]
            given[row, i + 1] = probs[first + i] / max(of_parent, np.float32(1e-9))
        first += size


@numba.njit(cache=True, nogil=True)
def _find(
    rows, ends, committed, places, count, foreseen, lengths,
    tokens, parents, probs, sources, sizes,
):  # fmt: skip
    """The drafts for what requests have committed.

    Args:
        rows: int64[n], of `places`; -1: none.
        ends: int64[n], in `committed`, where a request's tokens end.
        committed: int64[total], tokens.
        places, foreseen, lengths: of Foreseen and its continuations.
        count: the first so many have drafts.
        tokens, parents, probs, sources, sizes: these drafts (datastores.Drafts).

    Returns:
        The same arrays of n drafts; a size of -1 where there is none.
    """
    n, width = len(rows), tokens.shape[1]
    made = (
        np.zeros((n, width), np.int64), np.zeros((n, width), np.int32),
        np.zeros((n, width), np.float32), np.zeros((n, width), np.int8), np.full(n, -1, np.int64),
    )  # fmt: skip
    start = 0
    for i in range(n):
        size = ends[i] - start
        for place in places[rows[i]] if rows[i] >= 0 else places[0, :0]:
            if 0 <= place < count and lengths[place] == size:
                same = True
                for k in range(size):
                    same = same and foreseen[place, k] == committed[start + k]
                if same:
                    made[4][i] = sizes[place]
                    for k in range(sizes[place]):
                        made[0][i, k] = tokens[place, k]
                        made[1][i, k] = parents[place, k]
                        made[2][i, k] = probs[place, k]
                        made[3][i, k] = sources[place, k]
                    break
        start = ends[i]
    return made


def _warm_up() -> None:
    """Have what is compiled be compiled."""
    one = np.zeros((1, 1), np.int32)
    candidates, logprobs = np.zeros((1, 1, 1), np.int32), np.zeros((1, 1, 1), np.float32)
    view = ExitView(("",), one, one - 1, np.ones(1, np.int32), candidates, logprobs, 0.0)
    trie = InputTrie()
    trie.extend([1, 2])
    request = Mirrored(trie, 0, None, None, TokenTree.chain([1]))
    outcomes = likely_outcomes(view, 1, 0.0, _acceptance(view, {0: request}))
    foreseen = foreseen_of(view, outcomes, [0])
    drafts = SupposedDrafts([trie], [None], foreseen.continuations, 1)
    stop = Stop()
    drafts.make(stop)
    stop.wait(0)
    made = _Made([request], {id(trie): 0}, {None: None}, foreseen, drafts)
    Prepared(made).trees([trie], [[0]], lambda reads: None)
