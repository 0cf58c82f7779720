"""Measures what is left of a plan, the methods of a load by turns.

Every repeat has servers that were started for it: one start may be faster than another for as long
as it runs (two starts of plain decoding differed by a tenth), and a spread must show that.
"""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx

from sglang_ext.servers.started_server import ServerError
from sglang_ext.sweep import provenance
from sglang_ext.sweep.items import Item, Workload, heads, tokens_in_flight
from sglang_ext.sweep.load import ServerGone, run_batch, run_rate
from sglang_ext.sweep.measuring import Measurement, items_at, items_of, params_of, quietly
from sglang_ext.sweep.methods import BASELINE, LEARNING_CACHES, Method
from sglang_ext.sweep.plan import RATE, Point, turned
from sglang_ext.sweep.progress import Pace
from sglang_ext.sweep.results import PointResult, RequestResult, Results, ServedBefore
from sglang_ext.sweep.servers import ControlError, RunningServer, Servers
from sglang_ext.sweep.settling import open_runs, runs_needed

PLAIN_SERVER = "plain"
_WARM_UP = "warm-up"
_WARM_UP_REQUESTS, _WARM_UP_PROMPT, _WARM_UP_TOKENS = 4, 512, 16
# While prompts are answered that are not measured, or arrive by themselves.
_IN_FLIGHT = 16
# Drafts take room too, and no request is to wait for another one's end.
_KV_MARGIN = 2


class SweepError(Exception):
    """The sweep cannot go on; what is finished is kept."""


class Runner:
    """Measures a plan on running servers.

    Args:
        results: where the runs go; what is finished there is not measured again.
        workloads: by name, all of the plan's.
        methods: likewise.
        decode: text of token ids, for corpora.
        say: shows a line.

    Attributes:
        problems: what failed or was left out, a line each.
    """

    def __init__(
        self,
        results: Results,
        workloads: Mapping[str, Workload],
        methods: Mapping[str, Method],
        servers: Servers,
        model_path: str,
        decode: Callable[[Sequence[int]], str],
        say: Callable[[str], None],
    ):
        self.problems: list[str] = []
        self._results = results
        self._plan = results.plan
        self._workloads = workloads
        self._methods = methods
        self._servers = servers
        self._model_path = model_path
        self._decode = decode
        self._say = say
        self._total = 0
        self._deadline = time.monotonic() + 60.0 * (self._plan.minutes or math.inf)
        self._servers_used = False
        self._pace = Pace()
        self._warm: dict[str, set[str]] = {}
        self._broken: dict[str, str] = {}

    def left(self) -> list[tuple[int, Point]]:
        """The runs that have no result yet, in the order in which they are made.

        Once all have one, those that what is too close to tell apart is repeated with.
        """
        left = [
            (repeat, point)
            for repeat, point in self._plan.order()
            if not self._results.is_finished(repeat, point)
        ] or open_runs(self._plan, self._results.points)
        if not self._servers.together:
            order = {key: i for i, key in enumerate(self._servers_of(left))}
            left.sort(key=lambda run: (run[0], order[self._methods[run[1].method].server]))
        return left

    def missing(self) -> list[tuple[int, Point]]:
        """The runs without a result that a finished sweep has."""
        needed = runs_needed(self._plan, self._results.points)
        return [run for run in needed if not self._results.is_finished(*run)]

    def run(self) -> None:
        """Measure all that is left, as far as the time allows.

        Raises:
            SweepError: a server does not start, or prompts are not answered before the sweep.
        """
        left = self.left()
        if not left:
            return
        self._prepare_servers(left)
        self._answer_before(self.left())
        # Again where all has a result, and leaves something open; a run without one is a problem.
        while (left := self.left()) and not self.problems:
            finished = sum(point.error is None for point in self._results.points)
            self._total = finished + len(left)
            if not self._make(left):
                return

    def _make(self, left: Sequence[tuple[int, Point]]) -> bool:
        """Measure these, round by round; False: there was no time for all."""
        place = 0
        for _, group in itertools.groupby(left, lambda run: self._plan.round_of(run[0])):
            runs = list(group)
            if not self._begin_round(runs):
                self._say(
                    f"{self._plan.minutes:g} minutes are almost over: {len(left) - place} more "
                    "runs are left out, which the same command would make"
                )
                return False
            for (repeat, *_), turn in itertools.groupby(runs, self._turn_key):
                points = [point for _, point in turn]
                place += len(points)
                began = time.monotonic()
                self._measure(repeat, points, left[place:])
                self._pace.took(time.monotonic() - began)
        return True

    def _begin_round(self, runs: Sequence[tuple[int, Point]]) -> bool:
        """Servers start afresh, where there is time for it; False: there is none for the runs."""
        if self._servers_used:
            seconds = self._pace.seconds(point for _, point in runs)
            left = self._deadline - time.monotonic()
            if seconds > left:
                return False
            if seconds + self._pace.start_s <= left:
                self._start_afresh(self._servers_of(runs))
        self._servers_used = True
        return True

    def _start_afresh(self, keys: Iterable[str]) -> None:
        self._servers.stop_started()
        self._warm.clear()
        if not self._servers.together:
            return  # each when its turn has come
        for key in (key for key in keys if key not in self._broken):
            try:
                self._start(key)
            except SweepError as error:  # what the other servers decode is measured all the same
                self._give_up(key, str(error))

    def _turn_key(self, run: tuple[int, Point]) -> tuple[Any, ...]:
        """Runs with the same key take turns: all methods at one load, if their servers are up."""
        repeat, point = run
        alone = point.mode == RATE or not self._servers.together
        return repeat, point.workload, point.mode, point.load, point.method if alone else ""

    def _servers_of(self, runs: Iterable[tuple[int, Point]]) -> list[str]:
        return list(dict.fromkeys(self._methods[point.method].server for _, point in runs))

    def _prepare_servers(self, left: Sequence[tuple[int, Point]]) -> None:
        """Those that run together start at once, so that a mistake shows at once."""
        keys = self._servers_of(left)
        if PLAIN_SERVER not in keys and self._unanswered(left):
            keys.append(PLAIN_SERVER)
        parts = [p for w in self._workloads.values() for p in (w.measured, w.served_before)]
        longest = max(item.most_tokens for part in parts for item in part)
        # Whatever is left to do: a sweep that goes on must have the same servers.
        warm = any(self._methods[name].corpus for name in self._plan.methods)
        busy = (_IN_FLIGHT,) if self._plan.rates or warm else ()
        in_flight = max((*self._plan.batches, *busy))
        needed = _KV_MARGIN * max(tokens_in_flight(part, in_flight) for part in parts)
        self._servers.prepare(keys, self._model_path, needed, longest)
        if self._servers.together:
            began = time.monotonic()
            for key in keys:
                self._start(key)
            self._pace.start_s = time.monotonic() - began

    def _start(self, key: str) -> None:
        try:
            self._servers.get(key)
        except ServerError as error:
            raise SweepError(str(error)) from None
        self._note_servers()

    def _note_servers(self) -> None:
        """Keep the servers' flags, and what they measured of their forward passes."""
        known = self._results.environment
        servers = known.get("servers", {}) | self._servers.describe()
        costs = provenance.forward_costs(self._model_path)
        self._results.write_environment(known | {"servers": servers, "forward_costs": costs})

    def _unanswered(self, left: Iterable[tuple[int, Point]]) -> dict[str, list[Item]]:
        """By workload, what a corpus needs and nobody has answered yet."""
        names = {point.workload for _, point in left if self._methods[point.method].corpus}
        missing: dict[str, list[Item]] = {}
        for name in self._plan.workloads:
            if name in names:
                known = {served.id for served in self._results.served_before(name)}
                items = [i for i in self._workloads[name].served_before if i.id not in known]
                if items:
                    missing[name] = items
        return missing

    def _answer_before(self, left: Sequence[tuple[int, Point]]) -> None:
        """Plain decoding answers the prompts that are served before the sweep."""
        for name, items in self._unanswered(left).items():
            self._say(f"{name}: answering {len(items)} other prompts first, for the corpora")
            self._start(PLAIN_SERVER)
            server = self._servers.get(PLAIN_SERVER)
            try:
                load = run_batch(server.url, items, _IN_FLIGHT)
            except ServerGone as error:
                raise SweepError(f"{error}\n{server.last_words()}") from None
            served = [
                ServedBefore(name, item.id, list(item.input_ids), answer.output_ids)
                for item, answer in zip(items, load.answers, strict=True)
                if answer.error is None
            ]
            if not served:
                raise SweepError(f"{name}: no prompt was answered: {load.answers[0].error}")
            self._results.add_served_before(served)
        if PLAIN_SERVER not in self._servers_of(left):
            self._servers.stop(PLAIN_SERVER)

    def _measure(
        self, repeat: int, points: Sequence[Point], after: Sequence[tuple[int, Point]]
    ) -> None:
        """Points that take turns; those whose server dies are tried again once, by themselves."""
        for point in self._together(repeat, points, after):
            if self._together(repeat, [point], after):
                self.problems.append(
                    f"repeat {repeat + 1}, {point.id}: left out, its server died twice"
                )

    def _together(
        self, repeat: int, points: Sequence[Point], after: Sequence[tuple[int, Point]]
    ) -> list[Point]:
        """Measure these; those whose server died are returned."""
        lost: list[Point] = []
        runs: dict[Point, Measurement] = {}
        with ExitStack() as undo:
            for point in points:
                with self._losses(repeat, point, runs, lost):
                    if self._methods[point.method].server not in self._broken:
                        runs[point] = self._open(repeat, point, runs, undo)
            turns = max((len(run.parts) for run in runs.values()), default=0)
            for turn in range(turns):
                if turns > 1:
                    load = f"{points[0].workload} {points[0].mode} {points[0].load:g}"
                    self._say(f"repeat {repeat + 1}  {load}: turn {turn + 1} of {turns}")
                for name in turned([p.method for p in points], turn):
                    point = dataclasses.replace(points[0], method=name)
                    with self._losses(repeat, point, runs, lost):
                        if point in runs:
                            self._send(repeat, runs[point], turn, shared=len(points) > 1)
            done = [(run.results(self._decode), run.seconds) for run in runs.values()]
        for i, ((result, requests), seconds) in enumerate(done):
            waiting = [(repeat, finished[0].point) for finished, _ in done[i + 1 :]]
            waiting += [(repeat, point) for point in lost]
            self._keep(result, requests, seconds, [*waiting, *after])
        return lost

    @contextmanager
    def _losses(
        self, repeat: int, point: Point, runs: dict[Point, Measurement], lost: list[Point]
    ) -> Iterator[None]:
        """What goes wrong within the block ends the run, and those of a server that died."""
        key = self._methods[point.method].server
        started = time.time()
        try:
            yield
        except ServerError as error:
            self._give_up(key, str(error))
        except ControlError as error:
            runs.pop(point, None)
            self._fail(repeat, point, started, str(error))
        except (ServerGone, httpx.HTTPError) as error:
            reason = self._lost(repeat, point, started, key, error)
            others = [p for p in runs if self._methods[p.method].server == key and p != point]
            for gone in (point, *others):
                runs.pop(gone, None)
            if self._servers.is_started_here(key):
                lost += [point, *others]
            else:
                self._give_up(key, reason)

    def _lost(self, repeat: int, point: Point, started: float, key: str, error: Exception) -> str:
        """A server died; it is stopped, and starts again when it is needed."""
        server = self._servers.get(key)
        words = server.last_words()
        reason = f"the server {key!r} died: {error}"
        self._results.add_run(_failed(repeat, point, started, reason), [])
        self._say(f"{point.id}: {reason}" + (f"\n{words}" if words else ""))
        self._servers.stop(key)
        return reason

    def _give_up(self, key: str, reason: str) -> None:
        self._broken[key] = reason
        self._say(reason)
        methods = [name for name in self._plan.methods if self._methods[name].server == key]
        self.problems.append(f"no further runs of {', '.join(methods)}: {reason.splitlines()[0]}")

    def _fail(self, repeat: int, point: Point, started: float, reason: str) -> None:
        self._results.add_run(_failed(repeat, point, started, reason), [])
        self._say(f"{point.id}: {reason}")
        self.problems.append(f"repeat {repeat + 1}, {point.id}: {reason}")

    def _open(
        self, repeat: int, point: Point, runs: Mapping[Point, Measurement], undo: ExitStack
    ) -> Measurement:
        """Raises ServerError, ControlError, ServerGone, httpx.HTTPError."""
        method, workload = self._methods[point.method], self._workloads[point.workload]
        new = method.server not in self._servers.describe()
        server = self._servers.get(method.server)
        if new:
            self._warm.pop(method.server, None)
            self._note_servers()
        self._warm_up(server, method, workload)
        beside = [m for p in runs if (m := self._methods[p.method]).server == method.server]
        if not beside:
            # Every method starts alike; NGRAM's trie is emptied, too, so the corpus comes next.
            server.flush_cache()
            if groups := heads(items_at(workload, point)):
                run_batch(server.url, groups, 1)
        if method.corpus and not any(m.corpus for m in beside):
            self._load_corpus(server, workload, undo)
        return Measurement(repeat, point, method, server, workload, undo)

    def _send(self, repeat: int, run: Measurement, turn: int, shared: bool) -> None:
        if turn >= len(run.parts):
            return
        key = self._methods[run.point.method].server
        server = self._servers.get(key)
        groups = any(item.group for item in run.parts[turn])
        if shared and key not in LEARNING_CACHES and not groups:
            # What another method has read is none of this one's, nor plain decoding's own.
            server.flush_cache()
        load = run.point.load
        if run.point.mode == RATE:
            # Other arrivals each repeat, the same for all methods.
            seed = self._plan.seed + repeat
            run.send(turn, lambda items, params: run_rate(server.url, items, load, seed, params))
        else:
            run.send(turn, lambda items, params: run_batch(server.url, items, int(load), params))

    def _load_corpus(self, server: RunningServer, workload: Workload, after: ExitStack) -> None:
        """What one server would have served: all workloads' other prompts, none measured now."""
        name = f"sweep-{workload.name}"
        measured = {item.input_ids for item in workload.measured}
        served = [s for s in self._results.served_before() if tuple(s.prompt) not in measured]
        texts = [self._decode(s.output) for s in served]
        server.add_corpus(name, [text for text in texts if text])
        after.callback(quietly, server.remove_corpus, name)

    def _warm_up(self, server: RunningServer, method: Method, workload: Workload) -> None:
        """Short requests before a method's and a workload's first run on a server."""
        warm = self._warm.setdefault(method.server, set())
        if {method.name, workload.name} <= warm:
            return
        items = (workload.served_before or workload.measured)[:_WARM_UP_REQUESTS]
        short = [
            dataclasses.replace(
                item,
                input_ids=item.input_ids[:_WARM_UP_PROMPT],
                max_tokens=min(item.max_tokens, _WARM_UP_TOKENS),
            )
            for item in items
        ]
        with ExitStack() as after:
            params = params_of(method, _WARM_UP, server, after)
            run_batch(server.url, items_of(method, short, _WARM_UP), len(short), params)
        warm |= {method.name, workload.name}

    def _keep(
        self,
        result: PointResult,
        requests: Sequence[RequestResult],
        seconds: float,
        after: Sequence[tuple[int, Point]],
    ) -> None:
        self._results.add_run(result, requests)
        self._pace.note(result.point, seconds)
        if result.failed or result.error:
            first = next((r.error for r in requests if r.error), result.error)
            self.problems.append(
                f"repeat {result.repeat + 1}, {result.point.id}: {result.failed} of "
                f"{result.requests} requests failed: {first}"
            )
        self._say(self._line(result, after))

    def _line(self, result: PointResult, after: Sequence[tuple[int, Point]]) -> str:
        waiting = [run for run in after if self._methods[run[1].method].server not in self._broken]
        rounds = {self._plan.round_of(repeat) for repeat, _ in waiting}
        starts = len(rounds - {self._plan.round_of(result.repeat)})
        left = self._pace.left((point for _, point in waiting), starts)
        baseline = self._baseline(result)
        ratio = f"{result.output_throughput / baseline:.2f}x AR" if baseline else ""
        others = f"  disturbed: {o}" if (o := result.others) and o.disturbed else ""
        return (
            f"{self._total - len(after)}/{self._total}  repeat {result.repeat + 1}  "
            f"{result.workload} {result.mode} {result.load:g}  {result.method:17}"
            f"{result.output_throughput:8.1f} tokens/s  {ratio:9}  {left}{others}"
        )

    def _baseline(self, result: PointResult) -> float:
        """Tokens a second of AR at the same load: this repeat's, else the last one; 0: none."""
        point = dataclasses.replace(result.point, method=BASELINE)
        found = [p for p in self._results.points if p.error is None and p.point == point]
        found.sort(key=lambda p: p.repeat == result.repeat)
        return found[-1].output_throughput if found else 0.0


def _failed(repeat: int, point: Point, started: float, reason: str) -> PointResult:
    return PointResult(
        repeat=repeat, **dataclasses.asdict(point), started=started,
        duration_s=time.time() - started, requests=0, failed=0, output_tokens=0, prompt_tokens=0,
        cpu_s=None, memory_mb=None, verify_width=None, accept_length=None, error=reason,
    )  # fmt: skip
