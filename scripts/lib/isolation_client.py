"""check_isolation: a tenant as a client of /generate and of sessions, over HTTP."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from scripts.lib.http_client import HTTP

TIMEOUT_S = 300.0
TOKENS = 16
SESSIONS = "/v1/translation/sessions"


@dataclass(frozen=True)
class Tenant:
    """Who asks a server.

    Attributes:
        url: the server's or a router's.
        name: the namespace that the gateway would set; None: none.
        header: which header names it.
        key: for Authorization.
    """

    url: str
    name: str | None = None
    header: str = "x-sglang-ext-namespace"
    key: str | None = None
    more: Mapping[str, str] = field(default_factory=dict)

    def call(self, method: str, path: str, body: Any = None) -> httpx.Response:
        """One request with the tenant's headers."""
        headers = dict(self.more)
        if self.name is not None:
            headers[self.header] = self.name
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        return HTTP.request(method, self.url + path, json=body, headers=headers, timeout=TIMEOUT_S)

    def generate(self, prompt: Sequence[int], **params: Any) -> httpx.Response:
        """TOKENS greedy tokens, with these custom_params."""
        sampling: dict[str, Any] = {
            "temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True, "custom_params": params,
        }  # fmt: skip
        return self.call(
            "POST", "/generate", {"input_ids": list(prompt), "sampling_params": sampling}
        )

    def output(self, prompt: Sequence[int], **params: Any) -> list[int]:
        """The tokens of `generate`.

        Raises:
            httpx.HTTPError: it was refused.
        """
        answer = self.generate(prompt, **params)
        answer.raise_for_status()
        return answer.json()["output_ids"]

    def plain(self, prompt: Sequence[int]) -> list[int]:
        """What the model writes by itself."""
        return self.output(prompt, drafter="none", ingest=False)

    def write(
        self, prompt: Sequence[int], session: str, text: Sequence[int], ingest: bool = True
    ) -> str:
        """Have a session write `text`, whatever the model thinks of it; returns the request's id.

        Args:
            ingest: whether it joins the datastore as well.

        Raises:
            httpx.HTTPError: it was refused.
        """
        ssbd = {"session": session, "draft": list(text), "beta": 1}
        answer = self.generate(prompt, drafter="ssbd", ingest=ingest, ssbd=ssbd)
        answer.raise_for_status()
        assert answer.json()["output_ids"] == list(text), "a full bias did not write the draft"
        return answer.json()["meta_info"]["id"]

    def recall(self, prompt: Sequence[int], session: str, **ssbd: Any) -> httpx.Response:
        """The session's next answer; its output joins nothing but the session."""
        return self.generate(prompt, drafter="ssbd", ingest=False, ssbd={"session": session} | ssbd)

    def open_session(self) -> httpx.Response:
        """A translation session."""
        languages = {"source_language": "en", "target_language": "fr"}
        return self.call("POST", SESSIONS, languages)


def secret() -> str:
    """A session's name that nobody guesses."""
    return str(uuid.uuid4())
