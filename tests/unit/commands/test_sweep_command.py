"""The command line: what it asks for, what it refuses, and what it leaves behind."""

import json
from dataclasses import replace

import pytest

from sglang_ext.cli import main
from sglang_ext.commands import sweep
from sglang_ext.sweep import data_files
from sglang_ext.sweep.methods import DEFAULT_METHODS
from sglang_ext.sweep.results import Results
from tests.unit.sweep.fake_server import FakeServer
from tests.unit.sweep.finished_sweep import PLAN, write_sweep
from tests.unit.sweep.test_runner import WORKLOADS


class Tokenizer:
    def decode(self, ids, skip_special_tokens):
        return " ".join(map(str, ids))


@pytest.fixture
def servers():
    """plain and sssd."""
    made = {"plain": FakeServer(), "sssd": FakeServer("SSSD")}
    yield made
    for server in made.values():
        server.die()


@pytest.fixture
def reported(monkeypatch):
    """The folders that were reported on; workloads and model are replaced by small ones."""
    folders: list = []
    monkeypatch.setattr(sweep, "_report", folders.append)
    monkeypatch.setattr(
        sweep,
        "_load",
        lambda plan: ({w: WORKLOADS["w"] for w in plan.workloads}, "/no/model", Tokenizer()),
    )
    return folders


def urls(servers):
    return [part for key, s in servers.items() for part in ("--url", f"{key}={s.url}")]


def options(folder, *more):
    return [
        "sweep", "--out", str(folder), "--methods", "ar,sssd-live", "--workloads", "mt-bench",
        "--batches", "1,2", "--repeats", "1", *more,
    ]  # fmt: skip


def test_a_method_whose_package_is_missing(tmp_path, servers, packages, reported, capsys):
    packages.clear()
    more = ("--methods", "ar,suffix,sssd-live")
    assert main(options(tmp_path / "r", *more)) == 2
    said = capsys.readouterr().err
    assert "'suffix' needs the package of arctic_inference, which is not installed" in said
    assert "--methods ar,sssd-live" in said
    assert not (tmp_path / "r").exists()
    # A server that runs has what it needs.
    assert main(options(tmp_path / "r", *more, *urls(servers))) == 0


def test_a_sweep_over_running_servers_and_again(tmp_path, servers, reported, capsys):
    assert main(options(tmp_path / "r", *urls(servers))) == 0
    assert reported == [tmp_path / "r"]
    results = Results.read(tmp_path / "r")
    assert len(results.points) == 4
    assert results.environment["versions"]["python"]
    assert results.environment["servers"]["sssd"]["url"] == servers["sssd"].url
    before = len(servers["plain"].calls)
    capsys.readouterr()
    assert main(options(tmp_path / "r", *urls(servers))) == 0
    assert "0 of 4 runs to make" in capsys.readouterr().err
    assert len(servers["plain"].calls) == before
    assert len(Results.read(tmp_path / "r").environment["resumed"]) == 1


def test_a_server_that_dies_leaves_what_is_finished(tmp_path, servers, reported, capsys):
    servers["sssd"].fate = lambda body: "die"
    assert main(options(tmp_path, *urls(servers))) == 1
    said = capsys.readouterr().err
    assert "'sssd' died" in said and "no further runs of sssd-live" in said
    assert "2 runs have no result" in said and "the same command goes on" in said
    assert [p.method for p in Results.read(tmp_path).points if p.error is None] == ["ar", "ar"]
    assert reported == [tmp_path]


def test_no_server_at_the_url(tmp_path, servers, reported, capsys):
    servers["sssd"].die()
    assert main(options(tmp_path, *urls(servers))) == 1
    assert "no SGLang server answers there" in capsys.readouterr().err


def test_another_sweeps_folder(tmp_path, servers, reported, capsys):
    assert main(options(tmp_path, *urls(servers))) == 0
    assert main(options(tmp_path, "--seed", "5", *urls(servers))) == 2
    assert "holds another sweep: seed 0, not 5" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "ar,magic"], "unknown method 'magic'; known: ar, ngram"),
        (["--workloads", "poems"], "unknown workload 'poems'; known: "),
        (["--url", "gpu=http://h:1"], "--url gpu=...: expected one of plain"),
        (["--data", "/no/such/folder"], "there is no such file or folder"),
        (["--methods", "ar,ssbd"], "method 'ssbd' cannot decode workload 'mt-bench' (text); it is"),
        (
            ["--methods", "ar,sssd-live", "--workloads", "audio", "--model", "whisper-base"],
            "method 'sssd-live' cannot decode workload 'audio' (audio); it is for retranslation, t",
        ),
        (["--workloads", "audio"], "'audio' (audio) is not for smollm2-135m-instruct, which reads"),
        (
            ["--workloads", "gsm8k", "--model", "whisper-base"],
            "is not for whisper-base, which reads speech: --workloads audio",
        ),
        (["--batches", ""], "nothing to measure"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(tmp_path, capsys, arguments, message):
    assert main(["sweep", "--out", str(tmp_path / "r"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batches", "1,0"], "whole numbers from 1"),
        (["--batches", "1,1"], "different whole numbers"),
        (["--batches", "1,x"], "whole numbers from 1"),
        (["--rates", "-1"], "numbers above 0"),
        (["--rates", "nan"], "numbers above 0"),
        (["--repeats", "0"], "a whole number from 1"),
        (["--methods", "ar,,"], "different names"),
        (["--methods", "ar,ar"], "different names"),
        (["--url", "localhost:30000"], "expected NAME=http://HOST:PORT"),
    ],
)
def test_malformed_options(tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit):
        main(["sweep", "--out", str(tmp_path), *arguments])
    assert message in capsys.readouterr().err


def test_out_is_missing(capsys):
    assert main(["sweep"]) == 2
    assert "--out DIR is missing" in capsys.readouterr().err


def planned(tmp_path, reported, servers, *arguments):
    main(["sweep", "--out", str(tmp_path), *arguments, *urls(servers)])
    return json.loads((tmp_path / "sweep.json").read_text())


def test_quick_makes_small_what_is_not_given(tmp_path, reported, servers):
    plan = planned(
        tmp_path, reported, servers, "--quick", "--repeats", "1", "--methods", "ar,sssd-cold"
    )
    assert plan["repeats"] == 1
    assert plan["batches"] == list(sweep.QUICK.batches)
    assert plan["max_tokens"] == sweep.QUICK.max_tokens


@pytest.fixture
def plans(monkeypatch):
    """Those that are asked for; nothing is measured."""
    plans: list = []

    def load(plan):
        plans.append(plan)
        raise sweep.SweepUsageError("enough")

    monkeypatch.setattr(sweep, "_load", load)
    return plans


def test_the_defaults(tmp_path, plans):
    assert main(["sweep", "--out", str(tmp_path), "--server-flags", "--x 'a b'"]) == 2
    (plan,) = plans
    assert plan.methods == DEFAULT_METHODS
    assert plan.workloads == ("mt-bench", "gsm8k", "long")
    assert plan.batches == (1, 2, 4, 8, 16) and plan.rates == ()
    assert plan.server_flags == ("--x", "a b")
    assert plan.max_tokens == 128


def whisper(folder):
    """A folder that says it is one."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "whisper"}))
    return str(folder)


def test_the_defaults_of_a_whisper(tmp_path, plans):
    for model in ("whisper-base", whisper(tmp_path / "mine")):
        main(["sweep", "--out", str(tmp_path / "r"), "--model", model, "--quick"])
    for plan in plans:
        assert plan.workloads == ("audio",)
        assert plan.methods[:2] == ("ar", "specasr-fixed") and plan.methods[-1] == "specasr-tsp"
        assert (plan.max_tokens, plan.batches, plan.prompts) == (224, (1, 4), 4)
    assert len(plans) == 2


def test_the_defaults_follow_the_workloads(tmp_path, plans, monkeypatch):
    for name in ("text", "parallel"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("SGLANG_EXT_DATA", str(tmp_path))
    for workloads in ("retranslation", "retranslation,gsm8k"):
        main(["sweep", "--out", str(tmp_path / "r"), "--workloads", workloads])
    monkeypatch.delenv("SGLANG_EXT_DATA")
    main(["sweep", "--out", str(tmp_path / "r"), "--workloads", "retranslation"])
    first, mixed, alone = plans
    assert first.methods == ("ar", "ssbd", "ssbd-bias", "ssbd-plus")
    assert mixed.methods == DEFAULT_METHODS
    assert (first.data, mixed.data) == (str(tmp_path / "parallel"), str(tmp_path / "text"))
    assert alone.data == str(data_files.CARRIED)


def test_a_folder_of_data_that_is_not_there_is_named(tmp_path, plans, monkeypatch, capsys):
    monkeypatch.setenv("SGLANG_EXT_DATA", str(tmp_path / "nowhere"))
    assert main(["sweep", "--out", str(tmp_path / "r"), "--workloads", "gsm8k"]) == 2
    assert f"$SGLANG_EXT_DATA {tmp_path / 'nowhere'}: there is no" in capsys.readouterr().err


def test_report_of_no_sweep(tmp_path, capsys):
    assert main(["sweep", "report", str(tmp_path)]) == 2
    assert "holds no sweep" in capsys.readouterr().err


def test_report_again(tmp_path, servers, reported):
    assert main(options(tmp_path, *urls(servers))) == 0
    assert main(["sweep", "report", str(tmp_path)]) == 0
    assert reported == [tmp_path, tmp_path]


def test_two_sweeps_are_compared(tmp_path, capsys):
    def slower(result, requests):
        own = 1.0 if result.method == "ar" else 1.5
        return replace(result, duration_s=own * result.duration_s), requests

    first, second = tmp_path / "first", tmp_path / "second"
    write_sweep(first)
    write_sweep(second, change=slower)
    compare = ["sweep", "compare", str(first)]
    assert main([*compare, str(first), "--json", str(tmp_path / "same.json")]) == 0
    same = json.loads((tmp_path / "same.json").read_text())["figures"]
    assert same["points"] == 12 and same["worst_difference_percent"] == 0
    capsys.readouterr()
    assert main([*compare, str(second)]) == 1
    assert "worst_difference_percent       40" in capsys.readouterr().out


def test_sweeps_that_cannot_be_compared(tmp_path, capsys):
    first, other = tmp_path / "first", tmp_path / "other"
    write_sweep(first)
    write_sweep(other, plan=replace(PLAN, workloads=("gsm8k",)))
    assert main(["sweep", "compare", str(first), str(other)]) == 2
    assert "no batch size was measured in both" in capsys.readouterr().err
    assert main(["sweep", "compare", str(first), str(tmp_path / "none")]) == 2
    assert str(tmp_path / "none") in capsys.readouterr().err


def test_a_sweep_whose_repeats_differ_too_far_ends_with_3(tmp_path, servers, reported, monkeypatch):
    monkeypatch.setattr("sglang_ext.commands.sweep._report", lambda folder: True)
    assert main(options(tmp_path, *urls(servers))) == 3
