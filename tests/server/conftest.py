"""What the tests of real servers share; the servers are in text/ and speech/, one of a kind each.

A server of a folder ends with the folder's last test: each takes up to 4 GB.
"""

import json
import subprocess
import sys
from pathlib import Path

from tests.server.servers import Server

MODEL = "smollm2-135m-instruct"
EXAMPLES = Path(__file__).parents[2] / "examples"
# Small enough that a long prompt's prefill is chunked, and that four servers fit in memory.
CHUNK = ["--chunked-prefill-size", "128", "--max-total-tokens", "8192"]

JSON_SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "people": {"type": "integer"}},
        "required": ["city", "people"],
    }
)


def run_example(example: str, server: Server, *args: str) -> str:
    """What a program of examples/ prints about a server."""
    command = [sys.executable, str(EXAMPLES / example), "--base-url", server.base_url, *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
