"""How likely a running server finds texts: what a weight format costs in quality."""

import math
from collections.abc import Sequence

from scripts.lib.client import TIMEOUT_S
from scripts.lib.http_client import HTTP


def perplexity(base_url: str, texts: Sequence[Sequence[int]]) -> float:
    """exp of the mean negative log-probability of all tokens but each text's first.

    Args:
        texts: token ids, two or more each.

    Raises:
        httpx.HTTPStatusError: a request was refused.
    """
    total, count = 0.0, 0
    for ids in texts:
        body = {
            "input_ids": list(ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        response = HTTP.post(base_url + "/generate", json=body, timeout=TIMEOUT_S)
        response.raise_for_status()
        found = response.json()["meta_info"]["input_token_logprobs"][1:]  # the first has none
        total += sum(logprob for logprob, *_ in found)
        count += len(found)
    return math.exp(-total / count)
