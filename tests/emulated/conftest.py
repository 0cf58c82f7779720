"""Plain SGLang on the CPU and the emulated server, for one module: each takes 3 GB."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.emulation import cases
from scripts.emulation.cuda_environment import one_thread
from scripts.emulation.emulated_server import (
    IN_FLIGHT,
    EmulatedServer,
    check_settings,
    emulated_server,
    plain_server,
    retracting,
)
from scripts.emulation.traffic import Job, run
from scripts.lib.server import Server
from scripts.lib.spec_bench import MODEL, Prompt, spec_bench


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    """Short Spec-Bench prompts of different categories."""
    return spec_bench(MODEL, max_prompt_tokens=80)[:6]


@pytest.fixture(scope="module")
def jobs(prompts) -> list[Job]:
    """All features, mixed."""
    return cases.make_cases(prompts, 16, 1)


@pytest.fixture(scope="module")
def plain() -> Iterator[Server]:
    """SGLang without speculation."""
    with one_thread(), plain_server() as server:
        yield server


@pytest.fixture(scope="module")
def expected(plain, jobs) -> list:
    """Plain SGLang's answers to all jobs."""
    return run(plain.base_url, jobs, drafted=False, in_flight=IN_FLIGHT)


@pytest.fixture(scope="module")
def emulated(jobs, expected, tmp_path_factory) -> Iterator[EmulatedServer]:
    """The server that takes the CUDA path; its oracle knows plain SGLang's answers."""
    oracle: Path = tmp_path_factory.mktemp("oracle") / "truth.jsonl"
    oracle.write_text("\n".join(cases.oracle_lines(jobs, expected)))
    with one_thread(), retracting(), emulated_server(oracle) as server:
        check_settings(server)
        yield server
