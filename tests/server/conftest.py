"""Real SGLang servers, one per configuration for the whole test session."""

import json
from collections.abc import Iterator

import pytest

from scripts.lib.server import Server
from scripts.lib.spec_bench import Prompt, spec_bench

MODEL = "smollm2-135m-instruct"
# Small enough that a long prompt's prefill is chunked, and that four servers fit in memory.
CHUNK = ["--chunked-prefill-size", "128", "--max-total-tokens", "8192"]


@pytest.fixture(scope="session")
def prompts() -> list[Prompt]:
    """Short Spec-Bench prompts, one of each category that has one."""
    return spec_bench(MODEL, max_prompt_tokens=120)[:8]


@pytest.fixture(scope="session")
def plain_server() -> Iterator[Server]:
    """SGLang without speculation."""
    with Server(MODEL, CHUNK, name="plain") as server:
        yield server


@pytest.fixture(scope="session")
def sssd_server() -> Iterator[Server]:
    """SSSD that verifies every draft it has, with the drafter of random trees at hand."""
    flags = ["--speculative-algorithm", "SSSD", "--budget", "fixed", "--drafters", "random,ssbd"]
    with Server(MODEL, [*flags, *CHUNK, "--enable-metrics"], name="sssd") as server:
        yield server


@pytest.fixture(scope="session")
def smollm2_server(plain_server: Server) -> Server:
    """SmolLM2 on plain SGLang."""
    return plain_server


@pytest.fixture(scope="module")
def whisper_server() -> Iterator[Server]:
    """Whisper base on plain SGLang; for one module only, each server takes 4 GB."""
    with Server("whisper-base", name="whisper") as server:
        yield server


JSON_SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "people": {"type": "integer"}},
        "required": ["city", "people"],
    }
)
