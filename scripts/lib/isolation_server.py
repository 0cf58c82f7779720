"""check_isolation: tenants and clients of one server, over HTTP."""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from scripts.lib.isolation_client import SESSIONS, TIMEOUT_S, TOKENS, Tenant, secret
from scripts.lib.isolation_drafts import NothingShown
from scripts.lib.server import Server
from scripts.lib.spec_bench import spec_bench

MODEL = "smollm2-135m-instruct"
# What a client might call a session, and another might guess.
NAMES = ("talk-7", "1", "b1946ac9-2db6-11ee-be56-0242ac120002")
# Sessions and what a request says of how they are drafted.
_ASKED: tuple[tuple[str, dict[str, Any]], ...] = (
    *((name, {}) for name in NAMES),
    (NAMES[0], {"bias_realigned": True}),
    (NAMES[0], {"realign": False, "retrieve": False}),
)
_STRONG = 0.95
_TRANSLATION_SESSIONS = 40


def check(options: argparse.Namespace) -> dict[str, float]:
    """cross_session_changes, deletion_leftovers and starved_tenants of one server."""
    prompts = [p.input_ids for p in spec_bench(MODEL, max_prompt_tokens=120)]
    prompts = prompts[: 3 if options.quick else 16]
    with tempfile.TemporaryDirectory(prefix="isolation-") as folder:
        flags = ["--speculative-algorithm", "SSSD", "--drafters", "ssbd", "--datastore", folder]
        flags += ["--translation-sessions", str(_TRANSLATION_SESSIONS)]
        with Server(MODEL, flags, name="isolation") as server:
            return {
                "cross_session_changes": cross_session_changes(server.base_url, prompts),
                "deletion_leftovers": deletion_leftovers(server.base_url, Path(folder), prompts),
                "starved_tenants": starved_tenants(server.base_url),
            }


def cross_session_changes(url: str, prompts: Sequence[Sequence[int]]) -> int:
    """Answers that changed because another client of the namespace wrote to a guessed session.

    A request that asks for a bias towards what such a session has counts too, unless it is refused.

    Raises:
        NothingShown: not even in a session of one's own does what was written change an answer.
    """
    attacker = victim = Tenant(url)
    changes, own = 0, 0
    for i, prompt in enumerate(tqdm(prompts, desc="sessions", disable=None, leave=False)):
        expected = victim.plain(prompt)
        text = attacker.plain(prompts[i - 1])
        for name, ssbd in _ASKED:
            attacker.write(prompts[i - 1], name, text, ingest=False)
            biased = victim.recall(prompt, name, beta=_STRONG, **ssbd)
            changes += _noted(biased.status_code != 400, f"session {name} was read with a bias")
            answer = victim.recall(prompt, name, **ssbd)
            answer.raise_for_status()
            changed = answer.json()["output_ids"] != expected
            changes += _noted(changed, f"session {name} with {ssbd} changed an answer")
        session = secret()
        victim.write(prompt, session, text, ingest=False)
        own += victim.recall(prompt, session, beta=_STRONG).json()["output_ids"] != expected
    if own < len(prompts) / 2:
        raise NothingShown("sessions hardly change answers, one's own included")
    return changes


def deletion_leftovers(
    url: str, folder: Path, prompts: Sequence[Sequence[int]], key: str | None = None
) -> int:
    """What still comes back, or lies in the datastore's files, after deletions.

    Args:
        key: SGLang's --admin-api-key.

    Raises:
        NothingShown: it was not there before either.
    """
    tenant = Tenant(url, "doomed", key=key)
    left = 0
    for i, prompt in enumerate(tqdm(prompts, desc="deletions", disable=None, leave=False)):
        expected, text = tenant.plain(prompt), tenant.plain(prompts[i - 1])
        control, session = secret(), secret()
        tenant.write(prompt, control, text)
        rid = tenant.write(prompt, session, text)
        if tenant.recall(prompt, control, beta=_STRONG).json()["output_ids"] == expected:
            raise NothingShown("a session's output does not come back before it is deleted")
        opened = _translated(tenant)
        _flush(tenant)
        if not files_with(folder, text):
            raise NothingShown("an output is in no file before it is deleted")
        _delete(tenant, f"/datastore/requests/{rid}")
        left += _recalled(tenant, prompt, session, expected, "a request was deleted")
        _delete(tenant, f"/datastore/requests/{opened}")
        left += _still_open(tenant, opened, "it was deleted by its id")

        opened = _translated(tenant)
        tenant.write(prompt, session, text)
        _flush(tenant)
        _delete(tenant, "/datastore/namespaces/doomed")
        for name in (control, session):
            left += _recalled(tenant, prompt, name, expected, "its namespace was deleted")
        left += _still_open(tenant, opened, "its namespace was deleted")
        for name in files_with(folder, text):
            left += _noted(True, f"the deleted text is still in {name}")
        names = tenant.call("GET", "/datastore/namespaces").json()["namespaces"]
        left += _noted("doomed" in names, "the deleted namespace is still listed")
    return left


def starved_tenants(url: str) -> int:
    """Tenants that get no translation session once two others have taken all they could.

    Raises:
        NothingShown: they could not take half of what there is.
    """
    taken = []
    for name in ("greedy", "greedier"):
        tenant = Tenant(url, name)
        while (answer := tenant.open_session()).is_success:
            taken.append((tenant, answer.json()["id"]))
            if len(taken) > _TRANSLATION_SESSIONS:
                break
    if len(taken) < _TRANSLATION_SESSIONS / 2:
        raise NothingShown(f"only {len(taken)} translation sessions could be opened")
    starved = 0
    for name in ("small", "smaller"):
        answer = Tenant(url, name).open_session()
        starved += _noted(
            not answer.is_success, f"tenant {name} got no session: {answer.text[:200]}"
        )
    for tenant, session in taken:
        tenant.call("DELETE", f"{SESSIONS}/{session}")
    return starved


def files_with(folder: Path, tokens: Sequence[int]) -> list[str]:
    """The folder's files in whose bytes the tokens stand."""
    inner = np.array(tokens[2 : TOKENS - 2])
    needles = [inner.astype(f"<{kind}").tobytes() for kind in ("u2", "u4")]
    while True:
        try:
            contents = {p.name: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        except FileNotFoundError:
            continue  # folded meanwhile: its text is in another file now
        return [n for n, content in contents.items() if any(x in content for x in needles)]


def _recalled(
    tenant: Tenant, prompt: Sequence[int], session: str, expected: list[int], when: str
) -> int:
    answer = tenant.recall(prompt, session, beta=_STRONG)
    answer.raise_for_status()
    return _noted(answer.json()["output_ids"] != expected, f"a session came back after {when}")


def _translated(tenant: Tenant) -> str:
    """The id of a translation session whose output has joined the datastore."""
    opened = tenant.open_session()
    opened.raise_for_status()
    session = opened.json()["id"]
    body = {"append": "The train to Paris leaves at noon.", "final": True}
    tenant.call("POST", f"{SESSIONS}/{session}/updates", body).raise_for_status()
    return session


def _still_open(tenant: Tenant, session: str, when: str) -> int:
    status = tenant.call("GET", f"{SESSIONS}/{session}").status_code
    return _noted(status != 404, f"a translation session was still there after {when}")


def _delete(tenant: Tenant, path: str) -> None:
    answer = tenant.call("DELETE", path)
    answer.raise_for_status()
    if answer.json()["deleted_tokens"] <= 0:
        raise NothingShown(f"DELETE {path} deleted nothing")


def _flush(tenant: Tenant) -> None:
    tenant.call("POST", f"/datastore/flush?timeout={TIMEOUT_S:.0f}").raise_for_status()


def _noted(bad: bool, words: str) -> int:
    if bad:
        print(words, file=sys.stderr)
    return int(bad)
