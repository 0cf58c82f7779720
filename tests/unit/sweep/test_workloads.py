"""Workloads from small data sets and from the checkout's Spec-Bench, with a tokenizer of words."""

import base64
import gzip
import io
import json
import wave
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from sglang_ext.sweep import data_files
from sglang_ext.sweep.item_source import SERVED_TIMES
from sglang_ext.sweep.scenarios import AGENT_STEPS
from sglang_ext.sweep.workloads import (
    DOCUMENT_QUESTIONS,
    MT_BENCH,
    WORKLOADS,
    WorkloadError,
    kind_of,
    load_workload,
)
from tests.unit.sweep.test_clips import write_clip

SPEC_BENCH = Path(__file__).parents[3] / "scripts" / "data"
USER, ASSISTANT, GO_ON = 0, 1, 2


class Words:
    """A tokenizer with a token per word."""

    chat_template = "words"

    def __init__(self):
        self._ids = {word: i for i, word in enumerate(("<user>", "<assistant>", "<go on>"))}

    def encode(self, text, add_special_tokens=True):
        return [self._ids.setdefault(word, len(self._ids)) for word in text.split()]

    def apply_chat_template(
        self, messages, *, add_generation_prompt, return_dict, enable_thinking=True
    ):
        assert add_generation_prompt and not return_dict
        self.thinks = enable_thinking
        ids = []
        for message in messages:
            ids.append({"user": USER, "assistant": ASSISTANT}[message["role"]])
            ids += self.encode(message["content"])
        return [*ids, GO_ON]

    def words(self, item):
        names = list(self._ids)
        return " ".join(names[i] for i in item.input_ids)


@pytest.fixture(scope="module")
def tokenizer():
    return Words()


def load(name, tokenizer, data=SPEC_BENCH, **options):
    given = {"prompts": 16, "max_tokens": 128, "seed": 0, "context_len": 8192} | options
    return load_workload(name, tokenizer, data=data, **given)


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def questions(count, category="writing", words=3):
    return [
        {"question_id": i, "category": category, "turns": [f"{category} {i} " + "word " * words]}
        for i in range(count)
    ]


OF_SPEC_BENCH = sorted(set(WORKLOADS) - {"chat", "audio", "retranslation"})


@pytest.mark.parametrize("name", OF_SPEC_BENCH)
def test_what_was_served_before_is_never_measured(name, tokenizer):
    workload = load(name, tokenizer)
    assert (workload.name, workload.kind) == (name, "text")
    assert len(workload.measured) == 16
    items = workload.measured + workload.served_before
    assert workload.served_before
    assert len({item.input_ids for item in items}) == len({item.id for item in items}) == len(items)
    assert all(len(item.input_ids) + item.max_tokens < 8192 for item in items)
    assert {item.max_tokens for item in workload.served_before} == {128}
    lengths = [item.max_tokens for item in workload.measured]
    assert min(lengths) >= 64 and max(lengths) <= 128 and len(set(lengths)) > 8


@pytest.mark.parametrize("name", OF_SPEC_BENCH)
def test_the_seed_decides_which(name, tokenizer):
    first, again, other = (load(name, tokenizer, seed=seed).measured for seed in (1, 1, 2))
    assert first == again
    assert {item.id for item in first} != {item.id for item in other}


def test_mt_bench_covers_its_categories_evenly(tokenizer):
    workload = load("mt-bench", tokenizer)
    assert sorted(item.category for item in workload.measured) == sorted(MT_BENCH * 2)
    assert len(load("mt-bench", tokenizer, prompts=8).served_before) == SERVED_TIMES * 8
    everything = load("mt-bench", tokenizer, prompts=1000)
    assert (len(everything.measured), len(everything.served_before)) == (40, 40)


def test_spec_bench_has_six_parts(tokenizer):
    workload = load("spec-bench", tokenizer, prompts=12)
    categories = [item.category for item in workload.measured]
    assert sorted(categories[:6]) == sorted(categories[6:]) == [
        "math_reasoning", "mt-bench", "qa", "rag", "summarization", "translation"
    ]  # fmt: skip


def test_gsm8k_serves_its_training_set_and_measures_its_test_set(tmp_path, tokenizer):
    for part, ending, opened in (("test", "", open), ("train", ".gz", gzip.open)):
        with opened(tmp_path / f"gsm8k_{part}.jsonl{ending}", "wt") as file:
            for i in range(30):
                file.write(json.dumps({"question": f"{part} question {i}", "answer": "1"}) + "\n")
    workload = load("gsm8k", tokenizer, tmp_path, prompts=3)
    assert all("test question" in tokenizer.words(item) for item in workload.measured)
    assert all("train question" in tokenizer.words(item) for item in workload.served_before)
    assert (len(workload.measured), len(workload.served_before)) == (3, SERVED_TIMES * 3)


def test_gsm8k_without_its_files_is_spec_bench_s_part_of_it(tokenizer):
    workload = load("gsm8k", tokenizer, prompts=100)
    assert (len(workload.measured), len(workload.served_before)) == (40, 40)
    assert {item.category for item in workload.measured} == {"gsm8k"}


def test_long_documents_are_asked_about_several_times(tokenizer):
    workload = load("long", tokenizer)
    first = [item for item in workload.measured if item.id.startswith("document-0-")]
    assert 1 < len(first) <= DOCUMENT_QUESTIONS
    shared = min(map(len, (item.input_ids for item in first))) - 60
    assert len({item.input_ids[:shared] for item in first}) == 1
    assert all(4000 < len(item.input_ids) < 6200 for item in workload.measured)
    assert {item.category.partition(",")[0] for item in workload.measured} == {"answer", "summary"}


def test_a_passage_of_a_measured_document_is_in_no_other(tmp_path):
    rows = [
        {"question_id": i, "category": "rag", "turns": [f"p{i} " * 400 + f"\nwho is q{i} ?"]}
        for i in range(40)
    ]
    tokenizer = Words()
    workload = load("long", tokenizer, write_lines(tmp_path / "spec_bench.jsonl", rows))
    tokens = {i: tokenizer.encode(f"p{i}")[0] for i in range(40)}
    measured, served = (
        {i for i, token in tokens.items() for item in part if token in item.input_ids}
        for part in (workload.measured, workload.served_before)
    )
    assert len(measured) > 10 and len(served) > 10
    assert not measured & served
    for item in workload.measured:  # the question is about a passage that is there
        asked = tokenizer.words(item).removesuffix(" ? <go on>").split()[-1]
        assert tokens[int(asked.removeprefix("q"))] in item.input_ids


def test_long_documents_follow_the_context(tokenizer):
    lengths = [
        len(i.input_ids) for i in load("long", tokenizer, context_len=32768, prompts=24).measured
    ]
    assert min(lengths) > 5_000
    assert max(lengths) > 15_000
    with pytest.raises(WorkloadError, match="a context of 1024 tokens has room for 832"):
        load("long", tokenizer, context_len=1024)


def test_an_agents_requests_grow_and_begin_alike(tokenizer):
    workload = load("agent", tokenizer)
    steps = workload.measured[:AGENT_STEPS]
    assert [item.category for item in steps] == ["step 1", "step 2", "step 3", "step 4"]
    for before, after in pairwise(steps):
        assert after.input_ids[: len(before.input_ids) - 1] == before.input_ids[:-1]
        assert len(after.input_ids) > len(before.input_ids) + 20
    starts = {item.input_ids[:100] for item in workload.measured + workload.served_before}
    assert len(starts) == 1
    tasks, others = (
        {item.id.partition("-")[0] for item in part}
        for part in (workload.measured, workload.served_before)
    )
    assert not tasks & others


SHAREGPT = {
    "conversations": [
        {"from": "system", "value": "be kind"},
        {"from": "human", "value": "hello there"},
        {"from": "gpt", "value": "hi"},
        {"from": "human", "value": "more please"},
        {"from": "gpt", "value": "more"},
    ]
}
OPENAI = {
    "messages": [
        {"role": "user", "content": "another chat"},
        {"role": "assistant", "content": "yes"},
        {"role": "tool", "content": "42"},
        {"role": "user", "content": "never reached"},
    ]
}


@pytest.mark.parametrize("ending", ["jsonl", "json", "jsonl.gz"])
def test_chats_of_both_kinds(tmp_path, tokenizer, ending):
    path = tmp_path / f"mine.{ending}"
    if ending == "json":
        path.write_text(json.dumps([SHAREGPT, OPENAI]))
    else:
        with gzip.open(path, "wt") if ending.endswith("gz") else path.open("w") as file:
            file.write(f"{json.dumps(SHAREGPT)}\n\n{json.dumps(OPENAI)}\n")
    workload = load("chat", tokenizer, path)
    items = workload.measured + workload.served_before
    assert (len(workload.measured), len(workload.served_before)) == (1, 1)
    assert {tokenizer.words(item) for item in items} <= {
        "<user> be kind hello there <go on>",
        "<user> be kind hello there <assistant> hi <user> more please <go on>",
        "<user> another chat <go on>",
    }


def test_other_workloads_have_their_data_beside_a_file_of_chats(tmp_path, tokenizer):
    chats = write_lines(tmp_path / "mine.jsonl", [SHAREGPT])
    write_lines(tmp_path / "spec_bench.jsonl", questions(4))
    ids = {item.id for item in load("mt-bench", tokenizer, chats).measured}
    assert ids < {"0", "1", "2", "3"}


def test_prompts_that_are_too_long_or_there_twice_are_left_out(tmp_path, tokenizer):
    rows = [*questions(3), *questions(3), *questions(2, "coding", words=500)]
    write_lines(tmp_path / "spec_bench.jsonl", rows)
    workload = load("mt-bench", tokenizer, tmp_path, context_len=400)
    assert (len(workload.measured), len(workload.served_before)) == (2, 1)
    longer = write_lines(tmp_path / "spec_bench.jsonl", questions(2, words=9))
    with pytest.raises(WorkloadError, match=r"no prompt of .* fits into 8 tokens"):
        load("mt-bench", tokenizer, longer, context_len=200)


def test_a_base_model_reads_texts(tokenizer):
    base = Words()
    base.chat_template = None
    item = load("mt-bench", base).measured[0]
    assert not {USER, GO_ON} & set(item.input_ids)


@pytest.mark.parametrize(
    ("name", "file", "content", "message"),
    [
        ("mt-bench", "spec_bench.jsonl", "", "spec_bench.jsonl is empty"),
        ("mt-bench", "spec_bench.jsonl", '\n{"category": "writing"}\n', 'line 2: .* "turns"'),
        ("mt-bench", "spec_bench.jsonl", '{"turns": ["a"]}\n', 'line 1: .* "category"'),
        ("mt-bench", "spec_bench.jsonl", "[1]\n", "line 1: expected a JSON object"),
        ("mt-bench", "spec_bench.jsonl", '{"turns"\n', "line 1: not JSON"),
        ("mt-bench", "spec_bench.jsonl.gz", "plain text", "cannot be read"),
        ("gsm8k", "gsm8k_test.jsonl", '{"q": "a"}\n', 'line 1: expected "question"'),
        ("gsm8k", "gsm8k_train.jsonl", "", "gsm8k_train.jsonl is empty"),
        ("chat", "chat.json", "", "chat.json is empty"),
        ("chat", "chat.json", "[]", "chat.json is empty"),
        ("chat", "chat.json", '[{"messages": []}, {}]', 'entry 2: expected "conversations"'),
        ("chat", "chat.jsonl", '{"messages": [{"role": "user"}]}\n', "line 1, turn 1"),
        ("chat", "chat.jsonl", '{"messages": []}\n', "no prompt of .* fits"),
        ("chat", "other.jsonl", "{}\n", "give it with --data FILE"),
    ],
)
def test_wrong_data_is_named(tmp_path, tokenizer, name, file, content, message):
    (tmp_path / file).write_text(content)
    with pytest.raises(WorkloadError, match=message):
        load(name, tokenizer, tmp_path)


def test_speech_is_sent_as_16_khz_mono_and_what_is_known_comes_first(tmp_path, tokenizer):
    for number, seconds in enumerate((1, 6, 12, 31)):
        write_clip(tmp_path / f"{number}.wav", seconds, rate=8000)
    (tmp_path / "references.tsv").write_text("file\treference\n1.wav\tsome words\n")
    (tmp_path / "notes.txt").write_text("no audio")
    workload = load("audio", tokenizer, tmp_path, prompts=2, context_len=448, max_tokens=500)
    assert (workload.kind, kind_of("audio")) == ("audio", "audio")
    items = workload.measured + workload.served_before
    assert len(workload.measured) == 2  # all four, but the one of 31 s, which no Whisper reads
    assert {i.id: i.category for i in items} == {
        "0.wav": "0-5 s", "1.wav": "5-10 s", "2.wav": "> 10 s"
    }  # fmt: skip
    first = workload.measured[0]
    assert (first.id, first.reference, first.input_ids) == ("1.wav", "some words", ())
    assert [item.reference for item in items[1:]] == ["", ""]
    assert {item.max_tokens for item in items} == {224}  # half of the decoder's positions
    assert first.most_tokens == 1504 + 224
    kind, _, data = first.audio.partition(",")
    assert kind == "data:audio/wav;base64"
    with wave.open(io.BytesIO(base64.b64decode(data))) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (16000, 1, 2)
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
    assert len(samples) == pytest.approx(6 * 16000, rel=0.01)
    assert 8000 < np.abs(samples).max() < 12000  # a tone of 0.3


def test_speech_that_is_too_long_or_not_there(tmp_path, tokenizer):
    with pytest.raises(WorkloadError, match=r"needs a folder of speech: give it with --data"):
        load("audio", tokenizer, tmp_path)
    write_clip(tmp_path / "a.wav", 31)
    with pytest.raises(WorkloadError, match="no clip is at most 30 s long"):
        load("audio", tokenizer, tmp_path)


SENTENCES = [f"This sentence {n} has exactly eight words {n}" for n in range(24)]


def test_sources_grow_word_by_word_and_keep_together(tmp_path, tokenizer):
    data = tmp_path / "sentences.txt"
    data.write_text("\n".join([*SENTENCES, "", "Too short", SENTENCES[0]]) + "\n")
    workload = load("retranslation", tokenizer, data, prompts=2, max_tokens=20)
    assert workload.kind == "retranslation"
    assert len(workload.measured) == 2 * 3  # 3, 6 and 8 words
    for start in (0, 3):
        updates = workload.measured[start : start + 3]
        assert len({item.stream for item in updates}) == 1
        assert [item.category for item in updates] == ["update 1", "update 2", "update 3"]
        assert [item.id for item in updates] == [
            f"{updates[0].stream}-update-{n}" for n in (1, 2, 3)
        ]
        texts = [tokenizer.words(item) for item in updates]
        assert all("from English to French" in text for text in texts)
        sources = [text.removesuffix(" <go on>") for text in texts]
        assert all(b.startswith(a) for a, b in pairwise(sources))
        assert [len(b.split()) - len(a.split()) for a, b in pairwise(sources)] == [3, 2]
    assert tokenizer.thinks is False
    # One that grows, for the warm-up; of the others the whole sentence.
    first, others = workload.served_before[:3], workload.served_before[3:]
    assert len({item.stream for item in first}) == 1
    assert len(others) == SERVED_TIMES * 2 - 1
    assert all(item.id.endswith("-update-3") for item in others)
    streams = {item.stream for item in workload.measured}
    assert not streams & {item.stream for item in workload.served_before}


def test_sources_are_found_beside_other_data(tmp_path, tokenizer):
    (tmp_path / "text").mkdir()
    (tmp_path / "parallel").mkdir()
    with gzip.open(tmp_path / "parallel" / "multi30k.test_2016_flickr.en.gz", "wt") as file:
        file.write("\n".join(SENTENCES[:12]))
    assert load("retranslation", tokenizer, tmp_path / "text", prompts=3).measured
    ids = {item.id for item in load("retranslation", tokenizer, tmp_path / "text").measured}
    assert len(ids) == 6 * 3  # at most half of the sentences


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty: expected at least one sentence"),
        (b"\xff\xfe", "cannot be read"),
        (b"One two\nthree\n", "no sentence has more than 3 words"),
    ],
)
def test_sentences_that_cannot_be_used(tmp_path, tokenizer, content, message):
    (tmp_path / "mine.txt").write_bytes(content)
    with pytest.raises(WorkloadError, match=message):
        load("retranslation", tokenizer, tmp_path / "mine.txt")


def test_no_sentences(tmp_path, tokenizer):
    with pytest.raises(WorkloadError, match="a line each: give them with --data FILE"):
        load("retranslation", tokenizer, tmp_path)


def test_missing_spec_bench(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(data_files, "CARRIED", tmp_path / "nowhere")
    with pytest.raises(WorkloadError, match="there is no Spec-Bench in it"):
        load("long", tokenizer, tmp_path)


def test_unknown_workload(tokenizer):
    with pytest.raises(WorkloadError, match="unknown workload 'mtbench'; known: mt-bench"):
        load("mtbench", tokenizer)
