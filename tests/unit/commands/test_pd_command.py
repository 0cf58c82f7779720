"""`sglang-ext pd`: what it refuses, and the command lines of its servers."""

import argparse
import socket

import pytest

from sglang_ext import cli
from sglang_ext.commands import pd
from sglang_ext.commands.pd import check_command, plan_members
from sglang_ext.disaggregation import transfer
from sglang_ext.preflight import PreflightError
from sglang_ext.servers.processes import free_port


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    pd.add_commands(parser.add_subparsers())
    args, args.rest = parser.parse_known_args(["pd", *argv])
    return args


def packages_are_there(monkeypatch, missing: str = "") -> None:
    """Have the packages found, but for one, and the transfer backend loaded."""
    for module in (pd, transfer):
        monkeypatch.setattr(module, "find_spec", lambda name: None if name == missing else object())
    monkeypatch.setitem(transfer.BACKENDS, "mooncake", ("mooncake-transfer-engine", "sys"))


def commands(*argv: str) -> dict[str, str]:
    return {m.name: " ".join(m.command) for m in plan_members(parsed(*argv))}


def test_each_server_gets_its_part(monkeypatch):
    made = commands(
        "--model", "m", "--prefill", "2", "--decode", "2", "--port", "31000",
        "--speculative-algorithm", "SSSD", "--prefill-flags", "--chunked-prefill-size 512",
        "--decode-flags=--max-running-requests 8",
    )  # fmt: skip
    assert list(made) == ["prefill 1", "prefill 2", "decode 1", "decode 2", "router"]
    for name, line in made.items():
        assert ("--disaggregation-mode prefill" in line) == name.startswith("prefill")
        assert ("--disaggregation-mode decode" in line) == name.startswith("decode")
        assert ("--chunked-prefill-size 512" in line) == name.startswith("prefill")
        assert ("--max-running-requests 8" in line) == name.startswith("decode")
        assert ("--speculative-algorithm SSSD" in line) == (name != "router")
    router = made["router"]
    assert "--mini-lb" in router and "--port 31000" in router
    assert router.count("--prefill http") == 2 and router.count("--decode http") == 2


def test_ports_are_all_different():
    members = plan_members(parsed("--model", "m", "--prefill", "3", "--decode", "3"))
    assert len({m.url for m in members}) == 7


def test_decode_servers_share_a_datastore_and_prefill_servers_have_none():
    one = plan_members(parsed("--model", "m"))
    assert [dict(m.env) for m in one] == [{}, {}, {}]
    assert list(one[0].without) == ["SGLANG_EXT_DATASTORE"]
    two = plan_members(parsed("--model", "m", "--decode", "2"))
    shared = {"SGLANG_EXT_DATASTORE_SHARED": "1"}
    assert [dict(m.env) for m in two] == [{}, shared, shared, {}]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--model is missing"),
        (["--model", "m", "--disaggregation-mode", "decode"], "--disaggregation-mode is set by"),
        (["--model", "m", "--decode-flags=--port 1"], "--port is set by"),
    ],
)
def test_refusals(argv, message, monkeypatch):
    packages_are_there(monkeypatch)
    with pytest.raises(PreflightError, match=message):
        check_command(parsed(*argv))


@pytest.mark.parametrize("package", ["mooncake", "sglang_router"])
def test_a_missing_package_is_named(package, monkeypatch):
    packages_are_there(monkeypatch, missing=package)
    with pytest.raises(PreflightError, match=package.replace("_", "-")):
        check_command(parsed("--model", "m"))


def test_a_taken_port_is_a_usage_error(monkeypatch, capsys):
    packages_are_there(monkeypatch)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert cli.main(["pd", "--model", "m", "--port", port]) == 2
    assert f"port {port} on 127.0.0.1 is in use" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv", [["--prefill", "0"], ["--decode", "x"], ["--port", "70000"], ["--restart", "2"]]
)
def test_wrong_numbers_are_usage_errors(argv, capsys):
    with pytest.raises(SystemExit):
        parsed("--model", "m", *argv)
    assert "expected" in capsys.readouterr().err


def test_the_rust_router_is_refused_with_a_header_that_it_drops(monkeypatch):
    packages_are_there(monkeypatch)
    monkeypatch.delenv("SGLANG_EXT_NAMESPACE_HEADER", raising=False)
    argv = ["--model", "m", "--router", "rust", "--port", str(free_port())]
    with pytest.raises(PreflightError, match="does not pass the header x-sglang-ext-namespace on"):
        check_command(parsed(*argv))
    check_command(parsed(*argv, "--namespace-header", ""))
    check_command(parsed(*argv, "--namespace-header", "X-Request-Id-Tenant"))
    check_command(parsed("--model", "m", "--router", "mini", *argv[4:]))
    monkeypatch.setenv("SGLANG_EXT_NAMESPACE_HEADER", "x-tenant")
    with pytest.raises(PreflightError, match="the header x-tenant"):
        check_command(parsed(*argv))


def test_each_router_is_the_one_that_carries_headers():
    assert "sglang_ext.disaggregation.mini_router --mini-lb" in commands("--model", "m")["router"]
    rust = commands("--model", "m", "--router", "rust")["router"]
    assert "sglang_router.launch_router --pd" in rust and "--mini-lb" not in rust


def test_a_system_library_that_cannot_be_loaded_is_named_at_once(tmp_path, monkeypatch, capsys):
    """Mooncake's own module, with an empty file found in the place of a library that it needs."""
    pytest.importorskip("mooncake", exc_type=ImportError)
    (tmp_path / "libibverbs.so.1").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setattr(pd, "plan_members", lambda args: pytest.fail("started"))
    assert cli.main(["pd", "--model", "m", "--port", str(free_port())]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("sglang-ext pd: error: --transfer-backend mooncake: the library libib")
    assert "apt install libibverbs1 librdmacm1" in last


def test_a_backend_that_fails_otherwise_is_told_in_its_own_words(monkeypatch):
    monkeypatch.setitem(transfer.BACKENDS, "mooncake", ("m", "no_such_module_of_mooncake"))
    with pytest.raises(PreflightError, match="No module named 'no_such_module_of_mooncake'"):
        transfer.check_transfer_backend("mooncake")
