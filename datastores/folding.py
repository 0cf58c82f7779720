"""Writing sub-index files from logs and older files, in a process of its own at idle priority.

The datastore sends jobs to the process as JSON lines and waits for the answer in a background
thread; searches and ingest go on meanwhile. The process ends with whoever started it, and what it
was writing is then a leftover that the manifest does not name.
"""

import contextlib
import dataclasses
import json
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from .config import DatastoreError
from .container import Container, read_container, write_container
from .live import apply_deletion
from .segment import Segment, build_segments, merge
from .wal import Deletion, read_log

logger = logging.getLogger(__name__)

# Runs only when the processor has nothing else to do, as far as the system allows, from before
# its first import on.
_PROGRAM = """
import contextlib, os
os.nice(19)
with contextlib.suppress(OSError, AttributeError):
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
from datastores.folding import main
main()
"""
_LOOK_SECONDS = 1.0  # how often the process looks whether its parent is there
_PACKAGE_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@dataclass(frozen=True)
class FoldJob:
    """What to write: all of the containers, then of the logs, without what deletions take."""

    output: str
    vocab_size: int
    tokenizer_fingerprint: str
    segment_tokens: int
    containers: tuple[str, ...] = ()
    logs: tuple[str, ...] = ()
    deletions: tuple[Deletion, ...] = ()

    def to_json(self) -> str:
        deletions = [
            (d.number, d.namespace, None if d.digest is None else d.digest.hex())
            for d in self.deletions
        ]
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return json.dumps({**fields, "deletions": deletions})

    @classmethod
    def from_json(cls, text: str) -> "FoldJob":
        fields = json.loads(text)
        fields["deletions"] = tuple(
            Deletion(number, namespace, None if digest is None else bytes.fromhex(digest))
            for number, namespace, digest in fields["deletions"]
        )
        return cls(**fields)


def run_job(job: FoldJob) -> int:
    """Writes the job's output and returns its tokens; 0: nothing was left, and no file is written.

    Raises DatastoreError if an input is damaged or the output cannot be written.
    """
    by_owner: dict[str, list[Segment]] = {}
    for path in job.containers:
        container = read_container(path, job.vocab_size, job.tokenizer_fingerprint)
        for owner, segment in container.segments:
            by_owner.setdefault(owner, []).append(segment)
    for owner, segment in _log_segments(job):
        by_owner.setdefault(owner, []).append(segment)
    merged: list[tuple[str, Segment]] = []
    for owner, segments in by_owner.items():
        for deletion in job.deletions:
            if deletion.concerns(owner):
                segments = list(apply_deletion(deletion, segments, job.vocab_size))
        merged += [(owner, s) for s in merge_all(segments, job.vocab_size, job.segment_tokens)]
    if merged:
        content = Container(job.vocab_size, job.tokenizer_fingerprint, tuple(merged))
        write_container(job.output, content)
    return sum(segment.num_tokens for _, segment in merged)


def _log_segments(job: FoldJob) -> list[tuple[str, Segment]]:
    contents = [read_log(path, job.vocab_size, job.tokenizer_fingerprint) for path in job.logs]
    deletions = [d for content in contents for d in content.deletions]
    by_namespace: dict[str, list] = {}
    for content in contents:
        for namespace, document in content.documents:
            by_namespace.setdefault(namespace, []).append(document)
    segments = []
    for namespace, documents in by_namespace.items():
        built = tuple(build_segments(documents, job.vocab_size, job.segment_tokens))
        for deletion in deletions:
            if deletion.concerns(namespace):
                built = apply_deletion(deletion, built, job.vocab_size)
        segments += [(namespace, segment) for segment in built]
    return segments


def merge_all(segments: Sequence[Segment], vocab_size: int, segment_tokens: int) -> list[Segment]:
    """Neighbours merged, the smallest first, as long as they fit segment_tokens."""
    merged = list(segments)
    while True:
        sizes = [a.num_tokens + b.num_tokens for a, b in pairwise(merged)]
        if not sizes or min(sizes) > segment_tokens:
            return merged
        at = sizes.index(min(sizes))
        merged[at : at + 2] = [merge(merged[at], merged[at + 1], vocab_size)]


class FoldWorker:
    """Runs jobs in the process, which is started when there is a first one. One job at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()  # for starting and killing the process
        self._closed = False

    def run(self, job: FoldJob) -> int:
        """run_job() in the process. DatastoreError also if the process was killed."""
        process = self._start()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(job.to_json() + "\n")
            process.stdin.flush()
            reply = process.stdout.readline()
        except (OSError, ValueError):
            reply = ""
        if not reply:
            self.cancel()
            raise DatastoreError("the folding process was stopped; its job will be done again")
        answer = json.loads(reply)
        if "error" in answer:
            raise DatastoreError(answer["error"])
        return answer["tokens"]

    def cancel(self) -> None:
        """Kills the process; run() raises. The next job starts another."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()

    def close(self) -> None:
        """cancel() for good."""
        self._closed = True
        self.cancel()

    def _start(self) -> "subprocess.Popen[str]":
        with self._lock:
            if self._closed:
                raise DatastoreError("the datastore is closed")
            if self._process is None or self._process.poll() is not None:
                paths = [_PACKAGE_ROOT, os.environ.get("PYTHONPATH", "")]
                self._process = _spawned(
                    {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
                )
            return self._process


def _spawned(environment: dict[str, str]) -> "subprocess.Popen[str]":
    try:
        return subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
    except OSError as error:
        raise DatastoreError(
            f"cannot start the folding process: {error.strerror or error}"
        ) from None


def main() -> None:
    """The process: a job a line on stdin, an answer a line on stdout."""
    jobs: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read_jobs, args=(jobs,), daemon=True).start()
    threading.Thread(target=_end_with, args=(int(sys.argv[1]),), daemon=True).start()
    while True:
        try:
            answer: dict[str, int | str] = {"tokens": run_job(FoldJob.from_json(jobs.get()))}
        except Exception as error:  # the datastore tries again, and reports it
            answer = {"error": str(error) or type(error).__name__}
        try:
            print(json.dumps(answer), flush=True)
        except BrokenPipeError:
            os._exit(0)  # the datastore's process has ended: nobody waits for the answer


def _end_with(parent: int) -> None:
    """End this process when its parent has ended.

    A closed stdin tells it too, but not where another child of the parent has the pipe's other end:
    one that was forked while this process was started. (PR_SET_PDEATHSIG would come when the
    thread ends that started this process.)
    """
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    os._exit(0)


def _read_jobs(jobs: "queue.SimpleQueue[str]") -> None:
    for line in sys.stdin:
        jobs.put(line)
    os._exit(0)  # the datastore's process has ended
