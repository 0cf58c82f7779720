"""A drafter of one's own: what followed the last two tokens where they last stood is the draft."""

from collections.abc import Sequence

from sglang_ext.drafters import Drafter, DraftRequest
from sglang_ext.tree import TokenTree


class LastSeen(Drafter):
    """Prompt lookup without an index: nothing is kept, so nothing is to be forgotten."""

    def propose(self, requests: Sequence[DraftRequest], max_nodes: int) -> list[TokenTree]:
        return [self._draft([*r.prompt, *r.output], max_nodes) for r in requests]

    @staticmethod
    def _draft(text: Sequence[int], max_nodes: int) -> TokenTree:
        for end in range(len(text) - 1, 1, -1):  # the latest place first
            if text[end - 2 : end] == text[-2:]:
                return TokenTree.chain(text[end : end + max_nodes], prob=0.7)
        return TokenTree.chain([], prob=0.7)
