"""The page's servers: what they are started with, what is printed, and how they end."""

import contextlib
import socket

import pytest

from sglang_ext.captions import page_servers
from sglang_ext.cli import main


class Started:
    """Servers that are started, in place of real ones."""

    def __init__(self):
        self.made = []
        self.open = 0

    @contextlib.contextmanager
    def __call__(self, model, flags, log_file=None, port=None, env=None):
        self.open += 1
        server = Server(model, list(flags), port or 12345, dict(env or {}))
        self.made.append(server)
        try:
            yield server
        finally:
            self.open -= 1


class Server:
    running = True

    def __init__(self, model, flags, port, env):
        self.name, self.flags, self.env = model, flags, env
        self.url = f"http://127.0.0.1:{port}"
        self.ready = False

    def wait(self):
        self.ready = True

    def is_running(self):
        return self.running

    def exit_code(self):
        return 9

    def tail(self):
        return "out of memory"


@pytest.fixture
def started(monkeypatch):
    made = Started()
    monkeypatch.setattr(page_servers, "started", made)
    return made


def interrupted(monkeypatch, started):
    """Ctrl-C, once the command waits for its servers."""

    def interrupt(_):
        assert started.open == len(started.made) and all(s.ready for s in started.made)
        raise KeyboardInterrupt

    monkeypatch.setattr(page_servers.time, "sleep", interrupt)


def page(*args):
    return main(["captions", "--page", *args])


def test_the_address_is_printed_when_both_are_up_and_ctrl_c_ends_both(started, monkeypatch, capsys):
    interrupted(monkeypatch, started)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    with contextlib.suppress(KeyboardInterrupt, SystemExit):
        models = ["--asr-model", "w", "--translate-model", "t", "--asr-flags", "--x 1"]
        page("--port", str(free), *models)
    text, whisper = started.made
    assert (whisper.name, text.name) == ("w", "t")
    assert capsys.readouterr().out == f"http://127.0.0.1:{free}/captions\n"
    assert whisper.flags[-2:] == ["--translate-with", text.url] and "--x" in whisper.flags
    assert text.flags[-2:] == ["--drafters", "ssbd"]
    assert started.open == 0


def test_a_port_that_is_taken_and_a_text_server_that_runs_already(started, monkeypatch, capsys):
    interrupted(monkeypatch, started)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with contextlib.suppress(KeyboardInterrupt, SystemExit):
            page("--port", str(port), "--translate-url", "http://h:1/v1", "--api-key", "k")
    (whisper,) = started.made
    assert whisper.url != f"http://127.0.0.1:{port}" and whisper.url in capsys.readouterr().out
    assert whisper.flags[-2:] == ["--translate-with", "http://h:1"]
    # Others see command lines.
    assert whisper.env == {"SGLANG_EXT_TRANSLATE_KEY": "k"} and "k" not in whisper.flags


def test_a_server_that_ends_is_told_and_ends_the_other(started, monkeypatch, capsys):
    def end(_):
        started.made[0].running = False

    monkeypatch.setattr(page_servers.time, "sleep", end)
    assert page("--asr-model", "w", "--translate-model", "t") == 2
    assert "t has ended (exit code 9):\nout of memory" in capsys.readouterr().err
    assert started.open == 0


def test_what_a_page_cannot_do_is_said(capsys):
    for args, reason in (
        (("file.wav",), "leave FILE"),
        (("--asr-url", "http://h:1"), "leave FILE and --asr-url out"),
        (("--port", "0"), "expected 1 to 65535"),
    ):
        assert page(*args) == 2
        assert reason in capsys.readouterr().err
    assert main(["captions"]) == 2
    assert "name a FILE" in capsys.readouterr().err
