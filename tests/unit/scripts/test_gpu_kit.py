"""The GPU kit's parts that need no GPU: time, results, ties, the planted model, the carry."""

import argparse
import dataclasses
import gzip
import importlib
import io
import json
import lzma
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from scripts.gpu_kit import carry, features, phase_runner, schedule
from scripts.gpu_kit.attention_checks import RELATIVE_ERROR, Verify
from scripts.gpu_kit.checkpoint import SHAPES, lag_vectors, rope_angles, write
from scripts.gpu_kit.engine import COMMON, gpu_flags
from scripts.gpu_kit.kit import Kit, Part
from scripts.gpu_kit.kit_tables import report
from scripts.gpu_kit.lines import FAILED, NAME, PASSED, Lines
from scripts.gpu_kit.phases.latency import summary
from scripts.gpu_kit.phases.lossless import feature_of
from scripts.gpu_kit.phases.sampling import filtered
from scripts.gpu_kit.planted import with_wrong_tokens
from scripts.gpu_kit.probe import compress_trace
from scripts.gpu_kit.ties import Rounding, first_difference, judge, ulp
from scripts.gpu_kit.unpack import unpack
from sglang_ext.servers import processes

TINY = SHAPES["tiny"]


def kit(folder: Path) -> Kit:
    return Kit(str(folder), str(folder), "tiny", 0, True, "test")


# Time


def test_a_phase_gets_its_share_of_what_is_left():
    phases = list(schedule.SECONDS)
    first = schedule.allowance(540, phases)
    assert first == pytest.approx((540 - schedule.RESERVE_S) * 40 / sum(schedule.SECONDS.values()))
    assert schedule.allowance(100, ["trace"]) == 100 - schedule.RESERVE_S


def test_all_phases_together_take_no_more_than_there_is():
    left, phases = 540.0, list(schedule.SECONDS)
    for n in range(len(phases)):
        left -= schedule.allowance(left, phases[n:])
    assert left == pytest.approx(schedule.RESERVE_S)
    assert schedule.allowance(3, phases) == 0


def test_phases_are_chosen_by_number_or_name_in_their_own_order():
    assert schedule.chosen("kernels, 1") == ["environment", "kernels"]
    with pytest.raises(ValueError, match="'7' is none of 1 environment"):
        schedule.chosen("1,7")


def test_every_phase_has_parts_that_exist():
    assert list(phase_runner.PARTS) == list(schedule.SECONDS)
    for phase in schedule.SECONDS:
        module = importlib.import_module(f"scripts.gpu_kit.phases.{phase}")
        assert list(module.PARTS) == phase_runner.PARTS[phase]


# Results on disk


def test_a_line_cut_short_by_a_kill_is_left_out_and_the_next_one_is_whole(tmp_path):
    lines = Lines(tmp_path, {"emulated": True})
    lines.case("kernels", "one", PASSED, error=0.5)
    with open(tmp_path / NAME, "ab") as file:
        file.write(b'{"phase": "kernels", "case": "tw')
    lines.case("kernels", "three", FAILED)
    assert lines.cases("kernels") == {"one": PASSED, "three": FAILED}
    assert all(line["emulated"] for line in lines.read())


def test_a_phase_that_was_killed_has_not_ended(tmp_path):
    lines = Lines(tmp_path, {})
    lines.phase("kernels", PASSED)
    lines.phase("lossless", "timeout")
    lines.case("latency", "batch 1", PASSED)
    assert lines.ended() == {"kernels": PASSED}


def test_an_exception_becomes_a_failed_line_and_the_part_goes_on(tmp_path):
    part = Part(kit(tmp_path), "kernels", deadline=0)
    with part.attempt("breaks"):
        raise RuntimeError("no such kernel")
    part.result("works", True)
    breaks, works = kit(tmp_path).lines().read()
    assert breaks["status"] == FAILED and "no such kernel" in breaks["error"][-1]
    assert works["status"] == PASSED and part.failed


def test_what_failed_in_an_earlier_run_does_not_fail_this_one(tmp_path):
    kit(tmp_path).lines().case("kernels", "walk", FAILED)
    part = Part(kit(tmp_path), "kernels", deadline=0)
    part.result("walk", True)
    assert not part.failed and kit(tmp_path).lines().cases("kernels") == {"walk": PASSED}


def fake_parts(monkeypatch, source: str) -> None:
    """Parts whose processes run `source` instead, a program with `phase`, `name` and `seconds`."""

    def start(command, **kwargs):
        head = f"import sys; phase, name = {command[-2:]!r}; seconds = sys.stdin.readline()\n"
        return processes.start([sys.executable, "-c", head + source], **kwargs)

    monkeypatch.setattr(phase_runner, "start", start)


def test_a_part_that_hangs_is_killed_and_the_next_phase_runs(tmp_path, monkeypatch):
    fake_parts(monkeypatch, "import time\nif name == 'hangs': time.sleep(600)")
    monkeypatch.setattr(phase_runner, "PARTS", {"environment": ["hangs"], "kernels": ["works"]})
    monkeypatch.setattr(phase_runner, "LEAST_S", 0.01)
    monkeypatch.setattr(schedule, "RESERVE_S", 0.0)
    monkeypatch.setattr(schedule, "SECONDS", {"environment": 1, "kernels": 19})
    assert not phase_runner.run(kit(tmp_path), ["environment", "kernels"], 20)
    found = {(line["phase"], line.get("case")): line for line in kit(tmp_path).lines().read()}
    assert found["environment", None]["status"] == "timeout"
    assert "killed after 1 s" in found["environment", "hangs"]["error"][0]
    assert found["kernels", None]["status"] == PASSED


def test_a_part_that_dies_is_told_with_its_last_lines(tmp_path, monkeypatch):
    fake_parts(
        monkeypatch, "print('about to die', flush=True); import os; os.kill(os.getpid(), 11)"
    )
    monkeypatch.setattr(phase_runner, "PARTS", {"environment": ["dies"]})
    assert not phase_runner.run(kit(tmp_path), ["environment"], 60)
    case, phase = kit(tmp_path).lines().read()
    assert case["error"] == ["exit code -11", "about to die"]
    assert phase["status"] == FAILED


def test_chosen_parts_alone_are_run(tmp_path):
    chosen = dataclasses.replace(kit(tmp_path), parts=("acceptance",))
    assert Kit.from_json(chosen.as_json()) == chosen
    assert phase_runner._parts(chosen, "kernels") == [("kernels", "acceptance")]
    with pytest.raises(ValueError, match="phase trace has none of them"):
        phase_runner.run(chosen, ["kernels", "trace"], 60)


def test_a_second_run_does_only_what_has_not_passed(tmp_path, monkeypatch):
    fake_parts(monkeypatch, "open(f'{name}-ran', 'a').write('x')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(phase_runner, "PARTS", {"environment": ["a"], "kernels": ["b"]})
    kit(tmp_path).lines().phase("environment", PASSED)
    assert phase_runner.run(kit(tmp_path), ["environment", "kernels"], 60)
    assert not Path("a-ran").exists() and Path("b-ran").read_text() == "x"


# Ties


def test_a_step_of_bfloat16_is_torchs():
    for value in (0.3, 1.0, 20.0, -17.3, 300.0):
        exact = torch.tensor(value).to(torch.bfloat16)
        up = torch.nextafter(exact.abs(), torch.tensor(float("inf"), dtype=torch.bfloat16))
        assert ulp(float(exact)) == float(up) - float(exact.abs())


def test_two_steps_are_a_tie_and_three_are_not():
    step = ulp(20.0)
    assert judge(3, [7, 9], {7: 20.0, 9: 20.0 - 2 * step, 1: 0.0}).is_tie(Rounding())
    found = judge(3, [7, 9], {7: 20.0, 9: 20.0 - 3 * step, 1: 0.0})
    assert not found.is_tie(Rounding()) and found.ulps == 3 and found.gap == 3 * step
    assert found.is_tie(Rounding(gap=1.5 * step)) and not found.is_tie(Rounding(gap=1.4 * step))


def test_a_token_that_is_not_among_the_largest_is_no_tie():
    assert not judge(0, [7, 8], {7: 20.0, 9: 19.99}).is_tie(Rounding(gap=100.0))


def test_rounding_is_what_two_computations_of_the_same_logits_are_apart():
    pairs = [
        ({1: -0.5, 2: -4.0, 3: -6.0}, {1: -0.75, 2: -4.0, 9: -6.0}),
        ({1: -0.5, 2: -4.0}, {1: -0.5, 2: -3.0}),
    ]
    assert Rounding.between(pairs) == Rounding(logprob=0.25, gap=1.0)
    assert Rounding.between([]) == Rounding.between([({1: 0.0}, {2: 0.0})]) == Rounding()


def test_two_tokens_that_are_both_worse_than_the_best_are_no_tie():
    assert not judge(0, [1, 2], {7: 20.0, 1: 10.0, 2: 10.0}).is_tie(Rounding(gap=1.0))


def test_outputs_part_where_they_differ_or_where_one_ends():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


# Flags


def test_the_flags_of_a_gpu_are_sglangs():
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()  # SGLang's own would set this process's log level
    ServerArgs.add_cli_args(parser)
    args = parser.parse_args(["--model-path", "here", *COMMON, *gpu_flags([])])
    assert args.cuda_graph_bs_decode[-1] == args.max_running_requests == 64
    assert args.context_length == 16384


def test_a_flag_that_is_given_takes_the_place_of_a_gpus_own():
    assert "--context-length" not in gpu_flags(["--context-length", "2048"])
    assert "--cuda-graph-bs-decode" in gpu_flags(["--context-length", "2048"])


# The planted model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("tiny")
    write(folder, TINY, seed=3)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), folder


def test_the_checkpoint_writes_what_the_rule_says_with_wide_gaps(model):
    target, _ = model
    rule = TINY.rule(3)
    for seed in range(3):
        prompt = rule.prompt(30, seed)
        tokens = prompt + rule.continuation(prompt, 60)
        with torch.no_grad():
            logits = target(torch.tensor([tokens])).logits[0].float()
        for at in range(len(prompt) - 1, len(tokens) - 1):
            best = logits[at].topk(4)
            assert best.indices.tolist() == rule.candidates(tokens[: at + 1])
            gap = best.values[0] - best.values[1]
            assert gap > 16 * ulp(float(best.values[0]))


def test_one_wrong_token_some_positions_back_changes_the_rules_output():
    rule = TINY.rule(3)
    prompt = rule.prompt(30, 0)
    for back in (1, *[1 + lag for lag in rule.lags]):
        other = list(prompt)
        other[-back] = next(
            token
            for token in range(200, 512)
            if rule.symbol_of[token] != rule.symbol_of[prompt[-back]]
            and rule.candidates([*prompt[:-back], token, *prompt[len(prompt) - back + 1 :]])
            != rule.candidates(prompt)
        )
        assert rule.continuation(other, 20) != rule.continuation(prompt, 20)


def test_the_tokenizer_reads_text_as_bytes_and_writes_symbols_as_letters(model):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model[1])
    assert tokenizer.encode("abc é", add_special_tokens=False) == list("abc é".encode())
    assert tokenizer.decode([int(t) for t in TINY.rule(3).spoken]) == "abcdefghijklmnop"
    assert tokenizer.eos_token_id == 257 and len(tokenizer) == TINY.vocab


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("lag", [1, 4])
def test_a_lag_is_the_best_distance_of_all_up_to_40_000(shape, lag):
    query, key = lag_vectors(shape.head_dim, lag)
    half = shape.head_dim // 2
    angles = rope_angles(shape.head_dim)
    distance = np.arange(40_000)[:, None]
    # RoPE turns pair n by angles[n] a position.
    cos, sin = np.cos(distance * angles), np.sin(distance * angles)
    turned = np.concatenate([query[:half] * cos, query[:half] * sin], axis=1)
    scores = turned @ key / np.sqrt(shape.head_dim)
    best, second = np.argsort(-scores)[:2]
    assert best == lag and scores[best] - scores[second] > 40


def test_drafts_are_right_as_often_as_they_are_told_to_be():
    output = list(np.arange(5000) % 500)
    for right in (0.0, 0.5, 0.8, 1.0):
        draft = with_wrong_tokens(output, right, 512, seed=1)
        same = np.mean(np.array(draft) == np.array(output))
        assert same == pytest.approx(right, abs=0.03)


# What the phases compute


def test_one_wrong_bit_of_a_mask_is_more_than_rounding_in_every_step():
    for lens in ([37, 5, 120], [2000, 30]):
        step = Verify.random(lens, 8, 4, 2, 64, "cpu", seed=1)
        right = torch.cat([step.expected(n) for n in range(len(lens))]).to(torch.bfloat16)
        error, felt = step.errors(right)
        assert error < RELATIVE_ERROR < felt
        step.tree[0, 7, 0] ^= True
        assert step.errors(right)[0] > RELATIVE_ERROR


def test_an_output_that_is_not_a_number_is_an_error():
    step = Verify.random([37], 8, 4, 2, 64, "cpu", seed=1)
    broken = step.expected(0)
    broken[3, 0, 0] = float("nan")
    assert step.errors(broken)[0] == float("inf")


def test_logits_are_adjusted_as_sglangs_sampler_does():
    logits = {ord("a"): 20.0, ord("b"): -4.0, ord("p"): 6.0, 300: 1.0}
    penalized = features.adjusted(logits, "penalties", [ord("a")] * 3 + [ord("b")], TINY)
    assert penalized[ord("a")] == pytest.approx((20 - 2.0 * 3 - 1.0) / 1.3)
    assert penalized[ord("b")] == pytest.approx((-4 - 2.0 - 1.0) * 1.3)
    assert penalized[ord("p")] == 6.0
    assert list(features.adjusted(logits, "grammar", [], TINY)) == [ord("a"), ord("b")]
    assert ord("a") not in features.adjusted(logits, features.PROCESSOR, [], TINY)
    assert features.adjusted(logits, "stop string", [], TINY) == logits


def test_every_second_request_of_a_feature_is_plain():
    assert feature_of("grammar", 0) == "" and feature_of("grammar", 1) == "grammar"
    assert feature_of(features.PROCESSOR, 0) == features.PROCESSOR
    assert feature_of("staggered, batch 1", 1) == feature_of("logprobs", 1) == ""


def test_a_steps_times_come_from_whole_steps_alone():
    def step(at, requests, decode=True):
        return {
            "at": at, "requests": requests, "decode": decode, "device_ms": 6.0, "forward_ms": 5.0,
            "graph": True, "width": 4,
        }  # fmt: skip

    steps = [
        step(0, 2, False),
        step(1.0, 1),
        step(1.1, 2),
        step(1.11, 2),
        step(1.12, 2),
        step(9, 1),
    ]
    found = summary(steps, 2, tokens=2 + 16)
    assert found["step_ms"] == 10 and found["host_gap_ms"] == 4 and found["steps"] == 2
    assert found["tokens_per_step"] == 2.0 and found["token_ms"] == 5.0
    with pytest.raises(ValueError, match="all 3 requests"):
        summary(steps, 3, tokens=30)


def test_sampling_filters_keep_what_sglang_keeps():
    logits = {5: 8.0, 6: 4.0, 7: 2.0, 8: 0.0}
    kept = filtered(logits, {"temperature": 2.0, "top_k": 3, "min_p": 0.1})
    assert list(kept) == [5, 6]
    assert kept[6] / kept[5] == pytest.approx(np.exp(-2))
    assert sum(kept.values()) == pytest.approx(1)


def test_a_trace_that_is_too_large_keeps_what_the_device_did(tmp_path):
    events = [{"cat": "cpu_op", "name": str(n) * 50} for n in range(3000)]
    events.append({"cat": "kernel", "name": "gemm"})
    plain, packed = tmp_path / "t.json", tmp_path / "t.json.gz"
    plain.write_text(json.dumps({"traceEvents": events}))
    compress_trace(plain, packed, limit=1000)
    kept = json.loads(gzip.decompress(packed.read_bytes()))["traceEvents"]
    assert [event["cat"] for event in kept] == ["kernel"] and not plain.exists()


# What is carried


def items() -> list[carry.Item]:
    return [carry.Item("b", "b/two.py", b"two" * 50), carry.Item("a", "a/one.py", b"one")]


def test_the_same_files_make_the_same_archive_in_any_order():
    assert carry.archive(items()) == carry.archive(items()[::-1])
    plain = io.BytesIO(lzma.decompress(carry.archive(items())))
    with tarfile.open(fileobj=plain) as tar:
        assert tar.getnames() == ["a/one.py", "b/two.py"]


def test_an_archive_is_laid_out_and_the_variables_are_printed(tmp_path, capsys):
    (tmp_path / "kit.tar.xz").write_bytes(carry.archive(items()))
    assert unpack(tmp_path / "kit.tar.xz", tmp_path / "site") == 0
    assert (tmp_path / "site" / "a" / "one.py").read_bytes() == b"one"
    assert f'export PYTHONPATH="{tmp_path / "site"}:' in capsys.readouterr().out


def test_the_total_is_rounded_up():
    assert carry.total_mib({"a": 1.001, "b": 2.0}) == 3.01
    assert carry.total_mib({"a": 64.0}) == 64.0


def test_too_large_an_archive_is_refused_before_it_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(carry, "collect", lambda prebuilt: items())
    monkeypatch.setattr(carry, "_tree_mib", lambda: 64.0)
    assert carry.pack(tmp_path / "kit.tar.xz", None) == 1
    assert "the limit is 64" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_sizes_are_listed_by_group_with_their_total(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(carry, "collect", lambda prebuilt: items())
    monkeypatch.setattr(carry, "_tree_mib", lambda: 2.0)
    assert carry.list_carry(tmp_path / "f.json", None) == 0
    written = json.loads((tmp_path / "f.json").read_text())
    assert 2.0 < written["figures"]["carry_mib"] < 2.1
    assert set(written["groups"]) == {"a", "b", "this repository's tracked files"}
    assert carry.list_carry(tmp_path / "fast.json", None, fast=True) == 0
    bound = json.loads((tmp_path / "fast.json").read_text())["figures"]["carry_mib"]
    assert bound >= written["figures"]["carry_mib"]


def test_of_a_package_caches_tests_and_large_libraries_stay_behind():
    patterns = carry.PACKAGES["sgl_kernel"]
    assert carry.is_left_out("flash_ops.abi3.so", patterns)
    assert carry.is_left_out("sm90/__pycache__/x.pyc", patterns)
    assert not carry.is_left_out("load_utils.py", patterns)
    patterns = carry.PACKAGES["flashinfer"]
    assert carry.is_left_out("data/csrc/fused_moe/a.cu", patterns)
    assert not carry.is_left_out("data/csrc/batch_prefill.cu", patterns)
    assert not carry.is_left_out("data/cutlass/include/cute/layout.hpp", patterns)


def test_every_wheel_to_bring_is_locked():
    versions = carry.locked(carry.REPOSITORY / "requirements.lock")
    assert set(carry.WHEELS) <= set(versions)


# The report


def test_a_report_takes_the_later_of_two_lines_of_a_case():
    line = {"phase": "kernels", "case": "triton, requests 1", "status": "failed", "device": "X"}
    good = line | {"status": "passed", "relative_error": 0.004, "one_wrong_bit_changes": 0.1}
    text = report([line, good, {"phase": "kernels", "status": "passed", "device": "X"}])
    assert "| kernels | 1 | 0 | 0 |" in text and "| triton | 1 | 0.0040 | 0.1000 |" in text


def test_a_report_shows_what_a_step_took():
    figures = {"step_ms": 2.0, "device_ms": 1.5, "host_gap_ms": 0.5, "tokens_per_step": 3.0}
    line = {"phase": "latency", "case": "adaptive, batch 4, acceptance 0.8", "status": "passed"}
    of_step = {"device": "X", "batch": 4, "acceptance": 0.8, "widths": [1, 16], **figures}
    assert "| adaptive | 0.8 | 4 | 2.0 | 1.5 | 0.5 | 3.0 |  | 1 16 |" in report([line | of_step])


def test_lines_do_not_say_where_the_repository_lies(tmp_path):
    lines = Lines(tmp_path, {})
    lines.case("trace", "x", FAILED, error=[f'File "{Path(carry.REPOSITORY)}/scripts/a.py"'])
    assert lines.read()[0]["error"] == ['File "scripts/a.py"']
