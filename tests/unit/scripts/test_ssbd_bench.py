"""The benchmark against a server that answers from a rule, its tables, figures and plots."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from scripts import bench_ssbd
from scripts.bench_ssbd import Prompts, Translator, all_at_once, one_by_one
from scripts.lib import translation_runs
from scripts.lib.ssbd_page import write_page
from scripts.lib.ssbd_plots import AR, DEFAULT, EXACT, MODES, PUBLISHED_DEFAULT, TRIMMED, Tables
from scripts.lib.ssbd_streams import Settings, Stream, Update
from tests.unit.scripts.letters import END, Letters

STREAMS = [Stream(("ab", "abcd", "abcdef"), "ABCDEF"), Stream(("xy", "xyz"), "XYZ")]

TEMPLATE = "{source_language} to {target_language}\n\n{source}"
SETTINGS = Settings(
    "m", "a.en", "English", "French", 2, TEMPLATE, tuple(s.reference for s in STREAMS)
)


class FakeServer(ThreadingHTTPServer):
    """Translates into capitals: all right in AR and at beta 0, else its draft before the rest."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.requests: list[Any] = []

    def answer(self, body: dict[str, Any]) -> list[int]:
        source = "".join(map(chr, body["input_ids"][1:-1])).rsplit("\n", 1)[-1]
        params = body["sampling_params"]["custom_params"]
        draft = params.get("ssbd", {}).get("draft", [])
        right = list(map(ord, source.upper()))
        if params.get("ssbd", {}).get("beta"):
            right = draft + right[len(draft) :]
        return [*right, ord("."), END]


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        body = json.loads(self.rfile.read(length) or b"null")
        self.server.requests.append(body or self.path)
        reply: dict[str, Any] = {}
        if body:
            ids = self.server.answer(body)
            text = "".join(map(chr, ids[:-1]))
            reply = {"output_ids": ids, "text": text, "meta_info": {"id": "r"}}
        data = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server():
    made = FakeServer()
    thread = threading.Thread(target=made.serve_forever, args=(0.02,))
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


@pytest.fixture
def translator(server, monkeypatch):
    monkeypatch.setattr(translation_runs, "tokenizer", lambda model: Letters())
    return Translator(server.url, Prompts(SETTINGS), max_tokens=50)


def custom(body: dict[str, Any]) -> dict[str, Any]:
    return body["sampling_params"]["custom_params"]


def test_the_instruction_comes_before_the_source(translator):
    ids = translator.prompts.ids("Hello")
    assert ids[: len(translator.prompts.before_source)] == translator.prompts.before_source
    assert "".join(map(chr, ids[1:-1])).endswith("\n\nHello")
    assert "English to French" in "".join(map(chr, translator.prompts.before_source))


def test_the_instruction_is_the_servers_and_ends_with_the_source():
    assert bench_ssbd.server_template().endswith("{source}")


def test_only_the_end_of_an_output_is_cut(translator):
    assert translator.prompts.without_end([65, END, 66, END]) == (65, END, 66)
    assert translator.prompts.without_end([END]) == ()


def test_a_stream_drafts_its_own_last_output_in_that_mode(server, translator):
    updates = translator.translate(4, STREAMS[0], PUBLISHED_DEFAULT)
    first, second, third = map(custom, server.requests)
    assert first["ssbd"] == {
        "draft": [], "beta": 0.2, "trim": 0, "realign": False, "retrieve": False,
    }  # fmt: skip
    assert second["ssbd"]["draft"] == list(map(ord, "AB."))
    assert third["ssbd"]["draft"] == list(map(ord, "AB.D."))
    assert not first["ingest"]
    assert [(u.text, u.tokens, u.final) for u in updates] == [
        ("AB.", 4, False), ("AB.D.", 6, False), ("AB.D.F.", 8, True),
    ]  # fmt: skip
    assert updates[0].token_ids == tuple(map(ord, "AB."))


def test_modes_differ_in_what_they_ask_for(server, translator):
    for mode in (AR, DEFAULT, TRIMMED[1]):
        translator.translate(0, Stream(("ab",), "AB"), mode)
    plain, ours, trimmed = map(custom, server.requests)
    assert plain == {"drafter": "none", "ingest": False}
    assert ours["ssbd"]["realign"] and ours["ssbd"]["retrieve"]
    assert trimmed["ssbd"]["trim"] == 5 and not trimmed["ssbd"]["realign"]


def test_every_mode_of_a_stream_starts_with_the_instruction_in_the_cache(server, translator):
    updates = list(one_by_one(translator, STREAMS, timed_streams=1))
    assert {u.mode for u in updates if u.stream == 0} == {mode.name for mode in MODES}
    assert {u.mode for u in updates if u.stream == 1} == {AR.name, EXACT.name, DEFAULT.name}
    flushes = [i for i, r in enumerate(server.requests) if isinstance(r, str)]
    assert len(flushes) == len(MODES) + 3
    for at in flushes:
        assert server.requests[at].startswith("/flush_cache")
        primer = server.requests[at + 1]
        assert primer["input_ids"] == translator.prompts.before_source
        assert primer["sampling_params"]["max_new_tokens"] == 1
    # The second stream is begun by the second of its modes.
    assert next(u.mode for u in updates if u.stream == 1) == EXACT.name


def decode(token_ids) -> str:
    return "".join(map(chr, token_ids))


def measured(translator) -> list[Update]:
    updates = list(one_by_one(translator, STREAMS, timed_streams=2))
    return updates + list(all_at_once(translator, STREAMS))


def test_the_figures_of_a_run(translator, capsys):
    tables = Tables(SETTINGS, measured(translator), decode)
    figures = tables.figures()
    # Batch 1: 5 updates in 2 modes at beta 0; batch 8: 5 in one.
    assert (figures["mismatches_beta0"], figures["outputs_compared"]) == (0, 15)
    # A word a output: "AB." -> "ABCD." -> "ABCDEF.", and "XY." -> "XYZ.".
    assert figures["ne_ar"] == pytest.approx(3 / 2)
    # Beta 0.2 draws every draft in; all of it is accepted.
    assert figures["ad_beta02"] == 1
    assert figures["ao_beta02"] == pytest.approx((3 + 5 + 3) / (3 + 5 + 7 + 3 + 4))
    assert figures["chrf_delta_beta02"] < 0
    assert figures["ne_reduction_mask5_words"] == 1  # nothing whole is displayed before the end
    assert (figures["streams"], figures["timed_streams"]) == (2, 2)
    assert figures["speedup_beta02"] > 0
    tables.print()
    printed = capsys.readouterr().out
    assert "SSBD b=0.2 trim 5, mask 5" in printed and "0 differ" in printed


def test_speedups_are_tokens_per_second_by_ar_on_the_same_streams(translator):
    updates = measured(translator)
    timed = [
        Update(**{**u.__dict__, "seconds": 0.5 if u.mode == DEFAULT.name else 1.0, "tokens": 4})
        for u in updates
    ]
    figures = Tables(SETTINGS, timed, decode).figures()
    assert figures["speedup_beta02"] == pytest.approx(2)
    assert figures["speedup_realign_vs_published"] == pytest.approx(2)


def replaced(updates, mode: str, batch: int, token_ids) -> list[Update]:
    """The updates with the first output of stream 0 in a mode changed."""
    return [
        Update(**{**u.__dict__, "token_ids": tuple(token_ids)})
        if (u.mode, u.batch, u.stream, u.step) == (mode, batch, 0, 0)
        else u
        for u in updates
    ]


def test_an_output_at_beta_0_that_is_not_ars_is_a_mismatch(translator, capsys):
    updates = measured(translator)
    for mode, batch in ((EXACT.name, 1), (EXACT.name, 8), ("SSBD b=0", 1)):
        tables = Tables(SETTINGS, replaced(updates, mode, batch, [65, 67]), decode)
        assert tables.figures()["mismatches_beta0"] == 1
        tables.print()
        expected = f"differs: {mode}, batch {batch}, stream 0, update 0, token 1"
        assert expected in capsys.readouterr().out


def test_where_ar_contradicts_itself_either_of_its_answers_is_right(translator):
    updates = replaced(measured(translator), AR.name, 8, [65])
    exact = Tables(SETTINGS, updates, decode).exactness()
    assert (exact.contradictions, exact.mismatches) == (1, ())
    # At batch 1 only the answer at batch 1 is.
    wrong = replaced(updates, EXACT.name, 1, [65])
    assert len(Tables(SETTINGS, wrong, decode).exactness().mismatches) == 1


def test_streams_that_not_all_modes_translated_are_left_out_of_a_table(translator):
    updates = list(one_by_one(translator, STREAMS, timed_streams=1))
    tables = Tables(SETTINGS, updates, decode)
    assert {r.streams for r in tables.sweep.rows} == {1}
    assert {r.streams for r in tables.all_streams.rows} == {2}
    with pytest.raises(ValueError, match=r"none in: .*AR"):
        Tables(SETTINGS, [u for u in updates if u.mode != AR.name], decode)


def test_plots_are_drawn(translator, tmp_path):
    Tables(SETTINGS, measured(translator), decode).plot(tmp_path / "plots")
    assert (tmp_path / "plots" / "beta.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "plots" / "mask.svg").read_text()
    assert len(list((tmp_path / "plots").iterdir())) == 4


def test_the_page_has_the_papers_tables(translator, tmp_path):
    tables = Tables(SETTINGS, measured(translator), decode)
    write_page(tmp_path, tables)
    page = (tmp_path / "measured" / "ssbd.md").read_text()
    for table in (tables.sweep, tables.masks, tables.all_streams):
        assert f"### {table.title}" in page
        for r in table.rows:
            assert f"| {r.name} | {r.chrf:.2f} | {r.bleu:.2f} |" in page
    assert page.count(".svg)") == 2 and len(list((tmp_path / "measured").glob("*.svg"))) == 2


def test_a_run_keeps_its_outputs_and_they_give_the_same_figures(
    server, translator, monkeypatch, tmp_path
):
    class Running:
        base_url = server.url

        def __init__(self, *args, **kwargs):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

    source, reference = tmp_path / "s", tmp_path / "r"
    source.write_text("a b c\nd e\n")
    reference.write_text("A B C\nD E\n")
    monkeypatch.setattr(bench_ssbd, "Server", Running)
    monkeypatch.setattr(bench_ssbd, "server_template", lambda: TEMPLATE)
    results, figures = tmp_path / "results.jsonl", tmp_path / "figures.json"
    command = ["bench", "--lag", "1", "--json", str(figures)]
    run = ["--source", str(source), "--reference", str(reference), "--results", str(results)]
    monkeypatch.setattr("sys.argv", [*command, *run])
    of_the_machine = ("foreign_cpu_percent", "steal_percent")  # not of what is measured

    def measured():
        found = json.loads(figures.read_text())["figures"]
        return {name: value for name, value in found.items() if name not in of_the_machine}

    assert bench_ssbd.main() == 0
    first = measured()
    asked = len(server.requests)
    monkeypatch.setattr("sys.argv", [*command, "--from", str(results)])
    assert bench_ssbd.main() == 0
    assert measured() == first
    assert len(server.requests) == asked


@pytest.mark.parametrize(
    "given, message",
    [
        (["--lag", "0"], "--lag must be at least 1"),
        (["--timed-streams", "0"], "--timed-streams must be at least 1"),
        (["--source", "/nonexistent"], "/nonexistent is not there"),
    ],
)
def test_bad_options_are_refused(monkeypatch, capsys, given, message):
    monkeypatch.setattr("sys.argv", ["bench", *given])
    with pytest.raises(SystemExit):
        bench_ssbd.read_options()
    assert message in capsys.readouterr().err


def test_quick_is_fewer_streams(monkeypatch, tmp_path):
    path = tmp_path / "a"
    path.write_text("a\n")
    monkeypatch.setattr(
        "sys.argv", ["bench", "--quick", "--source", str(path), "--reference", str(path)]
    )
    options = bench_ssbd.read_options()
    assert (options.streams, options.timed_streams) == (8, 2)
