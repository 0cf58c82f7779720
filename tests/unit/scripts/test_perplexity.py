"""How likely a server finds texts."""

import math
from types import SimpleNamespace

import pytest

from scripts.lib import perplexity


@pytest.fixture
def server(monkeypatch):
    """Answers as /generate does: a token's log-probability is minus itself; the first has none."""

    def post(url, json, timeout):
        ids = json["input_ids"]
        told = [[None, ids[0], None], *([-float(token), token, None] for token in ids[1:])]
        body = {"meta_info": {"input_token_logprobs": told}}
        return SimpleNamespace(raise_for_status=lambda: None, json=lambda: body)

    monkeypatch.setattr(perplexity, "HTTP", SimpleNamespace(post=post))


@pytest.mark.parametrize(
    "texts, scored",
    [
        ([[9, 9, 1, 2], [9, 9, 3, 4, 5]], [1, 2, 3, 4, 5]),
        ([[7, 1], [8, 2]], [1, 2]),
        ([[7, 1, 2], [7, 1, 2, 3]], [3]),
    ],
)
def test_what_all_texts_begin_with_is_not_scored(server, texts, scored):
    found = perplexity.perplexity("http://server", texts)
    assert found == pytest.approx(math.exp(sum(scored) / len(scored)))
