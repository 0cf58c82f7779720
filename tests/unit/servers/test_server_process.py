"""A server's process: small HTTP servers in the place of SGLang's."""

import os
import signal
import sys
from pathlib import Path

import httpx
import pytest

from sglang_ext.servers import started_server
from sglang_ext.servers.processes import free_port
from sglang_ext.servers.server_process import ServerError, ServerProcess, is_ready
from tests.eventually import eventually
from tests.tiny_server import SERVER


def server_command(code: str, port: int) -> list[str]:
    return [sys.executable, "-c", code, str(port)]


def server(folder: Path, code: str = SERVER, **options) -> ServerProcess:
    port = free_port()
    url, command = f"http://127.0.0.1:{port}", server_command(code, port)
    return ServerProcess("x", command, url, folder / "x.log", **options)


def test_it_is_up_within_the_block_and_gone_behind_it(tmp_path):
    with server(tmp_path) as made:
        assert is_ready(made.url) and made.is_ready() and made.is_running()
        assert made.exit_code() is None
        assert made.cpu_seconds() > 0 and made.memory_bytes() > 1 << 20
        assert made.tail() == "listening"
    assert not is_ready(made.url) and not made.is_running()


def test_one_that_ends_is_told_with_its_last_lines(tmp_path):
    code = "print(*range(100), sep=chr(10)); raise SystemExit(3)"
    with pytest.raises(ServerError, match=r"(?s)^x did not start \(exit code 3\):\n70\n71\n.*99$"):
        server(tmp_path, code).start().wait()


def test_one_that_takes_too_long_is_stopped(tmp_path):
    made = server(tmp_path, "import time; print('loading'); time.sleep(600)").start()
    pid = made.pid
    eventually(made.output)
    with pytest.raises(ServerError, match=r"^x was not ready after 0 s:\nloading$"):
        made.wait(0.4)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_it_is_ready_when_its_own_check_says_so(tmp_path):
    code = "import time; print('a'); time.sleep(0.5); print('b'); time.sleep(600)"
    made = server(tmp_path, code, ready=lambda: made.tail() == "a\nb")
    with made:
        assert made.output() == "a\nb\n"


def test_its_environment_has_more_and_less_than_ours(tmp_path, monkeypatch):
    monkeypatch.setenv("TEST_HAS", "1")
    code = "import os; print(os.environ.get('TEST_HAS'), os.environ.get('TEST_NEW'))"
    made = server(tmp_path, code, env={"TEST_NEW": "2"}, without=["TEST_HAS"]).start()
    eventually(lambda: made.exit_code() == 0)
    assert made.tail() == "None 2"


def test_output_of_before_is_kept(tmp_path):
    made = server(tmp_path, "print('hello')")
    for _ in range(2):
        made.start()
        eventually(lambda: made.exit_code() == 0)
    assert made.output() == "hello\nhello\n"


def test_a_paused_one_answers_when_it_goes_on(tmp_path):
    with server(tmp_path) as made:
        made.pause()
        with pytest.raises(httpx.TimeoutException):
            httpx.get(made.url, timeout=0.3)
        made.resume()
        assert httpx.get(made.url, timeout=30).is_success


def test_kill_waits_for_nothing(tmp_path):
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf'); time.sleep(600)"
    made = server(tmp_path, code).start()
    eventually(made.output)
    pid = made.pid
    made.kill()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_stop_kills_what_is_deaf_after_its_grace(tmp_path):
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf'); time.sleep(600)"
    made = server(tmp_path, code, grace_s=0.2).start()
    eventually(made.output)
    pid = made.pid
    made.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def test_what_does_not_run_has_no_process(tmp_path):
    made = server(tmp_path)
    made.stop()
    made.kill()
    made.resume()
    assert made.exit_code() is None and made.tail() == ""
    with pytest.raises(AssertionError, match="x is not running"):
        made.memory_bytes()


def test_a_commands_server_has_a_folder_of_its_own_that_goes_with_it(tmp_path, monkeypatch):
    code = "import os; print(os.environ['TMPDIR'], flush=True)" + SERVER
    monkeypatch.setattr(
        started_server, "serve_command", lambda model, port, flags: server_command(code, port)
    )
    log = tmp_path / "kept.log"
    with started_server.started("m", [], log) as made:
        assert is_ready(made.wait().url)
        folder = Path(made.output().splitlines()[0])
        assert folder.is_dir()
    assert not folder.exists() and not is_ready(made.url)
    assert log.read_text() == f"{folder}\nlistening\n"


def test_a_commands_server_that_fails_is_named_by_its_model(monkeypatch):
    monkeypatch.setattr(
        started_server, "serve_command",
        lambda model, port, flags: server_command("print('no room'); raise SystemExit(2)", port),
    )  # fmt: skip
    words = r"^the server with m did not start \(exit code 2\):\nno room$"
    with started_server.started("m", []) as made, pytest.raises(ServerError, match=words):
        made.wait()
