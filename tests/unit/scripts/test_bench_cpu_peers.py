"""bench_cpu_peers: its ratios, its words on the command line, and talking to peers' processes."""

import argparse
import dataclasses
import itertools
import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts import bench_cpu_peers, check_lossless
from scripts.bench_shared_cores import Run
from scripts.bench_shared_cores import figures_of as shared_figures_of
from scripts.lib import (
    cpu_peers_common,
    cpu_peers_formats,
    cpu_peers_verify,
    peer_process,
    peer_weights,
)
from scripts.lib.cpu_peers_asr import PEER, PLAIN, SPECASR, Column, per_audio_second, turned
from scripts.lib.cpu_peers_asr import figures_of as asr_figures_of
from scripts.lib.cpu_peers_common import Taken, UsageError, ratio_figures, weights_flags
from scripts.lib.cpu_peers_formats import FORMS
from scripts.lib.cpu_peers_limits import LIMITS, broken
from scripts.lib.cpu_peers_llm import BATCHES, COLD, LOOKUP, TURN, WARM, WORKLOADS, Cell, in_turns
from scripts.lib.cpu_peers_llm import PEER as LLAMA
from scripts.lib.cpu_peers_llm import figures_of as llm_figures_of
from scripts.lib.cpu_peers_page import write_page
from scripts.lib.cpu_peers_verify import (
    NODES,
    VerifyTurn,
    attention_pass,
    linear_pass,
    median_seconds,
    repeated,
)
from scripts.lib.peer_llama import Row, Sequences
from scripts.lib.peer_process import PeerError, PeerProcess
from sglang_ext.options import Options

ECHO = """
import json, sys
print(json.dumps({"versions": {"echo": "1"}}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked.get("end"):
        sys.exit(3)
    print(json.dumps({"error": "no"} if asked.get("fail") else {"got": asked}), flush=True)
"""


@pytest.fixture
def echo(tmp_path, monkeypatch):
    (tmp_path / "echo.py").write_text(ECHO)
    monkeypatch.setattr(peer_process, "__file__", str(tmp_path / "peer_process.py"))
    with PeerProcess("echo.py", [], Path(sys.executable)) as peer:
        yield peer


def test_a_peer_answers_line_by_line(echo):
    assert echo.loaded == {"versions": {"echo": "1"}}
    assert echo.ask(prompts=[[1, 2]], text="ä\n") == {"got": {"prompts": [[1, 2]], "text": "ä\n"}}
    assert echo.ask(n=2) == {"got": {"n": 2}}


def test_a_peer_that_fails_or_ends_is_told(echo):
    with pytest.raises(PeerError, match=r"echo\.py: no"):
        echo.ask(fail=True)
    with pytest.raises(PeerError, match="has ended"):
        echo.ask(end=True)


def test_without_the_peers_environment_the_command_says_how_to_get_it(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(peer_weights, "default_cache_dir", lambda: tmp_path)
    (tmp_path / "bench" / "whisper-base-as-published").mkdir(parents=True)
    monkeypatch.setattr(bench_cpu_peers, "PARTS", {"asr": lambda options: missing(tmp_path)})
    monkeypatch.setattr(sys, "argv", ["bench_cpu_peers", "--parts", "asr"])
    assert bench_cpu_peers.main() == 2
    assert "make peers" in capsys.readouterr().err


def missing(folder: Path) -> dict[str, float]:
    PeerProcess("peer_whisper.py", [], folder / "python")
    return {}


def test_a_form_of_weights_that_the_server_does_not_know_is_refused(monkeypatch, capsys):
    plain = dataclasses.make_dataclass("Options", ["drafters"])
    monkeypatch.setattr(cpu_peers_common, "Options", plain)
    monkeypatch.setattr(
        sys, "argv", ["bench_cpu_peers", "--llm-weights", "int4", "--asr-weights", ""]
    )
    assert bench_cpu_peers.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --llm-weights int4:") and "--cpu-weights" in line
    with pytest.raises(UsageError):
        weights_flags("int8", "--asr-weights")
    known = dataclasses.make_dataclass("Options", ["cpu_weights"])
    monkeypatch.setattr(cpu_peers_common, "Options", known)
    assert weights_flags("int8", "--asr-weights") == ["--cpu-weights", "int8"]
    monkeypatch.setattr(cpu_peers_common, "Options", Options)
    assert weights_flags("", "--asr-weights") == []


def test_ratios_are_of_sums_and_state_their_error():
    figures = ratio_figures("r", [2.0, 4.4], [1.0, 2.0])
    assert figures["r"] == pytest.approx(6.4 / 3)
    assert figures["r_error_percent"] > 10
    assert ratio_figures("r", [1.0], [2.0]) == {"r": 0.5}


def test_asr_ratios_are_specasrs_unless_they_say_otherwise():
    columns = {
        PEER: Column([Taken(1.0, 2.0), Taken(2.0, 4.0)], [Taken(4.0, 8.0)]),
        SPECASR: Column([Taken(2.0, 3.0), Taken(2.0, 3.0)], [Taken(2.0, 4.0)]),
        PLAIN: Column([Taken(4.0, 9.0), Taken(5.0, 9.0)], [Taken(8.0, 8.0)]),
    }
    figures = asr_figures_of(columns, audio_s=10.0)
    figures |= per_audio_second(columns, [5.0] * 10)
    assert figures["asr_cpu_s_per_audio_s_faster_whisper"] == pytest.approx(6 / 50)
    # Two clips were left over when the others went eight at a time.
    assert figures["asr_wall_s_per_audio_s_eight_at_once_plain"] == pytest.approx(8 / 40)
    assert figures["asr_cpu_ratio"] == pytest.approx(1.0)
    assert figures["asr_wall_ratio"] == pytest.approx(4 / 3)
    assert figures["asr_cpu_ratio_eight_at_once"] == pytest.approx(0.5)
    assert figures["asr_wall_ratio_eight_at_once_plain"] == pytest.approx(2.0)
    assert figures["asr_cpu_ratio_plain"] == pytest.approx(3.0)


def cells(outputs=lambda name: {"a": [1, 2]}):
    speeds = {LLAMA: 10, LOOKUP: 12, "plain": 5, COLD: 10, WARM: 20}
    return {
        (name, loaded, rows): Cell(
            [Taken(1.0, 1.0, speed * rows), Taken(1.0, 1.0, speed * rows)], outputs(name)
        )
        for name, speed in speeds.items()
        for loaded in WORKLOADS
        for rows in BATCHES
    }


def test_llm_ratios_are_to_llamacpps_plain_decoding():
    figures = llm_figures_of(cells())
    assert figures["llm_ratio_vs_llamacpp_plain"] == pytest.approx(0.5)
    assert figures["llm_ratio_vs_llamacpp_sssd_warm"] == pytest.approx(2.0)
    assert figures["llm_ratio_vs_llamacpp_sssd_cold_batch8"] == pytest.approx(1.0)
    assert figures["llamacpp_lookup_ratio"] == pytest.approx(1.2)
    assert figures["llamacpp_tokens_per_s_batch8"] == pytest.approx(80)
    assert figures["llm_mismatches"] == 0
    assert figures["llamacpp_equal_outputs_percent"] == 100


def test_speculation_that_writes_something_else_is_counted():
    figures = llm_figures_of(cells(lambda name: {"a": [1, 3 if name == WARM else 2]}))
    assert figures["llm_mismatches"] == len(WORKLOADS) * len(BATCHES)


def test_engines_take_turns_at_being_first():
    assert [turned(["a", "b", "c"], turn)[0] for turn in range(4)] == ["a", "b", "c", "a"]


@pytest.mark.parametrize(("rows", "size"), [(1, TURN), (8, 5)])
def test_each_engine_has_all_items_a_few_at_a_time_in_a_namespace_of_its_own(rows, size):
    items = [SimpleNamespace(id=f"item {number}") for number in range(5)]
    seen = []

    def run(name, items, in_flight, namespace):
        seen.append((name, len(items), in_flight, namespace))
        return Taken(2.0, 3.0, 4), {item.id: [len(seen)] for item in items}

    found = in_turns({name: partial(run, name) for name in "ab"}, items, rows)
    turns = -(-len(items) // size)
    assert [name for name, *_ in seen] == list("abbaab")[: 2 * turns]
    assert all(count <= size and in_flight == rows for _, count, in_flight, _ in seen)
    assert len({(name, namespace) for name, *_, namespace in seen}) == 2
    for taken, outputs in found.values():
        assert taken == Taken(2.0 * turns, 3.0 * turns, 4 * turns)
        assert list(outputs) == [item.id for item in items]


def test_a_whispers_vocabulary_is_in_the_order_of_its_ids(tmp_path):
    tokenizer = {
        "model": {"vocab": {"b": 1, "a": 0}}, "added_tokens": [{"content": "<|x|>", "id": 2}]
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    peer_weights._write_vocabulary(tmp_path)
    assert json.loads((tmp_path / "vocabulary.json").read_text()) == ["a", "b", "<|x|>"]


class Counting(Sequences):
    """Sequences whose model says the number of tokens that it has read of a sequence."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._llama = self
        self._context = None
        self.passes: list[dict[int, list[int]]] = []
        self.forgotten: list[int] = []

    def llama_get_memory(self, context: None) -> None: ...

    def llama_memory_seq_rm(self, memory: None, sequence: int, start: int, end: int) -> None:
        self.forgotten.append(sequence)

    def _step(self, rows: dict[int, Row]) -> dict[int, int]:
        self.passes.append({sequence: list(row.pending) for sequence, row in rows.items()})
        for row in rows.values():
            row.read += len(row.pending)
        return {sequence: row.read for sequence, row in rows.items()}


def test_llamacpps_sequences_are_batched_continuously():
    engine = Counting(rows=2)
    outputs = engine.run([([7, 7], 3), ([7], 1), ([7, 7, 7], 2)], ends={4})
    assert outputs == [[2, 3, 4], [1], [3, 4]]
    # The third prompt comes in as soon as the second has ended, beside the first's next token.
    assert engine.passes == [{0: [7, 7], 1: [7]}, {0: [2], 1: [7, 7, 7]}, {0: [3], 1: [3]}]
    assert sorted(engine.forgotten) == [0, 1, 1]


def test_attention_of_a_small_model_is_timed(tmp_path):
    config = {
        "model_type": "llama", "num_attention_heads": 2, "num_key_value_heads": 1,
        "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 8, "vocab_size": 8,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    for form in ("fp32", "int4"):
        assert 0 < median_seconds(attention_pass(str(tmp_path), context=20, form=form)) < 60


def test_the_rows_stand_on_their_page_and_in_performance_md_once(tmp_path):
    page = tmp_path / "performance.md"
    page.write_text("# Performance\n\n## Results\n\nx\n\n## By category\n\ny\n")
    figures = llm_figures_of(cells()) | {"foreign_cpu_percent": 12.0, "steal_percent": 0.0}
    for _ in range(2):
        write_page(tmp_path, figures, {"llm": "int4", "asr": "float32"})
    text = page.read_text()
    assert text.count("## Beside llama.cpp and faster-whisper") == 1
    assert text.index("Beside llama.cpp") < text.index("## By category")
    assert "| SSSD warm | 20.0 (2.00x) | 160.0 (2.00x) |" in text
    assert "| llama.cpp, prompt lookup | 12.0 (1.20x) | - |" in text and "ours: int4" in text
    assert "Other programs took 12%" in (tmp_path / "measured" / "cpu-peers.md").read_text()
    assert text.startswith("# Performance") and text.endswith("## By category\n\ny\n")


def run(monkeypatch, path, **found):
    """The exit code of a run of parts that find these figures."""
    parts = {name: lambda options, value=value: value for name, value in found.items()}
    monkeypatch.setattr(bench_cpu_peers, "PARTS", parts)
    monkeypatch.setattr(sys, "argv", ["bench_cpu_peers", "--json", str(path)])
    return bench_cpu_peers.main()


def test_parts_run_one_by_one_and_broken_limits_are_lines(monkeypatch, tmp_path, capsys):
    path = tmp_path / "figures.json"
    assert run(monkeypatch, path, verify={"verify_overhead": 1.2}) == 0
    found = {"llm_ratio_vs_llamacpp_plain": 0.7, "asr_cpu_ratio": 0.9}
    assert run(monkeypatch, path, llm=found) == 1
    assert capsys.readouterr().err.splitlines() == [
        "llm_ratio_vs_llamacpp_plain is 0.7: expected at least 0.8"
    ]
    kept = json.loads(path.read_text())["figures"]
    assert kept["verify_overhead"] == 1.2 and kept["asr_cpu_ratio"] == 0.9
    assert run(monkeypatch, path, verify={"verify_overhead": 1.5}, llm={"asr_cpu_ratio": 1.1}) == 1
    assert len(capsys.readouterr().err.splitlines()) == 3


def test_what_a_part_has_found_is_kept_when_the_next_one_fails(monkeypatch, tmp_path, capsys):
    def fails(options):
        raise PeerError("gone")

    path = tmp_path / "figures.json"
    parts = {"verify": lambda options: {"verify_overhead": 1.2}, "asr": fails}
    monkeypatch.setattr(bench_cpu_peers, "PARTS", parts)
    monkeypatch.setattr(sys, "argv", ["bench_cpu_peers", "--json", str(path)])
    assert bench_cpu_peers.main() == 2
    assert json.loads(path.read_text()) == {"figures": {"verify_overhead": 1.2}}
    path.write_text("[1]")
    assert bench_cpu_peers.main() == 2
    assert "no file of figures" in capsys.readouterr().err and path.read_text() == "[1]"


def test_every_limit_is_of_a_figure_that_some_part_gives():
    """Names of limits that no part writes would never be broken."""
    columns = {
        name: Column([Taken(1.0, 1.0)] * 8, [Taken(1.0, 1.0)]) for name in (PEER, SPECASR, PLAIN)
    }
    given = asr_figures_of(columns, audio_s=8.0) | llm_figures_of(cells())
    runs = {("default", busy): [Run(1.0, 1.0)] for busy in (0, 2, 8)}
    given |= shared_figures_of(runs, ["default"], (0, 2, 8))
    source = "".join(
        (Path(bench_cpu_peers.__file__).parent / file).read_text()
        for file in ("lib/cpu_peers_asr.py", "lib/cpu_peers_verify.py")
    )
    by_form = [f"{what}_{form}" for what in ("decode_ratio", "perplexity_ratio", "mismatches")
               for form in FORMS]  # fmt: skip
    missing = [
        limit.figure for limit in LIMITS
        if limit.figure not in (*given, *by_form, "memory_ratio_smollm2", "memory_ratio_whisper")
        and f'"{limit.figure}"' not in source
    ]  # fmt: skip
    assert not missing


def test_a_figure_that_is_no_number_keeps_no_limit():
    assert list(broken({"asr_cpu_ratio": float("nan")})) == [
        "asr_cpu_ratio is nan: expected at most 1"
    ]


def test_memory_is_that_of_a_form_by_float32s_and_by_that_of_before(monkeypatch, tmp_path):
    def mib(form: str, checkout: Path | None) -> float:
        assert (checkout == tmp_path) == (form == "")
        return {"": 5000.0, "fp32": 4000.0, "int8": 1000.0, "int4": 2000.0}[form]

    monkeypatch.setattr(cpu_peers_formats, "_text_mib", lambda model, *kind: mib(*kind))
    monkeypatch.setattr(cpu_peers_formats, "_speech_mib", lambda options, *kind: mib(*kind))
    options = argparse.Namespace(
        model="m", llm_weights="int4", asr_weights="int8", memory_before=tmp_path
    )
    with pytest.raises(UsageError, match="no checkout"):
        cpu_peers_formats.memory_figures(options)
    (tmp_path / "sglang_ext").mkdir()
    (tmp_path / "sglang_ext" / "cli.py").touch()
    figures = cpu_peers_formats.memory_figures(options)
    assert figures["memory_ratio_smollm2"] == 0.4 and figures["memory_ratio_whisper"] == 0.2
    assert figures["memory_ratio_smollm2_by_fp32"] == 0.5
    assert figures["memory_mib_whisper_int8"] == 1000.0
    assert figures["memory_mib_whisper_before"] == 5000.0


def test_mismatches_are_told_by_form(monkeypatch):
    asked = []

    def figures(model, prompts, tokens, form):
        asked.append((model, prompts, tokens, form))
        return {"mismatches": 0, "prompts": len(prompts)}

    monkeypatch.setattr(check_lossless, "prompts_of", lambda model, quick: ["a prompt"] * 100)
    monkeypatch.setattr(check_lossless, "lossless_figures", figures)
    options = argparse.Namespace(model="m", quick=False)
    found = cpu_peers_formats.lossless_part("int4")(options)
    assert found == {"mismatches_int4": 0, "prompts_int4": 100}
    assert asked[0][3] == "int4"


def _verify_turns(steps):
    """What is asked of a measuring function, and the function: steps of these seconds."""
    asked = []

    def measured(prompt):
        asked.append(prompt)
        return VerifyTurn(next(steps), 12.0, linear_s=0.015, attention_s=0.001)

    return asked, measured


def test_verify_steps_are_measured_until_their_ratio_is_sure():
    steps = iter([0.010, 0.030] + [0.020] * 1000)
    asked, measured = _verify_turns(steps)
    figures = repeated(measured, ["a", "b"], most=500)
    assert figures["verify_overhead"] == pytest.approx(1.25)
    assert figures["verify_overhead_error_percent"] <= 3.0
    assert 4 < len(asked) < 1000 and asked[:4] == ["a", "b", "a", "b"]
    assert figures["verify_step_ms"] == pytest.approx(20.0)


def test_verify_steps_that_never_agree_are_measured_so_often_and_no_more():
    steps = itertools.cycle([0.010, 0.030])
    asked, measured = _verify_turns(steps)
    assert repeated(measured, ["a", "b"], most=3)["verify_overhead_error_percent"] > 3.0
    assert len(asked) == 6


@pytest.mark.parametrize("form", ["fp32", "bf16", "int8", "int4"])
def test_linear_layers_have_the_servers_weights_and_see_every_node(monkeypatch, form):
    seen = []
    monkeypatch.setattr(cpu_peers_verify, "run", lambda rows, weights: seen.append((rows, weights)))
    shapes = [(64, 32), (96, 64)]
    linear_pass(shapes, form)()
    rows, weights = seen[0]
    results = [w.linear(x).shape for x, w in zip(rows, weights, strict=True)]
    assert results == [(NODES, 64), (NODES, 96)]
    # With a scale a group of 32 inputs, and a least value in 4 bits; heads keep 8 bits.
    bits = {"fp32": (32, 32), "bf16": (16, 16), "int8": (8.5, 8.5), "int4": (5, 8.5)}[form]
    assert [w.nbytes * 8 for w in weights] == [
        n * k * b for (n, k), b in zip(shapes, bits, strict=True)
    ]
