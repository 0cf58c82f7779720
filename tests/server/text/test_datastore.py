"""Namespaces, deletion, corpora and metrics of the datastore, on one real server."""

import contextlib
import io
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from datastores import Datastore, verify_folder
from scripts.lib.http_client import HTTP
from scripts.lib.isolation_server import deletion_leftovers
from sglang_ext.cli import main
from tests.server.conftest import CHUNK, MODEL
from tests.server.servers import Server

HEADER = "x-sglang-ext-namespace"
PROMPT = "List the planets of the solar system, one a line.\n1."


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("datastore") / "store"


@pytest.fixture(scope="module")
def server(folder) -> Iterator[Server]:
    """SSSD over a durable datastore, with metrics and an admin key."""
    flags = ["--speculative-algorithm", "SSSD", "--datastore", str(folder), "--enable-metrics"]
    flags += ["--drafters", "ssbd"]
    with Server(MODEL, [*flags, *CHUNK, "--admin-api-key", "secret"], name="datastore") as server:
        yield server


def admin(server: Server, method: str, path: str, **options):
    headers = {"Authorization": "Bearer secret"}
    return HTTP.request(method, server.base_url + path, headers=headers, timeout=60, **options)


def generate(server: Server, header: str | None = None, path: str = "/generate", **body):
    headers = {} if header is None else {HEADER: header}
    return HTTP.post(server.base_url + path, json=body, headers=headers, timeout=300)


def ask(server: Server, header: str | None = None, n: int = 1, **params):
    """A /generate request of 24 tokens; its answer, or the answers of n samples."""
    sampling = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True, "n": n}
    response = generate(
        server, header, text=PROMPT, sampling_params=sampling | {"custom_params": params}
    )
    assert response.is_success, response.text
    return response.json()


def namespaces(server: Server) -> dict[str, int]:
    assert admin(server, "POST", "/datastore/flush").is_success
    return admin(server, "GET", "/datastore/namespaces").json()["namespaces"]


def test_outputs_join_the_namespace_of_params_or_header_and_no_other(server):
    before = namespaces(server).get("default", 0)
    ask(server, namespace="by-params")
    ask(server, header="by-header")
    ask(server, header="opted-out", ingest=False)
    ask(server)
    found = namespaces(server)
    assert found["by-params"] == found["by-header"] > 24
    assert found["default"] == before + found["by-params"]
    assert "opted-out" not in found


@pytest.mark.parametrize("kind", ["namespace", "cache_salt"])
def test_one_tenants_text_speeds_up_its_own_repetition_only(kind, server):
    def as_tenant(name: str):
        if kind == "namespace":
            return ask(server, namespace=name)
        sampling = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
        return generate(server, text=PROMPT, sampling_params=sampling, cache_salt=name).json()

    first = as_tenant("fast")
    namespaces(server)  # waits until it is searchable
    again = as_tenant("fast")
    other = as_tenant("elsewhere")
    assert again["output_ids"] == other["output_ids"] == first["output_ids"]
    steps = [a["meta_info"]["spec_verify_ct"] for a in (first, again, other)]
    assert steps[1] < 0.7 * steps[2], steps
    assert steps[2] > 0.8 * steps[0], steps


def test_openai_routes_take_the_header(server):
    body = {"model": MODEL, "max_tokens": 12, "temperature": 0}
    chat = body | {"messages": [{"role": "user", "content": "Say hello."}]}
    assert generate(server, "chat", "/v1/chat/completions", **chat).is_success
    completions = body | {"prompt": ["One, two,", "Red, green,"]}
    assert generate(server, "completions", "/v1/completions", **completions).is_success
    found = namespaces(server)
    assert found["chat"] > 0 and found["completions"] > 0


def body_of(path: str, params: dict) -> dict:
    """A short request of a route, with custom_params where the route has them."""
    return {
        "/generate": {"text": "x", "sampling_params": {"custom_params": params}},
        "/v1/chat/completions": {
            "model": MODEL, "messages": [{"role": "user", "content": "x"}], "custom_params": params,
        },
        "/v1/completions": {"model": MODEL, "prompt": ["x", "y"], "custom_params": params},
    }[path]  # fmt: skip


@pytest.mark.parametrize(
    ("header", "params", "message"),
    [
        ("a", {"namespace": "b"}, "custom_params.namespace 'b' contradicts the header"),
        ("a b", {}, f"the header {HEADER} must be 1 to 128 characters"),
        (None, {"namespace": "a/b"}, "custom_params.namespace must be 1 to 128 characters"),
        (None, {"namespace": 5}, "custom_params.namespace"),
        (None, {"ingest_name": ""}, "custom_params.ingest_name"),
    ],
)
@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/v1/completions"])
def test_bad_namespaces_get_a_400(header, params, message, path, server):
    response = generate(server, header, path, **body_of(path, params))
    assert response.status_code == 400 and message in response.text


def salt_name(server: Server, **salts: str) -> str:
    answer = admin(server, "POST", "/datastore/namespaces/name", json=salts)
    assert answer.is_success, answer.text
    return answer.json()["namespace"]


def test_salts_name_the_namespace_on_every_route(server):
    sampling = {"max_new_tokens": 12, "ignore_eos": True}
    bodies = {
        "/generate": {"text": PROMPT, "sampling_params": sampling},
        "/v1/chat/completions": {
            "model": MODEL, "max_tokens": 12, "messages": [{"role": "user", "content": "Hello."}],
        },
        "/v1/completions": {"model": MODEL, "prompt": ["One,", "Red,"], "max_tokens": 12, "n": 2},
        "/v1/responses": {"model": MODEL, "input": "Hello.", "max_output_tokens": 12},
    }  # fmt: skip
    for path, body in bodies.items():
        answer = generate(server, None, path, **body, cache_salt=path, extra_key="routes")
        assert answer.is_success, answer.text
    names = {path: salt_name(server, cache_salt=path, extra_key="routes") for path in bodies}
    found = namespaces(server)
    assert all(found.get(name, 0) >= 12 for name in names.values()), (found, names)


def test_each_prompt_of_a_batch_has_its_own_salt(server):
    sampling = {"max_new_tokens": 12, "ignore_eos": True, "n": 2}
    before = namespaces(server).get("default", 0)
    texts, salts = ["One,", "Red,", "Oak,"], ["batch-1", "batch-2", ""]
    answer = generate(server, text=texts, sampling_params=sampling, cache_salt=salts)
    assert answer.is_success, answer.text
    found = namespaces(server)
    own = [found.get(salt_name(server, cache_salt=salt), 0) for salt in salts[:2]]
    assert min(own) >= 24 and found["default"] - before >= 24
    for salt in salts[:2]:
        admin(server, "DELETE", f"/datastore/namespaces/{salt_name(server, cache_salt=salt)}")
    assert not namespaces(server).keys() & {salt_name(server, cache_salt=s) for s in salts[:2]}


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(("header", "params"), [("acme", {}), (None, {"namespace": "acme"})])
def test_salts_that_contradict_a_namespace_get_a_400(header, params, path, server):
    answer = generate(server, header, path, **body_of(path, params), cache_salt="pepper")
    assert answer.status_code == 400 and "contradicts cache_salt" in answer.text


def test_requests_are_deleted_by_the_id_that_the_answer_carries(server):
    answers = [*ask(server, namespace="ids", n=2), ask(server, namespace="ids")]
    chat = generate(
        server, "ids", "/v1/chat/completions",
        model=MODEL, max_tokens=12, messages=[{"role": "user", "content": "Count to nine."}],
    )  # fmt: skip
    ids = [a["meta_info"]["id"] for a in answers] + [chat.json()["id"]]
    total = namespaces(server)["ids"]
    deleted = [admin(server, "DELETE", f"/datastore/requests/{rid}").json() for rid in ids]
    tokens = [d["deleted_tokens"] for d in deleted]
    assert min(tokens) > 0 and sum(tokens) == total
    assert "ids" not in namespaces(server)
    again = admin(server, "DELETE", f"/datastore/requests/{ids[0]}")
    assert again.is_success and again.json() == {"deleted_tokens": 0}


def test_ingest_name_covers_every_choice_of_a_request(server):
    response = generate(
        server, "named", "/v1/completions",
        model=MODEL, prompt=["One, two,", "Red, green,"], n=2, max_tokens=12, temperature=0,
        custom_params={"ingest_name": "order/66"},
    )  # fmt: skip
    assert response.is_success and len(response.json()["choices"]) == 4
    total = namespaces(server)["named"]
    wrong = admin(server, "DELETE", "/datastore/requests/order/66", params={"namespace": "ids"})
    assert wrong.json() == {"deleted_tokens": 0}
    deleted = admin(server, "DELETE", "/datastore/requests/order/66")
    assert deleted.json() == {"deleted_tokens": total}


def test_a_deleted_namespace_is_gone_from_memory_and_files(server, folder):
    ask(server, namespace="doomed")
    total = namespaces(server)["doomed"]
    assert any(b"doomed" in p.read_bytes() for p in folder.rglob("*") if p.is_file())
    assert admin(server, "DELETE", "/datastore/namespaces/doomed").json() == {
        "deleted_tokens": total
    }
    assert "doomed" not in namespaces(server)
    ask(server, namespace="kept")
    assert namespaces(server)["kept"] == total


def test_nothing_of_a_request_or_a_namespace_is_left_in_sessions(server, folder, prompts):
    asked = [p.input_ids for p in prompts[:2]]
    assert deletion_leftovers(server.base_url, folder, asked, key="secret") == 0


def test_routes_need_the_admin_key_and_refuse_in_openais_shape(server):
    url = server.base_url + "/datastore"
    assert HTTP.get(url, timeout=30).status_code == 401
    assert HTTP.delete(url + "/namespaces/kept", timeout=30).status_code == 401
    bad = admin(server, "DELETE", "/datastore/namespaces/a%20b")
    assert bad.status_code == 400
    assert "namespace must be 1 to 128 characters" in bad.json()["error"]["message"]


def test_info_tells_size_and_state(server, folder):
    info = admin(server, "GET", "/datastore").json()
    assert info["path"] == str(folder) and info["problems"] == []
    assert info["num_tokens"] >= sum(info["namespaces"].values()) > 0
    assert info["bytes_per_token"] > 0 and info["disk_bytes"] > 0


def test_corpora_are_checked_before_they_are_loaded(server, tmp_path):
    def add(**body):
        return admin(server, "POST", "/add_external_corpus", json=body)

    path = tmp_path / "corpus.jsonl"
    path.write_text('"a string"\n{"text": "a record"}\n{"txt": "no field"}\n')
    assert "line 3: no field text or content" in add(corpus_id="x", file_path=str(path)).text
    with path.open("wb") as file:
        file.write(b'"')
        file.truncate(100 << 20)  # a line of 100 MB
    response = add(corpus_id="x", file_path=str(path))
    assert response.status_code == 400 and "line 1: longer than 16 MiB" in response.text
    broken = admin(server, "POST", "/add_external_corpus", content="nonsense")
    assert broken.status_code == 400 and "not JSON" in broken.text
    assert "documents must be a list" in add(corpus_id="x", documents="text").text
    assert "holds no text" in add(corpus_id="x", documents=["", ""]).text
    good = add(corpus_id="x", documents=["The quick brown fox jumps over the lazy dog. " * 5])
    assert good.is_success, good.text
    assert "exists already" in add(corpus_id="x", documents=["more"]).text
    assert ask(server)["output_ids"]
    assert admin(server, "GET", "/datastore").json()["corpora"] == {
        "x": good.json()["loaded_token_count"]
    }
    assert admin(server, "POST", "/remove_external_corpus", json={"corpus_id": "x"}).is_success


def test_a_namespaces_corpus_drafts_for_it_alone_and_for_who_chooses_it(server):
    alone = {"ingest": False, "budget": "fixed"}
    text = PROMPT + ask(server, **alone, namespace="nobody")["text"]
    mine = {"corpus_id": "answers", "namespace": "owner", "documents": [text]}
    added = admin(server, "POST", "/datastore/corpora", json=mine)
    assert added.is_success and added.json()["namespace"] == "owner", added.text
    others = {"corpus_id": "others", "documents": ["Something else. " * 9]}
    assert admin(server, "POST", "/datastore/corpora", json=others).is_success
    assert admin(server, "POST", "/datastore/corpora", json=mine).status_code == 400
    listed = admin(server, "GET", "/datastore/corpora").json()["corpora"]
    assert {"namespace": "owner", "name": "answers"} in listed
    assert {"namespace": None, "name": "others"} in listed

    def drafted(namespace, **params):
        answer = ask(server, **alone, namespace=namespace, **params)
        assert PROMPT + answer["text"] == text
        return answer["meta_info"]["spec_accept_length"]

    for helped in (drafted("owner"), drafted("owner", corpora=["answers"])):
        for bare in (drafted("owner", corpora=[]), drafted("thief", corpora=["others"])):
            assert helped > 2 + bare
    assert drafted("thief") < drafted("owner") - 2
    for namespace in ("thief", "default"):
        sampling = {"custom_params": {"corpora": ["answers"], "namespace": namespace}}
        refused = generate(server, text="a", sampling_params=sampling)
        assert refused.status_code == 400 and "no corpus 'answers'" in refused.text
        assert "'others'" in refused.text
    assert admin(server, "DELETE", "/datastore/namespaces/owner").json()["deleted_tokens"] > 0
    assert admin(server, "DELETE", "/datastore/corpora/others").json()["deleted_tokens"] > 0
    assert admin(server, "DELETE", "/datastore/corpora/owner/answers").status_code == 400
    assert admin(server, "GET", "/datastore/corpora").json() == {"corpora": []}


def test_metrics_are_in_sglangs_endpoint(server):
    ask(server, namespace="metrics")
    namespaces(server)
    ask(server, namespace="metrics")  # drafts from what was just served
    text = HTTP.get(server.base_url + "/metrics", timeout=30).text
    found: dict[str, float] = {}
    for name, labels, value in re.findall(r"^sglang_ext:(\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
        assert f'model_name="{MODEL}"' in labels
        other = re.search(r'(source|kind)="(\w+)"', labels)
        found[name + (f".{other[2]}" if other else "")] = float(value)
    assert found["accept_length_count"] > 0 and found["verify_width_count"] > 0
    assert found["retrieval_seconds_count"] > 0
    assert found["proposed_tokens_total.live"] >= found["accepted_tokens_total.live"] > 0
    assert {"proposed_tokens_total.static", "proposed_tokens_total.prompt"} <= found.keys()
    assert found["datastore_tokens.live"] > 0 and found["datastore_bytes.disk"] > 0
    assert found["budget_knee_tokens"] >= found["budget_cap"] >= 1
    assert {"datastore_ingest_lag_seconds", "datastore_dropped_documents_total"} <= found.keys()


def datastore_command(*argv: object) -> str:
    """What `sglang-ext datastore ARGV` prints; here, where its imports are made."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = main(["datastore", *map(str, argv)])
    assert code == 0, printed.getvalue()
    # A command that steps aside for a server does so in a process of its own.
    assert os.sched_getscheduler(0) == os.SCHED_OTHER and os.getpriority(os.PRIO_PROCESS, 0) == 0
    return printed.getvalue()


def test_a_running_servers_datastore_is_copied_and_looked_into(server, folder, tmp_path):
    answer = ask(server, namespace="copied")
    listed = namespaces(server)
    url = ["--url", server.base_url, "--api-key", "secret"]
    assert "verified" in datastore_command("snapshot", *url, tmp_path / "copy")
    assert verify_folder(tmp_path / "copy") == []
    with Datastore.open(tmp_path / "copy", create=False) as copy:
        assert copy.namespaces() == listed
    beginning = answer["text"].rsplit(" ", 2)[0]  # ends where a token does
    shown = ["--prefix", beginning, "--namespace", "copied", "--tokenizer", MODEL]
    assert "namespace 'copied'" in datastore_command("show", folder, *shown)
    datastore_command("export", folder, tmp_path / "out.jsonl", "--namespace", "copied")
    (line,) = (tmp_path / "out.jsonl").read_text().splitlines()
    assert json.loads(line)["tokens"][-24:] == answer["output_ids"]


def test_a_tenant_deleted_behind_a_push_is_gone_with_the_next(server, tmp_path):
    ask(server, namespace="tenant-66")
    url = ["--url", server.base_url, "--api-key", "secret"]
    address = f"file://{tmp_path}/remote"

    def pushed() -> bytes:
        datastore_command("push", *url, address, "--with-served", "--tokenizer", MODEL)
        return b"".join(path.read_bytes() for path in (tmp_path / "remote").iterdir())

    assert b"tenant-66" in pushed()
    assert admin(server, "DELETE", "/datastore/namespaces/tenant-66").is_success
    assert b"tenant-66" not in pushed()


def test_a_restart_serves_what_was_learned(server, folder):
    ask(server, namespace="lasting")
    before = namespaces(server)
    server.stop()
    with Server(
        MODEL,
        ["--speculative-algorithm", "SSSD", "--datastore", str(folder), *CHUNK],
        name="restarted",
        port=server.port,
    ) as restarted:
        after = HTTP.get(restarted.base_url + "/datastore/namespaces", timeout=60).json()
    kept = {name: after["namespaces"].get(name) for name in before if name != "default"}
    assert kept == {name: tokens for name, tokens in before.items() if name != "default"}


def test_a_server_fetches_what_another_has_pushed(folder, tmp_path, monkeypatch):
    """Behind the others: their server has ended, and its folder is free."""
    address = f"file://{tmp_path}/remote"
    datastore_command("push", folder, address, "--with-served")
    monkeypatch.setenv("SGLANG_EXT_CACHE", str(tmp_path / "cache"))
    flags = ["--speculative-algorithm", "SSSD", "--datastore", address, *CHUNK]
    with Server(MODEL, flags, name="fetched") as fetched:
        info = HTTP.get(fetched.base_url + "/datastore", timeout=60).json()
        first = ask(fetched, namespace="lasting", ingest=False)
        other = ask(fetched, namespace="never-seen", ingest=False)
    assert info["path"].startswith(str(tmp_path / "cache")) and info["namespaces"]["lasting"] > 0
    assert first["output_ids"] == other["output_ids"]
    steps = [answer["meta_info"]["spec_verify_ct"] for answer in (first, other)]
    assert steps[0] < 0.7 * steps[1], steps
