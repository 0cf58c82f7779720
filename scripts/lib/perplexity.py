"""How likely a running server finds texts: what a weight format costs in quality."""

import math
from collections.abc import Sequence
from itertools import takewhile

from scripts.lib.client import TIMEOUT_S
from scripts.lib.http_client import HTTP


def perplexity(base_url: str, texts: Sequence[Sequence[int]]) -> float:
    """exp of the mean negative log-probability of all tokens but those that all texts begin with.

    A chat template's first tokens are the same each time: a format's rounding moves their
    log-probabilities the same way in every text, so that many texts say no more of them than one.

    Args:
        texts: token ids, two or more texts of two or more each.

    Raises:
        httpx.HTTPStatusError: a request was refused.
    """
    shared = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*texts, strict=False))
    first = max(1, len(list(shared)))
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
        found = response.json()["meta_info"]["input_token_logprobs"][first:]
        total += sum(logprob for logprob, *_ in found)
        count += len(found)
    return math.exp(-total / count)
