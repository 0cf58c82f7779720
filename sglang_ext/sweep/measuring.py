"""One run of a method on its server, in parts, so that other methods can take turns with it."""

import dataclasses
import hashlib
import time
import uuid
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import httpx

from sglang_ext.servers.cpu_watch import CpuWatch
from sglang_ext.sweep.items import Item, Workload, as_sessions, streams
from sglang_ext.sweep.load import Answer, Load, run_batch
from sglang_ext.sweep.methods import Method
from sglang_ext.sweep.plan import BATCH, Point
from sglang_ext.sweep.quality import Ratios, qualities
from sglang_ext.sweep.results import PointResult, RequestResult
from sglang_ext.sweep.servers import ControlError, RunningServer

_NAMESPACE = "sweep-{}"
_OPENING_TOKENS = 32
# Prompts (streams) of a run for each one in flight, so that a large batch is full most of the time,
# and the least of them (of documents: questions): on a machine where a request's time varies by a
# tenth, fewer do not tell methods apart that differ by a few percent.
_PROMPTS_IN_FLIGHT, _LEAST_PROMPTS, _LEAST_QUESTIONS = 4, 32, 8
# A part has so many times the requests in flight, if those are several: at its end fewer are.
_ROUNDS = 2


def items_at(workload: Workload, point: Point) -> Sequence[Item]:
    """The measured items of a point: all at a rate, the first ones of a small batch."""
    if point.mode != BATCH:
        return workload.measured
    documents = any(item.group for item in workload.measured)
    least = _LEAST_QUESTIONS if documents else _LEAST_PROMPTS
    count = max(least, _PROMPTS_IN_FLIGHT * int(point.load))
    return [item for stream in streams(workload.measured)[:count] for item in stream]


def parts_of(workload: Workload, point: Point) -> list[tuple[Item, ...]]:
    """A point's items in parts, after each of which another method has its turn.

    Items of a stream, or of a document, stay together; arrivals at a rate are one part.
    """
    items = items_at(workload, point)
    if point.mode != BATCH:
        return [tuple(items)]
    least = _ROUNDS * int(point.load) if point.load > 1 else 1
    parts: list[list[list[Item]]] = []
    for stream in streams(items):
        group = stream[0].group
        if parts and (len(parts[-1]) < least or (group and group == parts[-1][-1][0].group)):
            parts[-1].append(stream)
        else:
            parts.append([stream])
    # What is left over is no part of its own: it would be all end.
    if len(parts) > 1 and len(parts[-1]) < least / 2:
        rest = parts.pop()
        parts[-1] += rest
    return [tuple(item for stream in part for item in stream) for part in parts]


class Measurement:
    """A run under way.

    Args:
        workload: whose items are sent; a method with sessions gets them as such.
        after: where to leave what is to be undone on the server.

    Attributes:
        parts: what is sent, one after the other.
        seconds: that it has taken so far, all included.
    """

    def __init__(
        self,
        repeat: int,
        point: Point,
        method: Method,
        server: RunningServer,
        workload: Workload,
        after: ExitStack,
    ):
        began = time.monotonic()
        self.point = point
        self._repeat = repeat
        self._server = server
        self._workload = workload
        run = uuid.uuid4().hex[:12]
        self.params = params_of(method, run, server, after)
        self.parts = [items_of(method, part, run) for part in parts_of(workload, point)]
        self._loads: list[Load] = []
        self._cpu: list[float | None] = []
        self._others = CpuWatch(whole=server.is_own)
        self._nodes = self._steps = 0.0
        self._started = time.time()
        self._open_namespace()
        self.seconds = time.monotonic() - began

    def _open_namespace(self) -> None:
        """What a drafter makes of a corpus for a new namespace, it makes at its first request."""
        item = (self._workload.served_before or self._workload.measured)[0]
        short = dataclasses.replace(item, input_ids=item.input_ids[:_OPENING_TOKENS], max_tokens=2)
        run_batch(self._server.url, [short], 1, self.params)

    def send(self, place: int, send: Callable[[Sequence[Item], Mapping[str, Any]], Load]) -> None:
        """Measure a part.

        Raises:
            ServerGone, httpx.HTTPError: the server ended.
        """
        began = time.monotonic()
        nodes, steps = self._server.widths()
        cpu = self._server.cpu_seconds()
        with self._others.span():
            self._loads.append(send(self.parts[place], self.params))
        cpu_after = self._server.cpu_seconds()
        nodes_after, steps_after = self._server.widths()
        self._cpu.append(cpu_after - cpu if cpu is not None and cpu_after is not None else None)
        self._nodes += nodes_after - nodes
        self._steps += steps_after - steps
        self.seconds += time.monotonic() - began

    def results(
        self, decode: Callable[[Sequence[int]], str]
    ) -> tuple[PointResult, list[RequestResult]]:
        """The run's rows, once all parts are sent; where every request failed, the run did."""
        answers = _after_each_other(self._loads)
        good = [answer for answer in answers if answer.error is None]
        ratios = qualities(self._workload.measured, {a.id: a.output_ids for a in good}, decode)
        error = None
        if not good:
            first = answers[0].error if answers else "there are no prompts"
            error = f"all {len(answers)} requests failed: {first}"
        width = self._server.width
        if width is None and self._steps:
            width = self._nodes / self._steps
        cpu = [s for s in self._cpu if s is not None]
        others = self._others.shares
        result = PointResult(
            repeat=self._repeat, **dataclasses.asdict(self.point), started=self._started,
            duration_s=sum(load.duration_s for load in self._loads), requests=len(answers),
            failed=len(answers) - len(good),
            output_tokens=sum(load.output_tokens for load in self._loads),
            prompt_tokens=sum(a.prompt_tokens for a in good),
            cpu_s=sum(cpu) if cpu and len(cpu) == len(self._cpu) else None,
            memory_mb=self._server.memory_mb(), verify_width=width,
            accept_length=accept_length(good), error=error,
            foreign_share=None if others is None else others.foreign,
            stolen_share=None if others is None else others.stolen,
        )  # fmt: skip
        requests = [_request(self._repeat, self.point, a, ratios.get(a.id, {})) for a in answers]
        return result, requests if error is None else []


def params_of(method: Method, run: str, server: RunningServer, after: ExitStack) -> dict[str, Any]:
    """custom_params of a run; what it leaves in the datastore is deleted `after`."""
    params = dict(method.params)
    if method.fresh_namespace:
        params["namespace"] = _NAMESPACE.format(run)
        after.callback(quietly, server.delete_namespace, params["namespace"])
    return params


def items_of(method: Method, items: Sequence[Item], run: str) -> Sequence[Item]:
    """What a run sends."""
    return as_sessions(items, method.params, run) if method.sessions else items


def quietly(clean_up: Callable[[str], None], name: str) -> None:
    """Undo something on a server, if it is there to be undone."""
    with suppress(ControlError, httpx.HTTPError):
        clean_up(name)


def accept_length(answers: Iterable[Answer]) -> float | None:
    """Tokens by verify step over all answers; None without verify steps."""
    pairs = [(len(a.output_ids), a.spec_verify_ct) for a in answers if a.spec_verify_ct]
    steps = sum(steps for _, steps in pairs)
    return sum(tokens for tokens, _ in pairs) / steps if steps else None


def output_sha(output_ids: Sequence[int]) -> str:
    """First 16 hex digits of the SHA-256 of the ids as int32."""
    return hashlib.sha256(array("i", output_ids).tobytes()).hexdigest()[:16]


def _after_each_other(loads: Iterable[Load]) -> list[Answer]:
    """All answers, as if each part had begun where the one before it ended."""
    answers, begin = [], 0.0
    for load in loads:
        answers += [dataclasses.replace(a, start_s=a.start_s + begin) for a in load.answers]
        begin += load.duration_s
    return answers


def _request(repeat: int, point: Point, answer: Answer, ratios: Ratios) -> RequestResult:
    return RequestResult(
        repeat=repeat, **dataclasses.asdict(point), id=answer.id, category=answer.category,
        start_s=answer.start_s, ttft_s=answer.ttft_s, e2e_s=answer.e2e_s, itl_s=answer.itl_s,
        prompt_tokens=answer.prompt_tokens, output_tokens=len(answer.output_ids),
        spec_verify_ct=answer.spec_verify_ct, output_sha=output_sha(answer.output_ids),
        error=answer.error, ratios=ratios,
    )  # fmt: skip
