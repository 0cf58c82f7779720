"""check_isolation: draft trees of the server's own drafters, in this process.

SSSD and SSBD serve three tenants and a fourth that was never served, over a durable datastore in a
temporary folder. All tenants' texts begin alike (the contexts) and go on with tokens that are in
one text of one tenant only (its markers), so a draft for one tenant that reads another's text shows
it; sessions of all tenants have the same names. Checked while texts come in, from memory, from
files, after a restart, and after one request's contribution and a whole namespace were deleted,
whose markers must be gone from the bytes of every file and from all that the drafters hold.
"""

import argparse
import sys
import tempfile
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tqdm import tqdm

from scripts.lib.memory_search import holders
from sglang_ext.api.datastore.control import Operations
from sglang_ext.drafters import Drafter, DrafterContext, DraftRequest, load_all
from sglang_ext.options import Options
from sglang_ext.request_options import RequestOptions

TENANTS = ("acme", "globex", "default")
STRANGER = "stranger"
MAX_NODES = 24
BATCH = 16
CONTEXT = 10  # tokens of a context
MARKERS = 12  # tokens that only one text has
COMMON = 2000  # token ids that contexts are made of; markers are above
TIMEOUT_S = 120
# Nobody guesses it, so that its output is a draft with a bias; every tenant has one of this name.
SESSION = "2c5ea4c0-4067-41e9-8bad-9b1deb4d3b7d"


class NothingShown(Exception):
    """What was to be looked for could not have been there."""


@dataclass(frozen=True)
class Text:
    """One served output: a shared context, then markers."""

    rid: str
    tenant: str
    context: tuple[int, ...]
    markers: tuple[int, ...]


@dataclass
class Findings:
    """What the trees showed."""

    drafts: int = 0
    own: int = 0
    leaks: int = 0
    left: int = 0
    left_in_memory: int = 0
    left_in_sessions: int = 0
    messages: list[str] = field(default_factory=list)

    def note(self, message: str) -> None:
        self.leaks += 1
        if len(self.messages) < 20:
            self.messages.append(message)


class Bench:
    """A drafter over a folder, the texts it has served, and the checks."""

    def __init__(self, folder: Path, contexts: int, rounds: int):
        self.folder = folder
        self.findings = Findings()
        rng = np.random.default_rng(0)
        self.contexts = [tuple(map(int, rng.integers(0, COMMON, CONTEXT))) for _ in range(contexts)]
        texts = rounds * (len(TENANTS) + 2) * contexts + 1
        self.vocab_size = COMMON + texts * MARKERS
        # Shuffled: ascending ones would stand in suffix arrays too, as positions.
        self.unused = rng.permutation(np.arange(COMMON, self.vocab_size)).tolist()
        self.owner = np.full(self.vocab_size, -1)  # index of the text that a marker belongs to
        self.texts: list[Text] = []
        self.gone: set[int] = set()  # texts that nobody may see (deleted, opted out, aborted)
        self.open()

    def open(self) -> None:
        """The server's drafters, and what its control socket does with them."""
        options = Options(datastore=str(self.folder), drafters="ssbd")
        context = DrafterContext(self.vocab_size, options, "isolation")
        drafters = load_all(context)
        self.drafter, self.sessions = drafters["sssd"], drafters["ssbd"]
        assert self.drafter.datastore is not None
        self.datastore = self.drafter.datastore
        self.operations = Operations(self.datastore, list(drafters.values()))

    def restart(self) -> None:
        self.datastore.close()
        self.open()

    def delete(self, **what: str) -> int:
        """As the HTTP routes ask for it; returns the tokens."""
        return self.operations(what)["tokens"]

    def write(self, tenant: str, context: tuple[int, ...]) -> Text:
        markers = tuple(self.unused.pop() for _ in range(MARKERS))
        self.owner[list(markers)] = len(self.texts)
        text = Text(f"{tenant}-{len(self.texts)}", tenant, context, markers)
        self.texts.append(text)
        return text

    def serve(
        self, text: Text, drafter: Drafter, *, ingest: bool = True, completed: bool = True
    ) -> None:
        """One request from start to finish, as the worker tells a drafter of it."""
        params = {"ssbd": {"session": SESSION}} if drafter is self.sessions else {}
        options = RequestOptions(namespace=text.tenant, ingest=ingest)
        request = DraftRequest(text.rid, text.context, [text.markers[0]], params, options=options)
        drafter.start(request)
        request.output.extend(text.markers[1:])
        drafter.observe(request, text.markers[1:])
        drafter.finish(request, completed)
        if not (ingest and completed):
            self.gone.add(self.texts.index(text))

    def serve_round(self) -> None:
        """Every tenant's text for every context, one opted out and one aborted among them."""
        for i, context in enumerate(self.contexts):
            for tenant in TENANTS:
                drafter = self.sessions if context is self.contexts[-1] else self.drafter
                self.serve(self.write(tenant, context), drafter)
            tenant = TENANTS[i % len(TENANTS)]
            self.serve(self.write(tenant, context), self.drafter, ingest=False)
            self.serve(self.write(tenant, context), self.drafter, completed=False)

    def check(self, when: str) -> None:
        """Draft for every tenant at every place where another tenant's text would fit."""
        requests = list(self.requests())
        own = 0
        for start in tqdm(range(0, len(requests), BATCH), desc=when, disable=None, leave=False):
            batch = requests[start : start + BATCH]
            for request in batch:
                self.drafter.start(request)
            for request, tree in zip(batch, self.drafter.propose(batch, MAX_NODES), strict=True):
                own += self.look_at(when, request, tree.tokens)
        self.findings.drafts += len(requests)
        self.findings.own += own
        served = {t.tenant for i, t in enumerate(self.texts) if i not in self.gone}
        print(f"{when}: {len(requests)} drafts, {own} with the tenant's own markers")
        if own < len(self.contexts) * len(served):
            raise NothingShown(f"{when}: hardly a draft has its tenant's own text")

    def requests(self) -> Iterable[DraftRequest]:
        """Contexts as they are, and as someone would write who knows how a text goes on."""
        everyone = (*TENANTS, STRANGER)
        for context in self.contexts:
            for tenant in everyone:
                yield draft_request("c", context, tenant)
        for text in self.texts[-2000:]:
            known = [*text.context, *text.markers[:3]]
            for tenant in everyone:
                yield draft_request("k", known, tenant)

    def look_at(self, when: str, request: DraftRequest, tokens: np.ndarray) -> bool:
        """Note what a draft must not hold; whether it holds its tenant's own."""
        given = {*request.prompt, *request.output}
        own = False
        for token in tokens.tolist():
            if token < COMMON or token in given:
                continue
            index = int(self.owner[token])
            text = self.texts[index]
            asked = request.options.namespace
            if text.tenant != asked:
                self.findings.note(f"{when}: {asked} was drafted {text.rid}")
            elif index in self.gone:
                self.findings.note(f"{when}: {text.rid} was drafted, though it is gone")
            else:
                own = True
        return own

    def check_sessions(self, when: str, gone: str | None = None) -> None:
        """What a tenant's session is drafted and biased to is the tenant's own.

        Args:
            gone: a tenant whose sessions were deleted.
        """
        drafted = set()
        for tenant in (*TENANTS, STRANGER):
            params = {"ssbd": {"session": SESSION, "beta": 1.0}}
            options = RequestOptions(namespace=tenant)
            request = DraftRequest("s", self.contexts[-1], [], params, options=options)
            self.sessions.prefill([request])
            bias = self.sessions.bias(request)
            tokens = {
                *self.sessions.prefill_draft([request], MAX_NODES)[0].tokens.tolist(),
                *(bias.tokens if bias is not None else ()),
            }
            if tokens:
                drafted.add(tenant)
            if tenant == gone and tokens:
                print(f"{when}: {tenant}'s session is still drafted", file=sys.stderr)
                self.findings.left_in_sessions += 1
            elif any(self.texts[int(self.owner[t])].tenant != tenant for t in tokens):
                self.findings.note(f"{when}: {tenant}'s session was drafted another's")
        if missing := {*TENANTS} - {gone} - drafted:
            raise NothingShown(f"{when}: no session draft for {', '.join(sorted(missing))}")

    def in_memory(self, text: Text) -> list[str]:
        """What of the drafters' has the text's markers."""
        return holders(self.operations, text.markers[4:8])

    def files_with(self, text: Text) -> list[str]:
        """The folder's files in whose bytes the text's markers stand, in whatever integers."""
        needles = [np.array(text.markers[4:8], dtype=f"<{kind}").tobytes() for kind in ("u2", "u4")]
        while True:
            paths = sorted(p for p in self.folder.rglob("*") if p.is_file())
            try:
                contents = {path.name: path.read_bytes() for path in paths}
            except FileNotFoundError:
                continue  # folded meanwhile: its text is in another file now
            return [n for n, content in contents.items() if any(x in content for x in needles)]

    def deleted(self, when: str, texts: Sequence[Text], tokens: int) -> None:
        """`tokens` tokens were deleted: from now on `texts` may be nowhere."""
        if tokens <= 0:
            raise NothingShown(f"{when}: nothing was deleted")
        self.gone.update(self.texts.index(text) for text in texts)
        self.look_for(when, texts)

    def look_for(self, when: str, texts: Sequence[Text]) -> None:
        """Note the files and objects that still hold deleted texts."""
        for text in [texts[0], texts[-1]] if texts else []:  # each is a walk of the memory
            for name in self.in_memory(text):
                print(f"{when}: {text.rid} is still in memory, in a {name}", file=sys.stderr)
                self.findings.left_in_memory += 1
        for text in texts:
            for name in self.files_with(text):
                print(f"{when}: {text.rid} is still in {name}", file=sys.stderr)
                self.findings.left += 1


def check(options: argparse.Namespace) -> dict[str, float]:
    """Drafts checked and leaks; deletion_leftovers of these drafters, over memory and disk."""
    contexts = 15 if options.quick else options.contexts
    with tempfile.TemporaryDirectory(prefix="isolation-") as folder:
        bench = Bench(Path(folder) / "datastore", contexts, rounds=4)
        try:
            run(bench)
        finally:
            bench.datastore.close()
    found = bench.findings
    print("\n".join(found.messages), file=sys.stderr)
    return {
        "drafts_checked": found.drafts,
        "leaks": found.leaks,
        "own_text_drafts": found.own,
        "left_after_deletion": found.left,
        "deletion_leftovers": found.left + found.left_in_memory + found.left_in_sessions,
    }


def run(bench: Bench) -> None:
    """All checks, over a new datastore.

    Raises:
        NothingShown: what is looked for was not there before either.
    """
    bench.serve_round()
    bench.datastore.flush(TIMEOUT_S)
    bench.check("in memory")
    bench.check_sessions("in memory")
    bench.datastore.fold(TIMEOUT_S)
    bench.check("in files")
    bench.serve_round()
    bench.datastore.flush(TIMEOUT_S)
    bench.restart()
    bench.check("after a restart, part in the log")
    check_while_serving(bench)
    bench.datastore.fold(TIMEOUT_S)
    bench.serve_round()
    bench.datastore.flush(TIMEOUT_S)

    kept = [t for i, t in enumerate(bench.texts) if i not in bench.gone and t.tenant == "acme"]
    # One in a sub-index file, one in the log and the last output of a session.
    early, late = kept[0], kept[-1]
    for text in (early, late):
        if not bench.files_with(text) or not bench.in_memory(text):
            raise NothingShown(f"{text.rid} is not in files and memory before it is deleted")
        tokens = bench.delete(op="delete_request", rid=text.rid, namespace=text.tenant)
        bench.deleted("one request deleted", [text], tokens)
    bench.check("one request deleted")
    bench.check_sessions("one request deleted", "acme")
    again = bench.write("acme", bench.contexts[-1])
    bench.serve(again, bench.sessions)
    bench.datastore.flush(TIMEOUT_S)
    bench.check_sessions("served again")
    others = [*(t for t in kept if t not in (early, late)), again]
    tokens = bench.delete(op="delete_namespace", namespace="acme")
    bench.deleted("namespace deleted", others, tokens)
    bench.check("namespace deleted")
    bench.check_sessions("namespace deleted", "acme")
    bench.restart()
    bench.look_for("deleted, after a restart", [*kept, again])
    bench.check("deleted, after a restart")
    bench.datastore.fold(TIMEOUT_S)
    bench.look_for("deleted, folded", [*kept, again])
    bench.check("deleted, folded")


def draft_request(rid: str, text: Sequence[int], tenant: str) -> DraftRequest:
    """A tenant's request that has written the last token of a text."""
    return DraftRequest(rid, text[:-1], [text[-1]], options=RequestOptions(namespace=tenant))


def check_while_serving(bench: Bench) -> None:
    """Check drafts for leaks while texts of all tenants come in and are folded."""
    done = threading.Event()

    def keep_folding() -> None:
        while not done.is_set():
            bench.datastore.fold(TIMEOUT_S)

    folding = threading.Thread(target=keep_folding)
    folding.start()
    try:
        bench.serve_round()
        bench.check("while texts come in and are folded")
    finally:
        done.set()
        folding.join()
