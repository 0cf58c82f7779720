"""How large a block drafter is."""

from dataclasses import dataclass, fields
from typing import Any

# Beyond these a shape is a mistake or a damaged manifest, not a drafter.
_LIMITS = {
    "width": 4096,
    "heads": 64,
    "feedforward": 16384,
    "encoder_layers": 48,
    "decoder_layers": 48,
    "block": 64,
    "window": 256,
    "source_tokens": 8192,
}


@dataclass(frozen=True)
class Shape:
    """A non-autoregressive encoder-decoder.

    Attributes:
        width: of the layers; a multiple of `heads`, and even.
        heads: of every attention.
        feedforward: inner width of the feed-forward layers.
        encoder_layers, decoder_layers: how many there are.
        block: tokens that one pass predicts, SpecDec's k.
        window: committed tokens before the last one that are read, whatever the output's length.
        source_tokens: most tokens of a source; of a longer one the last are read.
    """

    width: int = 256
    heads: int = 4
    feedforward: int = 1024
    encoder_layers: int = 6
    decoder_layers: int = 2
    block: int = 10
    window: int = 32
    source_tokens: int = 256

    def check(self) -> None:
        """Raise ValueError, naming the field, if no model can have this shape."""
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or not 1 <= value <= _LIMITS[field.name]:
                most = _LIMITS[field.name]
                raise ValueError(f"{field.name} must be a whole number of 1 to {most}: {value!r}")
        if self.width % self.heads or self.width % 2:
            raise ValueError(f"width {self.width} must be even, and a multiple of heads")

    @classmethod
    def of(cls, values: Any) -> "Shape":
        """The shape that a manifest states.

        Raises:
            ValueError: a field is missing, unknown or out of range.
        """
        names = {field.name for field in fields(cls)}
        if not isinstance(values, dict) or set(values) != names:
            raise ValueError(f"shape must have the fields {', '.join(sorted(names))}")
        shape = cls(**values)
        shape.check()
        return shape


@dataclass(frozen=True)
class TargetStates:
    """The target as the encoder: its residual stream is read, of the source and the output.

    Attributes:
        layer: behind so many of the target's layers.
        width: of a state, the target's hidden size.
    """

    layer: int
    width: int

    def check(self) -> None:
        """Raise ValueError, naming the field, if no target has such states."""
        for name, most in (("layer", 1024), ("width", 1 << 16)):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise ValueError(f"states.{name} must be a whole number of 1 to {most}: {value!r}")

    @classmethod
    def of(cls, values: Any) -> "TargetStates | None":
        """What a manifest states; None: the drafter has an encoder of its own.

        Raises:
            ValueError: a field is missing, unknown or out of range.
        """
        if values is None:
            return None
        if not isinstance(values, dict) or set(values) != {"layer", "width"}:
            raise ValueError("states must have the fields layer, width")
        states = cls(**values)
        states.check()
        return states


# By name: `base` is the paper's 6-6, `deep-shallow` its 12-2; the others are for CPUs.
SHAPES = {
    "tiny": Shape(width=128, heads=4, feedforward=512, encoder_layers=2, decoder_layers=2),
    "small": Shape(),
    "deep-shallow": Shape(512, 8, 2048, encoder_layers=12, decoder_layers=2),
    "base": Shape(512, 8, 2048, encoder_layers=6, decoder_layers=6),
}
