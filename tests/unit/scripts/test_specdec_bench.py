"""bench_specdec against servers that answer from a rule: what it asks, its tables and figures."""

import argparse
import json
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scripts import bench_specdec
from scripts.bench_specdec import drafters_of, read_options, run
from scripts.lib import (
    specdec_asking,
    specdec_bad_input,
    specdec_training,
    translation_runs,
)
from scripts.lib.drafter_alone import likeliest_path, write_alone
from scripts.lib.specdec_asking import Bench, Pair
from scripts.lib.specdec_bad_input import Case
from scripts.lib.specdec_methods import (
    AT,
    GRID,
    HIGH_EFFICIENCY,
    HIGH_QUALITY,
    Rule,
    growing_methods,
    sentence_methods,
    setting_methods,
)
from scripts.lib.specdec_page import tables_of, write_page
from scripts.lib.specdec_results import (
    GROWING,
    SENTENCES,
    SETTINGS,
    Answer,
    Results,
    per_step,
    repetition,
)
from scripts.lib.specdec_shared import Drafting, encode_seconds, shared_figures
from scripts.lib.specdec_training import Written, write_data
from scripts.lib.ssbd_streams import Stream
from scripts.lib.translation_runs import Prompts
from sglang_ext.block_drafter.drafter_files import save_drafter
from sglang_ext.block_drafter.nat_model import BlockModel
from sglang_ext.block_drafter.shapes import TargetStates
from sglang_ext.block_drafter.target_models import TargetModel
from sglang_ext.block_drafter.training_data import read_file
from sglang_ext.drafters import Drafter
from sglang_ext.request_options import RequestOptions
from sglang_ext.tree import TokenTree
from tests.unit.block_drafter.toy_drafters import (
    SHAPE,
    manifest,
    repeating,
    training_set,
    untrained,
)
from tests.unit.scripts.letters import END, Letters

STREAMS = [
    Stream(("a b c d", "a b c d e f"), "A B C D E F"),
    Stream(("d d e f g h",), "D D E F G H"),
]
PAIR = Pair("m", "{source_language} {target_language}\n\n{source}", "English", "German")


class FakeServer(ThreadingHTTPServer):
    """Translates into capitals; a relaxed rule with a tau above 1 makes an X of the last one."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.asked: list[Any] = []

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        source = "".join(map(chr, body["input_ids"][1:-1])).rsplit("\n", 1)[-1]
        params = body["sampling_params"].get("custom_params") or {"drafter": "none"}
        self.asked.append(params)
        ids, relaxed = list(map(ord, source.upper())), params.get("relaxed")
        marks = [0] * (len(ids) + 1)
        if relaxed is not None and relaxed["tau"] > 1:
            ids[-1], marks[len(ids) - 1] = ord("X"), 1
        meta: dict[str, Any] = {"id": "r"}
        if params.get("drafter") != "none":
            meta["spec_verify_ct"] = 2
        if relaxed is not None:
            meta["relaxed_tokens"] = marks
        return {"output_ids": [*ids, END], "text": "".join(map(chr, ids)), "meta_info": meta}


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        body = json.loads(self.rfile.read(length) or b"null")
        data = json.dumps(self.server.answer(body) if body else {}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def servers():
    made = [FakeServer(), FakeServer()]
    threads = [threading.Thread(target=s.serve_forever, args=(0.02,)) for s in made]
    for thread in threads:
        thread.start()
    yield made
    for server, thread in zip(made, threads, strict=True):
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def bench(servers, monkeypatch) -> Bench:
    monkeypatch.setattr(translation_runs, "tokenizer", lambda model: Letters())
    plain, ours = servers
    return Bench(plain.url, ours.url, Prompts(PAIR), "German", 50)


METHODS = {
    SENTENCES: sentence_methods(["sssd", "ssbd", "specdec"], 10),
    SETTINGS: setting_methods(["sssd", "ssbd", "specdec"], 10, GRID, (5, 10), True),
    GROWING: growing_methods(10, (HIGH_QUALITY, HIGH_EFFICIENCY)),
}


@pytest.fixture
def results(bench) -> Results:
    whole = [Stream(s.sources[-1:], s.reference) for s in STREAMS]
    answers = [
        *bench.one_by_one(SENTENCES, METHODS[SENTENCES], whole),
        *bench.one_by_one(SETTINGS, METHODS[SETTINGS], whole[:1]),
        *bench.one_by_one(GROWING, METHODS[GROWING], STREAMS),
    ]
    rates = []
    for rate, own in bench.in_flight([m for m in METHODS[SENTENCES] if m.batched], whole, 8):
        rates.append(rate)
        answers += own
    references = {"German": [s.reference for s in STREAMS]}
    return Results(METHODS, answers, rates, references, (1 << 30, 2 << 30), ["suffix: not here"])


def test_every_method_asks_for_what_a_server_takes():
    for methods in METHODS.values():
        names = [method.name for method in methods]
        assert len(set(names)) == len(names)
        for method in methods:
            asked = RequestOptions.parse(method.params([1, 2]), ("sssd", "ssbd", "specdec"))
            assert (asked.relaxed is None) == method.exact and not asked.ingest
            assert (asked.budget == "fixed") == (asked.draft_length is not None)


def test_blocks_beyond_a_drafters_are_absent(monkeypatch):
    shape = SimpleNamespace(shape=SimpleNamespace(block=10))
    monkeypatch.setattr(bench_specdec, "read_manifest", lambda folder: shape)
    known, absent = bench_specdec.blocks_of(Path("here"), (5, 10, 15, 20))
    assert known == [5, 10]
    assert absent == ["SpecDec k=15, 20: the drafter's blocks have 10 places"]
    assert bench_specdec.blocks_of(Path("here"), (5,)) == ([5], [])
    assert bench_specdec.blocks_of(None, (5, 10)) == ([], [])


def test_rows_of_drafters_that_are_not_there_are_absent():
    for methods in (
        sentence_methods(["sssd", "ssbd"], 10),
        setting_methods(["sssd", "ssbd"], 10, GRID, (5,), False),
    ):
        names = [m.name for m in methods]
        assert "SSSD relaxed (5, 3)" in names and not [n for n in names if "SpecDec" in n]
    by_target = [m.name for m in setting_methods(["specdec"], 10, GRID, (5,), False)]
    assert "SpecDec++ (3, 1)" in by_target and not [n for n in by_target if "by drafter" in n]
    drafters, absent = drafters_of(None)
    assert "specdec" not in drafters and any("NAT alone" in line for line in absent)
    drafters, absent = drafters_of(Path("here"))
    assert "specdec" in drafters and not any("SpecDec" in line for line in absent)


def test_baseline_and_methods_run_on_their_servers(servers, results):
    plain, ours = servers
    assert {params["drafter"] for params in plain.asked} == {"none"}
    # The instruction alone is plain decoding on both.
    asked = {(p.get("drafter"), p.get("draft_length")) for p in ours.asked}
    assert {("sssd", 10), ("sssd", None), ("specdec", 5), ("ssbd", 10), (None, None)} <= asked
    drafts = [p["ssbd"]["draft"] for p in ours.asked if "ssbd" in p]
    assert drafts[:2] == [[], list(map(ord, "A B C D"))]
    assert len([p for p in plain.asked]) > 0 and results.exactness().mismatches == ()


def test_figures(results):
    figures = results.figures(10)
    # Two sentences by six exact methods, SSBD, and five in flight; one by two shapes and lengths.
    assert figures["mismatches"] == 0 and figures["outputs_compared"] == 2 * (6 + 1 + 5) + 4
    # Each answer: twelve tokens, one of the prefill, the others in two steps.
    assert figures["accepted_per_step_k10"] == figures["accepted_per_step_sssd"] == 5.5
    assert figures["accepted_per_step_k10_chain"] == 5.5 and figures["speedup_specdec_chain"] > 0
    assert figures["bleu_specdecpp"] == figures["bleu_at"]
    assert figures["relaxed_sssd_bleu_beta3_tau1"] == figures["bleu_at"]
    assert figures["relaxed_sssd_bleu_beta5_tau3"] < figures["bleu_at"]
    assert figures["relaxed_ssbd_accepted_beta5_tau3"] > 0
    assert figures["relaxed_specdec_bleu_beta5_tau3_by_drafter"] < figures["bleu_at"]
    assert {"speedup_specdec", "speedup_specdecpp", "speedup_specdec_vs_sssd"} <= set(figures)
    assert {"speedup_together", "speedup_both_vs_better", "speedup_auto"} <= set(figures)
    assert figures["speedup_both_vs_better"] == pytest.approx(
        figures["speedup_together"] / max(figures["speedup_specdec"], figures["speedup_sssd"])
    )
    assert figures["bleu_loss_specdecpp"] == 0.0
    assert all(value >= 0 for value in figures.values())


def test_a_wrong_output_of_an_exact_method_is_a_mismatch(results):
    wrong = [
        replace(a, token_ids=(7, 7)) if (a.method, a.number) == ("SSSD", 1) else a
        for a in results.answers
    ]
    exact = replace(results, answers=wrong).exactness()
    assert len(exact.mismatches) == 2  # batch 1 and 8
    assert exact.mismatches[0].startswith("SSSD, German, batch 1, 1, token 0")
    relaxed = [
        replace(a, token_ids=(7, 7)) if a.method.startswith("SSSD relaxed") else a
        for a in results.answers
    ]
    assert not replace(results, answers=relaxed).exactness().mismatches


def test_tables_and_page(results, tmp_path):
    tables = list(tables_of(results))
    assert [t.title.split(" (")[0] for t in tables] == [
        "German, sentences, batch 1",
        "German, settings, batch 1",
        "German, growing sentences, batch 1",
        "German: tok/s",
    ]
    row = next(row for row in tables[0].rows if row[0] == f"SSSD relaxed {Rule(5, 3.0)}")
    assert row[1] == "5.50" and row[6] == "8.3%" and row[-1] == "2.00 GiB"
    assert tables[0].rows[0][0] == AT.name and tables[0].rows[0][-1] == "1.00 GiB"
    write_page(tmp_path, results, "m", 10)
    page = (tmp_path / "measured" / "specdec.md").read_text()
    assert "Absent: suffix: not here" in page and "specdec-tau-sssd.svg" in page
    for drafter in ("sssd", "ssbd", "specdecpp"):
        assert (tmp_path / "measured" / f"specdec-tau-{drafter}.png").is_file()


def test_steps_and_repetition():
    plain = Answer(SENTENCES, "German", "AT", 1, 0, (), "", 2, 12, 0, 0, 1.0)
    assert per_step([plain]) == 1.0
    assert per_step([replace(plain, steps=5)]) == 2.0
    assert repetition(["A a b", "c"]) == 0.25


class Blocks(Drafter):
    """Drafts a text in blocks, with a branch that it rates less."""

    def __init__(self, text):
        self._text = text

    def propose(self, requests, max_nodes):
        [request] = requests
        rest = self._text[len(request.output) :][:max_nodes]
        if not rest:
            return [TokenTree.empty()]
        chain = TokenTree.chain(rest)
        return [
            TokenTree(
                np.append(chain.tokens, 99),
                np.append(chain.parents, -1).astype(np.int32),
                np.append(chain.probs, 0.1).astype(np.float32),
            )
        ]


def test_a_drafter_alone_writes_its_blocks_until_one_is_short():
    text = list(range(10, 17))
    assert write_alone(Blocks(text), [1], 3, 50)[:2] == (text, 3)
    assert write_alone(Blocks(text), [1], 3, 5)[:2] == (text[:5], 2)
    assert write_alone(Blocks(text), [1], 3, 50, ends=[14])[:2] == (text[:4], 2)
    assert write_alone(Blocks([]), [1], 3, 50)[:2] == ([], 1)
    assert likeliest_path(TokenTree.empty()) == []


def answers_of(steps: int) -> list[Answer]:
    return [Answer(SENTENCES, "German", "m", 1, n, (), "", 1, 13, steps, 0, 1.0) for n in range(4)]


def test_a_shared_encoder_is_compared_by_tokens_and_by_drafting_time():
    own = Drafting(answers_of(3), 0.2, 0.010)
    shared = Drafting(answers_of(4), 0.1, 0.002)
    assert shared_figures(own, shared) == {
        "shared_encoder_accepted": 3.0,
        "shared_encoder_accepted_ratio": 0.75,
        "shared_encoder_drafting_ms": 25.0,
        "own_encoder_drafting_ms": 50.0,
        "shared_encoder_cost_ratio": pytest.approx(0.5),
        "shared_encoder_encode_ratio": pytest.approx(0.2),
    }


def test_encoding_is_timed_for_both_kinds(tmp_path):
    data = repeating(40)
    for name, states in (("own", None), ("shared", TargetStates(1, 8))):
        kept = untrained()[1]
        model = BlockModel(SHAPE, kept.num_rows, kept.num_classes, states=states)
        stated = manifest(data, training_set(data)[1], kept.outputs, states=states)
        save_drafter(tmp_path / name, stated, model, kept)
        assert 0 < encode_seconds(tmp_path / name) < 5


def test_what_was_written_is_data_that_a_drafter_is_trained_on(tmp_path, monkeypatch):
    target = TargetModel("m", "0" * 16, 50, (END,), 2, None)
    monkeypatch.setattr(specdec_training, "load_target", lambda model: target)
    path = tmp_path / "d.jsonl"
    write_data(path, "m", [Written([5, 6], [7, 8, 9], "a"), Written([5], [7], "b")])
    data = read_file(path, target, 1000)
    assert [each.prompt.tolist() for each in data.examples] == [[5, 6], [5]]
    assert [each.output.tolist() for each in data.examples] == [[7, 8, 9], [7]]


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        (["error: x holds no outputs"], ""),
        (["error: x", "error: y"], "2 lines"),
        ([], "0 lines"),
        (["error: no outputs " + "x" * 500], "a line of"),
        (["error: something else"], "does not say 'no outputs'"),
    ],
)
def test_one_clear_line_is_what_a_mistake_is_told_in(lines, fault):
    found = specdec_bad_input._fault(lines, "no outputs")
    assert found == fault or (fault and fault in found)


def test_commands_that_end_well_or_with_a_traceback_are_faults(monkeypatch, tmp_path):
    echo = [sys.executable, "-c"]
    monkeypatch.setattr(specdec_bad_input, "CLI", echo)
    said = "import sys; print('sglang-ext: error: no outputs', file=sys.stderr); sys.exit(2)"
    assert specdec_bad_input._command("a", [said], "no outputs").fault == ""
    assert "ended well" in specdec_bad_input._command("a", ["pass"], "x").fault
    assert "0 lines" in specdec_bad_input._command("a", ["raise SystemExit(3)"], "x").fault
    write = f"open({str(tmp_path / 'full')!r}, 'wb').write(bytes(1 << 20))"
    full = specdec_bad_input._command("a", [write], "x", full_disk=True)
    assert "File too large" in full.said


def test_a_quick_run_trains_both_and_a_given_drafter_is_not_trained(monkeypatch, capsys, tmp_path):
    (tmp_path / f"{specdec_asking.TEST}.en.gz").touch()
    monkeypatch.setattr("scripts.bench_specdec.DATA", tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench_specdec", "--quick"])
    options = read_options()
    assert options.shared_encoder and options.train_minutes > 0 and options.distil >= 20
    monkeypatch.setattr(sys, "argv", ["bench_specdec", "--quick", "--draft-model", "d"])
    assert not read_options().train_minutes
    wrong = ["--draft-model", "d", "--train-minutes", "3"]
    for argv in (wrong, ["--shared-encoder"], ["--train-minutes", "1", "--distil", "3"]):
        monkeypatch.setattr(sys, "argv", ["bench_specdec", *argv])
        with pytest.raises(SystemExit):
            read_options()
        assert "--train-minutes" in capsys.readouterr().err
    for argv in (["--data", "a"], ["--shared-draft-model", "d"]):
        monkeypatch.setattr(sys, "argv", ["bench_specdec", *argv])
        with pytest.raises(SystemExit):
            read_options()
        assert argv[0] in capsys.readouterr().err


def test_what_was_distilled_before_is_read(monkeypatch, tmp_path):
    target = TargetModel("m", "0" * 16, 0x110000, (), 2, None)
    monkeypatch.setattr(specdec_training, "load_target", lambda m: target)
    monkeypatch.setattr(specdec_training, "tokenizer", lambda m: Letters())
    written = {
        name: [Written([1, 2], list(map(ord, text)), text)]
        for name, text in (("French", "abc"), ("German", "de"))
    }
    files = [tmp_path / name for name in written]
    for file, each in zip(files, written.values(), strict=True):
        write_data(file, "m", each)
    options = argparse.Namespace(
        data=files, languages=list(written), model="m", train_minutes=0.0, draft_model="own",
        shared_draft_model="shared",
    )  # fmt: skip
    assert specdec_training.written_by_language(None, options) == written
    made = specdec_training.drafters_for(options, tmp_path, written)
    assert (made.own, made.shared) == (Path("own"), Path("shared"))
    assert made.data is not None and len(made.data.read_text().splitlines()) == 3


class Up:
    """A server of bench_specdec that is up already."""

    def __init__(self, server: FakeServer) -> None:
        self.base_url = server.url

    def __enter__(self) -> "Up":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def memory_bytes(self) -> int:
        return 1 << 30


@pytest.mark.parametrize("better", ["own", "shared"])
def test_a_whole_run_with_drafters_that_were_trained_here(better, servers, monkeypatch, tmp_path):
    plain, ours = servers
    started: list[tuple[str, list[str]]] = []

    def start(model: str, flags: list[str], name: str) -> Up:
        started.append((name, flags))
        return Up(plain if name == "plain" else ours)

    trained: list[str] = []

    def train(data: Path, model: str, out: Path, encoder: str, recipe: Any) -> None:
        trained.append(encoder)
        assert len(data.read_text().splitlines()) == 1 + 2 * 2  # both languages'
        model, kept = untrained()
        took = {"seconds": 90.0, "memory_gb": 1.0 + len(trained)}
        took |= {"reading_seconds": 30.0} if encoder == "target" else {}
        scores = {"accepted_per_step": {"6": 2.0 if out.name == better else 1.5}}
        rule = training_set(repeating())[1]
        stated = manifest(repeating(), rule, kept.outputs, training=took, scores=scores)
        save_drafter(out, stated, model, kept)

    seconds = iter([1.0, 3.0, 10.0, 11.0])
    monkeypatch.setattr(translation_runs, "tokenizer", lambda model: Letters())
    for name, value in {
        "scripts.bench_specdec.Server": start,
        "scripts.bench_specdec.streams_of": lambda language, count, lag: STREAMS[:count],
        "scripts.bench_specdec.alone": lambda options, folder: [],
        "scripts.bench_specdec.cases": lambda *given: [Case("a", "x", ""), Case("b", "y", "two")],
        "scripts.bench_specdec.add_corpus": lambda *given: None,
        "scripts.bench_specdec.remove_corpus": lambda *given: None,
        "scripts.lib.specdec_asking.server_template": lambda: PAIR.template,
        "scripts.lib.specdec_training.train": train,
        "scripts.lib.specdec_training.read_lines": lambda path: ["a b", "c d", "e f"],
        "scripts.lib.specdec_training.load_target": lambda m: TargetModel(
            m, "0" * 16, 9, (), 2, None
        ),
        "scripts.lib.specdec_shared._drafted_s": lambda url: next(seconds),
        "scripts.lib.specdec_shared.encode_seconds": lambda folder: len(folder.name),
    }.items():
        monkeypatch.setattr(name, value)
    (tmp_path / f"{specdec_asking.TEST}.en.gz").touch()
    monkeypatch.setattr("scripts.bench_specdec.DATA", tmp_path)
    argv = ["bench_specdec", "--quick", "--distil", "20", "--sentences", "2", "--model", "m"]
    monkeypatch.setattr(sys, "argv", argv)
    options = read_options()
    options.distil = 2
    results, more = run(options, tmp_path)
    assert trained == ["own", "target"]
    assert [name for name, _ in started] == ["plain", "ours", "other"]
    other = {"own": "shared", "shared": "own"}[better]
    for (_, flags), folder in zip(started[1:], (better, other), strict=True):
        assert flags[flags.index("--draft-model") + 1] == str(tmp_path / folder)
        assert flags[flags.index("--drafter") + 1] == "auto" and "--enable-metrics" in flags
    assert more["bad_inputs"] == 2 and more["bad_inputs_unclear"] == 1
    # Of what is served first 2 seconds, of the other 1.
    assert more["shared_encoder_cost_ratio"] == (2.0 if better == "shared" else 0.5)
    assert more["shared_encoder_accepted_ratio"] == 1.0
    assert more["shared_encoder_encode_ratio"] == 2.0
    assert more["served_shared_encoder"] == (better == "shared")
    assert more["trained_minutes"] == (2.0 if better == "shared" else 1.5)
    assert more["trained_memory_gb"] == (3.0 if better == "shared" else 2.0)
    figures = results.figures(options.length)
    assert figures["mismatches"] == 0 and results.languages() == ["French", "German"]
    assert {"accepted_per_step_k10", "speedup_specdec", "speedup_together"} <= set(figures)
