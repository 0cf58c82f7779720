"""The block drafter's network: encoder over the source, decoder over a window and k masks.

Source: SpecDec (arXiv 2203.16487, section 3). There the decoder is run over all committed tokens
in each step; here over a window of the last ones, so that a step costs the same however long the
output is. The encoder may be the target's (the paper's future work): then the memory is made of the
target's states of the source, by a linear layer.
"""

import math

import torch
from torch import nn

from sglang_ext.block_drafter.kept_tokens import PADDING, UNKNOWN
from sglang_ext.block_drafter.shapes import Shape, TargetStates


class BlockModel(nn.Module):
    """Predicts the next `shape.block` tokens at once.

    Attributes:
        embedding: of tokens and of what can be drafted (its weights are the output layer's too).
        slots: float[window + block, width], what a place of the decoder's input is.
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
        self.slots = nn.Parameter(0.02 * torch.randn(shape.window + shape.block, width))
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
            self.states_norm = nn.LayerNorm(width)
        self.decoder = nn.TransformerDecoder(
            nn.TransformerDecoderLayer(*sizes, **settings),
            shape.decoder_layers,
            nn.LayerNorm(width),
        )

    def encode(self, sources: torch.Tensor) -> torch.Tensor:
        """float[n, s, width], the memory of sources.

        Args:
            sources: int64[n, s], rows of the embedding, PADDING behind each; none is empty. Or
                float[n, s, states.width], the target's states, anything behind each.
        """
        if self.states is not None:
            places = torch.arange(sources.shape[1], device=sources.device).expand(sources.shape[:2])
            return self.dropout(self.remembered(sources, places))
        places = torch.arange(sources.shape[1], device=sources.device).expand_as(sources)
        hidden = self.dropout(self.embedded(sources, places))
        return self.encoder(hidden, src_key_padding_mask=sources == PADDING)

    def remembered(self, states: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """float[..., s, width], the memory of the target's states.

        Args:
            states: float[..., s, states.width].
            places: int64[..., s], where in the source each lies.
        """
        # A few numbers of a residual stream are far larger than the rest, and grow from layer to
        # layer: what a state says lies in its direction.
        even = nn.functional.layer_norm(states.float(), states.shape[-1:])
        found: torch.Tensor = self.states_norm(self.of_states(even))
        return found + sinusoids(places, self.shape.width)

    def decode(
        self,
        memory: torch.Tensor,
        padded: torch.Tensor,
        tokens: torch.Tensor,
        committed: torch.Tensor,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """float[n, block, num_classes], the logits of the next tokens.

        Args:
            memory: float[sources, s, width], of `encode`; of each source there are as many blocks,
                one behind the other.
            padded: bool[sources, s], where the source is padding.
            tokens: int64[n, window + block], the last committed tokens, PADDING before them, and
                the block: MASK, or tokens that are shown.
            committed: int64[n], tokens of each output before the block.
            wanted: bool[n, block], the m places whose logits are to be computed, and returned as
                float[m, num_classes]; default: all of them.
        """
        hidden = self.embedded(tokens, self.places(committed)) + self.slots
        hidden = self.dropout(hidden)
        unread = tokens == PADDING
        *layers, last = self.decoder.layers
        for layer in layers:
            hidden = _decoded(layer, hidden, hidden, unread, memory, padded)
        drafted = _decoded(last, hidden, hidden[:, self.shape.window :], unread, memory, padded)
        drafted = self.decoder.norm(drafted if wanted is None else drafted[wanted])
        return nn.functional.linear(drafted, self.output_weight, self.output_bias)

    @property
    def output_weight(self) -> torch.Tensor:
        """float[num_classes, width]."""
        return self.embedding.weight[UNKNOWN : UNKNOWN + self.num_classes]

    def places(self, committed: torch.Tensor) -> torch.Tensor:
        """int64[n, window + block], where in the output each slot of the decoder's input lies."""
        slots = torch.arange(-self.shape.window, self.shape.block, device=committed.device)
        return (committed[:, None] + slots).clamp_(min=0)

    def embedded(self, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """float[n, m, width], tokens at their places."""
        return self.embedding(tokens) * math.sqrt(self.shape.width) + sinusoids(
            places, self.shape.width
        )


def _decoded(
    layer: nn.TransformerDecoderLayer,
    hidden: torch.Tensor,
    kept: torch.Tensor,
    unread: torch.Tensor,
    memory: torch.Tensor,
    padded: torch.Tensor,
) -> torch.Tensor:
    """A decoder layer as nn.TransformerDecoderLayer's, at the last places alone: float as `kept`.

    Args:
        hidden: float[n, m, width], what its attention reads.
        kept: float[n, k, width], the last k places of it.
        unread: bool[n, m], where nothing is to be read.
    """
    seen = layer.norm1(hidden)
    asking = seen[:, -kept.shape[1] :]
    found, _ = layer.self_attn(asking, seen, seen, key_padding_mask=unread, need_weights=False)
    kept = kept + layer.dropout1(found)
    # A source's blocks ask together: its memory is projected once for them all.
    asking = layer.norm2(kept).reshape(len(memory), -1, kept.shape[2])
    found, _ = layer.multihead_attn(
        asking, memory, memory, key_padding_mask=padded, need_weights=False
    )
    kept = kept + layer.dropout2(found.reshape(kept.shape))
    inner = layer.dropout(layer.activation(layer.linear1(layer.norm3(kept))))
    found = layer.dropout3(layer.linear2(inner))
    return kept + found


def sinusoids(places: torch.Tensor, width: int) -> torch.Tensor:
    """float[..., width], the sines and cosines of "Attention Is All You Need", section 3.5."""
    half = torch.arange(width // 2, device=places.device)
    angles = places[..., None] * torch.exp(half * (-2 * math.log(10_000.0) / width))
    return torch.cat([angles.sin(), angles.cos()], dim=-1)
