"""The early exit of SGLang's own models: small ones, each in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[3]
TOKENS, KAPPA = 8, 5  # of real_target.py


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def found(request, tmp_path_factory) -> dict[str, Any]:
    """What tests/unit/mirror/real_target.py found."""
    folder = tmp_path_factory.mktemp("target")
    command = [sys.executable, "-m", "tests.unit.mirror.real_target", request.param, str(folder)]
    environment = os.environ | {"XDG_CACHE_HOME": str(folder), "HOME": str(folder)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_whoever_looks_changes_no_logit(found):
    assert found["tapped"] == found["watched"] == found["plain"]


def test_the_final_states_and_the_head_are_the_targets(found):
    assert found["shapes"] == [[TOKENS, 64], [TOKENS, 64]]
    np.testing.assert_allclose(found["of_finals"], found["plain"], rtol=1e-4, atol=1e-4)


def test_the_state_at_the_exit_is_all_that_the_first_layers_have_made(found):
    assert found["apart"] < 1e-4 * found["size"]


def test_an_opened_exit_tells_of_each_token_and_its_lens_is_fitted_on_what_the_target_reads(found):
    assert np.shape(found["paper"]) == np.shape(found["lensed"]) == (TOKENS, KAPPA)
    assert found["lens_tokens"] > 128
