"""Drafts retrieved for a step's likely outcomes while the second half of its pass runs.

A thread of its own retrieves, mostly without the GIL, for one likely outcome after another, the
best of each request first, until the drafts are asked for. The requests themselves do not change:
what they might go on with is supposed (`InputTrie.supposing`). Whatever fails or comes too late is
retrieved when it is asked for, as without this.
"""

import heapq
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from datastores import Draft, InputTrie, Snapshot, SupposedInput
from sglang_ext.mirror.exit_view import ExitView
from sglang_ext.mirror.outcomes import UNKNOWN, Outcomes, likely_outcomes, path_to
from sglang_ext.tree import TokenTree

logger = logging.getLogger(__name__)

# Retrieved for at once: whoever asks for the drafts waits for no more than these.
_AT_ONCE = 8
# Outcomes less probable than this are hardly ever right.
_LEAST = 0.005
# Waiting longer than this for a few retrievals means that the thread is gone.
_PATIENCE_S = 5.0
_MOST_FAILURES = 3

# Of a step's requests by their rows of its view: what is searched for each.
Look = Callable[[], Mapping[int, "Mirrored"]]
# One draft of at most so many nodes for each request, each with what it may read.
Retrieve = Callable[[Sequence[SupposedInput], Sequence[Snapshot | None], int], Sequence[Draft]]


@dataclass(frozen=True)
class Mirrored:
    """A request in the step whose outcome is foreseen.

    Attributes:
        rid: the request's.
        trie: what it has seen, its whole output included.
        length: of its output.
        snapshot: what it may read of the datastore; None: nothing.
        drafted: what was proposed for the step; None: nothing.
    """

    rid: str
    trie: InputTrie
    length: int
    snapshot: Snapshot | None
    drafted: TokenTree | None = None


@dataclass
class _Job:
    """A step's work for the thread.

    Attributes:
        look: gives `rows`, of the view, and whose they are.
        trees: by request, then by the tokens committed.
        stopped: nobody waits for more.
        done: the thread has let go of it.
    """

    view: ExitView
    look: Look
    max_nodes: int
    rows: Mapping[int, Mirrored] = field(default_factory=dict)
    trees: dict[str, dict[tuple[int, ...], TokenTree]] = field(default_factory=dict)
    stopped: bool = False
    done: threading.Event = field(default_factory=threading.Event)


class Prepared:
    """What was retrieved for a step's outcomes by the time that it was asked for."""

    def __init__(
        self,
        requests: Mapping[str, Mirrored],
        trees: Mapping[str, Mapping[tuple[int, ...], TokenTree]],
    ) -> None:
        self._requests = requests
        self._trees = trees
        self._holds: dict[tuple[int, int], bool] = {}

    def tree(
        self, rid: str, trie: InputTrie, output: Sequence[int], snapshot: Snapshot | None
    ) -> TokenTree | None:
        """The tree for what a request's step has committed; None: there is none.

        Args:
            output: its whole output by now.
            snapshot: what it may read by now; where that lacks any of what was read, a deletion
                may be the reason, and there is no tree.
        """
        request = self._requests.get(rid)
        if request is None or request.trie is not trie:
            return None
        if not self._still_holds(request.snapshot, snapshot):
            return None
        return self._trees.get(rid, {}).get(tuple(output[request.length :]))

    def _still_holds(self, before: Snapshot | None, now: Snapshot | None) -> bool:
        if before is now:
            return True
        if before is None or now is None:
            return False
        key = id(before), id(now)
        if key not in self._holds:
            present = set(map(id, now.segments))
            self._holds[key] = all(id(segment) in present for segment in before.segments)
        return self._holds[key]


NOTHING = Prepared({}, {})


class MirroredRetrieval:
    """The thread that retrieves ahead, and what it hands over. Called from one other thread.

    Args:
        retrieve: drafts of requests, some of them as they might go on.
        outcomes: of a step that are retrieved for, per request.

    Attributes:
        prepared: trees that were retrieved ahead so far.
    """

    def __init__(self, retrieve: Retrieve, outcomes: int) -> None:
        self._retrieve = retrieve
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
        job.stopped = True
        if not job.done.wait(_PATIENCE_S):
            self._failures = _MOST_FAILURES
            raise TimeoutError(f"retrieval ahead has not ended in {_PATIENCE_S:g} s")
        self._prepared = Prepared({r.rid: r for r in job.rows.values()}, job.trees)
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
                job.done.set()

    def _prepare(self, job: _Job) -> None:
        if job.stopped:
            return
        job.rows = job.look()
        outcomes = likely_outcomes(job.view, self._outcomes, _LEAST, _acceptance(job))
        for group in best_first(outcomes, job.rows):
            if job.stopped:
                return
            self._retrieve_for(job, outcomes, group)

    def _retrieve_for(
        self, job: _Job, outcomes: Outcomes, group: Sequence[tuple[int, int]]
    ) -> None:
        supposed: list[SupposedInput] = []
        whose: list[tuple[Mirrored, tuple[int, ...]]] = []
        for row, rank in group:
            request = job.rows[row]
            path = path_to(job.view, row, int(outcomes.nodes[row, rank]))
            committed = (*path, int(outcomes.tokens[row, rank]))
            trie = request.trie.supposing(committed)
            if trie is not None:
                supposed.append(trie)
                whose.append((request, committed))
        if not supposed:
            return
        drafts = self._retrieve(supposed, [r.snapshot for r, _ in whose], job.max_nodes)
        for (request, committed), draft in zip(whose, drafts, strict=True):
            job.trees.setdefault(request.rid, {})[committed] = tree_of(draft)
        self.prepared += len(whose)


def best_first(outcomes: Outcomes, rows: Iterable[int]) -> Iterator[list[tuple[int, int]]]:
    """(row, rank) of the outcomes of these rows, the most probable ones first, some at once.

    A row comes once in a group: supposing a second outcome of a request ends the first.
    """
    heap = [(-float(outcomes.probs[row, 0]), row, 0) for row in rows if outcomes.counts[row]]
    heapq.heapify(heap)
    while heap:
        group = [heapq.heappop(heap) for _ in range(min(_AT_ONCE, len(heap)))]
        yield [(row, rank) for _, row, rank in group]
        for _, row, rank in group:
            if rank + 1 < outcomes.counts[row]:
                heapq.heappush(heap, (-float(outcomes.probs[row, rank + 1]), row, rank + 1))


def tree_of(draft: Draft) -> TokenTree:
    """A draft as the worker takes it."""
    return TokenTree(draft.tokens.astype(np.int64), draft.parents, draft.probs, draft.sources)


def _acceptance(job: _Job) -> npt.NDArray[np.float32]:
    """float32[bs, width]: the drafter's estimate that each node follows its parent."""
    view = job.view
    given = np.full(view.tokens.shape, UNKNOWN, np.float32)
    for row, request in job.rows.items():
        tree, n = request.drafted, int(view.counts[row]) - 1
        if tree is None or n == 0 or len(tree) < n:
            continue
        same = (tree.tokens[:n] == view.tokens[row, 1 : n + 1]).all()
        if not (same and (tree.parents[:n] + 1 == view.parents[row, 1 : n + 1]).all()):
            continue  # nodes were left out in between
        probs = np.concatenate([[1.0], tree.probs[:n]])
        given[row, 1 : n + 1] = probs[1:] / np.maximum(probs[tree.parents[:n] + 1], 1e-9)
    return given


def _warm_up() -> None:
    """Have what is compiled be compiled."""
    trie = InputTrie()
    trie.extend([1, 2])
    trie.supposing([1])
    one = np.zeros((1, 1), np.int32)
    candidates, logprobs = np.zeros((1, 1, 1), np.int32), np.zeros((1, 1, 1), np.float32)
    view = ExitView(("",), one, one - 1, np.ones(1, np.int32), candidates, logprobs, 0.0)
    likely_outcomes(view, 1)
