"""check_pd: two decode servers on one datastore."""

import argparse
import tempfile
import time
from typing import Any

from scripts.lib.http_client import HTTP
from scripts.lib.pd_servers import Disaggregated, Pair
from scripts.lib.spec_bench import spec_bench

_TIMEOUT_S = 300.0
# What a follower may take, in seconds (docs/disaggregation.md).
BOUND_S = 2.0


def check(options: argparse.Namespace) -> dict[str, float]:
    """The figures shared_seconds (the longest of some), shared_accept_length and cold_."""
    prompts = [p.input_ids for p in spec_bench(options.model, max_prompt_tokens=120)]
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--decode", "2", "--speculative-algorithm", "SSSD", "--datastore", folder]
        with Disaggregated(options.model, flags, name="pd-shared") as pd:
            pairs = [pd.pair(1), pd.pair(2)]
            # One of them was first.
            follows = [info(pair)["follows"] for pair in pairs]
            assert sorted(follows) == [False, True], f"one folds, the other does not: {follows}"
            delays, cold, warm = [], [], []
            for number, prompt in enumerate(prompts[: 4 if options.quick else 12]):
                # Each takes in what it serves; the other one learns it.
                writer, reader = pairs[number % 2], pairs[1 - number % 2]
                body: dict[str, Any] = {
                    "input_ids": list(prompt),
                    "sampling_params": {"temperature": 0.0, "max_new_tokens": options.tokens},
                }
                cold.append(accept_length(writer, body))
                delays.append(seconds_until_equal(writer, reader))
                body["sampling_params"] |= {"custom_params": {"ingest": False}}
                warm.append(accept_length(reader, body))
    print(f"known to the other server after {max(delays):.2f} s at most", flush=True)
    return {
        "shared_seconds": max(delays),
        "shared_cold_accept_length": sum(cold) / len(cold),
        "shared_accept_length": sum(warm) / len(warm),
    }


def accept_length(pair: Pair, body: dict[str, Any]) -> float:
    """Tokens a step of the decode server's."""
    answer = pair.generate(body, _TIMEOUT_S)
    return float(answer["meta_info"].get("spec_accept_length") or 1.0)


def seconds_until_equal(writer: Pair, reader: Pair) -> float:
    """How long until the reader has all that the writer has."""
    start = time.monotonic()
    HTTP.post(writer.decode_url + "/datastore/flush", timeout=30).raise_for_status()
    wanted = info(writer)["num_tokens"]
    while info(reader)["num_tokens"] < wanted:
        if time.monotonic() - start > _TIMEOUT_S:
            raise TimeoutError(f"the other decode server never had the writer's {wanted} tokens")
        time.sleep(0.02)
    return time.monotonic() - start


def info(pair: Pair) -> dict[str, Any]:
    """The decode server's datastore."""
    answer = HTTP.get(pair.decode_url + "/datastore", timeout=30)
    answer.raise_for_status()
    return answer.json()
