"""check_pd: each process is killed in turn while requests come; what becomes of them."""

import argparse
import itertools
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import httpx

from scripts.lib.client import generate_all
from scripts.lib.http_client import HTTP
from scripts.lib.load_threads import LoadThreads
from scripts.lib.pd_servers import Disaggregated
from scripts.lib.spec_bench import spec_bench

# Longer than any answer takes here; a request that is not over by then hangs.
REQUEST_TIMEOUT_S = 120.0
_CLIENTS = 4
# So long after a kill the clients ask on as before, for the requests that it hits and later ones;
# then more slowly, since a server that starts beside them needs the cores.
_UNDER_LOAD_S = 15.0
_SLOWLY_S = 3.0
_TOKENS = 48


class Load(LoadThreads):
    """Clients that ask one request after another and note what they get.

    Args:
        url: of the router.
        prompts: token ids.
        expected: the right answer to each.

    Attributes:
        outcomes: how many requests ended how.
        wrong: what came instead of right answers.
        slowly: while it is set, clients pause between requests.
    """

    def __init__(
        self, url: str, prompts: Sequence[Sequence[int]], expected: Sequence[list[int]]
    ) -> None:
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._url = url
        self._cases = itertools.cycle(list(zip(prompts, expected, strict=True)))
        self._next = threading.Lock()
        self.slowly = threading.Event()
        super().__init__(_CLIENTS)

    def right_after(self, count: int, timeout_s: float) -> bool:
        """Whether `count` further right answers come within the time."""
        goal, deadline = self.outcomes["right"] + count, time.monotonic() + timeout_s
        while self.outcomes["right"] < goal and time.monotonic() < deadline:
            time.sleep(0.2)
        return self.outcomes["right"] >= goal

    def run(self) -> None:
        while not self.ending.is_set():
            with self._next:
                prompt, expected = next(self._cases)
            outcome = self._ask(prompt, expected)
            self.outcomes[outcome] += 1
            if self.slowly.is_set():
                self.ending.wait(_SLOWLY_S)
            elif outcome == "refused":
                time.sleep(0.5)  # the router is away

    def _ask(self, prompt: Sequence[int], expected: list[int]) -> str:
        body: dict[str, Any] = {
            "input_ids": list(prompt),
            "sampling_params": {"temperature": 0.0, "max_new_tokens": _TOKENS},
        }
        answer: httpx.Response | None = None
        try:
            with HTTP.stream(
                "POST", self._url + "/generate", json=body, timeout=REQUEST_TIMEOUT_S
            ) as answer:
                answer.read()
        except httpx.TimeoutException:
            return "hang"
        except httpx.HTTPError:
            return "refused" if answer is None else "error"  # broken before the answer, or amid it
        if not answer.is_success:
            return "error"
        try:
            content = answer.json()
            reason = content["meta_info"]["finish_reason"]["type"]
            tokens = content["output_ids"]
        except (ValueError, KeyError, TypeError):
            return "error"
        if reason == "abort":
            return "error"
        if tokens == expected:
            return "right"
        self.wrong.append(f"{reason}: {tokens} instead of {expected}")
        return "wrong"


def check(options: argparse.Namespace) -> dict[str, float]:
    """The figures kills, hangs, wrong, and how many requests ended how."""
    prompts = [p.input_ids for p in spec_bench(options.model, max_prompt_tokens=120)][:24]
    flags = ["--decode", "2", "--speculative-algorithm", "SSSD"]
    kills = lost = 0
    with Disaggregated(options.model, flags, name="pd-kills") as pd:
        members = sorted(pd.urls)
        answers = generate_all(pd.base_url, prompts, in_flight=_CLIENTS, max_new_tokens=_TOKENS)
        expected = [answer.token_ids for answer in answers]
        with Load(pd.base_url, prompts, expected) as load:
            for member in itertools.islice(itertools.cycle(members), options.kills):
                load.right_after(_CLIENTS, REQUEST_TIMEOUT_S)
                others = {name: pd.pid(name) for name in members if name != member}
                times, before = pd.ready_count(member), Counter(load.outcomes)
                pd.kill(member)
                time.sleep(_UNDER_LOAD_S)
                load.slowly.set()
                pd.wait_until_ready_again(member, times)
                load.slowly.clear()
                kills += 1
                # All go on: one that came back, and those that stayed.
                good = load.right_after(2 * _CLIENTS, REQUEST_TIMEOUT_S)
                good &= others == {name: pd.pid(name) for name in others}
                lost += not good
                since = Counter(load.outcomes) - before
                state = "goes on" if good else "DOES NOT GO ON"
                print(f"kill {kills}, {member}: {dict(since)}, {state}", flush=True)
    for line in load.wrong[:5]:
        print(f"    wrong: {line}")
    outcomes = load.outcomes
    return {
        "kills": kills,
        "hangs": outcomes["hang"] + lost,
        "wrong": outcomes["wrong"],
        "requests": sum(outcomes.values()) - outcomes["refused"],
        "errors": outcomes["error"],
    }
