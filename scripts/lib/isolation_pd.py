"""check_isolation: tenants, keys and deletions through both routers, with all servers behind them.

One prefill and one decode server; sglang-router's mini load balancer as `sglang-ext pd` starts it,
and the Rust router beside it, in front of the same servers.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import httpx

from scripts.lib.isolation_client import Tenant, secret
from scripts.lib.pd_servers import Disaggregated
from scripts.lib.spec_bench import spec_bench
from sglang_ext.servers.processes import free_port, kill_group, start

MODEL = "smollm2-135m-instruct"
HEADER = "x-request-id-namespace"  # which the Rust router passes on too
KEY = "isolation"
_READY_S = 120.0
_STRONG = 0.95
_FLAGS = [
    "--speculative-algorithm", "SSSD", "--drafters", "ssbd", "--budget", "fixed",
    "--namespace-header", HEADER,
]  # fmt: skip


@dataclass(frozen=True)
class Routed:
    """A router and what is behind it.

    Attributes:
        name: mini or rust.
        url: the router's.
        decode: the decode server's.
        key: SGLang's --api-key; None: none.
        fixed_budget: whether the server verifies all drafts, so that steps tell of them.
    """

    name: str
    url: str
    decode: str
    key: str | None = None
    fixed_budget: bool = False

    def tenant(self, name: str | None) -> Tenant:
        """A client of the router."""
        return Tenant(self.url, name and f"{self.name}-{name}", HEADER, self.key)

    def at_decode(self) -> Tenant:
        """Who administrates the decode server."""
        return Tenant(self.decode, key=self.key)

    def namespaces(self) -> dict[str, int]:
        """Tokens by namespace, once all can be found."""
        admin = self.at_decode()
        admin.call("POST", "/datastore/flush").raise_for_status()
        return admin.call("GET", "/datastore/namespaces").json()["namespaces"]


def check(options: argparse.Namespace) -> dict[str, float]:
    """pd_isolated_mini and pd_isolated_rust: 1 where nothing was found."""
    prompts = [p.input_ids for p in spec_bench(MODEL, max_prompt_tokens=120)][:3]
    with tempfile.TemporaryDirectory() as folder:
        flags = [*_FLAGS, "--datastore", folder, "--api-key", KEY]
        with Disaggregated(MODEL, flags, name="pd-isolation") as pd:
            mini = Routed("mini", pd.base_url, pd.urls["decode 1"], KEY, fixed_budget=True)
            found = {"mini": problems(mini, prompts)}
            with rust_router(pd, KEY) as url:
                found["rust"] = problems(replace(mini, name="rust", url=url), prompts)
    for name, words in found.items():
        for line in words:
            print(f"{name}: {line}", file=sys.stderr)
    return {f"pd_isolated_{name}": float(not words) for name, words in found.items()}


@contextmanager
def rust_router(pd: Disaggregated, key: str | None = None) -> Iterator[str]:
    """sglang-router's Rust router in front of the same servers; its address.

    Raises:
        TimeoutError: it does not pass requests on.
    """
    pair, port = pd.pair(), free_port()
    url = f"http://127.0.0.1:{port}"
    command = [
        sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation",
        "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port()),
        "--prefill", pair.prefill_url, str(pair.bootstrap_port), "--decode", pair.decode_url,
    ]  # fmt: skip
    command += ["--api-key", key] if key else []
    with (pd.folder / "rust-router.log").open("wb") as log:
        process = start(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + _READY_S
        while not _passes_on(Tenant(url, key=key)):
            if process.poll() is not None or time.monotonic() > deadline:
                raise TimeoutError(f"the Rust router does not answer; see {pd.folder}")
            time.sleep(0.3)
        yield url
    finally:
        kill_group(process)


def _passes_on(tenant: Tenant) -> bool:
    try:
        return tenant.generate([1, 2, 3], ingest=False).is_success
    except httpx.HTTPError:
        return False


def problems(routed: Routed, prompts: Sequence[Sequence[int]]) -> list[str]:
    """What is wrong with tenants behind a router; empty: nothing."""
    found = [*_keys(routed, prompts[0]), *_namespaces(routed, prompts)]
    if routed.name == "mini":  # the other one leaves custom_params out
        found += _sessions(routed, prompts)
    return [*found, *_deletions(routed, prompts[0])]


def _keys(routed: Routed, prompt: Sequence[int]) -> list[str]:
    """Only who has the key is served."""
    if routed.key is None:
        return []
    clients = [replace(routed.tenant("a"), key=key) for key in (None, "wrong")]
    statuses = [client.generate(prompt).status_code for client in clients]
    return [f"without its key a client got {s}" for s in statuses if s != 401]


def _namespaces(routed: Routed, prompts: Sequence[Sequence[int]]) -> list[str]:
    """Outputs join their tenants' namespaces alone, and speed up their own repetition alone."""
    before = routed.namespaces()
    wanted = {}
    steps = {}
    for name, prompt in zip("ab", prompts, strict=False):
        routed.tenant(name).output(prompt)
        wanted[f"{routed.name}-{name}"] = before.get(f"{routed.name}-{name}", 0)
    after = routed.namespaces()
    grown = {n for n, tokens in after.items() if tokens > before.get(n, 0)}
    found = [] if grown == set(wanted) else [f"namespaces that grew: {sorted(grown)}"]
    for name in "ac":  # who asks again, and who never did
        answer = routed.tenant(name).generate(prompts[0]).json()
        steps[name] = answer["meta_info"]["spec_verify_ct"]
    if routed.fixed_budget and steps["a"] >= steps["c"]:
        found.append(f"verify steps of a tenant and of a stranger: {steps['a']}, {steps['c']}")
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Say hello."}]}),
        ("/v1/completions", {"prompt": "One, two,"}),
    ):
        name = path.rsplit("/", 1)[-1]
        more = {"model": MODEL, "max_tokens": 8, "temperature": 0}
        routed.tenant(name).call("POST", path, body | more).raise_for_status()
        if f"{routed.name}-{name}" not in routed.namespaces():
            found.append(f"{path} lost its namespace")
    return found


def _sessions(routed: Routed, prompts: Sequence[Sequence[int]]) -> list[str]:
    """A session of the same name is another one for another tenant, and is deleted."""
    prompt, session = prompts[0], secret()
    owner, other = routed.tenant("owner"), routed.tenant("other")
    expected, text = owner.plain(prompt), owner.plain(prompts[1])
    # The first token is the prefill server's, which knows no drafts.
    ssbd = {"session": session, "draft": [*expected[:1], *text], "beta": 1}
    owner.generate(prompt, drafter="ssbd", ssbd=ssbd).raise_for_status()

    def recalled(tenant: Tenant) -> bool:
        return tenant.recall(prompt, session, beta=_STRONG).json()["output_ids"] != expected

    found = [] if recalled(owner) else ["a session is not recalled by its owner"]
    found += ["a session was recalled by another tenant"] if recalled(other) else []
    owner.call("DELETE", f"/datastore/namespaces/{owner.name}").raise_for_status()
    return found + (["a session was recalled after it was deleted"] if recalled(owner) else [])


def _deletions(routed: Routed, prompt: Sequence[int]) -> list[str]:
    """What a tenant wrote is gone from the decode server, by request and by namespace."""
    tenant = routed.tenant("a")
    # The mini load balancer passes deletions on; where the other router is, ask each server.
    admin = routed.tenant(None) if routed.name == "mini" else routed.at_decode()
    rid = tenant.generate(prompt).json()["meta_info"]["id"]
    routed.namespaces()
    found = []
    for path in (f"/datastore/requests/{rid}", f"/datastore/namespaces/{tenant.name}"):
        answer = admin.call("DELETE", path)
        if not answer.is_success or answer.json()["deleted_tokens"] <= 0:
            found.append(f"DELETE {path}: {answer.status_code} {answer.text[:200]}")
    if tenant.name in routed.namespaces():
        found.append("a deleted namespace is still there")
    return found
