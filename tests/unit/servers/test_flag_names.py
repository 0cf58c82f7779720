"""Flags under the names that SGLang's users look for, and command lines in SGLang's own terms."""

import argparse

import pytest
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_ext.options import Options, add_flags, export_flags
from sglang_ext.servers.flag_names import _ALIASES, METHODS, flags_of, resolved, without


def parsed(*argv: str) -> Options:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return export_flags(parser.parse_args(argv), {})


def test_each_alias_is_its_options_flag():
    assert set(_ALIASES) <= set(Options.__dataclass_fields__)
    assert flags_of("prefix_length") == ("--prefix-length", "--speculative-sssd-prefix-length")
    assert flags_of("max_choices") == ("--max-choices",)
    assert parsed("--speculative-sssd-prefix-length", "4").prefix_length == 4
    assert parsed("--asr-vad-threshold=0.3").vad_threshold == 0.3
    made = parsed("--speculative-specasr-length", "9", "--speculative-ssbd-beta", "0")
    assert (made.asp_length, made.ssbd_beta) == (9, 0)


def test_a_methods_name_is_sssd_with_its_drafter():
    argv = ["--model", "m", "--speculative-algorithm", "suffix", "--port", "1"]
    expected = ["--model", "m", "--speculative-algorithm", "SSSD", "--port", "1"]
    assert resolved(argv) == (expected, {"drafter": "suffix"})
    assert resolved(["--speculative-algorithm=PLD"])[0] == ["--speculative-algorithm=SSSD"]


def test_no_algorithm_of_sglangs_has_such_a_name():
    for name in METHODS:
        with pytest.raises(ValueError, match=name):
            SpeculativeAlgorithm.from_string(name)


@pytest.mark.parametrize("flag", ["--speculative-draft-model-path", "--speculative-draft-model"])
def test_sglangs_draft_model_is_ours_where_the_algorithm_is(flag):
    argv = ["--speculative-algorithm", "SPECASR", flag, "tiny", "--port", "1"]
    kept, options = resolved(argv)
    assert options == {"drafter": "specasr", "draft_model": "tiny"}
    assert kept == ["--speculative-algorithm", "SSSD", "--port", "1"]
    assert resolved(["--speculative-algorithm", "sssd", f"{flag}=t"])[1] == {"draft_model": "t"}


@pytest.mark.parametrize("algorithm", [["--speculative-algorithm", "EAGLE3"], []])
def test_another_algorithms_command_line_stays_as_it_is(algorithm):
    argv = [*algorithm, "--speculative-draft-model-path", "head"]
    assert resolved(argv) == (argv, {})


def test_flags_go_with_their_values():
    assert without(["--a", "1", "--b=2", "--c", "3"], "--a", "--b") == ["--c", "3"]
