"""SpecASR's options: of a server, and of a request (`custom_params["specasr"]`)."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

MODES = ("fixed", "asp", "recycling", "tsp")
# The paper's, and one for trunks that go past doubtful tokens.
LENGTH = 24
TSP_LENGTH = 32
_LIMITS = {"length": (1, 64), "beams": (1, 8)}


@dataclass(frozen=True)
class SpecASROptions:
    """How a request is drafted for.

    Attributes:
        mode: "fixed" (plain speculative decoding: `length` tokens in `beams` beams), "asp"
            (adaptive single-sequence prediction), "recycling" (ASP and draft recycling) or "tsp"
            (recycling and the two-pass sparse tree).
        length: tokens of a draft's trunk at most, in the draft model's tokens; None: 24, and 32
            in mode "tsp", which ends a trunk by the chance of all its tokens.
        threshold: a draft is cut before a token whose probability is below this.
        beams: width of the beam search in mode "fixed".
        feedback: in mode "tsp", the target's own tokens behind a rejected one advise the next
            draft (feedback.py; not in the paper).
    """

    mode: str = "tsp"
    length: int | None = None
    threshold: float = 0.4
    beams: int = 1
    feedback: bool = True

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"specasr.mode {self.mode!r}: expected one of {', '.join(MODES)}")
        for name, (low, high) in _LIMITS.items():
            value = getattr(self, name)
            if value is None and name == "length":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ValueError(f"specasr.{name} {value!r}: expected a whole number {low}..{high}")
        if not isinstance(self.feedback, bool):
            raise ValueError(f"specasr.feedback {self.feedback!r}: expected true or false")
        number = isinstance(self.threshold, int | float) and not isinstance(self.threshold, bool)
        if not number or not 0 <= self.threshold <= 1:
            raise ValueError(f"specasr.threshold {self.threshold!r}: expected a number 0..1")

    @property
    def trunk_length(self) -> int:
        """Tokens of a trunk at most."""
        if self.length is not None:
            return self.length
        return TSP_LENGTH if self.mode == "tsp" else LENGTH

    @property
    def uses_feedback(self) -> bool:
        """Whether what the target said is of use."""
        return self.feedback and self.mode == "tsp"

    def merged(self, given: Any) -> "SpecASROptions":
        """These options with a request's own, `custom_params["specasr"]`, on top; None: none.

        Raises:
            ValueError: not a dictionary, an unknown name, or a value out of range.
        """
        if given is None:
            return self
        if not isinstance(given, Mapping):
            raise ValueError(f"specasr must be an object, got {given!r}")
        names = [field.name for field in fields(self)]
        unknown = sorted(str(name) for name in set(given) - set(names))
        if unknown:
            raise ValueError(f"specasr.{unknown[0]} is unknown; expected {', '.join(names)}")
        return replace(self, **given)
