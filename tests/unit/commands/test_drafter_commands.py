"""`sglang-ext drafter` from sources to a drafter: a tokenizer made here, a played target."""

import argparse
import gzip
import http.server
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from datastores import Datastore
from sglang_ext.block_drafter.drafter_manifest import read_manifest
from sglang_ext.block_drafter.held_outputs import held_file, held_folder
from sglang_ext.block_drafter.target_models import load_target
from sglang_ext.block_drafter.training_data import DATASTORE_PROMPT_TAIL, read_datastore, read_file
from sglang_ext.commands.datastore import add_commands as add_datastore_commands
from sglang_ext.commands.drafter import add_commands
from sglang_ext.drafters.sssd import PROMPT_TAIL
from sglang_ext.mirror.streaming.stream_files import load_streams
from tests.unit.mirror.tiny_lms import write_lm

VOCAB_SIZE, END = 64, 2
WORDS = [f"w{i}" for i in range(40)]
QUICK = ["--shape", "tiny", "--steps", 4, "--evaluate", 2, "--batch", 4, "--block", 4]


def make_target(folder: Path, words: list[str]) -> str:
    vocabulary = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    config = {"model_type": "llama", "vocab_size": VOCAB_SIZE, "eos_token_id": END}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> str:
    return make_target(tmp_path_factory.mktemp("models") / "parrot", ["say", *WORDS])


class _Target(http.server.BaseHTTPRequestHandler):
    """Writes a prompt's last token three times, and ends, as SGLang's /generate answers."""

    asked: ClassVar[list[dict]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        last = body["input_ids"][-1]
        if last == 0:
            return self._reply(400, {"error": {"message": "that is no word"}})
        found = {"type": "stop", "matched": END}
        self._reply(200, {"output_ids": [last] * 3, "meta_info": {"finish_reason": found}})

    def _reply(self, status: int, content: dict) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args) -> None:
        pass


@pytest.fixture
def url(monkeypatch) -> Iterator[str]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(_Target, "asked", [])
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Target) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def run(*argv: object, adds=add_commands) -> int:
    parser = argparse.ArgumentParser()
    adds(parser.add_subparsers(required=True))
    args = parser.parse_args(list(map(str, argv)))
    return args.func(args)


def error_of(capsys, *argv: object) -> str:
    """The one line of a command that fails with exit code 2."""
    capsys.readouterr()
    assert run("drafter", *argv) == 2
    err = capsys.readouterr().err
    (line,) = [line for line in err.splitlines() if "error: " in line]
    assert line == err.splitlines()[-1] and line.startswith("sglang-ext drafter: error: ")
    return line


def distil(folder: Path, target: str, url: str, *more: object) -> int:
    sources = folder / "sources.txt"
    if not sources.exists():
        sources.write_text("\n".join(WORDS) + "\n")
    given = ["--sources", sources, "--model", target, "--url", url, "--out", folder / "data.jsonl"]
    return run("drafter", "distill", *given, "--raw", "--prompt", "say {source}", *more)


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_target_writes_what_a_drafter_is_made_of(tmp_path, target, url, capsys):
    assert distil(tmp_path, target, url, "--namespace", "tenant-a") == 0
    head, *outputs = lines_of(tmp_path / "data.jsonl")
    assert head["target"] == "parrot" and len(outputs) == 40
    assert {tuple(o["output"]) for o in outputs} == {(i, i, i, END) for i in range(4, 44)}
    asked = _Target.asked[0]["sampling_params"]
    assert asked["temperature"] == 0.0 and asked["custom_params"] == {"namespace": "tenant-a"}

    data = ["--data", tmp_path / "data.jsonl", "--model", target]
    made = tmp_path / "made"
    assert run("drafter", "train", *data, "--out", made, *QUICK) == 0
    assert "accepted tokens a step on 2 held-out outputs, k 2:" in capsys.readouterr().out
    manifest = read_manifest(made)
    assert manifest.source.before == (3,)  # "say"
    assert manifest.namespaces == {"tenant-a": 160}
    assert "already" in error_of(capsys, "train", *data, "--out", made, *QUICK)

    assert run("drafter", "eval", made, *data, "--json") == 0
    scores = json.loads(capsys.readouterr().out)
    assert 1 <= scores["accepted_per_step_k4"] <= 3
    assert run("drafter", "show", made) == 0
    shown = capsys.readouterr().out
    assert "parrot" in shown and "tenant-a: 160 tokens" in shown
    assert run("drafter", "list", tmp_path, "--saw", "tenant-a") == 0
    assert f"{made}: for parrot, k 4, 160 tokens of tenant-a" in capsys.readouterr().out
    assert run("drafter", "list", tmp_path, "--saw", "tenant-b") == 0
    assert "none was trained on outputs of 'tenant-b'" in capsys.readouterr().out


def test_training_is_judged_by_the_outputs_that_are_named(tmp_path, target, url, capsys):
    assert distil(tmp_path, target, url) == 0
    head, *outputs = (tmp_path / "data.jsonl").read_text().splitlines(keepends=True)
    held, other = tmp_path / "held.jsonl", tmp_path / "other.jsonl"
    held.write_text(head + "".join(outputs[:7]))
    other.write_text(head + "".join(outputs[7:]))
    asked = ["train", "--model", target, "--held-out", held, "--data"]
    assert run("drafter", *asked, other, "--out", tmp_path / "made", *QUICK) == 0
    said = capsys.readouterr()
    assert "33 outputs, 7 held out" in said.err and "on 7 held-out outputs" in said.out
    nothing = error_of(capsys, *asked, held, "--out", tmp_path / "d", *QUICK)
    assert "7 different sources" in nothing

    draft = write_lm(tmp_path / "draft", "llama", vocab_size=VOCAB_SIZE)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(target) / name, draft)
    streams = ["--kind", "streaming", "--draft-model", draft, "--streams", 2, "--steps", 40]
    streams += ["--evaluate", 10, "--learning-rate", 0.02, "--rank", 4, "--out", tmp_path / "s"]
    assert run("drafter", *asked, other, *streams) == 0
    assert "foreseen in 7 held-out outputs" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "s")
    nothing = error_of(capsys, *asked, held, *streams)
    assert "0 different outputs of more than 2 tokens to learn from and 7 held out" in nothing


def test_streams_of_a_draft_model_are_trained_shown_and_loaded(tmp_path, target, url, capsys):
    assert distil(tmp_path, target, url, "--namespace", "tenant-a") == 0
    draft = write_lm(tmp_path / "draft", "llama", vocab_size=VOCAB_SIZE)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(target) / name, draft)
    made = tmp_path / "streams"
    asked = ["train", "--kind", "streaming", "--model", target, "--out", made, "--streams", 2]
    asked += ["--data", tmp_path / "data.jsonl", "--rank", 4, "--steps", 40, "--evaluate", 10]
    asked += ["--learning-rate", 0.02]
    assert "needs --draft-model" in error_of(capsys, *asked)
    assert "no such model" in error_of(capsys, *asked, "--draft-model", tmp_path / "none")
    (made / "training").mkdir(parents=True)
    (made / "training" / "state.safetensors").write_bytes(b"torn")
    assert "is damaged" in error_of(capsys, *asked, "--draft-model", draft)
    shutil.rmtree(made)
    assert run("drafter", *asked, "--draft-model", draft) == 0
    assert "tokens foreseen in 2 held-out outputs, stream 1:" in capsys.readouterr().out
    manifest, streams = load_streams(made, draft)
    assert (manifest.streams, manifest.rank, manifest.target) == (2, 4, "parrot")
    # "say x x x end": behind the output's first x, half of the places, stream 2 is to say the end.
    assert manifest.scores["foreseen"][1] >= 0.5 and len(streams) == 2
    assert not (made / "training").exists()
    assert "already" in error_of(capsys, *asked, "--draft-model", draft)
    assert run("drafter", "list", tmp_path, "--saw", "tenant-a") == 0
    assert f"{made}: 2 streams of draft, 160 tokens of tenant-a" in capsys.readouterr().out
    assert run("drafter", "show", made) == 0
    shown = capsys.readouterr().out
    assert "2, changes of rank 4" in shown and "tenant-a: 160 tokens" in shown
    assert run("drafter", "show", made, "--json") == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "streaming"
    assert run("drafter", "list", tmp_path, "--saw", "tenant-b") == 0
    assert "none was trained" in capsys.readouterr().out
    (made / "streams.json").write_text("{")
    assert "streams.json is damaged" in error_of(capsys, "list", tmp_path)


def test_distillation_goes_on_behind_a_torn_line(tmp_path, target, url, capsys):
    assert distil(tmp_path, target, url) == 0
    path = tmp_path / "data.jsonl"
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole[:11]) + whole[11][:-9])
    _Target.asked.clear()
    assert distil(tmp_path, target, url) == 0
    assert len(_Target.asked) == 30
    assert sorted(o["n"] for o in lines_of(path)[1:]) == list(range(40))
    assert distil(tmp_path, target, url) == 0
    assert len(_Target.asked) == 30 and "all 40 outputs are there" in capsys.readouterr().out
    assert distil(tmp_path, target, url, "--max-tokens", 7) == 2
    assert "written with another" in capsys.readouterr().err


def test_sources_that_the_server_refuses_are_left_out_and_told(tmp_path, target, url, capsys):
    text = "".join(json.dumps({"source": word}) + "\n" for word in [*WORDS[:3], "unheard"])
    (tmp_path / "s.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    assert distil(tmp_path, target, url, "--sources", tmp_path / "s.jsonl.gz") == 1
    assert "1 sources were refused" in (out := capsys.readouterr().out) and "no word" in out
    assert len(lines_of(tmp_path / "data.jsonl")) == 4


def test_what_cannot_be_distilled_is_one_line(tmp_path, target, url, capsys, monkeypatch):
    from sglang_ext.block_drafter import distillation

    (tmp_path / "s.txt").write_text("\n\n")
    asked = ["distill", "--model", target, "--out", tmp_path / "o", "--raw", "--url", url]
    assert "no sources" in error_of(capsys, *asked, "--sources", tmp_path / "s.txt")
    assert "No such file" in error_of(capsys, *asked, "--sources", tmp_path / "none")
    (tmp_path / "s.txt").write_text("w1")
    given = [*asked, "--sources", tmp_path / "s.txt"]
    assert "{source}" in error_of(capsys, *given, "--prompt", "say it")
    assert "--namespace" in error_of(capsys, *given, "--namespace", "a b")
    assert "http://HOST:PORT" in error_of(capsys, *given, "--url", "localhost:3")
    monkeypatch.setattr(distillation, "_ATTEMPTS", 1)
    gone = error_of(capsys, *given, "--url", "http://127.0.0.1:9")
    assert "goes on where this one stopped" in gone
    (chat := [*asked]).remove("--raw")
    assert "no chat template" in error_of(capsys, *chat, "--sources", tmp_path / "s.txt")


def test_what_cannot_be_trained_on_is_one_line(tmp_path, target, url, capsys):
    assert distil(tmp_path, target, url) == 0
    path = tmp_path / "data.jsonl"
    head, *outputs = path.read_text().splitlines(keepends=True)

    def refused(text: str, *more: object) -> str:
        path.write_text(text)
        out = ["--out", tmp_path / "d", *QUICK, *more]
        return error_of(capsys, "train", "--data", path, "--model", target, *out)

    assert "no header" in refused(outputs[0])
    assert "no outputs to learn from" in refused(head)
    assert "3 different sources" in refused(head + "".join(outputs[:3]))
    assert "line 2 is no example: 'output' is missing" in refused(head + '{"prompt": [1]}\n')
    assert "ids must be in 0..63" in refused(head + '{"prompt": [1], "output": [64]}\n')
    whole = head + "".join(outputs)
    assert "--learning-rate" in refused(whole, "--learning-rate", 5)
    assert "--block" in refused(whole, "--block", 65)
    assert "--namespaces" in refused(whole, "--namespaces", "a")
    other = make_target(tmp_path / "other", WORDS)
    wrong = error_of(capsys, "train", "--data", path, "--model", other, "--out", tmp_path / "d")
    assert "outputs of parrot, whose tokenizer is another" in wrong
    assert "cannot be loaded" in error_of(
        capsys, "train", "--data", path, "--model", tmp_path, "--out", tmp_path / "d"
    )
    assert not (tmp_path / "d").exists()


def test_an_output_belongs_to_one_run_at_a_time(tmp_path, target, url, capsys):
    assert distil(tmp_path, target, url) == 0
    path, out = tmp_path / "data.jsonl", tmp_path / "d"
    written = path.read_bytes()
    train = ["train", "--data", path, "--model", target, "--out", out, *QUICK]
    distill = ["distill", "--model", target, "--out", path, "--raw", "--url", url]
    (tmp_path / "s.txt").write_text("w1")
    with held_folder(out), held_file(path):
        assert f"another run is writing to {out}: " in error_of(capsys, *train)
        asked = error_of(capsys, *distill, "--sources", tmp_path / "s.txt")
        assert f"another run is writing to {path}: " in asked
    assert path.read_bytes() == written and not out.exists()
    with pytest.raises(RuntimeError), held_file(tmp_path / "new"):
        raise RuntimeError
    assert not (tmp_path / "new").exists()
    assert run("drafter", *train) == 0, "the folder is free again"


def test_a_limit_of_tokens_bounds_what_is_read(tmp_path, target, url):
    assert distil(tmp_path, target, url) == 0
    data = read_file(tmp_path / "data.jsonl", load_target(target), most_tokens=60)
    assert (len(data.examples), data.left_out, data.tokens) == (10, 30, 60)


@pytest.fixture
def store(tmp_path, target) -> Path:
    """The served outputs of two tenants, as the drafter `sssd` keeps them."""
    loaded = load_target(target)
    made = Datastore.open(
        tmp_path / "store", vocab_size=VOCAB_SIZE, tokenizer_fingerprint=loaded.tokenizer
    )
    with made:
        for n in range(40):
            tail = [3] * (PROMPT_TAIL - 1) + [4 + n]
            made.add([*tail, 4 + n, 4 + n, 4 + n, END], "ann" if n % 2 else "bob", f"r{n}")
    return tmp_path / "store"


def test_served_outputs_are_learned_from_by_tenant(tmp_path, target, store, capsys):
    assert DATASTORE_PROMPT_TAIL == PROMPT_TAIL
    data = read_datastore(str(store), load_target(target), 1 << 20)
    assert data.namespaces() == {"ann": 80, "bob": 80}
    assert {len(e.prompt) for e in data.examples} == {PROMPT_TAIL}
    assert all(e.output.tolist() == [e.prompt[-1]] * 3 + [END] for e in data.examples)
    half = read_datastore(str(store), load_target(target), 20 * 20)
    assert half.namespaces() == {"ann": 40, "bob": 40} and half.left_out == 20

    asked = ["train", "--datastore", store, "--model", target]
    made = tmp_path / "made"
    assert run("drafter", *asked, "--out", made, "--namespaces", "ann", *QUICK) == 0
    manifest = read_manifest(made)
    assert manifest.namespaces == {"ann": 80}
    assert manifest.source.most_tokens == PROMPT_TAIL and manifest.source.before == ()
    assert "no namespace 'eve'" in error_of(
        capsys, *asked, "--out", tmp_path / "e", "--namespaces", "eve"
    )

    for name, said in (("ann", f"{made}: for parrot"), ("bob", "none was trained")):
        deletion = ["datastore", "delete", store, "--namespace", name, "--drafters", tmp_path]
        assert run(*deletion, adds=add_datastore_commands) == 0
        out = capsys.readouterr().out
        assert "tokens deleted" in out and said in out
    assert "no outputs to learn from" in error_of(capsys, *asked, "--out", tmp_path / "e")


def test_another_tokenizers_datastore_is_refused(tmp_path, store, capsys):
    other = make_target(tmp_path / "other", WORDS)
    asked = ["train", "--datastore", store, "--model", other, "--out", tmp_path / "d"]
    assert "tokenizer" in error_of(capsys, *asked)


def test_the_target_can_be_the_encoder(tmp_path, url, store, capsys):
    target = make_target(tmp_path / "parrot", ["say", *WORDS])
    write_lm(tmp_path / "parrot", vocab_size=VOCAB_SIZE)
    assert distil(tmp_path, target, url) == 0
    data, made = ["--data", tmp_path / "data.jsonl", "--model", target], tmp_path / "made"
    shared = ["--encoder", "target"]
    assert run("drafter", "train", *data, "--out", made, *QUICK, *shared, "--encoder-layer", 1) == 0
    assert sorted(path.name for path in made.iterdir()) == ["drafter.json", "model.safetensors"]
    manifest = read_manifest(made)
    assert manifest.states is not None and manifest.states.layer == 1
    capsys.readouterr()
    assert run("drafter", "show", made) == 0
    assert "the target behind layer 1, states of 64 numbers" in capsys.readouterr().out
    assert run("drafter", "eval", made, *data, "--json") == 0
    assert 1 <= json.loads(capsys.readouterr().out)["accepted_per_step_k4"] <= 3

    asked = ["train", "--model", target, "--out", tmp_path / "other"]
    told = error_of(capsys, *asked, "--data", tmp_path / "data.jsonl", "--encoder-layer", 2)
    assert "give --encoder target" in told
    assert "--encoder own" in error_of(capsys, *asked, "--datastore", store, *shared)
