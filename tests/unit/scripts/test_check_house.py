"""The house check: which commands the docs show, what is done with them, and what is counted."""

from types import SimpleNamespace

import pytest

from scripts.check_house import LIMITS, PLACES, beyond
from scripts.lib.docs_code import CheckedOut, MakeRules
from scripts.lib.docs_commands import Command, Kind, assigned, commands_of, extract, pages, plan
from scripts.lib.docs_record import DocsRecord
from scripts.lib.docs_runner import DocsRunner, Outcome
from scripts.lib.house_figures import declared_hooks, hook_lookups, long_functions


def texts(page: str) -> list[str]:
    return [command.text for command in extract(page)]


def block(*lines: str, fence: str = "sh") -> str:
    return "\n".join(["text", "", f"```{fence}", *lines, "```", ""])


def planned(text: str, **machine):
    return plan(Command("docs/x.md", 1, text), **machine)


# Extraction


def test_only_blocks_of_shell_have_commands():
    page = block("make a") + block("x = 1", fence="python") + block("make b", fence="bash")
    assert texts(page) == ["make a", "make b"]


def test_comments_are_no_commands_and_no_part_of_one():
    assert texts(block("# first", "make demo    # what it does", "echo 'a # b' x#y")) == [
        "make demo",
        "echo 'a # b' x#y",
    ]


def test_continued_lines_are_one_command():
    assert texts(block("curl URL \\", "    -H 'a: b' \\", "    -d x", "make")) == [
        "curl URL -H 'a: b' -d x",
        "make",
    ]


def test_a_quote_over_several_lines_is_one_command():
    assert texts(block("curl -d '{", '  "a": 1', "}'", "make")) == [
        "curl -d '{\n  \"a\": 1\n}'",
        "make",
    ]


def test_a_here_document_is_one_command():
    assert texts(block("cat > f <<'E'", "# kept", "it's", "E", "make")) == [
        "cat > f <<'E'\n# kept\nit's\nE",
        "make",
    ]


def test_a_pipe_is_one_command():
    assert texts(block("a | b - | jq .id")) == ["a | b - | jq .id"]


def test_a_command_has_its_line():
    found = list(extract(block("make a \\", "  b", "", "make c"), "docs/x.md"))
    assert [(c.page, c.line) for c in found] == [("docs/x.md", 4), ("docs/x.md", 7)]


def test_a_marked_block_has_its_reason_and_the_next_one_has_none():
    page = "<!-- not run: two machines -->\n" + block("a")[6:] + block("b")
    assert [(c.text, c.reason) for c in extract(page)] == [("a", "two machines"), ("b", None)]
    marked = next(extract(page))
    assert plan(marked).kind is Kind.SKIP and "two machines" in plan(marked).text


def test_variables_that_a_command_sets_are_known():
    assert assigned("URL=http://x\nID=$(curl $URL)") == ["URL", "ID"]
    assert assigned("curl -d a=b") == []


# What is done with them


@pytest.mark.parametrize(
    "text", ["sglang-ext serve --model M", "sglang-ext pd --model M", "sglang serve --model-path M"]
)
def test_servers_are_started(text: str):
    assert planned(text).kind is Kind.SERVE


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("python -m scripts.check_speech", "python -m scripts.check_speech --quick"),
        ("python -m scripts.check_speech --quick", "python -m scripts.check_speech --quick"),
        ("python -m scripts.demo", "python -m scripts.demo"),
        (
            "sglang-ext sweep --out x --methods ar",
            "sglang-ext sweep --out x --methods ar --quick",
        ),
        ("sglang-ext sweep report x", "sglang-ext sweep report x"),
    ],
)
def test_checks_and_sweeps_run_in_their_short_form(text: str, short: str):
    assert planned(text).text == short


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("make test", "--test-minutes"),
        ("pip install x", "installs"),
        ("sglang-ext sweep --out x --methods ar --minutes 83", "15 minutes"),
        ("python -m scripts.fuzz_audio --files 10000", "an hour"),
        ("python -m scripts.gpu_kit --out x", "GPU"),
        ("no-such-program x | cat", "no-such-program is not installed"),
    ],
)
def test_what_is_left_out_has_a_reason(text: str, reason: str):
    assert planned(text).kind is Kind.SKIP and reason in planned(text).text


def test_with_a_gpu_its_commands_run():
    assert planned("python -m scripts.gpu_kit --out x", has_gpu=True).kind is Kind.RUN


def test_every_page_with_a_block_of_shell_has_commands():
    shown = [page for page in pages() if "```sh" in page.read_text()]
    assert len(shown) > 10
    assert all(commands_of(page) for page in shown)


# Running them


def test_commands_run_with_the_variables_of_those_before(tmp_path):
    page = block(
        "A=$(echo 3)", "test $A = 3", "false", "nothing | cat", "curl -s http://127.0.0.1:1/x"
    )
    found = list(DocsRunner(tmp_path, list(extract(page))).outcomes())
    assert [outcome.state for outcome in found] == ["ok", "ok", "failed", "skipped", "failed"]
    assert "exit code 1" in found[2].detail


def test_a_command_for_a_server_that_its_page_does_not_show_fails(tmp_path):
    (found,) = DocsRunner(tmp_path, list(extract(block("curl 127.0.0.1:30000")))).outcomes()
    assert found.state == "failed" and "no server on port 30000" in found.detail


def test_a_server_stays_for_commands_that_name_it_by_a_variable(tmp_path, monkeypatch):
    serve = "sglang-ext serve --model m"
    shown = block(serve, "U=http://127.0.0.1:30000/x", "test -n $U", "true")
    runner = DocsRunner(tmp_path, list(extract(shown)))
    begun, known = [], runner._servers

    def begin(self, number):
        begun.append(number)
        known["30000"] = SimpleNamespace(stop=lambda: begun.append("stop"))
        return ""

    monkeypatch.setattr(DocsRunner, "_serve", begin)
    states = [(outcome.state, list(known)) for outcome in runner.outcomes()]
    there = ("ok", ["30000"])
    assert states == [there, there, there, ("ok", [])] and begun == [0, "stop"]


def test_what_reads_the_results_of_a_skipped_command_is_skipped(tmp_path):
    page = block(
        "sglang-ext sweep --out res --methods ar --minutes 83", "sglang-ext sweep report res"
    )
    found = list(DocsRunner(tmp_path, list(extract(page))).outcomes())
    assert [outcome.state for outcome in found] == ["skipped", "skipped"]
    assert "res" in found[1].detail


def test_a_check_of_an_earlier_page_is_not_run_again(tmp_path, monkeypatch):
    run = []
    monkeypatch.setattr(DocsRunner, "_shell", lambda self, text: run.append(text) or "wrong")
    ran = DocsRecord(None, str)
    for number, page in enumerate(("a.md", "b.md")):
        commands = list(extract(block("python -m scripts.check_lens", "true"), page))
        (tmp_path / page).mkdir()
        found = list(DocsRunner(tmp_path / page, commands, ran=ran).outcomes())
        assert [outcome.state for outcome in found] == ["failed", "failed"]
        assert found[0].detail == ("wrong" if number == 0 else "as a.md:4")
    assert run == ["python -m scripts.check_lens --quick", "true", "true"]


def test_the_page_in_a_browser_needs_one(monkeypatch):
    for name, kind in (("chromium", Kind.RUN), (None, Kind.SKIP)):
        monkeypatch.setattr("scripts.lib.docs_commands.find_chromium", lambda found=name: found)
        assert planned("python -m scripts.check_captions_page --quick").kind is kind


def test_a_benchmark_that_wrote_its_page_has_run_without_it_too(tmp_path, monkeypatch):
    run = []
    monkeypatch.setattr(DocsRunner, "_shell", lambda self, text: run.append(text) or "")
    shown = [f"python -m scripts.bench_ssbd --quick{more}" for more in ("", " --docs docs", "")]
    list(DocsRunner(tmp_path, list(extract(block(*shown))), ran=DocsRecord(None, str)).outcomes())
    assert run == shown[:2]


def test_what_ended_well_with_the_same_code_is_on_record(tmp_path):
    ok, wrong = (Outcome(Command("a.md", 3, "true"), state, "", 2.5) for state in ("ok", "failed"))
    file = tmp_path / "record"
    made = DocsRecord(file, lambda text: f"c1 {text}")
    made.add("one", ok)
    made.add("two", wrong)
    made.add_page("a.md", [ok, ok])
    made.add_page("b.md", [ok, wrong])
    again = DocsRecord(file, lambda text: f"c1 {text}")
    shown = [ok.command] * 2
    assert again.get("one") == ok and again.page("a.md", shown) == [ok, ok]
    assert again.page("a.md", shown[:1]) is None and again.page("b.md", shown) is None
    assert again.get("two") is None and made.get("two") == wrong
    other = DocsRecord(file, lambda text: f"c2 {text}")
    assert other.get("one") is None and other.page("a.md", shown) is None


def test_a_page_is_current_while_the_checks_that_it_shows_are(tmp_path):
    code = {"true": "1", "python -m scripts.check_lens --quick": "1"}
    record = DocsRecord(tmp_path / "record", lambda text: text + code.get(text, ""))
    shown = list(extract(block("python -m scripts.check_lens --quick", "true"), "a.md"))
    outcomes = [Outcome(command, "ok") for command in shown]
    record.add_page("a.md", outcomes)
    assert record.page("a.md", shown) is None
    record.add(shown[0].text, outcomes[0])
    assert record.page("a.md", shown) == outcomes
    code[shown[0].text] = "2"
    again = DocsRecord(tmp_path / "record", lambda text: text + code.get(text, ""))
    assert again.page("a.md", shown) is None
    again.add(shown[0].text, outcomes[0])
    assert again.page("a.md", shown) == outcomes
    code["true"] = "2"
    assert again.page("a.md", shown) is None


SOURCES = {
    "Makefile": "demo:\n\tpython -m scripts.demo\n",
    "sglang_ext/worker.py": "",
    "sglang_ext/sweep/items.py": "",
    "sglang_ext/sweep/methods.py": "",
    "docs/a.md": "",
    "scripts/data/text.gz": "",
    "scripts/__init__.py": "",
    "scripts/demo.py": "from scripts.lib import server\n",
    "scripts/bench.py": "RUN = ['-m', 'scripts.kit']\n",
    "scripts/load.py": "from sglang_ext.sweep.items import Item\n",
    "scripts/kit/__main__.py": "from . import parts\n",
    "scripts/kit/parts.py": "",
    "scripts/kit/found_by_name.py": "",
    "scripts/lib/__init__.py": "",
    "scripts/lib/server.py": "from .client import get\n",
    "scripts/lib/client.py": "",
    "scripts/lib/docs_runner.py": "",
    "datastores/shipping/push.py": "",
    "sglang_ext/cuda/graphs.py": "",
    "sglang_ext/cuda/staging.py": "",
    "scripts/ship.py": "from datastores.shipping import push",
    "scripts/verify.py": "from sglang_ext.cuda import graphs",
}


SWEEP = "sglang_ext/sweep"
DEMO = {"scripts/demo", "scripts/lib/server", "scripts/lib/client"}


@pytest.mark.parametrize(
    ("command", "read"),
    [
        ("sglang-ext serve", set()),
        ("sglang-ext sweep --out results", {f"{SWEEP}/items", f"{SWEEP}/methods"}),
        ("python -m scripts.load", {"scripts/load", f"{SWEEP}/items"}),
        ("make demo", DEMO),
        ("python -m scripts.demo --quick", DEMO),
        ("sglang-ext datastore push", {"datastores/shipping/push"}),
        ("python -m scripts.ship", {"scripts/ship", "datastores/shipping/push"}),
        ("python -m scripts.verify", {"scripts/verify", "sglang_ext/cuda/graphs"}),
        (
            "python -m scripts.bench",
            {
                "scripts/bench",
                "scripts/kit/__main__",
                "scripts/kit/parts",
                "scripts/kit/found_by_name",
            },
        ),
    ],
)
def test_a_command_is_known_by_the_code_it_reads(tmp_path, command: str, read: set[str]):
    for path, source in SOURCES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(source)
    before = CheckedOut(dict.fromkeys(SOURCES, "1"), tmp_path).fingerprint(command)
    changes = {
        path
        for path in SOURCES
        if CheckedOut(dict.fromkeys(SOURCES, "1") | {path: "2"}, tmp_path).fingerprint(command)
        != before
    }
    always = {"sglang_ext/worker.py", "sglang_ext/cuda/staging.py", "scripts/data/text.gz"}
    assert changes == always | {f"{name}.py" for name in read}


MAKEFILE = "A := 1\ndemo: setup\n\trun $(A)\n# A note.\ntest: setup\n\tpytest\nsetup: lock\n\tpip\n"


@pytest.mark.parametrize(
    ("words", "change", "differs"),
    [
        ("demo", ("run", "start"), True),
        ("demo", ("pip", "uv"), True),  # what it needs
        ("demo", ("A := 1", "A := 2"), True),  # what all share
        ("demo", ("pytest", "unittest"), False),
        ("demo", ("note", "word"), False),
        ("test", ("pytest", "unittest"), True),
        ("-s", ("run", "start"), True),  # the first rule
    ],
)
def test_a_call_of_make_reads_its_rules(words: str, change: tuple[str, str], differs: bool):
    before, after = MakeRules(MAKEFILE), MakeRules(MAKEFILE.replace(*change))
    assert (before.text_of([words]) != after.text_of([words])) == differs


# Figures


def test_a_drafters_public_names_are_its_hooks():
    source = "class Drafter:\n x: int = 1\n y = 2\n def propose(self): ...\n def _own(self): ..."
    assert declared_hooks(source) == {"x", "y", "propose"}


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("getattr(x, 'propose', None)", 1),
        ("hasattr(x, 'propose')", 1),
        ("getattr(known.drafter, name)", 1),
        ("getattr(x, 'other')", 0),
        ("getattr(options, name)", 0),
        ("x.propose()", 0),
    ],
)
def test_lookups_of_hooks_are_counted(source: str, count: int):
    assert len(list(hook_lookups(source, {"propose"}))) == count


def test_a_function_of_51_lines_is_too_long_and_its_decorator_does_not_count():
    def source(lines):
        return "@decorator\ndef f():\n" + "    x = 1\n" * (lines - 1)

    assert list(long_functions(source(50))) == []
    assert list(long_functions(source(51))) == [(2, "f", 51)]


def test_figures_above_their_limits_are_beyond_them():
    at_limits = dict(LIMITS)
    assert beyond(at_limits) == []
    assert beyond(at_limits | {"worker_lines": LIMITS["worker_lines"] + 1}) == ["worker_lines"]


def test_every_list_of_places_has_a_limit():
    assert {count.__name__ for count in PLACES} <= set(LIMITS)
