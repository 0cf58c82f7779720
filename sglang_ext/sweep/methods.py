"""What a sweep compares: SSSD, its peers, and plain decoding.

Each peer drafts by its own published rule and with its own settings (docs/peers.md), and verifies
all that it drafts. How many nodes a step verifies is part of SSSD, not of its peers; `pld-budget`,
`rest-budget` and `suffix-budget` show them with our budget.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Text that a model goes on with, or audio, or growing sources.
TEXT, AUDIO, RETRANSLATION = "text", "audio", "retranslation"


@dataclass(frozen=True)
class Method:
    """A way to decode.

    Attributes:
        name: on the command line and in results.
        title: in tables and plots.
        server: the key in SERVERS; methods with the same one share a running server.
        params: custom_params of its requests.
        corpus: what was served before is loaded as a corpus for its runs.
        fresh_namespace: each run has a namespace of its own, which its outputs join.
        peer: an n-gram peer of SSSD.
        workload_kinds: what it can decode.
    """

    name: str
    title: str
    server: str
    params: Mapping[str, Any] = field(default_factory=dict)
    corpus: bool = False
    fresh_namespace: bool = False
    peer: bool = False
    workload_kinds: frozenset[str] = frozenset({TEXT})


class UnknownMethod(ValueError):
    """No method has this name; the message lists them."""


# Flags of `sglang-ext serve` besides model, host and port.
SERVERS: Mapping[str, tuple[str, ...]] = {
    "plain": (),
    "ngram": ("--speculative-algorithm", "NGRAM"),
    # Half of SGLang's 12 draft tokens come from the corpus.
    "ngram-corpus": (
        "--speculative-algorithm", "NGRAM", "--speculative-ngram-external-sam-budget", "6",
    ),
    "sssd": ("--speculative-algorithm", "SSSD", "--drafters", "pld,rest,suffix"),
}  # fmt: skip


def _peer(name: str, title: str, **more: Any) -> list[Method]:
    """A peer by its own rule, and with our budget."""
    own = {"drafter": name, "ingest": bool(more.get("fresh_namespace"))}
    return [
        Method(name, title, "sssd", own | {"budget": "fixed"}, peer=True, **more),
        Method(f"{name}-budget", f"{title}, our budget", "sssd", own | {"budget": "auto"}, **more),
    ]


_COLD = {"drafter": "sssd", "ingest": False}
METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        Method("ar", "AR", "plain"),
        Method("ngram", "NGRAM", "ngram", peer=True),
        Method("ngram-corpus", "NGRAM with corpus", "ngram-corpus", corpus=True, peer=True),
        *_peer("pld", "PLD"),
        *_peer("rest", "REST", corpus=True),
        *_peer("suffix", "Suffix decoding", corpus=True, fresh_namespace=True),
        Method("sssd-cold", "SSSD cold", "sssd", _COLD),
        Method("sssd-static", "SSSD static", "sssd", _COLD, corpus=True),
        Method(
            "sssd-live", "SSSD live", "sssd", {"drafter": "sssd"},
            corpus=True, fresh_namespace=True,
        ),
    )
}  # fmt: skip
DEFAULT_METHODS = (
    "ar", "ngram", "pld", "rest", "suffix", "sssd-cold", "sssd-static", "sssd-live",
)  # fmt: skip


def method(name: str) -> Method:
    """The method of a name.

    Raises:
        UnknownMethod: there is none.
    """
    if name not in METHODS:
        raise UnknownMethod(f"unknown method {name!r}; known: {', '.join(METHODS)}")
    return METHODS[name]
