"""`datastore snapshot | push | pull | show | export`, and `serve --datastore ADDRESS`."""

import argparse
import gzip
import http.server
import json
import os
import shutil
import threading
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from datastores import Datastore, InputTrie, retrieve, verify_folder
from datastores.shipping import read_card
from sglang_ext import cli
from sglang_ext.commands.datastore import pulled
from sglang_ext.commands.datastore.model_tokenizer import ModelTokenizer
from sglang_ext.commands.datastore.pulled import cache_folder, local_datastore
from sglang_ext.drafters import DrafterContext
from sglang_ext.drafters.sssd import open_datastore
from sglang_ext.options import Options, env_name
from sglang_ext.preflight import PreflightError
from tests.unit.commands.small_tokenizer import TEXTS, VOCAB_SIZE, make_model, run


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache of its own, and no remote files."""
    monkeypatch.setenv("SGLANG_EXT_CACHE", str(tmp_path / "cache"))
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture
def folder(tmp_path: Path, model: str, capsys) -> Path:
    """A built datastore with a corpus `lines` and served outputs of `acme`."""
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    assert run("build", tmp_path / "store", lines, "--tokenizer", model) == 0
    (said,) = ModelTokenizer(model).encode(["what is 7 times 9? It is a secret."])
    with Datastore.open(tmp_path / "store", create=False) as store:
        store.add(said, "acme")
    capsys.readouterr()
    return tmp_path / "store"


def refusal(capsys, *argv: object) -> str:
    capsys.readouterr()
    assert run(*argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("sglang-ext datastore: error: ")
    return err


def test_snapshot_says_what_it_copied(folder: Path, tmp_path: Path, capsys) -> None:
    with Datastore.open(folder, create=False):  # a server's
        assert run("snapshot", folder, tmp_path / "copy") == 0
    out = capsys.readouterr().out
    assert f"{tmp_path / 'copy'}: " in out and "tokens in 2 files" in out and "verified" in out
    assert verify_folder(tmp_path / "copy") == []
    assert "exists and is no empty folder" in refusal(capsys, "snapshot", folder, folder)
    assert "expected FOLDER TARGET" in refusal(capsys, "snapshot", folder)


def test_push_sends_no_tenants_text_unasked(folder: Path, tmp_path: Path, capsys) -> None:
    told = refusal(capsys, "push", folder, "memory://r")
    assert "served outputs of 1 namespaces" in told and "--corpora-only" in told
    assert not MemoryFileSystem.store
    assert run("push", folder, "memory://r", "--corpora-only") == 0
    assert run("pull", "memory://r", tmp_path / "here") == 0
    with Datastore.open(tmp_path / "here", create=False) as here:
        assert here.namespaces() == {} and list(here.list_corpora()) == ["lines"]
    assert run("push", folder, "memory://s", "--with-served") == 0
    assert run("pull", "memory://s", tmp_path / "all") == 0
    with Datastore.open(tmp_path / "all", create=False) as here:
        assert list(here.namespaces()) == ["acme"]


def test_the_card_says_what_build_and_push_were_told(
    folder: Path, model: str, tmp_path: Path, capsys
) -> None:
    said = ["--licence", "mit", "--description", "Sums.", "--source", "lines=https://sums.org"]
    assert run("push", folder, "memory://r", "--corpora-only", *said) == 0
    assert run("push", folder, "memory://r", "--corpora-only") == 0  # what was said is kept
    assert run("pull", "memory://r", tmp_path / "here") == 0
    card = read_card(str(tmp_path / "here"))
    assert card.licence == "mit" and card.description == "Sums."
    assert card.sources == {"lines": ("lines.jsonl", "https://sums.org")}
    assert card.tokenizer == os.path.basename(model), "a path of this machine tells too much"
    text = (tmp_path / "here" / "README.md").read_text()
    assert "Sums." in text and "lines.jsonl, https://sums.org" in text and str(tmp_path) not in text
    assert "expected CORPUS=TEXT" in refusal(
        capsys, "push", folder, "memory://r", "--corpora-only", "--source", "x"
    )


def test_pull_refuses_another_models_datastore(folder: Path, model: str, tmp_path, capsys) -> None:
    assert run("push", folder, "memory://r", "--corpora-only") == 0
    capsys.readouterr()
    (tmp_path / "other").mkdir()
    other = make_model(tmp_path / "other", size=400)
    told = refusal(capsys, "pull", "memory://r", tmp_path / "here", "--tokenizer", other)
    assert "was built with tokenizer" in told and not (tmp_path / "here").exists()
    assert run("pull", "memory://r", tmp_path / "here", "--tokenizer", model) == 0
    assert "received" in capsys.readouterr().out
    assert run("pull", "memory://r", tmp_path / "here") == 0
    assert "it was here already" in capsys.readouterr().out
    assert "neither an address" in refusal(capsys, "pull", "nowhere", tmp_path / "x")


class Routes(http.server.BaseHTTPRequestHandler):
    """The datastore's route of a server."""

    info: ClassVar[dict] = {}

    def do_GET(self) -> None:
        content = json.dumps(self.info).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args) -> None:
        pass


def test_a_servers_folder_is_found_by_its_url(folder: Path, tmp_path: Path, capsys) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Routes)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        Routes.info = {"path": str(folder)}
        assert run("snapshot", "--url", url, tmp_path / "copy") == 0
        assert run("push", "--url", url, "memory://r", "--corpora-only") == 0
        capsys.readouterr()
        Routes.info = {"path": None}
        assert "keeps its datastore in memory" in refusal(
            capsys, "snapshot", "--url", url, tmp_path / "x"
        )
        Routes.info = {"path": "/not/here"}
        assert "is not on this machine" in refusal(capsys, "snapshot", "--url", url, tmp_path / "x")
    finally:
        server.shutdown()
        server.server_close()
    assert "cannot ask the server" in refusal(capsys, "snapshot", "--url", url, tmp_path / "x")


# -- show ----------------------------------------------------------------------------------


def test_show_counts_continuations_and_names_their_sources(folder: Path, capsys) -> None:
    assert run("show", folder, "--prefix", "is 7 times", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    texts = "".join(TEXTS)
    assert found["matched"] == " is 7 times"
    assert found["sources"] == {
        "corpus 'lines'": texts.count("is 7 times"), "namespace 'acme'": 1,
    }  # fmt: skip
    assert found["occurrences"] == sum(found["sources"].values())
    assert found["occurrences"] == sum(each["count"] for each in found["continuations"])
    (secret,) = [c for c in found["continuations"] if c["text"].startswith(" 9")]
    assert secret["sources"] == {"namespace 'acme'": 1}

    little = ["--corpus", "lines", "--most", 2, "--tokens", 1]
    assert run("show", folder, "--prefix", "times", *little) == 0
    first, *rows = capsys.readouterr().out.splitlines()
    assert first == "' times' (1 of 1 tokens): 400 times, 400 in corpus 'lines'"
    assert len(rows) == 2 and all(row.endswith("corpus 'lines'") for row in rows)
    counts = [int(row.split()[0]) for row in rows]
    assert counts == sorted(counts, reverse=True)


def test_show_matches_the_end_of_a_text_that_occurs_nowhere(folder: Path, capsys) -> None:
    assert run("show", folder, "--prefix", "Zebras! what is 7", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["matched"].endswith(" what is 7") and "Zebras" not in found["matched"]
    assert run("show", folder, "--prefix", "~", "--namespace", "acme") == 1
    assert "not found" in capsys.readouterr().out


def test_show_looks_where_it_is_told(folder: Path, tmp_path: Path, capsys) -> None:
    assert run("show", folder, "--prefix", "times", "--namespace", "acme", "--json") == 0
    assert json.loads(capsys.readouterr().out)["sources"] == {"namespace 'acme'": 1}
    assert "there is no corpus 'x'" in refusal(
        capsys, "show", folder, "--prefix", "a", "--corpus", "x"
    )
    (tmp_path / "other").mkdir()
    other = make_model(tmp_path / "other", size=400)
    assert "was built with tokenizer" in refusal(
        capsys, "show", folder, "--prefix", "a", "--tokenizer", other
    )
    (folder / "CARD.json").unlink()
    assert "does not say its tokenizer" in refusal(capsys, "show", folder, "--prefix", "a")


# -- export --------------------------------------------------------------------------------


def drafts(folder: Path, corpus: str, texts: list[np.ndarray]) -> list[list[tuple]]:
    """What each text's beginnings draft from a corpus alone: tokens, parents, probabilities."""
    found = []
    with Datastore.open(folder, create=False, read_only=True) as store:
        snapshot = store.snapshot("nobody", [corpus])
        for tokens in texts:
            trie = InputTrie()
            trie.extend(tokens.tolist())
            (draft,) = retrieve([trie], snapshot, 20)
            found.append(
                [
                    (int(t), int(p), float(q), int(s))
                    for t, p, q, s in zip(
                        draft.tokens, draft.parents, draft.probs, draft.sources, strict=True
                    )
                ]
            )
    return found


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_an_exported_corpus_that_is_built_again_drafts_the_same(
    name: str, folder: Path, model: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    assert run("export", folder, file, "--corpus", "lines") == 0
    built = ["--field", "tokens", "--tokenizer", model, "--corpus", "lines"]
    assert run("build", tmp_path / "again", file, *built) == 0
    queries = ModelTokenizer(model).encode([text[: 5 + i % 40] for i, text in enumerate(TEXTS)])
    before = drafts(folder, "lines", queries)
    assert sum(map(len, before)) > 1000
    assert drafts(tmp_path / "again", "lines", queries) == before


def test_export_says_whose_each_document_is(folder: Path, model: str, tmp_path, capsys) -> None:
    with Datastore.open(folder, create=False) as store:
        store.add_corpus("own", [[5, 6, 7]], "acme")
        store.add([1, 2, 3], "gone")
        store.delete_namespace("gone")
    assert run("export", folder, "-", "--tokenizer", model) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    owners = {(line["corpus"], line["namespace"]) for line in lines}
    assert owners == {("lines", None), ("own", "acme"), (None, "acme")}
    assert [line["text"] for line in lines if line["corpus"] == "lines"] == TEXTS
    assert run("export", folder, "-", "--namespace", "acme") == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["namespace"] == "acme" and "text" not in json.loads(line)
    assert "there is no namespace 'gone'" in refusal(
        capsys, "export", folder, tmp_path / "x.jsonl", "--namespace", "gone"
    )
    assert not (tmp_path / "x.jsonl").exists()


def test_export_leaves_no_half_file(folder: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    out = tmp_path / "out" / "x.jsonl.gz"
    out.parent.mkdir()
    out.write_bytes(gzip.compress(b"old"))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    assert "No space left on device" in refusal(capsys, "export", folder, out)
    assert gzip.decompress(out.read_bytes()) == b"old" and len(os.listdir(out.parent)) == 1


# -- serve ---------------------------------------------------------------------------------


def test_serve_fetches_once_and_keeps_what_it_learned(folder: Path, model: str, capsys) -> None:
    assert run("push", folder, "memory://r", "--corpora-only") == 0
    first = Path(local_datastore("memory://r", model))
    assert first.parent == cache_folder("memory://r") and verify_folder(first) == []
    with Datastore.open(first, create=False) as server:
        server.add([1, 2, 3], "learned")
    assert Path(local_datastore("memory://r", model)) == first
    with Datastore.open(first, create=False) as server:
        assert server.namespaces() == {"learned": 3}
    with Datastore.open(folder, create=False) as store:
        store.add_corpus("more", [[1, 2]])
    assert run("push", folder, "memory://r", "--corpora-only") == 0
    second = Path(local_datastore("memory://r", model))
    assert second != first and first.is_dir()
    with Datastore.open(second, create=False) as server:
        assert set(server.list_corpora()) == {"lines", "more"}


def test_a_server_starts_from_its_cache_where_the_address_is_silent(
    folder: Path, model: str, tmp_path: Path, capsys
) -> None:
    address = f"file://{tmp_path}/remote"
    assert run("push", folder, address, "--corpora-only") == 0
    first = local_datastore(address, model)
    shutil.rmtree(tmp_path / "remote")
    capsys.readouterr()
    assert local_datastore(address, model) == first
    (line,) = capsys.readouterr().err.splitlines()
    assert "there is no datastore at" in line and "serving what came from there last" in line


def serve(model: str, address: str) -> Options:
    """What `serve` makes of its options, as far as the datastore goes."""
    argv = ["--model-path", model]
    return cli._pull_datastore(address, argv)


def test_serve_takes_an_address_or_ends_in_one_line(
    folder: Path, model: str, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv(env_name("datastore"), "memory://r")
    with pytest.raises(PreflightError, match="--datastore: there is no datastore at memory://r"):
        serve(model, "memory://r")
    assert run("push", folder, "memory://r", "--corpora-only") == 0
    options = serve(model, "memory://r")
    assert Path(options.datastore).parent == cache_folder("memory://r")
    assert os.environ[env_name("datastore")] == options.datastore
    (tmp_path / "other").mkdir()
    other = make_model(tmp_path / "other", size=400)
    with pytest.raises(PreflightError, match="was built with tokenizer"):
        serve(other, "memory://r")


def test_a_server_that_nobody_fetched_for_says_so() -> None:
    context = DrafterContext(VOCAB_SIZE, Options(datastore="s3://bucket/x"))
    with pytest.raises(Exception, match="is an address, which `sglang-ext serve` alone fetches"):
        open_datastore(context)


def test_the_cache_names_addresses_apart_and_without_secrets() -> None:
    names = {
        cache_folder(address).name
        for address in ("s3://a/b", "s3://a/c", "gs://a/b", "hf://a/b", "hf://datasets/a/b")
    }
    assert len(names) == 4
    assert "hunter2" not in cache_folder("ftp://me:hunter2@host/x").name
    assert pulled.is_address("hf://a/b") and not pulled.is_address("./store")


def test_help_of_each_command_can_be_shown(capsys) -> None:
    for command in ("snapshot", "push", "pull", "show", "export"):
        with pytest.raises(SystemExit) as ended:
            run(command, "--help")
        assert ended.value.code == 0
        assert isinstance(capsys.readouterr().out, str)
    with pytest.raises((SystemExit, argparse.ArgumentError)):
        run("show", "x")
