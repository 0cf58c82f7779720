"""Drafters for checks: one proposes garbage, one the truth. Neither may change an output."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sglang_ext.drafters import Drafter, DrafterContext, DrafterError, DraftRequest
from sglang_ext.tree import TokenTree


class RandomDrafter(Drafter):
    """Random trees of random tokens, some of them right by way of the request's own tokens."""

    def __init__(self, context: DrafterContext):
        self._vocab_size = context.vocab_size
        self._random = random.Random(0)

    def propose(self, requests: Sequence[DraftRequest], max_nodes: int) -> list[TokenTree]:
        """Trees of any shape; probabilities that claim they are all right."""
        return [self._tree(request, max_nodes) for request in requests]

    def _tree(self, request: DraftRequest, max_nodes: int) -> TokenTree:
        n = self._random.randint(0, max_nodes)
        seen = [*request.prompt, *request.output]
        tokens = [
            self._random.choice(seen)
            if self._random.random() < 0.5
            else self._random.randrange(self._vocab_size)
            for _ in range(n)
        ]
        parents = [self._random.randint(-1, i - 1) for i in range(n)]
        return TokenTree(
            np.array(tokens, dtype=np.int64),
            np.array(parents, dtype=np.int32),
            np.full(n, 0.99, dtype=np.float32),
        )


class OracleDrafter(Drafter):
    """Chains read from a file of known outputs (`--oracle-file`), found by their prompt.

    The file holds a JSON object a line: {"prompt": [ids], "output": [ids]}. With "draft": [ids]
    beside them, of the same length, those are proposed at their places in the output instead, so
    that the share of right ones sets the acceptance.
    """

    def __init__(self, context: DrafterContext):
        path = context.options.oracle_file
        if not path:
            raise DrafterError("the drafter 'oracle' needs --oracle-file FILE")
        self._outputs: dict[tuple[int, ...], tuple[list[int], list[int]]] = {}
        try:
            for line in Path(path).read_text().splitlines():
                entry = json.loads(line)
                output = entry["output"]
                self._outputs[tuple(entry["prompt"])] = output, entry.get("draft", output)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DrafterError(
                f"--oracle-file {path}: expected a JSON object with prompt and output (lists of "
                f"token ids) on each line: {error}"
            ) from error

    def start(self, request: DraftRequest) -> None:
        """Look the request's output up."""
        request.state = self._outputs.get(tuple(request.prompt), ([], []))

    def propose(self, requests: Sequence[DraftRequest], max_nodes: int) -> list[TokenTree]:
        """What comes next in the known output, as long as the request has kept to it."""
        trees = []
        for request in requests:
            done, (known, draft) = len(request.output), request.state
            on_track = known[:done] == list(request.output)
            trees.append(TokenTree.chain(draft[done : done + max_nodes] if on_track else [], 0.99))
        return trees
