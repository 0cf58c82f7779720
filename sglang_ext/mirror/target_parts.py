"""The parts of a model that an early exit needs: its decoder layers, final norm and LM head."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "final_norm")
_HEADS = ("lm_head", "output", "embed_out")
# Layers with this argument of theirs give their input's whole state to it (SGLang's EAGLE-3 path,
# layers/layer_boundary/stage.py); the residual is not among what they return.
_CAPTURE = "capture_output"
_BOUNDARIES = "sglang.srt.layers.layer_boundary"

# Rows of a head are read by so many unit vectors at a time: each makes a number of each token.
_UNITS = 64

Receive = Callable[[torch.Tensor], None]


class ExitError(ValueError):
    """A model that an early exit cannot be put into; the message says why."""


@dataclass(frozen=True)
class TargetParts:
    """A decoder's parts.

    Attributes:
        layers: its decoder layers.
        norm: the norm between the last of them and the LM head.
        head: the LM head.
        vocab_size: rows of the head that are tokens.
        scale: what logits are multiplied by.
        softcap: c of c * tanh(logits / c), which its logits pass through; None: they do not.
    """

    layers: torch.nn.ModuleList
    norm: torch.nn.Module
    head: Any
    vocab_size: int
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """float32[T, vocabulary] of the final normalised states, float[T, d], as the target's.

        SGLang's LogitsProcessor does the same (layers/logits_processor.py), and more for several
        ranks, which do not come here.
        """
        return self.finished(self._product(normed)[..., : self.vocab_size].float())

    def head_rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """float[n, d], the LM head's rows of these tokens, int64[n].

        Of a head that does not have its weight as a plain matrix (a quantized one, or one that
        keeps it in fewer bits alone) they are what it makes of unit vectors: what it multiplies by.
        """
        weight: Any = getattr(self.head, "weight", None)
        plain = weight is not None and weight.dim() == 2 and weight.is_floating_point()
        # SGLang's word for weights that are not what they were loaded as (cpu/released_weights.py).
        if plain and not getattr(self.head, "_weight_export_error", None):
            rows: torch.Tensor = weight.detach()[tokens]
            return rows
        normed = next(self.norm.parameters(), None)
        size = weight.shape[1] if plain or normed is None else len(normed)
        units = torch.eye(size, dtype=torch.float32 if normed is None else normed.dtype)
        read = [self._product(some)[:, tokens].T for some in units.split(_UNITS)]
        return torch.cat(read, dim=1)

    def _product(self, normed: torch.Tensor) -> torch.Tensor:
        """float[T, at least vocab_size] of final normalised states, float[T, d]."""
        method: Any = getattr(self.head, "quant_method", None)
        of_sglang = hasattr(method, "apply")
        made: torch.Tensor = method.apply(self.head, normed) if of_sglang else self.head(normed)
        return made

    def finished(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits of a product with rows of the head, scaled and capped as the target's."""
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits


def parts_of(model: torch.nn.Module, num_layers: int, vocab_size: int) -> TargetParts:
    """Find the parts of a causal language model of SGLang's, or of transformers'.

    Raises:
        ExitError: they are not where such models have them.
    """
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == num_layers
    ]
    if not lists:
        raise ExitError(f"the model has no list of {num_layers} decoder layers")
    name, layers = min(lists, key=lambda found: found[0].count("."))
    around = model.get_submodule(name.rpartition(".")[0])
    norm = _first(around, _NORMS)
    if norm is None:
        raise ExitError(f"beside the decoder layers ({name}) there is no final norm")
    head = _first(model, _HEADS)
    if head is None:
        raise ExitError("the model has no LM head")
    processor = getattr(model, "logits_processor", None)
    return TargetParts(
        layers,
        norm,
        head,
        vocab_size,
        scale=getattr(processor, "logit_scale", None) or 1.0,
        softcap=getattr(processor, "final_logit_softcapping", None),
    )


def _first(module: torch.nn.Module, names: tuple[str, ...]) -> torch.nn.Module | None:
    found = (getattr(module, name, None) for name in names)
    return next((each for each in found if isinstance(each, torch.nn.Module)), None)


def check_layers(layers: torch.nn.ModuleList) -> None:
    """Refuse layers that do not show their state.

    Raises:
        ExitError: the message names their class.
    """
    for layer in layers:
        if not _captures(layer) and _keeps_its_residual(layer):
            raise ExitError(f"{type(layer).__name__} does not show its state ({_CAPTURE})")


def _captures(layer: torch.nn.Module) -> bool:
    return _CAPTURE in inspect.signature(layer.forward).parameters


def tap_state(layers: torch.nn.ModuleList, exit_layer: int, receive: Receive) -> Callable[[], None]:
    """Have `receive` be given the state behind the first `exit_layer` layers, in every pass.

    That is float[T, d], what the residual stream holds there: a token's input and all that those
    layers have added. It is lent: whoever keeps it must copy it.

    Returns:
        what ends it.

    Raises:
        ExitError: there is no such place, or the layers do not show their state.
    """
    if not 1 <= exit_layer < len(layers):
        raise ExitError(f"an exit lies behind layer 1 to {len(layers) - 1}, not {exit_layer}")
    check_layers(layers)
    behind, before = layers[exit_layer], layers[exit_layer - 1]
    if _captures(behind):
        return behind.register_forward_pre_hook(_capturing(receive), with_kwargs=True).remove

    def look(_layer: torch.nn.Module, _args: Any, output: Any) -> None:
        receive(_state_of(output))

    return before.register_forward_hook(look).remove


def _capturing(receive: Receive) -> Callable[..., Any]:
    def hook(_layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        theirs = kwargs.get(_CAPTURE)

        def capture(state: torch.Tensor, *, owned: bool = False) -> None:
            if theirs is not None:
                theirs(state, owned=owned)
            receive(state)

        return args, kwargs | {_CAPTURE: capture}

    return hook


def _keeps_its_residual(layer: torch.nn.Module) -> bool:
    """Whether SGLang's boundaries carry its residual from layer to layer, out of our sight."""
    held = [*vars(layer).values(), *layer._modules.values()]
    return any(type(each).__module__.startswith(_BOUNDARIES) for each in held)


def _state_of(output: Any) -> torch.Tensor:
    """The state in what a layer returns: a tensor, or what it added and the residual before it."""
    if isinstance(output, torch.Tensor):
        return output
    added, residual = output[:2]
    return added if residual is None else added + residual


def tap_normed(norm: torch.nn.Module, receive: Receive) -> Callable[[], None]:
    """Have `receive` be given what the final norm returns, float[T, d]; returns what ends it."""

    def look(_norm: torch.nn.Module, _args: Any, output: Any) -> None:
        receive(output[0] if isinstance(output, tuple) else output)

    return norm.register_forward_hook(look).remove
