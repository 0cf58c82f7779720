"""The block drafter's network: what was read and written is remembered, k masks ask it.

Source: SpecDec (arXiv 2203.16487, section 3), an encoder over the source and a non-autoregressive
decoder. There the decoder is run over all committed tokens in each step; here it has the last one
and k masks, and finds the others in its memory beside the source, so that a step costs the same
however long the output is. The encoder may be the target's (the paper's future work): then the
memory is made of the target's states, of the source and of what was written, by a linear layer.
There a place's token is chosen without regard to its neighbours; here a small head tells what
stands at a place behind which two tokens (after NART-CRF, Sun et al., NeurIPS 2019, and Hydra,
arXiv 2402.05109), while the decoder is run once a block all the same.
"""

import math

import torch
from torch import nn
from torch.nn.functional import layer_norm, linear, relu

from sglang_ext.block_drafter.kept_tokens import FIRST, PADDING, UNKNOWN
from sglang_ext.block_drafter.shapes import Shape, TargetStates

# What an entry of the memory is of.
OF_SOURCE, OF_OUTPUT = 0, 1
# So many tokens before a place tell what stands there.
EARLIER = 2


class PathHead(nn.Module):
    """What stands at a place of a block behind which tokens.

    Attributes:
        norm: of the earlier tokens' embeddings.
        of_place, of_earlier, out: of a feed-forward layer over both.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.of_place = nn.Linear(width, 2 * width)
        self.of_earlier = nn.Linear(EARLIER * width, 2 * width, bias=False)
        self.out = nn.Linear(2 * width, width)

    def forward(self, places: torch.Tensor, earlier: torch.Tensor) -> torch.Tensor:
        """float[..., width], to be multiplied with the output layer's weights.

        Args:
            places: float[..., width], of `BlockModel.decode`.
            earlier: float[..., EARLIER, width], embeddings of the tokens before, the nearest last.
        """
        known = self.norm(earlier).flatten(-2)
        found: torch.Tensor = self.out(relu(self.of_place(places) + self.of_earlier(known)))
        return places + found


class BlockModel(nn.Module):
    """Predicts the next `shape.block` tokens at once.

    Attributes:
        embedding: of tokens and of what can be drafted (its weights are the output layer's too).
        slots: float[1 + block, width], what a place of the decoder's input is.
        kinds: float[2, width], what an entry of the memory is of: the source, or the output.
        of_before: of the entry before the last token's, which every slot is told of.
        path: chooses a place's token behind those before it.
        states: of the target, which it reads; None: it has an encoder of its own.
    """

    def __init__(
        self,
        shape: Shape,
        num_rows: int,
        num_classes: int,
        dropout: float = 0.1,
        states: TargetStates | None = None,
    ) -> None:
        """num_rows, num_classes: KeptTokens' of these names."""
        super().__init__()
        self.shape, self.states = shape, states
        self.num_classes = num_classes
        width = shape.width
        self.embedding = nn.Embedding(num_rows, width, padding_idx=PADDING)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.slots = nn.Parameter(0.02 * torch.randn(1 + shape.block, width))
        self.kinds = nn.Parameter(0.1 * torch.randn(2, width))
        self.output_bias = nn.Parameter(torch.zeros(num_classes))
        self.dropout = nn.Dropout(dropout)
        sizes = (width, shape.heads, shape.feedforward, dropout)
        settings = {"batch_first": True, "norm_first": True}
        if states is None:
            self.encoder = nn.TransformerEncoder(
                nn.TransformerEncoderLayer(*sizes, **settings),
                shape.encoder_layers,
                nn.LayerNorm(width),
                enable_nested_tensor=False,
            )
        else:
            self.of_states = nn.Linear(states.width, width)
        self.memory_norm = nn.LayerNorm(width)
        self.of_before = nn.Linear(width, width)
        self.path = PathHead(width)
        self.decoder = nn.TransformerDecoder(
            nn.TransformerDecoderLayer(*sizes, **settings),
            shape.decoder_layers,
            nn.LayerNorm(width),
        )

    @torch.no_grad()
    def begin_with(self, embeddings: torch.Tensor) -> None:
        """Begin at embeddings of the kept tokens, float[n, m] of variance 1, m at most `width`."""
        scaled = embeddings * self.shape.width**-0.5
        self.embedding.weight[FIRST:, : embeddings.shape[1]] = scaled

    def encode(self, sources: torch.Tensor) -> torch.Tensor:
        """float[n, s, width], the memory of sources.

        Args:
            sources: int64[n, s], rows of the embedding, PADDING behind each; none is empty. Or
                float[n, s, states.width], the target's states, anything behind each.
        """
        places = torch.arange(sources.shape[1], device=sources.device).expand(sources.shape[:2])
        if self.states is not None:
            return self.dropout(self.remembered(sources, places))
        hidden = self.dropout(self.embedded(sources, places))
        encoded: torch.Tensor = self.encoder(hidden, src_key_padding_mask=sources == PADDING)
        return encoded + self.kinds[OF_SOURCE]

    def remembered(
        self, read: torch.Tensor, places: torch.Tensor, *, written: bool = False
    ) -> torch.Tensor:
        """float[..., m, width], entries of the memory.

        Args:
            read: float[..., m, states.width], the target's states; or int64[..., m], rows of the
                embedding, where the drafter has an encoder of its own (`written` alone).
            places: int64[..., m], where in the source or the output each lies.
            written: they are of the output.
        """
        if self.states is not None:
            # A few numbers of a residual stream are far larger than the rest, and grow from layer
            # to layer: what a state says lies in its direction.
            even = layer_norm(read.float(), read.shape[-1:])
            entries: torch.Tensor = self.memory_norm(self.of_states(even))
        else:
            entries = self.memory_norm(self.embedding(read))
        kind = self.kinds[OF_OUTPUT if written else OF_SOURCE]
        return entries + sinusoids(places, self.shape.width) + kind

    def decode(
        self,
        memory: torch.Tensor,
        seen: torch.Tensor,
        tokens: torch.Tensor,
        committed: torch.Tensor,
        before: torch.Tensor,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """float[n, block, width], what is known of the next tokens' places, for `logits`.

        Args:
            memory: float[sources, m, width], of `encode`, and of `remembered` for what was written;
                of each source there are as many blocks, one behind the other.
            seen: bool[n, m], the entries that each block may read; one at least.
            tokens: int64[n, 1 + block], the last committed token, PADDING if there is none, and
                the block: MASK, or tokens that are shown.
            committed: int64[n], tokens of each output before the block.
            before: int64[n], of which entry is the last token's predecessor: of the output, or the
                source's last one.
            wanted: bool[n, block], the m places that are to be returned, as float[m, width];
                default: all of them.
        """
        sources = torch.arange(len(memory), device=memory.device)
        of_block = sources.repeat_interleave(len(tokens) // len(memory))
        told = self.of_before(memory[of_block, before])
        hidden = self.dropout(self.slots_of(tokens, committed, told))
        mask = torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, -math.inf)
        # A source's blocks ask together.
        mask = mask.repeat_interleave(hidden.shape[1], 0).view(len(memory), 1, -1, seen.shape[1])
        for layer in self.decoder.layers:
            hidden = _decoded(layer, hidden, memory, mask, self.shape.heads)
        drafted = hidden[:, 1:]
        places: torch.Tensor = self.decoder.norm(drafted if wanted is None else drafted[wanted])
        return places

    def logits(self, places: torch.Tensor, earlier: torch.Tensor) -> torch.Tensor:
        """float[..., num_classes], of the tokens at places.

        Args:
            places: float[..., width], of `decode`.
            earlier: int64[..., EARLIER], rows of the tokens before each, PADDING if there are none.
        """
        chosen = self.path(places, self.embedding(earlier))
        return linear(chosen, self.output_weight, self.output_bias)

    def slots_of(
        self, tokens: torch.Tensor, committed: torch.Tensor, told: torch.Tensor
    ) -> torch.Tensor:
        """float[n, 1 + block, width], the decoder's input.

        Args:
            tokens, committed: as `decode` takes them.
            told: float[n, width], of `of_before`.
        """
        return self.embedded(tokens, self.places(committed)) + self.slots + told[:, None]

    @property
    def output_weight(self) -> torch.Tensor:
        """float[num_classes, width]."""
        return self.embedding.weight[UNKNOWN : UNKNOWN + self.num_classes]

    def places(self, committed: torch.Tensor) -> torch.Tensor:
        """int64[n, 1 + block], where in the output each slot of the decoder's input lies."""
        slots = torch.arange(-1, self.shape.block, device=committed.device)
        return (committed[:, None] + slots).clamp_(min=0)

    def embedded(self, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """float[n, m, width], tokens at their places."""
        return self.embedding(tokens) * math.sqrt(self.shape.width) + sinusoids(
            places, self.shape.width
        )


def _decoded(
    layer: nn.TransformerDecoderLayer,
    hidden: torch.Tensor,
    memory: torch.Tensor,
    mask: torch.Tensor,
    heads: int,
) -> torch.Tensor:
    """A decoder layer as nn.TransformerDecoderLayer's, norms first: float as `hidden`.

    Attention is by plain products: in so short rows torch's fused one takes, backward on a CPU,
    most of a training step.

    Args:
        hidden: float[n, k, width].
        memory: float[sources, m, width], each read by n / sources rows of `hidden`.
        mask: float[sources, 1, n k / sources, m], 0 where an entry is read and minus infinity
            elsewhere.
    """
    own, cross, width = layer.self_attn, layer.multihead_attn, hidden.shape[2]
    qkv = linear(layer.norm1(hidden), own.in_proj_weight, own.in_proj_bias)
    query, keys, values = qkv.chunk(3, dim=-1)
    found = own.out_proj(attended(query, keys, values, heads))
    hidden = hidden + layer.dropout1(found)
    # A source's memory is projected once for all of its blocks.
    asking = layer.norm2(hidden).reshape(len(memory), -1, width)
    query = linear(asking, cross.in_proj_weight[:width], cross.in_proj_bias[:width])
    both = linear(memory, cross.in_proj_weight[width:], cross.in_proj_bias[width:])
    keys, values = both.chunk(2, dim=-1)
    found = cross.out_proj(attended(query, keys, values, heads, mask))
    hidden = hidden + layer.dropout2(found.reshape(hidden.shape))
    inner = layer.dropout(layer.activation(layer.linear1(layer.norm3(hidden))))
    return hidden + layer.dropout3(layer.linear2(inner))


def attended(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    heads: int,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention: float[n, k, width] of a query [n, k, width], keys and values [n, m, width].

    Args:
        mask: float[n, 1, k, m], is added to the scores.
    """
    query, keys, values = (
        x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (query, keys, values)
    )
    scores = query * query.shape[-1] ** -0.5 @ keys.transpose(-1, -2)
    if mask is not None:
        scores = scores + mask.to(scores.dtype)
    found = torch.softmax(scores, -1, dtype=torch.float32).to(values.dtype) @ values
    return found.transpose(1, 2).flatten(2)


def sinusoids(places: torch.Tensor, width: int) -> torch.Tensor:
    """float[..., width], the sines and cosines of "Attention Is All You Need", section 3.5."""
    angles = places[..., None] * sinusoid_rates(width, places.device)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def sinusoid_rates(width: int, device: torch.device | None = None) -> torch.Tensor:
    """float[width / 2], radians a place."""
    half = torch.arange(width // 2, device=device)
    return torch.exp(half * (-2 * math.log(10_000.0) / width))
