"""Server options (environment and flags) and request options (custom_params)."""

import argparse

import pytest

from sglang_ext.options import OptionError, Options, add_flags, export_flags
from sglang_ext.preflight import PreflightError, check_port
from sglang_ext.request_options import RelaxedRule, RequestOptionError, RequestOptions
from sglang_ext.servers.flags import flag_value, set_flag


def test_defaults_need_no_environment():
    assert Options.from_env({}) == Options()


def test_environment_is_read_by_type():
    options = Options.from_env(
        {"SGLANG_EXT_LIVE_INGEST": "off", "SGLANG_EXT_PREFIX_LENGTH": "6", "OTHER": "x"}
    )
    assert options.live_ingest is False
    assert options.prefix_length == 6


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"SGLANG_EXT_PREFIX_LENGTH": "0"}, "PREFIX_LENGTH='0': expected a whole number"),
        ({"SGLANG_EXT_PREFIX_LENGTH": "four"}, "expected a whole number of at least 1"),
        ({"SGLANG_EXT_LIVE_INGEST": "maybe"}, "expected 1 or 0"),
        ({"SGLANG_EXT_BUDGET": "big"}, "expected one of auto, fixed"),
        ({"SGLANG_EXT_NAMESPACE_HEADER": "x tenant"}, "expected letters, digits and hyphens"),
        ({"SGLANG_EXT_CUDA_WIDTHS": "4, 8"}, "CUDA_WIDTHS='4, 8': expected whole numbers of 2 to"),
        ({"SGLANG_EXT_CUDA_WIDTHS": "1,4"}, "CUDA_WIDTHS='1,4': expected whole numbers of 2 to"),
        ({"SGLANG_EXT_BUDGET_KNEE": "-1"}, "BUDGET_KNEE='-1': expected a whole number"),
    ],
)
def test_wrong_values_name_the_option_and_the_expectation(env, message):
    with pytest.raises(OptionError, match=message):
        Options.from_env(env)


def test_flags_travel_as_environment():
    parser = argparse.ArgumentParser()
    add_flags(parser)
    env: dict[str, str] = {}
    options = export_flags(parser.parse_args(["--branch-length", "9", "--drafter", "none"]), env)
    assert options.branch_length == 9 and options.drafter == "none"
    assert env == {"SGLANG_EXT_BRANCH_LENGTH": "9", "SGLANG_EXT_DRAFTER": "none"}


def test_a_wrong_flag_is_named_as_the_user_wrote_it():
    parser = argparse.ArgumentParser()
    add_flags(parser)
    with pytest.raises(OptionError, match="--branch-length='x'"):
        export_flags(parser.parse_args(["--branch-length", "x"]), {})


def test_loaded_drafters_has_no_doubles_and_no_none():
    assert Options(drafter="none", drafters="sssd, random,sssd").loaded_drafters() == [
        "sssd",
        "random",
    ]


def test_request_options_leave_foreign_keys_alone():
    options = RequestOptions.parse({"drafter": "none", "draft_length": 3, "mine": 1}, ["sssd"])
    assert options == RequestOptions(drafter="none", draft_length=3)
    options = RequestOptions.parse({"namespace": "acme:eu-1@x.y_z", "ingest_name": "job/7"}, [])
    assert options.namespace == "acme:eu-1@x.y_z" and options.ingest_name == "job/7"
    assert RequestOptions.parse(None, []) == RequestOptions()


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"drafter": "eagle"}, "drafter must be one of none, sssd, got 'eagle'"),
        ({"draft_length": -1}, "draft_length must be a whole number of at least 0, got -1"),
        ({"draft_length": True}, "draft_length"),
        ({"draft_length": "8"}, "draft_length"),
        ({"ingest": "no"}, "ingest must be true or false, got 'no'"),
        ({"datastore": 0}, "datastore must be true or false, got 0"),
        ({"namespace": ""}, "namespace must be 1 to 128 characters"),
        ({"namespace": "a/b"}, "namespace must be 1 to 128 characters of A-Z .*, got 'a/b'"),
        ({"namespace": "é"}, "namespace"),
        ({"namespace": "a\n"}, "namespace"),
        ({"namespace": 7}, "namespace must be .*, got 7"),
        ({"namespace": "x" * 10_000}, r"namespace must be .*\.\.\. \(10002 characters\)"),
        ({"ingest_name": "a b"}, "ingest_name must be 1 to 256 visible ASCII characters"),
        ({"ingest_name": ["r"]}, "ingest_name"),
        ({"relaxed": 3}, "relaxed must be an object with top_beta, tau and by.*, got 3"),
        ({"relaxed": True}, "relaxed must be an object"),
        ({"relaxed": {"top_beta": 0}}, "relaxed.top_beta must be a whole number of 1 to 32, got 0"),
        ({"relaxed": {"top_beta": 33}}, "relaxed.top_beta must be .*, got 33"),
        ({"relaxed": {"top_beta": True}}, "relaxed.top_beta"),
        ({"relaxed": {"top_beta": 2.5}}, "relaxed.top_beta"),
        ({"relaxed": {"top_beta": "3"}}, "relaxed.top_beta must be .*, got '3'"),
        ({"relaxed": {"tau": -0.1}}, "relaxed.tau must be a number from 0 to 10, got -0.1"),
        ({"relaxed": {"tau": float("nan")}}, "relaxed.tau must be .*, got nan"),
        ({"relaxed": {"tau": float("inf")}}, "relaxed.tau"),
        ({"relaxed": {"tau": 10.5}}, "relaxed.tau"),
        ({"relaxed": {"tau": "1"}}, "relaxed.tau"),
        ({"relaxed": {"tau": None}}, "relaxed.tau must be .*, got None"),
        ({"relaxed": {"by": "both"}}, "relaxed.by must be target or drafter, got 'both'"),
        ({"relaxed": {"beta": 3}}, "relaxed has no field 'beta'; known: top_beta, tau, by"),
    ],
)
def test_request_options_name_the_field(params, message):
    with pytest.raises(RequestOptionError, match=message):
        RequestOptions.parse(params, ["sssd"])


def test_a_relaxed_rule_has_the_papers_high_quality_for_a_default():
    asked = RequestOptions.parse({"relaxed": {"top_beta": 5, "tau": 3}}, []).relaxed
    assert asked == RelaxedRule(top_beta=5, tau=3.0, by="target")
    assert RequestOptions.parse({"relaxed": {}}, []).relaxed == RelaxedRule(top_beta=3, tau=1.0)
    assert RequestOptions.parse({"relaxed": None}, []).relaxed is None


def test_flag_values_in_both_spellings():
    argv = ["--model", "a", "--port=31", "--model-path=b"]
    assert flag_value(argv, "--model-path", "--model") == "b"
    assert flag_value(argv, "--port") == "31"
    assert flag_value(argv, "--host") is None
    assert set_flag(argv, "c", "--model-path", "--model") == [
        "--model", "c", "--port=31", "--model-path=c",
    ]  # fmt: skip


def test_a_port_in_use_is_named():
    import socket

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        with pytest.raises(PreflightError, match=f"port {port} on 127.0.0.1 is in use"):
            check_port("127.0.0.1", port)
