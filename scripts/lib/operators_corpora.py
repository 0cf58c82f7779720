"""check_operators: what corpora that a request has not chosen cost it, without a model.

Known answers are given in a closed loop, as a greedy target would: each step drafts, the longest
right path and one more token are committed. The right corpus holds half of each answer's kind; the
others are as large, of other answers.
"""

import argparse
import gzip
import json
import time
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from scripts.lib.isolation_drafts import NothingShown
from scripts.lib.spec_bench import DATA, tokenizer
from sglang_ext.drafters import Drafter, DrafterContext, DraftRequest, load
from sglang_ext.options import Options
from sglang_ext.request_options import RequestOptions

CORPORA = 9
_RIGHT = "corpus-0"
_HELD_BACK, _QUICK_HELD_BACK = 60, 12
_ROUNDS = 3
_NODES = 15
_PROMPT = 8
_LEAST_GAIN = 1.01


def check(options: argparse.Namespace) -> dict[str, float]:
    """corpora_accept_ratio, corpora_time_ratio and corpora_unchosen_ratio.

    Raises:
        NothingShown: the right corpus helps nothing.
    """
    encode = tokenizer(options.model)
    with gzip.open(DATA / "gsm8k.jsonl.gz", "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["answer"] for line in lines]
    documents = [encode.encode(t, add_special_tokens=False) for t in texts]
    held = documents[: _QUICK_HELD_BACK if options.quick else _HELD_BACK]
    rest = documents[len(held) :]
    ends = np.linspace(0, len(rest), CORPORA + 1).astype(int)
    # The first half of what is asked for stands in the right corpus, as in a domain's documents.
    parts = [rest[a:b] for a, b in pairwise(ends)]
    parts[0] = [*parts[0], *(d[: len(d) // 2] for d in held)]
    vocab_size = len(encode)
    alone, many = drafter_of(parts[:1], vocab_size), drafter_of(parts, vocab_size)
    runs = {
        "alone": (alone, (_RIGHT,)),
        "chosen": (many, (_RIGHT,)),
        "all": (many, None),
        "none": (many, ()),
    }
    lengths: dict[str, float] = {}
    taken: dict[str, list[npt.NDArray[np.float64]]] = {name: [] for name in runs}
    for turn in tqdm(range(_ROUNDS), desc="rounds", disable=None, leave=False):
        names = list(runs)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            lengths[name], seconds = replay(*runs[name], held)
            taken[name].append(seconds)
    # The least of each answer's rounds: what disturbs one is not what drafting takes.
    seconds_of = {name: float(np.min(rounds, axis=0).sum()) for name, rounds in taken.items()}
    if lengths["alone"] < _LEAST_GAIN * lengths["none"]:
        raise NothingShown("the right corpus helps nothing")
    print({name: round(length, 3) for name, length in lengths.items()})
    return {
        "corpora_accept_ratio": lengths["chosen"] / lengths["alone"],
        "corpora_time_ratio": seconds_of["chosen"] / seconds_of["alone"],
        "corpora_unchosen_ratio": lengths["all"] / lengths["alone"],
    }


def drafter_of(parts: Sequence[Sequence[Sequence[int]]], vocab_size: int) -> Drafter:
    """SSSD with these corpora."""
    made = load("sssd", DrafterContext(vocab_size, Options()))
    for i, documents in enumerate(parts):
        made.add_corpus(f"corpus-{i}", documents)
    return made


def replay(
    drafter: Drafter, corpora: tuple[str, ...] | None, answers: Sequence[Sequence[int]]
) -> tuple[float, npt.NDArray[np.float64]]:
    """Tokens committed per step; float64[answers], seconds of drafting for each."""
    options = RequestOptions(corpora=corpora, ingest=False)
    steps, tokens, seconds = 0, 0, np.zeros(len(answers))
    for i, answer in enumerate(answers):
        output = answer[_PROMPT : _PROMPT + 1]
        request = DraftRequest("r", answer[:_PROMPT], list(output), options=options)
        drafter.start(request)
        while (done := _PROMPT + len(request.output)) < len(answer):
            began = time.perf_counter()
            [tree] = drafter.propose([request], _NODES)
            seconds[i] += time.perf_counter() - began
            right = int(tree.path(answer[done:]).sum())
            request.output.extend(answer[done : done + right + 1])
            steps, tokens = steps + 1, tokens + right + 1
        drafter.finish(request, True)
    return tokens / steps, seconds
