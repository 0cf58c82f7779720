"""bench_mirror's parts: what is kept of them, what is asked again, limits, kills."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from scripts import bench_mirror
from scripts.lib import mirror_distribution, mirror_kills, mirror_parts
from scripts.lib.mirror_distribution import Sampled
from scripts.lib.mirror_folder import ResultFolder
from scripts.lib.mirror_kills import Kills, Load, kill_executors
from scripts.lib.mirror_limits import LIMITS, broken, unmeasured
from scripts.lib.mirror_parts import Part, all_parts, asked_by_turns
from scripts.lib.mirror_rows import AR, MIRROR, SD, splits
from scripts.lib.mirror_runs import Answer, Settings
from scripts.lib.spec_bench import Prompt
from tests.eventually import eventually

SETTINGS = Settings("big", "small", "", 64, 7, 2, 256, 500.0)
PROMPTS = {"qa": [Prompt("qa", str(n), (n,)) for n in range(2)], "code": [Prompt("c", "x", (9,))]}


def answer(row: str, task: str = "qa", number: int = 0, temperature: float = 0.0) -> Answer:
    return Answer("lens", row, task, 1, temperature, number, (1, 2, 3), 1.5, {"steps": 2.0})


class Client:
    """Answers at once; ends after so many answers, as a session does."""

    def __init__(self, most: int = 99) -> None:
        self.asked: list[tuple[str, str, int]] = []
        self._most = most

    def answer(self, row, task, number, prompt, temperature) -> Answer:
        if len(self.asked) == self._most:
            raise KeyboardInterrupt
        self.asked.append((row.name, task, number))
        return answer(row.name, task, number, temperature)


def test_what_was_answered_before_an_end_is_not_asked_again(tmp_path):
    rows, first = (AR, SD, MIRROR), Client(most=4)
    kept = ResultFolder(tmp_path, SETTINGS).part("lens-qa")
    with pytest.raises(KeyboardInterrupt):
        asked_by_turns(first, rows, PROMPTS, kept)
    assert [name for name, _, _ in first.asked] == [AR.name, SD.name, MIRROR.name, SD.name]
    with (tmp_path / "lens-qa.jsonl").open("a") as file:
        file.write('{"split": "lens", "ro')  # torn by a kill
    again, second = ResultFolder(tmp_path, SETTINGS).part("lens-qa"), Client()
    asked_by_turns(second, rows, PROMPTS, again)
    assert len(second.asked) == 5 and not set(first.asked) & set(second.asked)
    whole = ResultFolder(tmp_path, SETTINGS).answers()
    assert len(whole) == 9 and whole == again.answers
    # At another temperature they are others.
    asked_by_turns(third := Client(), rows, PROMPTS, again, 1.0)
    assert len(third.asked) == 9


def test_a_folder_is_of_one_setting(tmp_path):
    ResultFolder(tmp_path, SETTINGS)
    other = Settings("big", "small", "", 32, 7, 2, 256, 500.0)
    with pytest.raises(ValueError, match="has results with tokens 64, not 32: name another"):
        ResultFolder(tmp_path, other)


def test_figures_of_parts_are_added_up(tmp_path):
    folder = ResultFolder(tmp_path, SETTINGS)
    folder.part("kills1").finish({"executor_kills": 10, "wrong_after_kills": 0})
    assert folder.part("kills1").complete and not folder.part("kills2").complete
    folder.part("kills2").finish({"executor_kills": 10, "wrong_after_kills": 1})
    assert folder.figures() == {"executor_kills": 20, "wrong_after_kills": 1}


def test_parts_are_run_once_and_none_that_would_end_too_late(tmp_path, capsys):
    folder, ran = ResultFolder(tmp_path, SETTINGS), []

    def part(name: str, minutes: float) -> Part:
        return Part(name, minutes, lambda run, kept: ran.append(name) or {"different_trees": 0})

    parts = [part("a", 10), part("b", 40), part("c", 20)]
    bench_mirror.run_parts(None, parts, folder, 30)
    assert ran == ["a", "c"] and "b: left for the next time (40 min)" in capsys.readouterr().out
    bench_mirror.run_parts(None, parts, folder, None)
    assert ran == ["a", "c", "b"]
    bench_mirror.show(parts, folder)
    assert capsys.readouterr().out.count("done") == 3


def test_every_part_is_under_half_an_hour_and_has_a_name_of_its_own():
    parts = all_parts()
    assert len({part.name for part in parts}) == len(parts)
    assert all(part.minutes < 30 for part in parts)
    assert {"exit1", "exit3", "kills1", "kills2", "distribution", "retrieval", "batches",
            "sampled", "lossless4", "head-rag", "lens-code", "both-qa"} <= {
        part.name for part in parts
    }  # fmt: skip


def test_a_task_begins_its_server_anew(tmp_path):
    said: list[str] = []
    client = SimpleNamespace(warm_up=lambda rows, prompt: None)
    servers = SimpleNamespace(
        of=lambda split: said.append(split.name) or client, stop=lambda: said.append("stop")
    )
    short = [Prompt("qa", "x", (1,))]
    run = mirror_parts.Run(splits([0, 1]), servers, {}, short, 2, (), quick=False)
    run.client("both")
    parts = {part.name: part for part in all_parts()}
    for name in ("both-qa", "lens-qa"):
        parts[name].do(run, ResultFolder(tmp_path, SETTINGS).part(name))
    assert said == ["both", "stop", "both", "stop", "lens"]


def options(monkeypatch, *argv: str):
    # A worker of the tests may have one core alone.
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(sys, "argv", ["bench_mirror", *argv])
    return bench_mirror.read_options()


def test_parts_are_chosen_by_patterns(monkeypatch, capsys):
    chosen = bench_mirror.chosen_parts(options(monkeypatch, "--parts", "kills?,lens-qa"))
    assert [part.name for part in chosen] == ["lens-qa", "kills1", "kills2"]
    quick = bench_mirror.chosen_parts(options(monkeypatch, "--quick"))
    assert {"lens-qa", "kills1", "retrieval"} <= {part.name for part in quick}
    assert len(quick) < len(all_parts()) / 2
    assert len(bench_mirror.chosen_parts(options(monkeypatch))) == len(all_parts())
    for argv, message in (
        (["--parts", "nothing"], "--parts nothing: there is none; known: both-mt-bench"),
        (["--batches", "5"], "numbers of 2 to 4"),
        (["--tokens", "0"], "--tokens must be at least 1"),
    ):
        with pytest.raises(SystemExit):
            options(monkeypatch, *argv)
        assert message in capsys.readouterr().err


GOOD = {
    "outputs_compared": 300, "mismatches": 0, "prompts_compared": 100, "distribution_rejected": 0,
    "distribution_drafted": 900, "speedup_mirror_vs_ar": 2.5, "speedup_mirror_vs_vanilla": 1.25,
    "speedup_mirror_vs_vanilla_both": 1.0, "hidden_share": 0.9, "latency_law_error": 0.05,
    "fallback_rises": 0, "draft_steps_ratio_streaming": 0.67, "draft_steps_ratio_retrieval": 0.8,
    "mirrored_retrieval_critical_ratio": 0.3, "different_trees": 0, "executor_kills": 20,
    "wrong_after_kills": 0, "hangs_after_kills": 0,
}  # fmt: skip


def test_each_limit_that_is_broken_has_a_line_and_ends_with_1(capsys):
    assert not list(broken(GOOD, whole=True)) and not unmeasured(GOOD)
    assert bench_mirror.judged(GOOD, whole=True) == 0
    for limit in LIMITS:
        wrong = limit.least - 0.1 if limit.least is not None else limit.most + 0.1
        [line] = broken(GOOD | {limit.figure: wrong}, whole=True)
        assert line.startswith(f"{limit.figure} is ")
        assert list(broken(GOOD | {limit.figure: wrong}, whole=False)) == [line] * (not limit.whole)
    assert list(broken(GOOD | {"hidden_share": float("nan")}, whole=True))
    capsys.readouterr()
    assert bench_mirror.judged({"mismatches": 2, "hidden_share": 0.5}, whole=False) == 1
    said = capsys.readouterr().out
    assert said.count("broken: ") == 2 and "not measured: outputs_compared, " in said


@pytest.mark.parametrize(("second", "rejected"), [(2, 0), (3, 4)])
def test_sampled_outputs_are_tested_as_check_sampling_does(monkeypatch, second, rejected):
    exact = {(1,): 0.5, (2,): 0.5}
    monkeypatch.setattr(mirror_distribution, "exact_distribution", lambda *_: exact)

    def sample(url, prompt, case, count, params=None) -> Counter:
        other = 2 if params is None else second  # a 3 never comes of the target
        return Counter({(1,): count // 2, (other,): count // 2})

    monkeypatch.setattr(mirror_distribution, "sample", sample)

    class Asked:
        url, drafted = "", 0

        def counts(self) -> dict[str, float]:
            self.drafted += 7
            return {"spec_decode_num_draft_tokens_total": self.drafted}

    prompts = mirror_distribution.prompts_of(
        [Prompt("qa", "x", (1,) * n) for n in (99, 1, 2, 3, 4)]
    )
    figures = Sampled(Asked(), prompts, 200).figures(Asked(), MIRROR)
    assert figures["distribution_rejected"] == rejected and figures["distribution_drafted"] == 7
    assert figures["distribution_tv"] == (0.5 if rejected else 0.0)


def test_a_program_that_finds_nothing_is_no_part_that_is_done(monkeypatch):
    ended = subprocess.CompletedProcess([], 3)
    monkeypatch.setattr(mirror_parts.subprocess, "run", lambda *_, **__: ended)
    part = next(part for part in all_parts() if part.name == "retrieval")
    run = SimpleNamespace(servers=SimpleNamespace(stop=lambda: None), quick=True)
    with pytest.raises(RuntimeError, match="ended with exit status 3"):
        part.do(run, None)


def test_what_comes_under_load_is_counted():
    found, asked = Kills(), []

    def ask(number: int) -> list[int]:
        asked.append(number)
        if number == 2:
            raise TimeoutError("no answer")
        return [number]

    with Load(ask, [[0], [7], [2]], found):
        eventually(lambda: found.answers >= 9)
    assert found.answers == len(asked) and set(asked) == {0, 1, 2}
    assert found.wrong == asked.count(1) and found.hangs == asked.count(2)


class Killed:
    """A draft process that is started again, or not, when it is killed."""

    def __init__(self, comes_back: int) -> None:
        self.kills = self.restarts = 0
        self._comes_back = comes_back

    def send_signal(self, _: int) -> None:
        self.kills += 1
        self.restarts += self.kills <= self._comes_back


@pytest.fixture
def answering(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(mirror_kills, "_AFTER_S", (0.01,))
    monkeypatch.setattr(mirror_kills, "_RESTART_S", 0.0)

    class Made:
        token_ids = (1, 2)

    monkeypatch.setattr(mirror_kills, "generate", lambda *_, **__: Made)
    yield


@pytest.mark.parametrize(("comes_back", "kills", "hangs"), [(9, 5, 0), (2, 3, 1), (4, 5, 1)])
def test_the_executor_is_killed_each_time_that_it_is_back(
    monkeypatch, answering, comes_back, kills, hangs
):
    process = Killed(comes_back)
    monkeypatch.setattr(mirror_kills, "_executor", lambda pid: process)
    metrics = {"drafter.executor_restarts": 0.0}
    monkeypatch.setattr(
        mirror_kills, "read_metrics",
        lambda url: metrics | {"drafter.executor_restarts": process.restarts},
    )  # fmt: skip

    class Server:
        url, tokens, pid = "", 4, 0

    found = kill_executors(Server(), PROMPTS["qa"], MIRROR, 5)
    assert (found.kills, process.kills, found.hangs, found.wrong) == (kills, kills, hangs, 0)
    assert found.answers > 0
