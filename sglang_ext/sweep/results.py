"""A sweep's folder: what was planned, where it ran, and what was measured.

sweep.json            the plan
environment.json      versions, machine, commit, the servers' flags
served_before.jsonl   the outputs that the warm methods' corpora are made of
points.jsonl          a line per run
requests.jsonl        a line per request
server-KEY.log        what a server printed, of every start

A run's requests are on disk before its own line is, so what has no line was not finished: its
requests are dropped when the sweep goes on.
"""

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sglang_ext.models.cached_tables import PARTIAL, replace_file
from sglang_ext.servers.cpu_watch import Shares
from sglang_ext.sweep.plan import Plan, PlanError, Point

PLAN = "sweep.json"
ENVIRONMENT = "environment.json"
SERVED_BEFORE = "served_before.jsonl"
POINTS = "points.jsonl"
REQUESTS = "requests.jsonl"
_LOCK = ".lock"


class ResultsError(Exception):
    """A folder that cannot be used; the message says why and what to do."""


@dataclass(frozen=True)
class PointResult:
    """One run of a point.

    Attributes:
        repeat: from 0.
        started: seconds since 1970.
        duration_s: from the first request's begin to the last one's end.
        requests: how many there were; `failed` of them ended with an error.
        output_tokens, prompt_tokens: sums of the requests that did not fail.
        cpu_s: CPU seconds that the server used in the run; None: not this command's server.
        memory_mb: its memory at the end in MiB, shared pages counted once (PSS); None likewise.
        verify_width: s_q, nodes that a step verifies per request, root included, mean; None: the
            server does not say.
        accept_length: tokens by verify step; None without speculation.
        error: why there is no result.
        foreign_share: what other programs took of the processors meanwhile, 0.25 for a quarter of
            all of them; None: not known, or not told apart from a server that was not started here.
        stolen_share: likewise the host of a virtual machine; None: not known.
    """

    repeat: int
    method: str
    workload: str
    mode: str
    load: float
    started: float
    duration_s: float
    requests: int
    failed: int
    output_tokens: int
    prompt_tokens: int
    cpu_s: float | None
    memory_mb: float | None
    verify_width: float | None
    accept_length: float | None
    error: str | None
    # Folders of earlier versions lack them.
    foreign_share: float | None = None
    stolen_share: float | None = None

    @property
    def point(self) -> Point:
        return Point(self.method, self.workload, self.mode, self.load)

    @property
    def others(self) -> Shares | None:
        """What others took of the processors; None: not known."""
        return None if self.stolen_share is None else Shares(self.foreign_share, self.stolen_share)

    @property
    def output_throughput(self) -> float:
        """Output tokens a second, by the name that SGLang's bench_serving gives it."""
        return self.output_tokens / self.duration_s if self.duration_s else 0.0


@dataclass(frozen=True)
class RequestResult:
    """One request of a run.

    Attributes:
        id, category: of the workload's item.
        start_s: when it was sent, in seconds from the run's begin.
        ttft_s: time to first token; None: it failed before that.
        e2e_s: until its end.
        itl_s: seconds between tokens; a chunk of n tokens counts n times interval / n.
        spec_verify_ct: verify steps; None without speculation.
        output_sha: first 16 hex digits of the SHA-256 of the output's ids, int32 little-endian.
        error: why it failed.
        ratios: [part, whole] by column, see quality.py.
    """

    repeat: int
    method: str
    workload: str
    mode: str
    load: float
    id: str
    category: str
    start_s: float
    ttft_s: float | None
    e2e_s: float
    itl_s: list[float]
    prompt_tokens: int
    output_tokens: int
    spec_verify_ct: int | None
    output_sha: str
    error: str | None
    ratios: dict[str, list[int]] = dataclasses.field(default_factory=dict)

    @property
    def point(self) -> Point:
        return Point(self.method, self.workload, self.mode, self.load)


@dataclass(frozen=True)
class ServedBefore:
    """A prompt that was answered before the sweep, as token ids."""

    workload: str
    id: str
    prompt: list[int]
    output: list[int]


Row = TypeVar("Row", PointResult, RequestResult, ServedBefore)


class Results:
    """A sweep's folder. The one made by `create_or_resume` is locked until it is closed.

    Attributes:
        plan: what the folder is for.
        environment: where it was measured; empty until it is known.
        points: the runs so far, those with an error included.
    """

    def __init__(self, folder: Path, plan: Plan, lock: Any = None):
        self.folder = folder
        self.plan = plan
        self.environment: dict[str, Any] = _read_json(folder / ENVIRONMENT)
        self.points = list(_rows(folder / POINTS, PointResult))
        self._finished = {(p.repeat, p.point) for p in self.points if p.error is None}
        self._lock = lock

    @classmethod
    def create_or_resume(cls, folder: Path, plan: Plan) -> "Results":
        """The folder to write a sweep to: a new or an empty one, or that of the same sweep.

        Raises:
            ResultsError: it holds something else, or another process writes to it.
        """
        from filelock import FileLock, Timeout

        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Before the lock, so that no folder of anything else gets a file of ours.
            others = {p.name for p in folder.iterdir() if p.suffix != PARTIAL} - {PLAN, _LOCK}
            if not (folder / PLAN).exists() and others:
                raise ResultsError(f"{folder} is not empty and holds no sweep; choose another")
            lock = FileLock(folder / _LOCK)
            lock.acquire(timeout=0)
        except Timeout:
            raise ResultsError(f"another sweep is writing to {folder}") from None
        except OSError as error:
            raise ResultsError(f"{folder} cannot be written to: {error.strerror}") from None
        try:
            return cls._opened(folder, plan, lock)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def _opened(cls, folder: Path, plan: Plan, lock: Any) -> "Results":
        if (folder / PLAN).exists():
            there = _read_plan(folder)
            if there != plan:
                raise ResultsError(
                    f"{folder} holds another sweep: {'; '.join(there.differences(plan))}. "
                    "Its own options go on with it; other ones need another folder"
                )
        else:
            _write_json(folder / PLAN, plan.to_json())
        results = cls(folder, plan, lock)
        results._drop_unfinished()
        return results

    @classmethod
    def read(cls, folder: Path) -> "Results":
        """A sweep's folder, finished or not.

        Raises:
            ResultsError: there is none.
        """
        if not (folder / PLAN).is_file():
            raise ResultsError(f"{folder} holds no sweep: there is no {PLAN} in it")
        return cls(folder, _read_plan(folder))

    @property
    def requests(self) -> Iterator[RequestResult]:
        """The requests of finished runs, in the order of the runs."""
        for request in _rows(self.folder / REQUESTS, RequestResult):
            if self.is_finished(request.repeat, request.point):
                yield request

    def is_finished(self, repeat: int, point: Point) -> bool:
        """Whether this run has a result."""
        return (repeat, point) in self._finished

    def served_before(self, workload: str | None = None) -> list[ServedBefore]:
        """What was answered before the sweep, of one workload or of all."""
        rows = _rows(self.folder / SERVED_BEFORE, ServedBefore)
        return [row for row in rows if workload in (None, row.workload)]

    def add_served_before(self, served: Sequence[ServedBefore]) -> None:
        """Keep answers for the warm methods' corpora."""
        _append(self.folder / SERVED_BEFORE, served)

    def add_run(self, point: PointResult, requests: Sequence[RequestResult]) -> None:
        """Keep a run. One with an error has no requests, and may be made again."""
        _append(self.folder / REQUESTS, requests)
        _append(self.folder / POINTS, [point])
        self.points.append(point)
        if point.error is None:
            self._finished.add((point.repeat, point.point))

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        """Keep where this is measured."""
        self.environment = dict(environment)
        _write_json(self.folder / ENVIRONMENT, self.environment)

    def _drop_unfinished(self) -> None:
        """Remove what an interrupted sweep has left: half lines, requests without their run."""
        _rewrite(self.folder / POINTS, self.points)
        served = list(_rows(self.folder / SERVED_BEFORE, ServedBefore))
        _rewrite(self.folder / SERVED_BEFORE, served)
        _rewrite(self.folder / REQUESTS, self.requests)

    def close(self) -> None:
        """Let others write to the folder."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> "Results":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read_plan(folder: Path) -> Plan:
    try:
        return Plan.from_json(_read_json(folder / PLAN))
    except PlanError as error:
        raise ResultsError(f"{folder / PLAN}: {error}") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ResultsError(f"{path} cannot be read: {error}") from None


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with replace_file(path) as file:
        file.write((json.dumps(content, indent=2) + "\n").encode())


def _rows(path: Path, kind: type[Row]) -> Iterator[Row]:
    """The file's lines; an unfinished last one is left out.

    Raises:
        ResultsError: another line cannot be read.
    """
    if not path.exists():
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                yield kind(**json.loads(line))
            except (ValueError, TypeError) as error:
                raise ResultsError(f"{path}, line {number}: {error}") from None


def _line(row: Any) -> str:
    return json.dumps(dataclasses.asdict(row), separators=(",", ":")) + "\n"


def _append(path: Path, rows: Iterable[Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(map(_line, rows))
        file.flush()
        os.fsync(file.fileno())


def _rewrite(path: Path, rows: Iterable[Any]) -> None:
    """Replace a file's lines, where it exists; `rows` may come from the file itself."""
    if path.exists():
        with replace_file(path) as file:
            file.writelines(_line(row).encode() for row in rows)
