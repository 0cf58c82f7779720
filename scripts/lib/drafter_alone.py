"""What a drafter writes when nobody verifies it: its blocks, one behind the other."""

import time
from collections.abc import Collection, Sequence
from typing import Any

from scripts.lib.spec_bench import tokenizer
from sglang_ext.drafters import Drafter, DrafterContext, DraftRequest, load
from sglang_ext.models import resolve
from sglang_ext.models.tokenizers import fingerprint
from sglang_ext.options import Options
from sglang_ext.tree import NO_PARENT, TokenTree


def load_drafter_of(model: str, name: str, **options: Any) -> tuple[Drafter, frozenset[int]]:
    """The drafter `name` as a server of `model` would have it, and the tokens that end an output.

    Args:
        options: fields of sglang_ext.options.Options.

    Raises:
        DrafterError: it is not installed, or does not go with the model.
    """
    from transformers import AutoConfig

    path, reader = str(resolve(model)), tokenizer(model)
    ends = frozenset(reader.all_special_ids)
    context = DrafterContext(
        vocab_size=AutoConfig.from_pretrained(path).vocab_size,
        options=Options(**options),
        tokenizer_fingerprint=fingerprint(reader),
        eos_token_ids=ends,
        model_path=path,
    )
    return load(name, context), ends


def write_alone(
    drafter: Drafter,
    prompt: Sequence[int],
    length: int,
    max_tokens: int,
    ends: Collection[int] = (),
) -> tuple[list[int], int, float]:
    """A drafter's own output.

    It ends where a block ends before its `length` tokens (no end is ever drafted), or at
    `max_tokens`.

    Args:
        length: most tokens of a block.
        ends: tokens that end an output.

    Returns:
        the output, how many blocks it took, and seconds.
    """
    start = time.perf_counter()
    params = {"specdec": {"retrieve": False}}
    request = DraftRequest("alone", list(prompt), [], params=params)
    drafter.prefill([request])
    drafter.start(request)
    blocks = 0
    while len(request.output) < max_tokens:
        [tree] = drafter.propose([request], length)
        block = likeliest_path(tree)[: max_tokens - len(request.output)]
        blocks += 1
        written = next((i for i, token in enumerate(block) if token in ends), len(block))
        if written:
            request.output.extend(block[:written])
            drafter.observe(request, block[:written])
        if written < length:
            break
    output = list(request.output)
    drafter.finish(request, False)
    return output, blocks, time.perf_counter() - start


def likeliest_path(tree: TokenTree) -> list[int]:
    """The tokens of a tree from its root on, at each node the child that its drafter rates best."""
    path: list[int] = []
    at = NO_PARENT
    while True:
        children = [i for i in range(len(tree)) if tree.parents[i] == at]
        if not children:
            return path
        at = max(children, key=lambda i: float(tree.probs[i]))
        path.append(int(tree.tokens[at]))
