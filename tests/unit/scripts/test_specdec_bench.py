"""bench_specdec against servers that answer from a rule: what it asks, its tables and figures."""

import argparse
import json
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from scripts import bench_specdec
from scripts.bench_specdec import Bench, drafters_of
from scripts.lib import translation_runs
from scripts.lib.drafter_alone import likeliest_path, write_alone
from scripts.lib.specdec_methods import (
    AT,
    GRID,
    HIGH_EFFICIENCY,
    HIGH_QUALITY,
    Rule,
    growing_methods,
    sentence_methods,
)
from scripts.lib.specdec_page import tables_of, write_page
from scripts.lib.specdec_results import GROWING, SENTENCES, Answer, Results, per_step, repetition
from scripts.lib.ssbd_streams import Stream
from scripts.lib.translation_runs import Prompts
from sglang_ext.drafters import Drafter
from sglang_ext.request_options import RequestOptions
from sglang_ext.tree import TokenTree
from tests.unit.scripts.letters import END, Letters

STREAMS = [
    Stream(("a b c d", "a b c d e f"), "A B C D E F"),
    Stream(("d d e f g h",), "D D E F G H"),
]
PAIR = bench_specdec.Pair(
    "m", "{source_language} {target_language}\n\n{source}", "English", "German"
)


class FakeServer(ThreadingHTTPServer):
    """Translates into capitals; a relaxed rule with a tau above 1 makes an X of the last one."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.asked: list[Any] = []

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        source = "".join(map(chr, body["input_ids"][1:-1])).rsplit("\n", 1)[-1]
        params = body["sampling_params"]["custom_params"]
        self.asked.append(params)
        ids, relaxed = list(map(ord, source.upper())), params.get("relaxed")
        marks = [0] * (len(ids) + 1)
        if relaxed is not None and relaxed["tau"] > 1:
            ids[-1], marks[len(ids) - 1] = ord("X"), 1
        meta: dict[str, Any] = {"id": "r"}
        if params["drafter"] != "none":
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
    SENTENCES: sentence_methods(["sssd", "ssbd", "specdec"], 10, GRID, (5, 10), True),
    GROWING: growing_methods(10, (HIGH_QUALITY, HIGH_EFFICIENCY)),
}


@pytest.fixture
def results(bench) -> Results:
    whole = [Stream(s.sources[-1:], s.reference) for s in STREAMS]
    answers = [
        *bench.one_by_one(SENTENCES, METHODS[SENTENCES], whole),
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


def test_rows_of_drafters_that_are_not_there_are_absent():
    names = [m.name for m in sentence_methods(["sssd", "ssbd"], 10, GRID, (5,), False)]
    assert "SSSD relaxed (5, 3)" in names and not [n for n in names if "SpecDec" in n]
    by_target = [m.name for m in sentence_methods(["specdec"], 10, GRID, (5,), False)]
    assert "SpecDec++ (3, 1)" in by_target and not [n for n in by_target if "by drafter" in n]
    drafters, absent = drafters_of(argparse.Namespace(draft_model=""))
    assert "specdec" not in drafters and any("NAT alone" in line for line in absent)
    drafters, absent = drafters_of(argparse.Namespace(draft_model="here"))
    assert "specdec" in drafters and not any("SpecDec" in line for line in absent)


def test_baseline_and_methods_run_on_their_servers(servers, results):
    plain, ours = servers
    assert {params["drafter"] for params in plain.asked} == {"none"}
    # The instruction alone is plain decoding on both.
    asked = {(p["drafter"], p.get("draft_length")) for p in ours.asked if p["drafter"] != "none"}
    assert {("sssd", 10), ("sssd", None), ("specdec", 5), ("ssbd", 10)} <= asked
    drafts = [p["ssbd"]["draft"] for p in ours.asked if "ssbd" in p]
    assert drafts[:2] == [[], list(map(ord, "A B C D"))]
    assert len([p for p in plain.asked]) > 0 and results.exactness().mismatches == ()


def test_figures(results):
    figures = results.figures(10)
    # Two sentences by five exact methods, SSBD, and four in flight.
    assert figures["mismatches"] == 0 and figures["outputs_compared"] == 2 * (5 + 1 + 4)
    # Each answer: twelve tokens, one of the prefill, the others in two steps.
    assert figures["accepted_per_step_k10"] == figures["accepted_per_step_sssd"] == 5.5
    assert figures["bleu_specdecpp"] == figures["bleu_at"]
    assert figures["relaxed_sssd_bleu_beta3_tau1"] == figures["bleu_at"]
    assert figures["relaxed_sssd_bleu_beta5_tau3"] < figures["bleu_at"]
    assert figures["relaxed_ssbd_accepted_beta5_tau3"] > 0
    assert figures["relaxed_specdec_bleu_beta5_tau3_by_drafter"] < figures["bleu_at"]
    assert {"speedup_specdec", "speedup_specdecpp", "speedup_specdec_vs_sssd"} <= set(figures)
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
