"""`sglang-ext datastore` on real folders, with a real tokenizer trained here in milliseconds."""

import gzip
import http.server
import io
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from tokenizers import Tokenizer

from datastores import Datastore, DatastoreError
from sglang_ext.commands.datastore import build_progress
from sglang_ext.commands.datastore.build_progress import BuildProgress, Waiting, short
from sglang_ext.commands.datastore.model_tokenizer import PIECE_BYTES, ModelTokenizer
from sglang_ext.models import list_models
from tests.eventually import eventually
from tests.unit.commands.small_tokenizer import TEXTS, VOCAB_SIZE, make_model, run


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return make_model(tmp_path_factory.mktemp("model"))


def write_lines(path: Path, texts: list[str] = TEXTS) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def corpus_tokens(folder: Path, name: str) -> list[np.ndarray]:
    """The token arrays of a corpus, in order."""
    with Datastore.open(folder, create=False, read_only=True) as store:
        assert name in store.list_corpora()
        return [segment.tokens.copy() for segment in store.snapshot().static]


def decoded(model: str, folder: Path, name: str) -> list[str]:
    """The documents of a corpus as texts."""
    tokenizer = Tokenizer.from_file(f"{model}/tokenizer.json")
    (tokens,) = corpus_tokens(folder, name)
    ends = np.flatnonzero(tokens == VOCAB_SIZE)
    starts = [0, *(ends[:-1] + 1)]
    pairs = zip(starts, ends, strict=True)
    return [tokenizer.decode(tokens[start:end].tolist()) for start, end in pairs]


def error_of(capsys, *argv: object) -> str:
    """The one line of a command that fails with exit code 2."""
    assert run(*argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("sglang-ext datastore: error: ")
    return err


# -- build and add -------------------------------------------------------------------------


def test_build_then_add_from_every_kind_of_source(tmp_path, model, capsys):
    folder = tmp_path / "store"
    lines = write_lines(tmp_path / "lines.jsonl")
    assert run("build", folder, lines, "--tokenizer", model) == 0
    out = capsys.readouterr().out
    assert "corpus 'lines'" in out and "400 documents" in out
    assert decoded(model, folder, "lines") == TEXTS

    (tmp_path / "texts").mkdir()
    for i in range(3):
        (tmp_path / "texts" / f"{i}.txt").write_text(TEXTS[i])
    (tmp_path / "texts" / "z.md.gz").write_bytes(gzip.compress(TEXTS[3].encode()))
    (tmp_path / "texts" / "picture.png").write_bytes(b"\x89PNG")
    np.save(tmp_path / "ids.npy", np.array([[1, 2, 3], [4, 5, 599]]))
    sources = [tmp_path / "texts", tmp_path / "ids.npy"]
    assert run("add", folder, *sources, "--tokenizer", model, "--corpus", "more") == 0
    assert "left out: 1 files" in capsys.readouterr().err
    with Datastore.open(folder, create=False) as store:
        assert set(store.list_corpora()) == {"lines", "more"}
        info = store.info()
        assert info.num_documents == 406 and info.vocab_size == VOCAB_SIZE
        assert info.tokenizer_fingerprint == ModelTokenizer(model).fingerprint != ""


def test_long_texts_are_tokenized_whole(model):
    text = "".join(TEXTS) * 20
    assert len(text) > 2 * PIECE_BYTES
    tokens, empty = ModelTokenizer(model).encode([text, ""])
    assert Tokenizer.from_file(f"{model}/tokenizer.json").decode(tokens.tolist()) == text
    assert tokens.dtype == np.int32 and empty.size == 0


@pytest.mark.parametrize("stop", ["kill", "interrupt", "disk full"])
def test_a_stopped_build_goes_on_to_the_same_result(tmp_path, model, capsys, monkeypatch, stop):
    sources = [write_lines(tmp_path / f"{i}.jsonl", TEXTS[i::3]) for i in range(3)]
    argv = [*sources, "--tokenizer", model, "--corpus", "c", "--chunk-tokens", 1000]
    assert run("build", tmp_path / "whole", *argv) == 0

    folder = tmp_path / "stopped"
    committed = []
    for after in (0, 1, 2, 3):  # chunks that a run stores before it is stopped
        with monkeypatch.context() as patch:
            stop_commits_after(patch, after, stop)
            if stop == "kill":
                with pytest.raises(Killed):
                    run("build", folder, *argv)
            else:
                capsys.readouterr()
                assert run("build", folder, *argv) == (130 if stop == "interrupt" else 2)
                assert ("the same command goes on" in capsys.readouterr().err) == (
                    bool(committed) or after > 0 or stop == "interrupt"
                )
        info = info_of(folder, capsys)
        committed.append(info["unfinished"]["c"])
        assert info["corpora"] == {}, "not served before it is whole"
    assert committed == sorted(committed) and committed[0] == 0 < committed[-1]

    assert run("build", folder, *argv) == 0
    assert f"after {committed[-1]:,} tokens" in capsys.readouterr().err
    for one, other in zip(
        corpus_tokens(folder, "c"), corpus_tokens(tmp_path / "whole", "c"), strict=True
    ):
        assert np.array_equal(one, other)


class Killed(BaseException):
    """Nothing catches it, as nothing catches a kill."""


def stop_commits_after(patch, count: int, how: str) -> None:
    from datastores import CorpusBuilder

    original = CorpusBuilder.commit
    calls = []

    def commit(self, progress):
        calls.append(progress)
        if len(calls) <= count:
            return original(self, progress)
        if how == "kill":
            raise Killed
        if how == "interrupt":
            raise KeyboardInterrupt
        # A real refusal of the system: no file may grow beyond this.
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        try:
            return original(self, progress)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, handler)

    patch.setattr(CorpusBuilder, "commit", commit)


def test_a_kill_before_the_last_merge_repeats_nothing(tmp_path, model, monkeypatch):
    source = write_lines(tmp_path / "a.jsonl")
    argv = [source, "--tokenizer", model, "--chunk-tokens", 1000]

    def killed(self):
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("datastores.CorpusBuilder.finish", killed)
        run("build", tmp_path / "store", *argv)
    assert run("build", tmp_path / "store", *argv) == 0
    assert decoded(model, tmp_path / "store", "a") == TEXTS


def stopped_build(tmp_path: Path, model: str, monkeypatch) -> list[object]:
    """The command line of a build of two files that was killed after its first chunk."""
    sources = [write_lines(tmp_path / f"{i}.jsonl", TEXTS[i::2]) for i in range(2)]
    argv = ["build", tmp_path / "store", *sources, "--tokenizer", model, "--chunk-tokens", 1000]
    with monkeypatch.context() as patch, pytest.raises(Killed):
        stop_commits_after(patch, 1, "kill")
        run(*argv)
    return argv


def test_changed_sources_are_noticed(tmp_path, model, monkeypatch, capsys):
    argv = stopped_build(tmp_path, model, monkeypatch)
    error = error_of(capsys, *argv, "--field", "text", "--field", "title", "--skip-bad")
    assert "begun with --field text; give the same as before, or begin anew with --restart" in error
    write_lines(tmp_path / "2.jsonl")
    error = error_of(capsys, *argv[:4], tmp_path / "2.jsonl", *argv[4:])
    assert "begun with 2 files, and there are 3 now" in error
    write_lines(tmp_path / "1.jsonl", TEXTS[:7])
    assert f"{tmp_path / '1.jsonl'} is new or has changed" in error_of(capsys, *argv)
    assert run(*argv, "--restart") == 0
    assert decoded(model, tmp_path / "store", "0") == TEXTS[0::2] + TEXTS[:7]


def test_build_makes_and_add_extends(tmp_path, model, capsys):
    source = write_lines(tmp_path / "a.jsonl")
    argv = [tmp_path / "store", source, "--tokenizer", model]
    assert "`sglang-ext datastore build` begins one" in error_of(capsys, "add", *argv)
    assert run("build", *argv) == 0
    capsys.readouterr()
    assert "datastore add` puts another" in error_of(capsys, "build", *argv, "--corpus", "b")
    for command in ("build", "add"):
        error = error_of(capsys, command, *argv)
        assert f"datastore delete {tmp_path / 'store'} --corpus a`" in error
    assert run("add", *argv, "--corpus", "b") == 0


def test_an_unfinished_build_can_be_given_up(tmp_path, model, monkeypatch, capsys):
    stopped_build(tmp_path, model, monkeypatch)
    folder = tmp_path / "store"
    assert run("info", folder) == 0
    assert "unfinished" in capsys.readouterr().out
    before = sum(f.stat().st_size for f in folder.iterdir())
    assert run("delete", folder, "--all-unfinished") == 0
    assert "corpus '0'" in capsys.readouterr().out
    assert sum(f.stat().st_size for f in folder.iterdir()) < before
    assert run("delete", folder, "--all-unfinished") == 0
    assert "none is unfinished" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"text": "a"}\n{"text": 1}\n', "line 2: field 'text' is int"),
        ('{"txt": "a"}\n', "line 1: there is no field 'text'"),
        ('{"text": "a"}\nnonsense\n', "line 2: expected a JSON object"),
        ("", "is empty"),
        ('{"text": ""}\n', "holds no tokens"),
    ],
)
def test_bad_sources_are_one_line(tmp_path, model, capsys, content, expected):
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    error = error_of(capsys, "build", tmp_path / "store", path, "--tokenizer", model)
    assert expected in error
    path.write_text('{"text": "mended"}\n')
    assert run("build", tmp_path / "store", path, "--tokenizer", model) == 0


def test_bad_lines_can_be_skipped(tmp_path, model, capsys):
    path = tmp_path / "a.jsonl"
    path.write_text('nonsense\n{"text": "one"}\n{"text": 5}\n{"text": "two"}\n{"a": "b"}\n' * 4)
    argv = ["build", tmp_path / "store", path, "--tokenizer", model, "--chunk-tokens", 3]
    assert run(*argv, "--skip-bad") == 0
    out, err = capsys.readouterr()
    assert "12 bad lines or rows skipped" in out
    assert err.count("skipped: ") == 6 and "line 3: field 'text' is int" in err
    assert decoded(model, tmp_path / "store", "a") == ["one", "two"] * 4


def test_ids_outside_the_vocabulary_are_refused(tmp_path, model, capsys):
    np.save(tmp_path / "a.npy", np.array([[1, 2], [3, 600]]))
    argv = [tmp_path / "store", tmp_path / "a.npy", "--tokenizer", model]
    assert "row 2: token id 600 is outside 0..599" in error_of(capsys, "build", *argv)
    write_lines(tmp_path / "b.jsonl")
    argv = [tmp_path / "store2", tmp_path / "b.jsonl", "--tokenizer", model, "--vocab-size", 50]
    assert "document 1: token id" in error_of(capsys, "build", *argv)


def test_unusable_tokenizers_and_folders(tmp_path, model, capsys):
    source = write_lines(tmp_path / "a.jsonl")
    error = error_of(capsys, "build", tmp_path / "s", source, "--tokenizer", "smolm2-135m-instruct")
    assert "did you mean" in error
    (tmp_path / "bare").mkdir()
    error = error_of(capsys, "build", tmp_path / "s", source, "--tokenizer", tmp_path / "bare")
    assert "no tokenizer can be loaded" in error
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "bare" / name).write_bytes((Path(model) / name).read_bytes())
    error = error_of(capsys, "build", tmp_path / "s", source, "--tokenizer", tmp_path / "bare")
    assert "--vocab-size" in error
    argv = ["--tokenizer", tmp_path / "bare", "--vocab-size", VOCAB_SIZE]
    assert "must be a folder" in error_of(capsys, "build", source, source, *argv)
    assert "cannot create datastore" in error_of(capsys, "build", "/proc/store", source, *argv)
    assert "not empty" in error_of(capsys, "build", tmp_path, source, *argv)
    assert run("build", tmp_path / "s", source, *argv) == 0
    capsys.readouterr()
    error = error_of(capsys, "add", tmp_path / "s", source, *argv[:3], 700, "--corpus", "b")
    assert "vocabulary of 600 tokens, not 700" in error


# -- info, merge, verify, delete -----------------------------------------------------------


@pytest.fixture
def folder(tmp_path, model) -> Path:
    """A datastore with a corpus and the served outputs of two namespaces."""
    source = write_lines(tmp_path / "facts.jsonl")
    assert run("build", tmp_path / "store", source, "--tokenizer", model) == 0
    with Datastore.open(tmp_path / "store", create=False) as store:
        store.add([1, 2, 3, 4], "ann", "request-1")
        store.add([5, 6, 7], "ann", "request-2")
        store.add([8, 9], "bob", "request-3")
    return tmp_path / "store"


def info_of(folder: Path, capsys) -> dict:
    capsys.readouterr()
    assert run("info", folder, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_info_beside_a_server(folder, capsys):
    with Datastore.open(folder, create=False) as server:
        info = info_of(folder, capsys)
        assert info["namespaces"] == {"ann": 7, "bob": 2} == server.namespaces()
        assert info["corpora"] == server.list_corpora()
        assert info["unfinished"] == {} and info["problems"] == []
        assert info["disk_bytes"] == sum(f.stat().st_size for f in folder.iterdir())
        assert info["log_bytes"] == sum(f.stat().st_size for f in folder.glob("log-*"))
        assert run("info", folder) == 0
        text = capsys.readouterr().out
        for expected in ("7 tokens in 'ann'", "in 'facts'", "vocabulary of 600", "per token"):
            assert expected in text


def test_info_needs_a_datastore(tmp_path, capsys):
    assert str(tmp_path / "none") in error_of(capsys, "info", tmp_path / "none")
    assert "no MANIFEST" in error_of(capsys, "info", tmp_path)


def test_delete_removes_what_is_named(folder, capsys):
    assert run("delete", folder, "--request", "request-1") == 0
    assert capsys.readouterr().out.endswith("request 'request-1': 4 tokens deleted\n")
    assert run("delete", folder, "--request", "request-1") == 0
    assert "nothing to delete" in capsys.readouterr().out
    assert run("delete", folder, "--namespace", "bob") == 0
    assert info_of(folder, capsys)["namespaces"] == {"ann": 3}
    assert run("delete", folder, "--corpus", "facts") == 0
    assert info_of(folder, capsys)["corpora"] == {}
    assert "there is no corpus 'facts'" in error_of(capsys, "delete", folder, "--corpus", "facts")


def test_a_folder_in_use_is_left_alone(folder, model, tmp_path, capsys):
    capsys.readouterr()
    with Datastore.open(folder, create=False):
        for what in (["--namespace", "ann"], ["--corpus", "facts"], ["--all-unfinished"]):
            error = error_of(capsys, "delete", folder, *what)
            assert f"in use by process {os.getpid()}" in error and "--url" in error
        argv = [folder, tmp_path / "facts.jsonl", "--tokenizer", model, "--corpus", "b"]
        assert "in use" in error_of(capsys, "add", *argv)
        assert "in use" in error_of(capsys, "merge", tmp_path / "target", folder)


def test_merge_joins_folders(folder, tmp_path, model, capsys):
    other = write_lines(tmp_path / "other.jsonl", TEXTS[:50])
    assert run("build", tmp_path / "second", other, "--tokenizer", model) == 0
    with Datastore.open(tmp_path / "second", create=False) as store:
        store.add([10, 11], "ann")
    assert run("merge", tmp_path / "target", folder, tmp_path / "second") == 0
    info = info_of(tmp_path / "target", capsys)
    assert set(info["corpora"]) == {"facts", "other"}
    assert info["namespaces"] == {"ann": 9, "bob": 2}
    assert "corpus 'facts' is in" in error_of(capsys, "merge", tmp_path / "target", folder)
    assert "named twice" in error_of(capsys, "merge", folder, folder)


def test_verify_finds_a_flipped_bit(folder, capsys):
    capsys.readouterr()
    assert run("verify", folder) == 0
    assert "all is well" in capsys.readouterr().out
    file = max(folder.glob("sub-*"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert run("verify", folder) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert str(file) in line and "checksum" in line
    assert run("info", folder) == 0
    assert "problem" in capsys.readouterr().out


# -- through a server ----------------------------------------------------------------------


class _Server(http.server.BaseHTTPRequestHandler):
    """Answers as the server's routes do, and notes what it was asked."""

    asked: ClassVar[list[tuple[str, str, str, str | None]]] = []

    def do_DELETE(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        self.asked.append((self.command, self.path, body, self.headers.get("Authorization")))
        if "forbidden" in self.path:
            error = {"error": {"message": "namespace must be\nanother", "type": "x", "code": 400}}
            self._reply(400, error)
        else:
            self._reply(200, {"deleted_tokens": 12} if self.command == "DELETE" else {})

    do_POST = do_DELETE

    def _reply(self, status: int, content: dict) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args) -> None:
        pass


def test_delete_through_a_server(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(_Server, "asked", [])
    with http.server.HTTPServer(("127.0.0.1", 0), _Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = ["--url", f"http://127.0.0.1:{server.server_port}/"]
        assert run("delete", *url, "--namespace", "a@b:c") == 0
        assert run("delete", *url, "--request", "x/y", "--api-key", "secret") == 0
        assert run("delete", *url, "--corpus", "facts") == 0
        out = capsys.readouterr().out
        assert out.count("12 tokens deleted") == 2 and "corpus 'facts': deleted" in out
        error = error_of(capsys, "delete", *url, "--namespace", "forbidden")
        assert "refused (400): namespace must be another" in error
        server.shutdown()
    assert _Server.asked[:3] == [
        ("DELETE", "/datastore/namespaces/a%40b%3Ac", "", None),
        ("DELETE", "/datastore/requests/x%2Fy", "", "Bearer secret"),
        ("POST", "/remove_external_corpus", '{"corpus_id": "facts"}', None),
    ]
    assert "cannot ask the server" in error_of(capsys, "delete", *url, "--corpus", "facts")
    assert "--url" in error_of(capsys, "delete", "--corpus", "facts")
    assert "--url" in error_of(capsys, "delete", tmp_path, *url, "--corpus", "facts")
    assert "needs the FOLDER" in error_of(capsys, "delete", *url, "--all-unfinished")


# -- progress ------------------------------------------------------------------------------


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_is_a_bar():
    terminal = _Terminal()
    shown = BuildProgress(4_000_000, 1_000_000, terminal)
    shown._bar.mininterval = 0
    shown.update(2_000_000, 500_000)
    shown.busy("sorting")
    shown.say("a line")
    shown.close()
    text = terminal.getvalue()
    assert " 50%|" in text and "2.00M/4.00MB" in text and "500 k tokens" in text
    assert "tokens/s" in text and "sorting" in text and "a line\n" in text


def test_progress_elsewhere_is_lines(monkeypatch):
    lines = io.StringIO()
    shown = BuildProgress(1000, 0, lines)
    shown.update(100, 50)
    assert lines.getvalue() == "", "not more than one line in ten seconds"
    monkeypatch.setattr(build_progress, "LINE_EVERY_S", 0.0)
    shown.update(250, 100)
    (line,) = lines.getvalue().splitlines()
    assert line.startswith("25%: 250B of 1.0 kB read, 100 tokens") and "s left" in line
    monkeypatch.setattr(build_progress, "LINE_EVERY_S", 0.01)
    waited = io.StringIO()
    with Waiting("merging", waited):
        eventually(waited.getvalue)
    assert waited.getvalue().startswith("merging: 0 s so far\n")


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (999, "999"), (1234, "1.2 k"), (5.6e7, "56.0 M"), (3e9, "3.0 G")]
)
def test_short_numbers(number, text):
    assert short(number) == text


# -- the whole command ---------------------------------------------------------------------


def test_info_starts_without_torch(folder):
    code = (
        "import sys; from sglang_ext.cli import main; "
        f"code = main(['datastore', 'info', {str(folder)!r}]); "
        "print({'torch', 'sglang', 'transformers', 'pyarrow', 'datasets'} & set(sys.modules), code)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.splitlines()[-1] == "set() 0", result.stderr


def test_end_to_end_with_a_served_model(tmp_path):
    name = "smollm2-135m-instruct"
    if not next(model for model in list_models() if model.name == name).present:
        pytest.skip(f"{name} is not here; `sglang-ext models fetch {name}` brings it")
    source = write_lines(tmp_path / "facts.jsonl")
    command = [sys.executable, "-m", "sglang_ext.cli", "datastore", "build", tmp_path / "store"]
    result = subprocess.run([*command, source, "--tokenizer", name], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "400 documents" in result.stdout
    with Datastore.open(tmp_path / "store", vocab_size=49152, create=False) as store:
        assert store.list_corpora().keys() == {"facts"}
        assert len(store.tokenizer_fingerprint) == 16
    with pytest.raises(DatastoreError, match="vocabulary"):
        Datastore.open(tmp_path / "store", vocab_size=32000)
