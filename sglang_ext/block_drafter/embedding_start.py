"""Where a drafter's embedding begins: at the target's own, in fewer dimensions.

The target has learned which tokens are alike; what is left of that in the directions in which its
embedding varies most saves a drafter thousands of updates.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from sglang_ext.block_drafter.kept_tokens import KeptTokens
from sglang_ext.models import resolve


def embedding_start(model: str, kept: KeptTokens, width: int) -> torch.Tensor | None:
    """float32[len(kept.tokens), m], the target's embeddings of kept tokens by principal components.

    Args:
        model: a name of `sglang-ext models list`, a path or a hub id.
        width: m at most; the target's where that is less.

    Returns:
        numbers of mean 0 and of variance 1 over all; None: the target has no such weights in
        safetensors.
    """
    found = _input_embedding(model)
    if found is None or len(found) <= int(kept.tokens.max()):
        return None
    rows = found[torch.from_numpy(kept.tokens)].double()
    rows = rows - rows.mean(0)
    _, directions = torch.linalg.eigh(rows.T @ rows)
    components = (rows @ directions.flip(1)[:, :width]).float()
    scale = components.std()
    return components / scale if scale > 0 else None


def _input_embedding(model: str) -> torch.Tensor | None:
    """float32[vocabulary, hidden size]."""
    from transformers import AutoConfig, AutoModel

    path = Path(resolve(model))
    try:
        with torch.device("meta"):
            empty = AutoModel.from_config(AutoConfig.from_pretrained(path))
        wanted = empty.get_input_embeddings().weight
        name = next(name for name, given in empty.named_parameters() if given is wanted)
        # A file has the names of the model with its head: the same behind a prefix.
        return _tensor(path, name)
    except (OSError, SafetensorError, ValueError, StopIteration, NotImplementedError):
        return None


def _tensor(folder: Path, name: str) -> torch.Tensor | None:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for stored in tensors.keys():  # noqa: SIM118 - it is no mapping
                if stored == name or stored.endswith("." + name):
                    return tensors.get_tensor(stored).float()
    return None
