"""Requests to a running server, one at a time or a fixed number in flight."""

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from scripts.lib.http_client import HTTP, lines

TIMEOUT_S = 600


@dataclass(frozen=True)
class Completion:
    """What a server answered.

    Attributes:
        token_ids: the output.
        text: the same, decoded.
        seconds: from sending the request to its end.
        decode_seconds: from the first token to the last; `stream` alone measures it.
        accept_length: tokens per verify step; 1 without speculation.
        rid: the request's id.
        steps: decode steps that it took; without speculation not told, 0.
        relaxed: tokens that were accepted by relaxation.
    """

    token_ids: list[int]
    text: str
    seconds: float
    decode_seconds: float
    accept_length: float
    rid: str
    steps: int = 0
    relaxed: int = 0


def flush_cache(base_url: str) -> None:
    """Empty the server's radix cache, once what runs has ended."""
    response = HTTP.post(base_url + "/flush_cache", params={"timeout": 60}, timeout=TIMEOUT_S)
    response.raise_for_status()


def generate(
    base_url: str,
    input_ids: Sequence[int],
    *,
    params: Mapping[str, Any] | None = None,
    max_new_tokens: int = 64,
    **sampling: Any,
) -> Completion:
    """One /generate request, greedy unless `sampling` says otherwise.

    Args:
        params: custom_params (drafter, draft_length, ingest).
        sampling: further sampling_params of SGLang.
    """
    body = _body(input_ids, params, max_new_tokens, sampling)
    start = time.perf_counter()
    response = HTTP.post(base_url + "/generate", json=body, timeout=TIMEOUT_S)
    seconds = time.perf_counter() - start
    response.raise_for_status()
    return _completion(response.json(), seconds, 0.0)


def stream(
    base_url: str,
    input_ids: Sequence[int],
    *,
    params: Mapping[str, Any] | None = None,
    max_new_tokens: int = 64,
    **sampling: Any,
) -> Completion:
    """As `generate`, streamed, so that the time of the first token is known."""
    start, first, last = time.perf_counter(), None, b""
    for event in events(base_url, _body(input_ids, params, max_new_tokens, sampling)):
        first, last = first or time.perf_counter(), event
    end = time.perf_counter()
    return _completion(json.loads(last), end - start, end - (first or end))


def events(base_url: str, body: Mapping[str, Any]) -> Iterator[bytes]:
    """The JSON of each event of a streamed `/generate`, as it comes.

    Raises:
        httpx.HTTPStatusError: the request was refused.
    """
    begin, asked = b"data: ", {**body, "stream": True}
    with HTTP.stream("POST", base_url + "/generate", json=asked, timeout=TIMEOUT_S) as response:
        response.raise_for_status()
        for line in lines(response):
            if line.startswith(begin + b"{"):
                yield line[len(begin) :]


def _body(
    input_ids: Sequence[int],
    params: Mapping[str, Any] | None,
    max_new_tokens: int,
    sampling: Mapping[str, Any],
) -> dict[str, Any]:
    settings = {"temperature": 0.0, "max_new_tokens": max_new_tokens} | dict(sampling)
    if params:
        settings["custom_params"] = dict(params)
    return {"input_ids": list(input_ids), "sampling_params": settings}


def _completion(answer: dict[str, Any], seconds: float, decode_seconds: float) -> Completion:
    return Completion(
        token_ids=answer["output_ids"],
        text=answer["text"],
        seconds=seconds,
        decode_seconds=decode_seconds,
        accept_length=answer["meta_info"].get("spec_accept_length") or 1.0,
        rid=answer["meta_info"]["id"],
        steps=answer["meta_info"].get("spec_verify_ct") or 0,
        relaxed=sum(answer["meta_info"].get("relaxed_tokens") or ()),
    )


def generate_all(
    base_url: str,
    prompts: Iterable[Sequence[int]],
    *,
    in_flight: int = 1,
    label: str = "",
    **kwargs: Any,
) -> list[Completion]:
    """Every prompt's completion, `in_flight` at a time, with a progress bar on a terminal."""
    prompts = list(prompts)
    with ThreadPoolExecutor(in_flight) as pool:
        answers = pool.map(lambda prompt: generate(base_url, prompt, **kwargs), prompts)
        return list(tqdm(answers, total=len(prompts), desc=label, disable=None, leave=False))
