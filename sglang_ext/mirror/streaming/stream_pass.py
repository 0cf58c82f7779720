"""A pass in which streams learn: a text at once, and the streams behind many of its places.

It computes what `CausalLM.forward` says of streams, without caches and with gradients.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from sglang_ext.mirror.causal_lm import CausalLM, Layer, rms_norm
from sglang_ext.mirror.streaming.lookahead_streams import LookaheadStreams, LowRank

Product = Callable[[str, torch.Tensor], torch.Tensor]


def said_ahead(
    model: CausalLM, streams: LookaheadStreams, tokens: Sequence[int], places: Sequence[int]
) -> torch.Tensor:
    """float32[places, streams, vocab], logits of what each stream says behind each place.

    Args:
        model: in float32; no gradients go to it.
        tokens: a text, up to the last place at least.
        places: in rising order, each the number of a token.
    """
    count, read = len(streams), places[-1] + 1
    with torch.no_grad():
        keys, values = _keys_and_values(model, tokens[:read])
    x = streams.embeddings.repeat(len(places), 1)
    turned = model.rotation([place + 1 + j for place in places for j in range(count)])
    sees = _mask(places, read, count).to(model.device)
    for number, layer in enumerate(model.layers):
        product = _changed(layer, streams.changes[number])
        h = rms_norm(x, layer.attention_norm, model.shape.eps)
        q, k, v = model.turned_heads(product("qkv", h), layer, turned)
        all_k, all_v = torch.cat([keys[number], k]), torch.cat([values[number], v])
        x = x + product("out", _attended(q, all_k, all_v, sees))
        x = _behind_mlp(model, layer, product, x)
    return model.logits(x).view(len(places), count, -1)


def _keys_and_values(
    model: CausalLM, tokens: Sequence[int]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Of a text, [tokens, kv_heads, head_dim] for each layer."""
    x = model.embedded(tokens)
    turned = model.rotation(range(len(tokens)))
    sees = torch.ones(len(tokens), len(tokens), dtype=torch.bool, device=model.device).tril()
    keys, values = list[torch.Tensor](), list[torch.Tensor]()
    for layer in model.layers:
        product = _changed(layer, {})
        h = rms_norm(x, layer.attention_norm, model.shape.eps)
        q, k, v = model.turned_heads(product("qkv", h), layer, turned)
        keys.append(k)
        values.append(v)
        x = x + product("out", _attended(q, k, v, sees))
        x = _behind_mlp(model, layer, product, x)
    return keys, values


def _changed(layer: Layer, changes: dict[str, LowRank]) -> Product:
    """The products of a layer's matrices by name, with what is changed in them."""

    def product(name: str, rows: torch.Tensor) -> torch.Tensor:
        made = getattr(layer, name).product(rows)
        return made + changes[name].product(rows) if name in changes else made

    return product


def _behind_mlp(model: CausalLM, layer: Layer, product: Product, x: torch.Tensor) -> torch.Tensor:
    gate, up = product("gate_up", rms_norm(x, layer.mlp_norm, model.shape.eps)).chunk(2, dim=-1)
    return x + product("down", F.silu(gate) * up)


def _mask(places: Sequence[int], tokens: int, streams: int) -> torch.Tensor:
    """bool[rows, tokens + rows]: a stream sees the text up to its place, and those before it."""
    text = torch.arange(tokens)[None] <= torch.tensor(places)[:, None]
    own = torch.block_diag(*[torch.ones(streams, streams).tril()] * len(places)).bool()
    return torch.cat([text.repeat_interleave(streams, dim=0), own], dim=1)


def _attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sees: torch.Tensor
) -> torch.Tensor:
    """[rows, heads, d], [slots, kv_heads, d] twice and bool[rows, slots] -> [rows, heads * d]."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1).transpose(0, 1) for x in (k, v))
    read = F.scaled_dot_product_attention(q.transpose(0, 1), k, v, attn_mask=sees)
    return read.transpose(0, 1).reshape(len(q), -1)
