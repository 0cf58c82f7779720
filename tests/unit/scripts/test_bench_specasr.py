"""The benchmark's arithmetic, on counts that can be checked by hand."""

import json

import pytest

from scripts.bench_specasr import describe, referenced
from scripts.lib.result_page import aligned
from scripts.lib.served_metrics import parse_metrics
from scripts.lib.specasr_page import table, write_page
from scripts.lib.specasr_runs import (
    COUNTED,
    Row,
    Run,
    counted_late,
    mismatches,
    prefill_excess,
    summarize,
)
from scripts.lib.speech_client import MODES, Transcript
from scripts.lib.word_errors import WordErrors
from tests.unit.scripts.test_speech_data import tone

METRICS = """\
# HELP sglang_ext:draft_seconds_total Drafting for a batch.
sglang_ext:draft_seconds_total{engine_type="unified",model_name="whisper",pid="3"} 1.5
sglang_ext:verify_steps_total{model_name="whisper, \\"name=1\\""} 12.0
sglang_ext:accept_length_bucket{le="1.0",model_name="whisper"} 3.0
sglang_ext:accept_length_sum{model_name="whisper"} 40.0
sglang_ext:accept_length_count{model_name="whisper"} 1e+01
sglang_ext:drafter{model_name="whisper",name="draft_steps"} 70.0
sglang_ext:drafter{name="decoded_tokens",model_name="a\\\\b,c\\n} 9"} 33.0
sglang_ext:drafter{name="a,b=\\"c\\""} 4.0
sglang:num_running_reqs{model_name="whisper"} 2.0
"""


def test_metrics_are_read_by_name():
    assert parse_metrics(METRICS) == {
        "draft_seconds_total": 1.5,
        "verify_steps_total": 12.0,
        "accept_length_sum": 40.0,
        "accept_length_count": 10.0,
        "drafter.draft_steps": 70.0,
        "drafter.decoded_tokens": 33.0,
        'drafter.a,b="c"': 4.0,
    }


def run(tokens=(1, 2, 3), **counted: float) -> Run:
    named = {name.replace(".", "_"): name for name in COUNTED}
    values = dict.fromkeys(COUNTED, 0.0) | {named[key]: value for key, value in counted.items()}
    return Run(Transcript(list(tokens), "text", 2.0), values)


def drafted(draft_s: float, verify_s: float, plain_s: float = 0.0) -> Run:
    """One plain step and 4 rounds that committed 14 tokens, 10 of them drafted: 9 of the draft
    model's 12."""
    return run(
        draft_seconds_total=draft_s, verify_seconds_total=verify_s, plain_seconds_total=plain_s,
        verify_steps_total=4, plain_steps_total=1, accept_length_sum=14, accept_length_count=4,
        drafter_decoded_tokens=12, drafter_accepted_tokens=9, drafter_predicted_tokens=15,
        drafter_draft_steps=9,
    )  # fmt: skip


def test_a_row_adds_up_its_clips():
    row = Row([[drafted(0.1, 0.4, 0.1)], [drafted(0.2, 0.6)]])
    assert row.rounds == 10
    assert row.accepted == 20
    assert row.decoding_acceptance == pytest.approx(18 / 24)
    assert row.per_round(row.accepted) == pytest.approx(2.0)
    assert row.draft_seconds == pytest.approx(0.3)
    assert row.target_seconds == pytest.approx(1.1)
    assert row.decoder_seconds == pytest.approx(1.4)


def test_the_median_repeat_counts_and_a_disturbed_one_does_not():
    row = Row([[drafted(0.1, 9.0), drafted(0.1, 0.4), drafted(0.1, 0.5)]])
    assert row.decoder_seconds == pytest.approx(0.6)
    assert row.rounds == 5
    even = Row([[drafted(0.1, 9.0), drafted(0.1, 0.4)]])
    assert even.decoder_seconds == pytest.approx(0.5)


def test_drafts_accepted_in_plain_decoding_are_another_requests():
    made = rows()
    assert not counted_late(made)
    made["AR"].runs[0].append(run(drafter_accepted_tokens=3))
    assert counted_late(made)


def test_plain_decoding_has_no_drafts_to_accept():
    row = Row([[run(plain_seconds_total=2.0, plain_steps_total=10)]])
    assert (row.rounds, row.accepted, row.decoding_acceptance) == (10, 0, 0)
    assert Row([[run()]]).per_round(0) == 0


def rows(**seconds: float) -> dict[str, Row]:
    times = dict.fromkeys(MODES, 1.0) | {"AR": 3.0} | seconds
    return {
        name: Row([[drafted(0.25 * total, 0.75 * total)]])
        if name != "AR"
        else Row([[run(plain_seconds_total=total, plain_steps_total=30)]])
        for name, total in times.items()
    }


def test_speedups_are_by_decoder_time_and_against_the_best_baseline():
    figures = summarize(rows(**{"(16,1)": 0.9, "(8,2)": 1.2, "ASP": 0.8, "TSP": 0.6}), 20.0)
    assert figures["speedup_asp_vs_ar"] == pytest.approx(3 / 0.8)
    assert figures["speedup_recycling_vs_ar"] == pytest.approx(3.0)
    assert figures["speedup_tsp_vs_ar"] == pytest.approx(5.0)
    assert figures["speedup_tsp_vs_best_baseline"] == pytest.approx(1.5)
    assert figures["decoding_acceptance_asp"] == pytest.approx(9 / 12)
    assert figures["accepted_per_round_tsp"] == pytest.approx(2.0)
    # 0.6 s for 20 s of audio: 300 ms per 10 s, a quarter of it drafting.
    assert figures["draft_ms_per_10s"] == pytest.approx(75)
    assert figures["target_ms_per_10s"] == pytest.approx(225)
    assert figures["ar_ms_per_10s"] == pytest.approx(1500)
    assert figures["mismatches"] == 0


def test_what_prefills_take_longer_is_the_decoders_time():
    plain = Row(
        [[run(prefill_decoder_seconds_total=1.0)] * 3, [run(prefill_decoder_seconds_total=2.0)] * 3]
    )
    slow = [1.04, 1.05, 9.0], [2.05, 1.0, 2.06]  # two disturbed
    tsp = Row([[run(prefill_decoder_seconds_total=s) for s in repeats] for repeats in slow])
    tsp.prefill_excess = prefill_excess(tsp, plain)
    assert tsp.prefill_excess == pytest.approx(2 * 0.05)
    assert tsp.decoder_seconds == tsp.target_seconds == pytest.approx(0.1)


def test_every_run_that_differs_from_plain_decoding_counts():
    changed = rows()
    changed["TSP"].runs[0].append(run(tokens=(1, 2)))
    changed["(8,1)"].runs[0] = [run(tokens=(1, 2, 4))]
    assert mismatches(changed) == 2


def test_word_errors_are_counted_after_the_normalizer():
    errors = WordErrors(["The colour of Mr. Smith's 2 cats.", "in being comparatively modern"])
    assert (
        errors.rate(["the color of mister smith's two cats", "In being comparatively modern!"]) == 0
    )
    assert errors.rate(
        ["the color of mister smith's two dogs", "In being modern!"]
    ) == pytest.approx(2 / 12, abs=0.02)


def test_clips_without_reference_or_beyond_the_window_are_left_out():
    clips = [tone("a", 440, 1), tone("b", 440, 1, reference="b"), tone("c", 440, 31, reference="c")]
    assert [clip.name for clip in referenced(clips)] == ["b"]
    with pytest.raises(ValueError, match=r"references\.tsv"):
        referenced(clips[:1])


def test_an_enlarged_target_is_named_so(tmp_path):
    config = {"decoder_layers": 24, "d_model": 1024, "decoder_attention_heads": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "enlarged to" not in describe(tmp_path)
    made = {"name": "whisper-base", "width": 2, "encoder_layers": 6, "decoder_layers": 24}
    (tmp_path / "config.json").write_text(json.dumps(config | {"enlarged_from": made}))
    text = describe(tmp_path)
    assert text.startswith("whisper-base enlarged")
    assert "24 layers, d_model 1024, 16 heads" in text


def test_the_table_has_every_mode():
    wers = dict.fromkeys(MODES, 0.05)
    shown = table(rows(), wers, 20.0, "some target")
    assert shown.title == "some target; 20 s of audio, batch 1"
    assert [row[0] for row in shown.rows] == list(MODES)
    assert dict(zip(shown.header, next(r for r in shown.rows if r[0] == "TSP"), strict=True)) == {
        "mode": "TSP", "WER": "5.0%", "rounds": "5", "draft steps": "9", "predicted/round": "3.00",
        "accepted/round": "2.00", "decoding acceptance": "75.0%", "draft ms/10s": "125",
        "target ms/10s": "375", "decoder ms/10s": "500", "vs AR": "3.00",
        "vs best baseline": "1.00", "prefill +ms/10s": "0", "draft encoder ms/10s": "0",
        "request ms/10s": "1000",
    }  # fmt: skip
    lines = aligned(shown).splitlines()
    assert lines[1].startswith("mode ") and len({len(line) for line in lines[1:]}) == 1


def test_the_page_has_the_table_its_plot_and_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["/x/scripts/bench_specasr.py", "--docs", "a b"])
    wers = dict.fromkeys(MODES, 0.05)
    figures = summarize(rows(), 20.0) | {
        "wer_target": 0.05, "wer_specasr": 0.05, "wer_draft": 0.07, "audio_seconds": 20.0,
    }  # fmt: skip
    write_page(tmp_path, rows(), table(rows(), wers, 20.0, "some target"), figures)
    page = (tmp_path / "measured" / "specasr.md").read_text()
    assert "python -m scripts.bench_specasr --docs 'a b'" in page
    assert "draft model alone 7.0%" in page and "| TSP | 5.0% |" in page
    assert "](specasr.svg)" in page and (tmp_path / "measured" / "specasr.svg").stat().st_size
