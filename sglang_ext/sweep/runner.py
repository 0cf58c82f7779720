"""Measures what is left of a plan, run by run."""

import dataclasses
import hashlib
import time
import uuid
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import httpx

from sglang_ext.started_server import ServerError
from sglang_ext.sweep import environment
from sglang_ext.sweep.items import Item, Workload, as_sessions
from sglang_ext.sweep.load import Answer, Load, ServerGone, run_batch, run_rate
from sglang_ext.sweep.methods import Method
from sglang_ext.sweep.plan import RATE, Point
from sglang_ext.sweep.progress import Pace
from sglang_ext.sweep.quality import Ratios, qualities
from sglang_ext.sweep.results import PointResult, RequestResult, Results, ServedBefore
from sglang_ext.sweep.servers import ControlError, RunningServer, Servers

BASELINE = "ar"
PLAIN_SERVER = "plain"
_NAMESPACE = "sweep-{}"
_WARM_UP = "warm-up"
_WARM_UP_REQUESTS, _WARM_UP_TOKENS = 4, 16
_OPENING_TOKENS = 32
# While prompts are answered that are not measured, or arrive by themselves.
_IN_FLIGHT = 16


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
        self._total = sum(1 for _ in self._plan.order())
        self._pace = Pace()
        self._warm: dict[str, set[str]] = {}
        self._broken: dict[str, str] = {}

    def left(self) -> list[tuple[int, Point]]:
        """The runs that have no result yet, in the order in which they are made."""
        left = [
            (repeat, point)
            for repeat, point in self._plan.order()
            if not self._results.is_finished(repeat, point)
        ]
        if not self._servers.together:
            order = {key: i for i, key in enumerate(self._servers_of(left))}
            left.sort(key=lambda run: (run[0], order[self._methods[run[1].method].server]))
        return left

    def run(self) -> None:
        """Measure all that is left.

        Raises:
            SweepError: a server does not start, or prompts are not answered before the sweep.
        """
        left = self.left()
        if not left:
            return
        self._prepare_servers(left)
        left = self.left()
        self._answer_before(left)
        for place, (repeat, point) in enumerate(left):
            self._pace.begin()
            self._measure(repeat, point, left[place + 1 :])

    def _servers_of(self, runs: Iterable[tuple[int, Point]]) -> list[str]:
        return list(dict.fromkeys(self._methods[point.method].server for _, point in runs))

    def _prepare_servers(self, left: Sequence[tuple[int, Point]]) -> None:
        """Those that run together start at once, so that a mistake shows at once."""
        keys = self._servers_of(left)
        if PLAIN_SERVER not in keys and self._unanswered(left):
            keys.append(PLAIN_SERVER)
        longest = max(
            item.most_tokens
            for workload in self._workloads.values()
            for item in workload.measured + workload.served_before
        )
        busy = (_IN_FLIGHT,) if self._plan.rates or self._unanswered(left) else ()
        in_flight = max((*self._plan.batches, *busy))
        self._servers.prepare(keys, self._model_path, longest * in_flight, longest)
        if self._servers.together:
            for key in keys:
                self._start(key)

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
        costs = environment.forward_costs(self._model_path)
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

    def _measure(self, repeat: int, point: Point, after: Sequence[tuple[int, Point]]) -> None:
        """One run, tried again once where its server dies."""
        key = self._methods[point.method].server
        if key in self._broken:
            return
        reason = ""
        for _ in range(2):
            started = time.time()
            try:
                result, requests = self._run(repeat, point)
            except ServerError as error:
                self._give_up(key, str(error))
                return
            except ControlError as error:
                self._fail(repeat, point, started, str(error))
                return
            except (ServerGone, httpx.HTTPError) as error:
                reason = self._lost(repeat, point, started, key, error)
                if not self._servers.is_started_here(key):
                    self._give_up(key, reason)
                    return
                continue
            self._keep(result, requests, after)
            return
        self.problems.append(f"repeat {repeat + 1}, {point.id}: left out, its server died twice")

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

    def _run(self, repeat: int, point: Point) -> tuple[PointResult, list[RequestResult]]:
        """Raises ServerError, ControlError, ServerGone, httpx.HTTPError."""
        method, workload = self._methods[point.method], self._workloads[point.workload]
        new = method.server not in self._servers.describe()
        server = self._servers.get(method.server)
        if new:
            self._warm.pop(method.server, None)
            self._note_servers()
        self._warm_up(server, method, workload)
        with ExitStack() as after:
            # Every method starts alike; NGRAM's own trie is emptied, too, so the corpus comes next.
            server.flush_cache()
            if method.corpus:
                self._load_corpus(server, workload.name, after)
            run = uuid.uuid4().hex[:12]
            params = _params(method, run, server, after)
            self._open_namespace(server, workload, params)
            items = _items(method, workload.measured, run)
            nodes, steps = server.widths()
            cpu, started = server.cpu_seconds(), time.time()
            load = self._send(server, repeat, point, items, params)
            cpu_after = server.cpu_seconds()
            memory = server.memory_mb()
            nodes_after, steps_after = server.widths()
        width = server.width
        if width is None and steps_after > steps:
            width = (nodes_after - nodes) / (steps_after - steps)
        outputs = {a.id: a.output_ids for a in load.answers if a.error is None}
        return _results(
            repeat, point, started, load, qualities(workload.measured, outputs, self._decode),
            cpu_s=cpu_after - cpu if cpu is not None and cpu_after is not None else None,
            memory_mb=memory,
            verify_width=width,
        )  # fmt: skip

    def _send(
        self,
        server: RunningServer,
        repeat: int,
        point: Point,
        items: Sequence[Item],
        params: Mapping[str, Any],
    ) -> Load:
        if point.mode == RATE:
            # Other arrivals each repeat, the same for all methods.
            return run_rate(server.url, items, point.load, self._plan.seed + repeat, params)
        return run_batch(server.url, items, int(point.load), params)

    def _load_corpus(self, server: RunningServer, workload: str, after: ExitStack) -> None:
        name = f"sweep-{workload}"
        texts = [self._decode(served.output) for served in self._results.served_before(workload)]
        server.add_corpus(name, [text for text in texts if text])
        after.callback(_quietly, server.remove_corpus, name)

    def _warm_up(self, server: RunningServer, method: Method, workload: Workload) -> None:
        """Short requests before a method's and a workload's first run on a server."""
        warm = self._warm.setdefault(method.server, set())
        if {method.name, workload.name} <= warm:
            return
        items = (workload.served_before or workload.measured)[:_WARM_UP_REQUESTS]
        short = [
            dataclasses.replace(item, max_tokens=min(item.max_tokens, _WARM_UP_TOKENS))
            for item in items
        ]
        with ExitStack() as after:
            params = _params(method, _WARM_UP, server, after)
            run_batch(server.url, _items(method, short, _WARM_UP), len(short), params)
        warm |= {method.name, workload.name}

    @staticmethod
    def _open_namespace(
        server: RunningServer, workload: Workload, params: Mapping[str, Any]
    ) -> None:
        """What a drafter makes of a corpus for a new namespace, it makes at its first request."""
        item = (workload.served_before or workload.measured)[0]
        short = dataclasses.replace(item, input_ids=item.input_ids[:_OPENING_TOKENS], max_tokens=2)
        run_batch(server.url, [short], 1, params)

    def _keep(
        self,
        result: PointResult,
        requests: Sequence[RequestResult],
        after: Sequence[tuple[int, Point]],
    ) -> None:
        self._results.add_run(result, requests)
        self._pace.end(result.point)
        if result.failed:
            first = next((r.error for r in requests if r.error), result.error)
            self.problems.append(
                f"repeat {result.repeat + 1}, {result.point.id}: {result.failed} of "
                f"{result.requests} requests failed: {first}"
            )
        self._say(self._line(result, after))

    def _line(self, result: PointResult, after: Sequence[tuple[int, Point]]) -> str:
        waiting = [
            point for _, point in after if self._methods[point.method].server not in self._broken
        ]
        baseline = self._baseline(result)
        ratio = f"{result.output_throughput / baseline:.2f}x AR" if baseline else ""
        return (
            f"{self._total - len(after)}/{self._total}  repeat {result.repeat + 1}  "
            f"{result.workload} {result.mode} {result.load:g}  {result.method:17}"
            f"{result.output_throughput:8.1f} tokens/s  {ratio:9}  {self._pace.left(waiting)}"
        )

    def _baseline(self, result: PointResult) -> float:
        """Tokens a second of AR at the same load: this repeat's, else the last one; 0: none."""
        point = dataclasses.replace(result.point, method=BASELINE)
        found = [p for p in self._results.points if p.error is None and p.point == point]
        found.sort(key=lambda p: p.repeat == result.repeat)
        return found[-1].output_throughput if found else 0.0


def _params(method: Method, run: str, server: RunningServer, after: ExitStack) -> dict[str, Any]:
    """custom_params of a run; what it leaves in the datastore is deleted `after`."""
    params = dict(method.params)
    if method.fresh_namespace:
        params["namespace"] = _NAMESPACE.format(run)
        after.callback(_quietly, server.delete_namespace, params["namespace"])
    return params


def _items(method: Method, items: Sequence[Item], run: str) -> Sequence[Item]:
    """What a run sends."""
    return as_sessions(items, method.params, run) if method.sessions else items


def _quietly(clean_up: Callable[[str], None], name: str) -> None:
    with suppress(ControlError, httpx.HTTPError):  # the server is gone, or has none of it
        clean_up(name)


def _failed(repeat: int, point: Point, started: float, reason: str) -> PointResult:
    return PointResult(
        repeat=repeat, **dataclasses.asdict(point), started=started,
        duration_s=time.time() - started, requests=0, failed=0, output_tokens=0, prompt_tokens=0,
        cpu_s=None, memory_mb=None, verify_width=None, accept_length=None, error=reason,
    )  # fmt: skip


def _results(
    repeat: int,
    point: Point,
    started: float,
    load: Load,
    ratios: Mapping[str, Ratios],
    **measured: Any,
) -> tuple[PointResult, list[RequestResult]]:
    """A run's rows; where every request failed, the run did."""
    good = [answer for answer in load.answers if answer.error is None]
    error = None
    if not good:
        first = load.answers[0].error if load.answers else "there are no prompts"
        error = f"all {len(load.answers)} requests failed: {first}"
    result = PointResult(
        repeat=repeat, **dataclasses.asdict(point), started=started, duration_s=load.duration_s,
        requests=len(load.answers), failed=len(load.answers) - len(good),
        output_tokens=load.output_tokens, prompt_tokens=sum(a.prompt_tokens for a in good),
        accept_length=accept_length(good), error=error, **measured,
    )  # fmt: skip
    requests = [_request(repeat, point, a, ratios.get(a.id, {})) for a in load.answers]
    return result, requests if error is None else []


def accept_length(answers: Iterable[Answer]) -> float | None:
    """Tokens by verify step over all answers; None without verify steps."""
    pairs = [(len(a.output_ids), a.spec_verify_ct) for a in answers if a.spec_verify_ct]
    steps = sum(steps for _, steps in pairs)
    return sum(tokens for tokens, _ in pairs) / steps if steps else None


def _request(repeat: int, point: Point, answer: Answer, ratios: Ratios) -> RequestResult:
    return RequestResult(
        repeat=repeat, **dataclasses.asdict(point), id=answer.id, category=answer.category,
        start_s=answer.start_s, ttft_s=answer.ttft_s, e2e_s=answer.e2e_s, itl_s=answer.itl_s,
        prompt_tokens=answer.prompt_tokens, output_tokens=len(answer.output_ids),
        spec_verify_ct=answer.spec_verify_ct, output_sha=output_sha(answer.output_ids),
        error=answer.error, ratios=ratios,
    )  # fmt: skip


def output_sha(output_ids: Sequence[int]) -> str:
    """First 16 hex digits of the SHA-256 of the ids as int32."""
    return hashlib.sha256(array("i", output_ids).tobytes()).hexdigest()[:16]
