"""Command lines of sglang-ext that end by themselves, one after the other.

    python -m tests.server.refused_commands < LINES

A line of JSON each: the file for what it prints, and its words. Prints an exit code each. Every
command runs in a fork of this process, which has imported what servers import: that takes 15 s.
"""

import json
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from sglang_ext.cli import main

LIMIT_S = 120


def run(file: str, words: Sequence[str]) -> NoReturn:
    """Be the command; a server that starts after all is killed."""
    signal.alarm(LIMIT_S)
    out = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, sys.stdout.fileno())
    os.dup2(out, sys.stderr.fileno())
    sys.argv = ["sglang-ext", *words]
    try:
        code = main(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    import_module("sglang.srt.entrypoints.http_server")
    for file, words in map(json.loads, sys.stdin):
        child = os.fork()
        if child == 0:
            run(file, words)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
