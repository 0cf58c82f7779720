"""The text examples run as they are shown, against servers that other tests use too."""

import subprocess
import sys

import pytest

from scripts.lib.client import generate
from tests.server.conftest import EXAMPLES, run_example


@pytest.mark.parametrize("drafter", ["sssd", "my_drafter"])
def test_a_chat_is_the_same_with_a_drafter_and_without_one(drafter, sssd_server):
    question = "Repeat this: one two three four one two three four"
    *plain, counts = run_example("chat.py", sssd_server, question, "--drafter", "none").splitlines()
    *drafted, _ = run_example("chat.py", sssd_server, question, "--drafter", drafter).splitlines()
    assert plain == drafted and any(plain)
    assert int(counts.split()[0]) > 1


def test_a_chat_says_what_is_wrong(sssd_server):
    command = [sys.executable, str(EXAMPLES / "chat.py"), "--base-url", sssd_server.base_url]
    done = subprocess.run([*command, "--drafter", "x"], capture_output=True, text=True, timeout=120)
    assert done.returncode and "custom_params.drafter" in done.stderr


def test_the_drafter_of_ones_own_drafts(sssd_server, prompts):
    params = {"drafter": "my_drafter", "ingest": False}
    made = [generate(sssd_server.base_url, p.input_ids, params=params) for p in prompts[:2]]
    assert max(answer.accept_length for answer in made) > 1


def test_a_live_translation_grows_and_nothing_of_it_is_unstable_in_the_end(sssd_server):
    lines = run_example("live_translation.py", sssd_server).splitlines()
    assert len(lines) == 5 and all(lines)  # 15 words, four at a time, and the end
    assert "[" not in lines[-1]
