"""Answers of servers to the same prompts, to be compared."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from scripts.lib.http_client import HTTP
from scripts.lib.spec_bench import Prompt
from tests.server.servers import Server


def answer(server: Server, prompt: Prompt, body: dict[str, Any] | None = None, **sampling: Any):
    """One greedy /generate answer."""
    sampling = {"temperature": 0, "max_new_tokens": 48} | sampling
    response = HTTP.post(
        server.base_url + "/generate",
        json={"input_ids": prompt.input_ids, "sampling_params": sampling} | (body or {}),
        timeout=300,
    )
    assert response.is_success, response.text
    return response.json()


def answers(server: Server, jobs: Sequence[tuple[Prompt, dict[str, Any]]]) -> list[Any]:
    """The answers to prompts with sampling parameters, eight under way at a time."""
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda job: answer(server, job[0], **job[1]), jobs))


def told(answered: Any) -> list[Any]:
    """What a client reads of an answer, its log-probabilities aside."""
    meta = answered["meta_info"]
    counts = [meta[key] for key in ("finish_reason", "completion_tokens", "prompt_tokens")]
    return [answered["output_ids"], answered["text"], *counts]
