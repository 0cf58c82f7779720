"""A real SGLang server with SSSD, which ends with this folder's last test."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.conftest import CHUNK, EXAMPLES, MODEL
from tests.server.servers import Server


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
def sssd_server(installed_drafter: Path, block_drafter: Path) -> Iterator[Server]:
    """SSSD that verifies every draft it has, with random trees and our example at hand.

    Its drafts are retrieved while passes run, where they can be.
    """
    flags = ["--speculative-algorithm", "SSSD", "--budget", "fixed", "--drafter", "sssd"]
    flags += ["--drafters", "random,ssbd,my_drafter,specdec", "--draft-model", str(block_drafter)]
    flags += ["--speculative-num-draft-tokens", "16"]  # the default without a draft model
    flags += ["--mirror-retrieval", "1", "--mirror-lens-seconds", "6"]
    server = Server(MODEL, [*flags, *CHUNK, "--enable-metrics"], name="sssd")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(installed_drafter), prepend=os.pathsep)
        server.start()
    with server:
        yield server
