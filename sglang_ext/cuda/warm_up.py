"""Kernels of a verify step that no graph holds, compiled and loaded before there are requests.

On an H200 whose caches were empty the first tree walk compiled for some five seconds, and the first
step of each width took 150 ms more than the second one (docs/gpu.md).
"""

from collections.abc import Iterable
from types import SimpleNamespace

import numpy as np
import torch

from sglang_ext.cuda.staging import full_mask, mask_starts
from sglang_ext.step.verify import walk_on_device
from sglang_ext.tree import TokenTree, pack


def warm_up(widths: Iterable[int], device: str) -> None:
    """Run each width's mask and tree walk once, for one request of one token and no draft.

    Args:
        widths: nodes per request; 1 is a plain step, which has neither.
        device: torch's name of where steps run.
    """
    lens = np.ones(1, dtype=np.int64)
    for width in widths:
        if width == 1:
            continue
        packed = pack([0], [TokenTree.empty()], width)
        total = int(width * (lens.sum() + width))
        full_mask(
            torch.from_numpy(packed.mask).to(device),
            torch.from_numpy(lens).to(device),
            torch.from_numpy(mask_starts(lens, width)).to(device),
            total,
        )
        said = torch.zeros(width, dtype=torch.int64, device=device)
        tree = {
            name: torch.from_numpy(array.astype(np.int64)).to(device)
            for name, array in (
                ("draft_token", packed.tokens),
                ("retrieve_next_token", packed.next_token),
                ("retrieve_next_sibling", packed.next_sibling),
            )
        }
        index = torch.arange(width, device=device).view(1, width)
        walk_on_device(
            said, SimpleNamespace(draft_token_num=width, retrieve_index=index, tree_topk=-1, **tree)
        )
