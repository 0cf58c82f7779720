"""What a sweep compares: SSSD, SpecASR and SSBD, their peers, and plain decoding.

Each peer drafts by its own published rule and with its own settings (docs/peers.md), and verifies
all that it drafts. How many nodes a step verifies is part of SSSD, not of its peers; `pld-budget`,
`rest-budget` and `suffix-budget` show them with our budget.
"""

from collections.abc import Collection, Iterable, Mapping
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
        sessions: a stream of growing sources is a session of its own, whose last output is the
            draft; only what a stream ends with is ingested.
        exact: greedy output is plain decoding's.
        module: of a package that its drafter needs besides ours; "": none.
    """

    name: str
    title: str
    server: str
    params: Mapping[str, Any] = field(default_factory=dict)
    corpus: bool = False
    fresh_namespace: bool = False
    peer: bool = False
    # A growing source is a prompt like any other to those that have no sessions.
    workload_kinds: frozenset[str] = frozenset({TEXT, RETRANSLATION})
    sessions: bool = False
    exact: bool = True
    module: str = ""


class UnknownMethod(ValueError):
    """No method has this name; the message lists them."""


# Flags of `sglang-ext serve` besides model, host and port; "sssd" also loads its peers' drafters.
SERVERS: Mapping[str, tuple[str, ...]] = {
    "plain": (),
    "ngram": ("--speculative-algorithm", "NGRAM"),
    # Half of SGLang's 12 draft tokens come from the corpus.
    "ngram-corpus": (
        "--speculative-algorithm", "NGRAM", "--speculative-ngram-external-sam-budget", "6",
    ),
    "sssd": ("--speculative-algorithm", "SSSD"),
    "specasr": ("--speculative-algorithm", "SSSD", "--draft-model", "whisper-tiny.en"),
    "ssbd": ("--speculative-algorithm", "SSSD", "--drafters", "ssbd"),
}  # fmt: skip

# Whose /flush_cache empties what the method has learned.
LEARNING_CACHES = frozenset({"ngram", "ngram-corpus"})


def _peer(name: str, title: str, **more: Any) -> list[Method]:
    """A peer by its own rule, and with our budget."""
    own = {"drafter": name, "ingest": bool(more.get("fresh_namespace"))}
    return [
        Method(name, title, "sssd", own | {"budget": "fixed"}, peer=True, **more),
        Method(f"{name}-budget", f"{title}, our budget", "sssd", own | {"budget": "auto"}, **more),
    ]


def _specasr(name: str, title: str, budget: str = "fixed", **options: Any) -> Method:
    """A mode of SpecASR; as published, all that is drafted is verified."""
    params = {"drafter": "specasr", "specasr": options, "budget": budget}
    return Method(name, title, "specasr", params, workload_kinds=frozenset({AUDIO}))


def _ssbd(name: str, title: str, beta: float, more: bool = False) -> Method:
    """SSBD as published, or with realignment and retrieval, the server's default."""
    ssbd = {"beta": beta, "realign": more, "retrieve": more}
    return Method(
        name, title, "ssbd", {"drafter": "ssbd", "ssbd": ssbd, "ingest": more},
        corpus=more, fresh_namespace=more, workload_kinds=frozenset({RETRANSLATION}),
        sessions=True, exact=not beta,
    )  # fmt: skip


_STATIC = {"drafter": "sssd", "ingest": False}
METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        Method("ar", "AR", "plain", workload_kinds=frozenset({TEXT, AUDIO, RETRANSLATION})),
        Method("ngram", "NGRAM", "ngram", peer=True),
        Method("ngram-corpus", "NGRAM with corpus", "ngram-corpus", corpus=True, peer=True),
        *_peer("pld", "PLD"),
        *_peer("rest", "REST", corpus=True),
        *_peer(
            "suffix", "Suffix decoding", corpus=True, fresh_namespace=True,
            module="arctic_inference",
        ),
        # It shares its server with methods whose corpus is loaded there.
        Method("sssd-cold", "SSSD cold", "sssd", _STATIC | {"datastore": False}),
        Method("sssd-static", "SSSD static", "sssd", _STATIC, corpus=True),
        Method(
            "sssd-live", "SSSD live", "sssd", {"drafter": "sssd"},
            corpus=True, fresh_namespace=True,
        ),
        _specasr("specasr-fixed", "Draft (8,1)", mode="fixed", length=8, beams=1),
        _specasr("specasr-asp", "SpecASR ASP", mode="asp"),
        _specasr("specasr-recycling", "SpecASR ASP, recycling", mode="recycling"),
        _specasr("specasr-tsp", "SpecASR TSP", "auto", mode="tsp"),
        _ssbd("ssbd", "SSBD, no bias", 0.0),
        _ssbd("ssbd-bias", "SSBD, bias 0.2", 0.2),
        _ssbd("ssbd-plus", "SSBD+, bias 0.2", 0.2, more=True),
    )
}  # fmt: skip
# What the others are compared with, and the method of ours that is compared with its peers, where.
BASELINE = "ar"
OURS = "sssd-live"
PEER_WORKLOADS = ("mt-bench", "gsm8k")
DEFAULT_METHODS = (
    "ar", "ngram", "pld", "rest", "suffix", "sssd-cold", "sssd-static", "sssd-live",
)  # fmt: skip
_DEFAULTS: Mapping[str, tuple[str, ...]] = {
    TEXT: DEFAULT_METHODS,
    AUDIO: ("ar", "specasr-fixed", "specasr-asp", "specasr-recycling", "specasr-tsp"),
    RETRANSLATION: ("ar", "ssbd", "ssbd-bias", "ssbd-plus"),
}


def default_methods(kinds: Collection[str]) -> tuple[str, ...]:
    """Those that are compared on workloads of these kinds, where none are named."""
    return _DEFAULTS[next(iter(kinds))] if len(set(kinds)) == 1 else DEFAULT_METHODS


def method(name: str) -> Method:
    """The method of a name.

    Raises:
        UnknownMethod: there is none.
    """
    if name not in METHODS:
        raise UnknownMethod(f"unknown method {name!r}; known: {', '.join(METHODS)}")
    return METHODS[name]


def servers_for(methods: Iterable[Method]) -> dict[str, tuple[str, ...]]:
    """SERVERS, with no other drafters than these methods': one may need what is not installed."""
    names = [m.params["drafter"] for m in methods if m.server == "sssd"]
    more = ",".join(name for name in dict.fromkeys(names) if name != "sssd")
    return {**SERVERS, "sssd": (*SERVERS["sssd"], *(("--drafters", more) if more else ()))}
