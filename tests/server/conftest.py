"""Real SGLang servers, one per configuration for the whole test session."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.lib.server import Server
from scripts.lib.spec_bench import Prompt, spec_bench

MODEL = "smollm2-135m-instruct"
EXAMPLES = Path(__file__).parents[2] / "examples"
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
def installed_drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of installed packages with the example of a drafter of one's own."""
    made = tmp_path_factory.mktemp("my-drafter")
    source = shutil.copytree(EXAMPLES / "my_drafter", made / "source")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    alone = ["--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, *alone, "--target", str(made / "site"), str(source)], check=True)
    return made / "site"


@pytest.fixture(scope="session")
def sssd_server(installed_drafter: Path) -> Iterator[Server]:
    """SSSD that verifies every draft it has, with random trees and our example at hand."""
    flags = ["--speculative-algorithm", "SSSD", "--budget", "fixed"]
    flags += ["--drafters", "random,ssbd,my_drafter"]
    server = Server(MODEL, [*flags, *CHUNK, "--enable-metrics"], name="sssd")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(installed_drafter), prepend=os.pathsep)
        server.start()
    with server:
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
