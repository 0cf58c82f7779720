"""Real SGLang servers of a text model, one per configuration."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.lib.server import Server
from scripts.lib.spec_bench import Prompt, spec_bench
from tests.server.conftest import CHUNK, EXAMPLES, MODEL


@pytest.fixture(scope="session")
def prompts() -> list[Prompt]:
    """Short Spec-Bench prompts, one of each category that has one."""
    return spec_bench(MODEL, max_prompt_tokens=120)[:8]


@pytest.fixture(scope="package")
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


@pytest.fixture(scope="package")
def sssd_server(installed_drafter: Path) -> Iterator[Server]:
    """SSSD that verifies every draft it has, with random trees and our example at hand."""
    flags = ["--speculative-algorithm", "SSSD", "--budget", "fixed"]
    flags += ["--drafter", "sssd", "--drafters", "random,ssbd,my_drafter,mirror"]
    flags += ["--draft-model", MODEL]  # its own draft: what it drafts is nearly always right
    server = Server(MODEL, [*flags, *CHUNK, "--enable-metrics"], name="sssd")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(installed_drafter), prepend=os.pathsep)
        server.start()
    with server:
        yield server
