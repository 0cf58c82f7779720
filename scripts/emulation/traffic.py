"""Requests that join and leave a server's batch at different times, and how answers differ."""

import json
import math
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from scripts.lib.http_client import HTTP, lines

_TIMEOUT_S = 900
# Two backends' float32 logits differ in the last bits.
_LOGPROB_TOLERANCE = 2e-3


@dataclass(frozen=True)
class Job:
    """One /generate request.

    Attributes:
        feature: what it tests; mismatches are counted by it.
        body: the request, but for custom_params.
        params: its custom_params where it is drafted for.
        leaves_after: tokens after which its client is gone; 0: it stays to the end.
        abort: it leaves by /abort_request, and not by closing its connection.
    """

    feature: str
    body: Mapping[str, Any]
    params: Mapping[str, Any] = field(default_factory=dict)
    leaves_after: int = 0
    abort: bool = False

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.feature} ({self.params.get('drafter', 'plain')})"

    def request(self, drafted: bool) -> dict[str, Any]:
        """The JSON to send."""
        body = {key: value for key, value in self.body.items()}
        if drafted:
            body["sampling_params"] = body["sampling_params"] | {"custom_params": self.params}
        return body


def run(base_url: str, jobs: Sequence[Job], *, drafted: bool, in_flight: int = 8) -> list[Any]:
    """Every job's answer, `in_flight` at a time: one joins as another leaves, at its own length.

    Args:
        drafted: whether custom_params are sent.

    Returns:
        the JSON answers, lists of them where a job asks for several.
    """
    with ThreadPoolExecutor(in_flight) as pool:
        return list(pool.map(lambda job: ask(base_url, job, drafted), jobs))


def ask(base_url: str, job: Job, drafted: bool) -> Any:
    """One job's answer; of one that leaves (where it is drafted for), what had come until then."""
    body = job.request(drafted)
    if body.get("stream") or (drafted and job.leaves_after):
        return _stream(base_url, job, body, job.leaves_after if drafted else 0)
    response = HTTP.post(f"{base_url}/generate", json=body, timeout=_TIMEOUT_S)
    if not response.is_success:
        raise RuntimeError(f"{job.name}: {response.status_code} {response.text[:500]}")
    return response.json()


def _stream(base_url: str, job: Job, body: dict[str, Any], leaves_after: int) -> Any:
    """A streamed answer, which must grow with every chunk."""
    rid = body.setdefault("rid", f"emulated-{threading.get_ident()}-{id(job)}-{id(body)}")
    last: dict[str, Any] = {"output_ids": [], "text": "", "meta_info": {"completion_tokens": 0}}
    aborted = False
    with HTTP.stream(
        "POST", f"{base_url}/generate", json=body | {"stream": True}, timeout=_TIMEOUT_S
    ) as response:
        response.raise_for_status()
        for line in lines(response):
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[len(b"data: ") :])
            grown = chunk["output_ids"][: len(last["output_ids"])] == last["output_ids"]
            if not grown or not chunk["text"].startswith(last["text"].rstrip("\ufffd")):
                raise RuntimeError(f"{job.name}: a streamed chunk takes back an earlier one")
            last = chunk
            if leaves_after and len(last["output_ids"]) >= leaves_after and not aborted:
                if not job.abort:
                    break
                aborted = True
                HTTP.post(f"{base_url}/abort_request", json={"rid": rid}, timeout=60)
    return last


def first_difference(got: Sequence[int], expected: Sequence[int]) -> int | None:
    """The first place where two outputs differ; None: they are equal."""
    for i, (a, b) in enumerate(zip(got, expected, strict=False)):
        if a != b:
            return i
    return None if len(got) == len(expected) else min(len(got), len(expected))


def difference(job: Job, got: Any, expected: Any) -> str | None:
    """What is wrong with an answer, beside plain SGLang's to the same job; None: nothing."""
    if isinstance(expected, list):
        if len(got) != len(expected):
            return f"{len(got)} answers instead of {len(expected)}"
        each = [difference(job, g, e) for g, e in zip(got, expected, strict=True)]
        return next((f"answer {i} {d}" for i, d in enumerate(each) if d), None)
    ids = expected["output_ids"]
    if job.leaves_after:
        place = first_difference(got["output_ids"], ids[: len(got["output_ids"])])
        if len(got["output_ids"]) < job.leaves_after:
            return f"ended after {len(got['output_ids'])} tokens, before its client left"
        if job.abort and len(got["output_ids"]) >= len(ids):
            return "was not aborted"
        return None if place is None else f"differs from token {place} on"
    place = first_difference(got["output_ids"], ids)
    if place is not None:
        return f"differs from token {place} on"
    if got["text"] != expected["text"]:
        return f"has the text {got['text']!r} instead of {expected['text']!r}"
    for key in ("finish_reason", "completion_tokens", "prompt_tokens"):
        if got["meta_info"][key] != expected["meta_info"][key]:
            return f"has {key} {got['meta_info'][key]} instead of {expected['meta_info'][key]}"
    return _logprob_difference(got["meta_info"], expected["meta_info"])


_LOGPROBS = (
    "input_token_logprobs",
    "output_token_logprobs",
    "output_top_logprobs",
    "output_token_ids_logprobs",
)


def _logprob_difference(got: dict[str, Any], expected: dict[str, Any]) -> str | None:
    for key in _LOGPROBS:
        if not expected.get(key):
            continue
        ours, theirs = _flat(got.get(key) or []), _flat(expected[key])
        if [entry[1] for entry in ours] != [entry[1] for entry in theirs]:
            return f"has {key} of other tokens"
        for a, b in zip(ours, theirs, strict=True):
            same = a[0] == b[0] or (
                a[0] is not None
                and b[0] is not None
                and math.isclose(a[0], b[0], abs_tol=_LOGPROB_TOLERANCE)
            )
            if not same:
                return f"has {key} {a[0]} instead of {b[0]} for token {a[1]}"
    return None


def _flat(entries: Sequence[Any]) -> list[Any]:
    """(logprob, token, text) of a list of those or of lists of those."""
    if entries and entries[0] and isinstance(entries[0][0], list):
        return [item for entry in entries for item in entry]
    return list(entries)
